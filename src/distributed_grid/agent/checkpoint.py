# ruff: noqa: PTH102, PTH208
"""A task on disk instead of in memory: how its shim stores the tree with CRIU, and brings it back in the same place.

The agent writes `checkpoint.json` (what is wanted, numbered) and wakes the shim; the shim obeys and says in
`checkpointed.json` how it stands. So it does not matter who else dies meanwhile. Imported by the shim when it is first
asked for: standard library only, no pathlib.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from distributed_grid.agent.supervisor import Shim
if TYPE_CHECKING or __package__:
    from distributed_grid.agent.program import put, read_json, write_json
else:  # under shim.py
    from program import put, read_json, write_json

ORDER, RESULT, IMAGES = "checkpoint.json", "checkpointed.json", "checkpoint"
CRIU_LIMIT_S, GONE_LIMIT_S = 900.0, 60.0
#: So often a restore is tried before the task counts as lost.
TRIES = 3
OUR_PIDS = 600  # room for CRIU's own pids, apart from those in the image
ENVIRONMENT = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}


def obey(shim: Shim) -> None:
    """Do what is wanted last; what was wanted meanwhile too."""
    done = 0
    while True:
        try:
            order = read_json(f"{shim.dir}/{ORDER}")
        except (OSError, ValueError):
            return
        if order["number"] <= max(done, shim.obeyed):
            return
        try:
            errors = carry_out(shim, order)
        except OSError as error:  # nothing may end a shim
            errors = [str(error)]
        shim.obeyed = done = int(order["number"])
        answer = {"number": done, "phase": "stored" if shim.stored else "running", "errors": errors}
        try:
            write_json(f"{shim.dir}/{RESULT}", answer)
        except OSError:
            return  # a full disk: whoever waits for the answer gives up, and asks again


def carry_out(shim: Shim, order: dict[str, Any]) -> list[str]:
    if order["want"] == "store" and not shim.stored:
        return store(shim, order)
    if order["want"] == "run" and shim.stored:
        return restore(shim, order)
    if order["want"] == "end" and shim.stored:
        forget(shim)
        shim.record(None, int(order["signal"]))
    return []


def store(shim: Shim, order: dict[str, Any]) -> list[str]:
    """The tree is on disk and gone; or it runs on, and why."""
    if shim.recorded or not shim.main:
        return ["it has ended"]
    if others := [pid for pid in children() if pid != shim.main and not is_dead(pid)]:
        return [f"process {others[0]} of it is no longer below its first one"]
    if shim.feed and shim.feed.unread_bytes():  # it would be there twice afterwards
        return ["it has not read its input"]
    images = f"{shim.dir}/{IMAGES}"
    shutil.rmtree(images, ignore_errors=True)
    os.mkdir(images, 0o700)
    command = [
        order["criu"], "dump", "-t", str(shim.main), "-D", images, "-o", "dump.log", "-v1",
        "--manage-cgroups=ignore", "--file-locks", "--ghost-limit", str(64 << 20),
    ]  # fmt: skip
    shim.pids = [int(name) for pid in numbers("/proc") for name in os.listdir(f"/proc/{pid}/task")]
    status = run(command, [])
    if status == 0:
        shim.stored, shim.tries = True, 0
        await_alone(shim)
        return []
    errors = errors_in(f"{images}/dump.log") or [f"CRIU ended with {status}"]
    shutil.rmtree(images, ignore_errors=True)
    return errors


def restore(shim: Shim, order: dict[str, Any]) -> list[str]:
    """The tree runs again with its pids, on the cores it has now; or it stays on disk, and why."""
    await_alone(shim)  # its old pids must be free
    last = keep_pids_apart(shim.pids)
    images = f"{shim.dir}/{IMAGES}"
    command = [
        order["criu"], "restore", "-D", images, "-d", "--restore-sibling", "--leave-stopped", "--pidfile",
        f"{images}/restored.pid", "-o", "restore.log", "-v1", "--manage-cgroups=ignore", "--file-locks",
    ]  # fmt: skip
    status = run(command, shim.spec["cgroups"])
    put("/proc/sys/kernel/ns_last_pid", last)
    if status != 0:
        errors = errors_in(f"{images}/restore.log") or [f"CRIU ended with {status}"]
        shim.tries += 1
        if shim.tries >= TRIES:
            forget(shim)
            shim.record(None, None, error={"kind": "checkpoint", "message": "; ".join(errors[:2])})
        return errors
    who = shim.proc.identity(shim.proc.host_pid(shim.main))
    tree = numbers("/proc")
    for pid in tree:
        pin(pid, order.get("cores") or [])
    forget(shim)
    shim.record_start({**who, "inner_pid": shim.main, **shim.facts, "time": shim.times["started_at"]})
    for pid in tree:
        try:
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            pass
    return []


def forget(shim: Shim) -> None:
    shim.stored = False
    shutil.rmtree(f"{shim.dir}/{IMAGES}", ignore_errors=True)


def run(command: list[str], cgroups: list[str]) -> int:
    """CRIU's exit status. In the task's groups, so that the memory it fills is the task's."""
    pid = os.fork()
    if pid == 0:
        try:
            for directory in cgroups:
                put(f"{directory}/cgroup.procs", "0")
            null = os.open("/dev/null", os.O_RDWR)
            for number in range(3):
                os.dup2(null, number)
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            os.execve(command[0], command, ENVIRONMENT)
        finally:
            os._exit(127)
    ended = os.pidfd_open(pid)
    if not select.select([ended], [], [], CRIU_LIMIT_S)[0]:
        os.kill(pid, signal.SIGKILL)
    os.close(ended)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def await_alone(shim: Shim) -> None:
    """Until what CRIU killed is really gone, and its memory with it."""
    deadline = time.monotonic() + GONE_LIMIT_S
    while shim.reap() and time.monotonic() < deadline:
        time.sleep(0.005)


def numbers(directory: str) -> list[int]:
    """The pids (all but ours, 1) or threads that are there."""
    return [int(name) for name in os.listdir(directory) if name.isdigit() and name != "1"]


def children() -> list[int]:
    with open("/proc/1/task/1/children") as file:
        return [int(word) for word in file.read().split()]


def is_dead(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def keep_pids_apart(taken: list[int]) -> str:
    """CRIU itself must not get a pid that is in the image; the last pid, to be put back."""
    with open("/proc/sys/kernel/pid_max") as file:
        top = int(file.read())
    with open("/proc/sys/kernel/ns_last_pid") as file:
        last = file.read().strip()
    for base in (top - 2 * OUR_PIDS, top // 2, top // 4, top // 8):
        if not any(base <= pid < base + OUR_PIDS for pid in taken):
            put("/proc/sys/kernel/ns_last_pid", str(base))
            break
    return last


def pin(pid: int, cores: list[int]) -> None:
    """CRIU does not carry affinity."""
    if not cores:
        return
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            os.sched_setaffinity(int(thread), cores)
    except OSError:
        pass  # it has just ended


def errors_in(log: str) -> list[str]:
    try:
        with open(log, errors="replace") as file:
            lines = [line.split("): ", 1)[-1].strip() for line in file if "Error (" in line]
    except OSError:
        return []
    return [line for line in lines if "RLIMIT_NOFILE" not in line]
