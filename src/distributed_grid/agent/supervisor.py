# ruff: noqa: PTH104, PTH106, PTH108, PTH110, PTH120
"""The launcher, which detaches from the agent, and the shim itself, which stays with the user's program to its end.

Imported by shim.py, which runs without our package: standard library only, no pathlib.
"""

from __future__ import annotations

import fcntl
import os
import resource
import select
import signal
import time

TYPE_CHECKING = False
if TYPE_CHECKING:  # importing typing costs a third of the start
    from typing import Any, NoReturn

    from distributed_grid.agent.feed import Feed
if TYPE_CHECKING or __package__:
    from distributed_grid.agent.program import Program, SetupError, libc_call, put, read_json, set_nice, write_json
else:  # under shim.py
    from program import Program, SetupError, libc_call, put, read_json, set_nice, write_json

CLONE_NEWNS, CLONE_NEWPID = 0x00020000, 0x20000000
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REC, MS_PRIVATE = 2, 4, 8, 16384, 1 << 18
PR_SET_CHILD_SUBREAPER = 36
LAUNCH_WAIT_S = 8.0
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
WATCHED = (signal.SIGCHLD, signal.SIGUSR1, *FORWARDED)


class HostProc:
    """/proc as the agent sees it, kept open from before we mounted our own over it."""

    def __init__(self) -> None:
        self.fd = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)

    def read(self, path: str) -> str:
        fd = os.open(path, os.O_RDONLY, dir_fd=self.fd)
        try:
            return os.read(fd, 65536).decode(errors="replace")
        finally:
            os.close(fd)

    def own_pid(self) -> int:
        return int(os.readlink("self", dir_fd=self.fd))

    def identity(self, pid: int) -> dict[str, int]:
        after_name = self.read(f"{pid}/stat").rpartition(")")[2].split()
        return {"pid": pid, "start_ticks": int(after_name[19])}

    def host_pid(self, pid: int) -> int:
        """The outside pid of a child of ours whose pid in our namespace is `pid`."""
        own = self.own_pid()
        for child in self.read(f"{own}/task/{own}/children").split():
            for line in self.read(f"{child}/status").splitlines():
                if line.startswith("NSpid:") and int(line.split()[-1]) == pid:
                    return int(child)
        raise ProcessLookupError(pid)


# ------------------------------------------------------------------ launcher


def launch(task_dir: str) -> int:
    """Start the shim, detached; 0 once the program runs or its failure is on disk, or another shim has the task."""
    detach()
    lock = os.open(f"{task_dir}/shim.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the shim inherits it and holds it for life
    except BlockingIOError:
        return 0
    if os.path.exists(f"{task_dir}/shim.json"):
        return 0  # it had its one start
    spec = read_json(f"{task_dir}/spec.json")
    env = read_json(f"{task_dir}/env.json")
    for directory in spec["shim_cgroups"]:
        put(f"{directory}/cgroup.procs", "0")
    if os.geteuid() == 0:
        answer = fork_shim(task_dir, spec, env, namespaced=True)
        if answer != b"n":
            return 0 if answer != b"" else 1
    return 0 if fork_shim(task_dir, spec, env, namespaced=False) != b"" else 1


def detach() -> None:
    """Shed what a Ray worker hands down: descriptors, signal state, niceness, the OOM killer's preference."""
    os.closerange(3, max(256, resource.getrlimit(resource.RLIMIT_NOFILE)[0]))
    os.chdir("/")
    os.umask(0o077)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        try:
            signal.signal(number, signal.SIG_IGN if number == signal.SIGPIPE else signal.SIG_DFL)
        except (OSError, ValueError):
            pass  # the C library keeps two for itself
    signal.pthread_sigmask(signal.SIG_SETMASK, WATCHED)
    set_nice(0)
    # With its namespace the whole task dies, so the shim is the last one to take; 0 is what a plain process has.
    if not put("/proc/self/oom_score_adj", "-900"):
        put("/proc/self/oom_score_adj", "0")


def fork_shim(task_dir: str, spec: dict[str, Any], env: dict[str, str], *, namespaced: bool) -> bytes:
    """Its answer: `r` running or failure recorded, `n` no namespace to be had, `t` still starting, empty: it died."""
    own_namespace = os.open("/proc/self/ns/pid", os.O_RDONLY)
    if namespaced:
        try:
            libc_call("unshare", CLONE_NEWPID)
        except OSError:
            return b"n"
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.close(reading)
        shim(task_dir, spec, env, namespaced, writing)
    os.close(writing)
    answer = read_within(reading, LAUNCH_WAIT_S)
    os.close(reading)
    if answer == b"n":
        libc_call("setns", own_namespace, CLONE_NEWPID)
    os.close(own_namespace)
    return answer


def read_within(fd: int, limit_s: float) -> bytes:
    ready, _, _ = select.select([fd], [], [], limit_s)
    return os.read(fd, 1) if ready else b"t"


# ------------------------------------------------------------------ shim


def shim(task_dir: str, spec: dict[str, Any], env: dict[str, str], namespaced: bool, answer: int) -> NoReturn:
    code = 1
    try:
        code = Shim(task_dir, spec, namespaced, answer).run(env)
    except BaseException:  # noqa: BLE001 - a forked child must never return into its parent's code
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)


class Shim:
    def __init__(self, task_dir: str, spec: dict[str, Any], namespaced: bool, answer: int) -> None:
        self.dir = task_dir
        self.spec = spec
        self.namespaced = namespaced
        self.answer = answer
        self.main = 0  # the main process, by its pid in our namespace
        self.times = {"started_at": time.time(), "ended_at": 0.0}
        self.recorded = False
        self.more: dict[str, Any] = {}  # for the record of the end
        #: The tree is on disk, not in memory (see checkpoint.py); its threads; orders obeyed, restores that failed.
        self.stored = False
        self.pids: list[int] = []
        self.obeyed = self.tries = 0
        self.feed: Feed | None = None

    def run(self, env: dict[str, str]) -> int:
        os.setsid()
        self.proc = HostProc()
        if self.namespaced:
            try:
                mount_own_proc()
            except OSError:
                os.write(self.answer, b"n")
                return 0
        else:
            libc_call("prctl", PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # orphans come to us, as they do to a pid 1
        me = self.proc.identity(self.proc.own_pid())
        self.facts = {"boot_id": self.spec["boot_id"], "shim": me, "namespaced": self.namespaced}
        write_json(f"{self.dir}/shim.json", {**me, **self.facts, "stores": self.namespaced})
        try:
            if self.spec.get("fed"):
                self.feed = self.open_feed()
            # A restored tree would be another class with the same two steps: prepare, release.
            program = Program(self.spec, env)
            self.main = program.prepare()
            main = {**self.proc.identity(self.proc.host_pid(self.main)), "inner_pid": self.main, **self.facts}
            write_json(f"{self.dir}/staged.json", {**main, "time": time.time()})
            if self.spec["hold"]:
                self.tell()
                self.wait_for_go()
            if not self.recorded:
                program.release()
                self.times["started_at"] = time.time()
                self.record_start({**main, "time": self.times["started_at"]})
        except SetupError as error:
            self.record(error.code, None, error={"kind": error.kind, "message": error.message})
        remove_file(f"{self.dir}/env.json")  # it may hold secrets, and nobody needs it again
        self.tell()
        while self.reap() or self.stored:
            if self.feed and not self.stored:
                self.feed.hand_on(WATCHED)
            caught = signal.sigwaitinfo(WATCHED)
            self.handle(caught)
            if caught.si_signo == signal.SIGUSR1 and self.namespaced and os.path.exists(f"{self.dir}/checkpoint.json"):
                self.obey()
        for directory in self.spec["cgroups"]:
            try:
                os.rmdir(directory)
                if self.spec.get("group"):
                    os.rmdir(os.path.dirname(directory))  # unless another task is in it
            except OSError:
                pass  # the agent tries again when the task is removed
        return 0

    def record_start(self, data: dict[str, Any]) -> None:
        """A full disk must not end a program that runs by now: what was staged names it as well."""
        try:
            write_json(f"{self.dir}/started.json", data)
        except OSError:
            try:
                os.rename(f"{self.dir}/staged.json", f"{self.dir}/started.json")
            except OSError:
                pass

    def tell(self) -> None:
        """Let the launcher go; it may be gone already."""
        try:
            os.write(self.answer, b"r")
            os.close(self.answer)
        except OSError:
            pass

    def wait_for_go(self) -> None:
        """Hold the prepared program until the agent says go by a file, so that no death of an agent loses the word."""
        while not self.recorded and not os.path.exists(f"{self.dir}/go"):
            self.handle(signal.sigtimedwait(WATCHED, 1.0))
            self.reap()

    def handle(self, caught: signal.struct_siginfo | None) -> None:
        if caught and caught.si_signo in FORWARDED and self.main and not self.recorded:
            try:
                os.kill(self.main, caught.si_signo)
            except ProcessLookupError:
                pass

    def open_feed(self) -> Feed:
        """Only for the few with an input of their own: loaded only then."""
        if __package__:
            from distributed_grid.agent.feed import Feed
        else:
            from feed import Feed  # type: ignore[import-not-found,no-redef]
        try:
            return Feed(self.dir, WATCHED)
        except OSError as error:
            raise SetupError("stdin", f"cannot open its input: {error}") from None

    def obey(self) -> None:
        """Stored on disk, or brought back: rarely asked for, so it is loaded only then."""
        if __package__:
            from distributed_grid.agent import checkpoint
        else:
            import checkpoint  # type: ignore[import-not-found,no-redef]
        checkpoint.obey(self)

    def reap(self) -> bool:
        """Collect the dead; False once nobody is left."""
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self.main and not self.recorded and not self.stored:
                self.record_end(status, usage)

    def record_end(self, status: int, usage: resource.struct_rusage) -> None:
        if os.path.exists(f"{self.dir}/moved"):  # it lives on elsewhere; what we see is only its removal
            self.record(None, None, error={"kind": "moved", "message": "it was moved to another node"})
            return
        code = os.waitstatus_to_exitcode(status)
        self.record(code if code >= 0 else None, -code if code < 0 else None, usage=usage)

    def record(
        self,
        code: int | None,
        signal_number: int | None,
        error: dict[str, str] | None = None,
        usage: resource.struct_rusage | None = None,
    ) -> None:
        """The exit is what we are here for: on a full disk we wait until it can be written."""
        self.recorded = True
        self.times["ended_at"] = time.time()
        data: dict[str, Any] = {"code": code, "signal": signal_number, "error": error, **self.times, **self.more}
        data["oom_killed"] = any(oom_kills(directory) for directory in self.spec["cgroups"])
        if usage:
            data |= {"user_s": usage.ru_utime, "system_s": usage.ru_stime, "max_rss_bytes": usage.ru_maxrss * 1024}
        while True:
            try:
                write_json(f"{self.dir}/exit.json", data, durable=True)
                return
            except FileNotFoundError:
                return  # somebody removed the task; there is nobody to tell
            except OSError:
                time.sleep(1.0)


def mount_own_proc() -> None:
    libc_call("unshare", CLONE_NEWNS)
    libc_call("mount", b"none", b"/", None, MS_REC | MS_PRIVATE, None)
    libc_call("mount", b"proc", b"/proc", b"proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, None)


def oom_kills(cgroup: str) -> int:
    for name in ("memory.events", "memory.oom_control"):  # v2, v1
        try:
            with open(f"{cgroup}/{name}") as file:
                for line in file:
                    if line.startswith("oom_kill "):
                        return int(line.split()[1])
        except OSError:
            continue
    return 0


def remove_file(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass
