"""Running processes moved between the nodes of an embedded cluster: by the commands, with nobody the wiser."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from distributed_grid.core.process import ProcessId, read_stat, tree_of
from tests.cluster.offloads import (
    LIMIT_S,
    OVER,
    PROGRAMS,
    Started,
    chain_line,
    check_chain,
    check_pool,
    check_threads,
    found,
    move,
    moves,
    refused,
    until_over,
)
from tests.lab.clusters import PYTHON, EmbeddedCluster
from tests.lab.waiting import wait_until

pytestmark = [pytest.mark.root, pytest.mark.criu]


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


# Looking


def test_scan_and_plan_tell_the_real_command(embedded: EmbeddedCluster, started: Started) -> None:
    who = started.chain()
    command = f"{PYTHON} {PROGRAMS / 'chain.py'} {started.end} 0"

    def lines() -> list[str]:
        table = embedded.grid("offload", "scan", "-a", timeout=LIMIT_S).stdout.splitlines()
        return [line for line in table if command in line]

    [line] = wait_until(lines, LIMIT_S, "a new process to be seen")
    assert line.split()[:2] == [str(who.pid), "gpu-master"]
    told = embedded.json("offload", "scan", "-a", timeout=LIMIT_S)
    [one] = [one for one in told if one["pid"] == who.pid]
    assert one["command"] == command and one["type"] == "Batch Jobs"
    assert not one["movable"] and "1m 0s are asked for" in one["why_not"]
    assert who.pid not in [one["pid"] for one in embedded.json("offload", "scan", timeout=LIMIT_S)]

    said = embedded.grid("offload", "plan", str(who.pid), timeout=LIMIT_S).stdout
    assert f"PID {who.pid} on gpu-master" in said and "live to gpu" in said and command in said
    plan = embedded.json("offload", "execute", str(who.pid), "--dry-run", "-t", "gpu2", timeout=LIMIT_S)
    assert (plan["strategy"], plan["target"], plan["pid"]) == ("live", "gpu2", who.pid) and plan["bytes"] > 0
    started.goes_on(who)


# Moving


def test_the_shell_sees_the_programs_own_code_and_the_log_is_whole(embedded: EmbeddedCluster, started: Started) -> None:
    script = f'"{PYTHON}" "{PROGRAMS}/chain.py" "$1" 5 > "$2"; echo rc $?'
    shell, who = started.shell(script, started.end, started.log)
    done = move(embedded, who.pid, "-t", "gpu1")
    assert (done["node"], done["target"], done["pid"]) == ("gpu-master", "gpu1", who.pid)
    at_move = started.size()
    assert who.is_alive() and "moved to gpu1" in command_of(who.pid)
    running = found(embedded, done["id"])
    assert running["state"] == "CLEANED" and running["pause_s"] > 0 and running["bytes"] > 0 and running["stub"]
    wait_until(lambda: started.size() > at_move + 100, LIMIT_S, "its output to go on in the same file")
    assert who.is_alive() and shell.poll() is None
    started.end.touch()
    assert shell.wait(LIMIT_S) == 0
    assert (started.directory / "shell").read_text() == "rc 5\n"
    check_chain(started.log.read_text(), 10)
    assert until_over(embedded, done["id"])["exit_code"] == 5


def test_su_does_not_stop_with_its_program(embedded: EmbeddedCluster, started: Started) -> None:
    """It stops itself when its child stops, and would have nobody who wakes it."""
    line = f"exec {PYTHON} {PROGRAMS / 'chain.py'} {started.end} 7"
    su = started.spawn(["su", "-s", "/bin/sh", "root", "-c", line])
    move(embedded, tree_of(su.pid)[-1], "-t", "gpu1")
    started.more("on gpu1")
    stat = read_stat(su.pid)
    assert stat and stat.state == "S"
    started.end.touch()
    assert started.processes[-1].wait(LIMIT_S) == 7
    check_chain(started.log.read_text(), 3)


def test_signals_to_the_pid_at_home_reach_it(embedded: EmbeddedCluster, started: Started) -> None:
    who = started.run("signals.py", "3")
    done = move(embedded, who.pid, "-t", "gpu2")
    for number, name in ((signal.SIGUSR1, "SIGUSR1"), (signal.SIGTERM, "SIGTERM")):
        os.kill(who.pid, number)
        wait_until(lambda name=name: f"got {name}\n" in started.log.read_text(), LIMIT_S, name)  # type: ignore[misc]
    assert started.processes[0].wait(LIMIT_S) == 3
    assert started.log.read_text() == "ready\ngot SIGUSR1\ngot SIGTERM\n"
    assert until_over(embedded, done["id"])["exit_code"] == 3


def test_ctrl_z_stops_the_program_too_and_fg_has_it_go_on(embedded: EmbeddedCluster, started: Started) -> None:
    who = started.chain(code=3)
    there = found(embedded, move(embedded, who.pid, "-t", "gpu1")["id"])["target_pid"]
    for _ in range(2):
        os.kill(who.pid, signal.SIGTSTP)
        for pid in (who.pid, there):
            wait_until(lambda pid=pid: state_of(pid) == "T", LIMIT_S, "both to be stopped")  # type: ignore[misc]
        os.kill(who.pid, signal.SIGCONT)
        wait_until(lambda: state_of(there) != "T", LIMIT_S, "the program to be woken")
        size = started.size()
        wait_until(lambda size=size: started.size() > size, LIMIT_S, "its output to go on")  # type: ignore[misc]
    started.end.touch()
    assert started.processes[0].wait(LIMIT_S) == 3
    check_chain(started.log.read_text())


def state_of(pid: int) -> str:
    stat = read_stat(pid)
    return stat.state if stat else "gone"


def test_a_program_that_dies_of_a_signal_does_so_at_home_too(embedded: EmbeddedCluster, started: Started) -> None:
    who = started.chain()
    done = move(embedded, who.pid)
    assert done["target"] in ("gpu1", "gpu2")
    embedded.grid("offload", "cancel", done["id"], "--grace", "0", timeout=LIMIT_S)
    assert started.processes[0].wait(LIMIT_S) in (-signal.SIGTERM, -signal.SIGKILL)
    assert found(embedded, done["id"])["state"] == "ENDED"
    check_chain(started.log.read_text())
    again = embedded.grid("offload", "cancel", done["id"], check=False, timeout=LIMIT_S)
    assert again.returncode == 4 and "is over: ended" in again.stderr


def test_a_stub_that_is_killed_is_told_and_leaves_nothing(embedded: EmbeddedCluster, started: Started) -> None:
    who = started.chain()
    done = move(embedded, who.pid, "-t", "gpu1")
    [program] = [word for word in command_of(who.pid).split() if word.endswith("/stub.py")]
    os.kill(who.pid, signal.SIGKILL)
    assert started.processes[0].wait(LIMIT_S) == -signal.SIGKILL

    def told() -> list[str]:
        events = embedded.json("events", "--limit", "100", timeout=LIMIT_S)
        return [one["kind"] for one in events if one["kind"] == "offload.stub_gone" and done["id"] in json.dumps(one)]

    wait_until(told, LIMIT_S, "it to be told")
    wait_until(lambda: not Path(program).parent.exists(), LIMIT_S, "what the stub left to be swept")
    assert found(embedded, done["id"])["state"] == "CLEANED"  # the program itself runs on
    embedded.grid("offload", "cancel", done["id"], "--grace", "0", timeout=LIMIT_S)
    assert found(embedded, done["id"])["state"] == "ENDED"


def test_a_tree_with_a_pipe_moves_whole_twice_and_comes_home(embedded: EmbeddedCluster, started: Started) -> None:
    script = f'"{PYTHON}" "{PROGRAMS}/chain.py" "$1" | cat; exit 6'
    who = started.spawn(["sh", "-c", script, "sh", str(started.end)])
    first = move(embedded, who.pid, "-t", "gpu1")
    started.more("from gpu1")
    logs = embedded.grid("offload", "logs", first["id"], timeout=LIMIT_S).stdout
    assert logs and logs in started.log.read_text()

    second = move(embedded, f"gpu1:{first['target_pid']}", "-t", "gpu2")
    assert (second["node"], second["target"]) == ("gpu1", "gpu2")
    assert found(embedded, first["id"])["state"] == "MOVED"
    started.more("from gpu2")

    home = embedded.json("offload", "return", second["id"], timeout=LIMIT_S)
    assert home["target"] == "gpu-master" and found(embedded, second["id"])["state"] == "MOVED"
    started.more("at home")
    assert who.is_alive()
    started.end.touch()
    assert started.processes[0].wait(LIMIT_S) == 6
    check_chain(started.log.read_text(), 20)
    assert until_over(embedded, home["id"])["exit_code"] == 6


def test_pool_and_threads(embedded: EmbeddedCluster, started: Started) -> None:
    pool = started.run("pool.py", started.end, log="pool")
    threads = started.run("threads.py", started.end)
    for who, log in ((pool, "pool"), (threads, "log")):
        move(embedded, who.pid)
        size = started.size(log)
        wait_until(lambda size=size, log=log: started.size(log) > size, LIMIT_S, f"more in {log}")  # type: ignore[misc]
    started.end.touch()
    assert [process.wait(LIMIT_S) for process in started.processes] == [4, 0]
    check_pool((started.directory / "pool").read_text())
    check_threads(started.log.read_text())


def test_a_relaunch_starts_it_again_with_what_was_asked(embedded: EmbeddedCluster, started: Started) -> None:
    script = 'echo "start $$ $WORD $KEPT"; while [ ! -e "$1" ]; do sleep 0.05; done; echo end; exit 9'
    argv = ["sh", "-c", script, "sh", str(started.end)]
    who = started.spawn(argv, env={**os.environ, "KEPT": "kept"}, cwd=started.directory)
    env = json.dumps({"env_vars": {"WORD": "given"}})
    done = move(embedded, who.pid, "-t", "gpu1", "--runtime-env", env)
    assert done["strategy"] == "relaunch"
    assert "IN_DOUBT" not in [step["state"] for step in found(embedded, done["id"])["steps"]]
    wait_until(lambda: started.log.read_text().count("start") == 2, LIMIT_S, "its second beginning in the same file")
    assert who.is_alive()
    started.end.touch()
    assert started.processes[0].wait(LIMIT_S) == 9
    first, second, last = started.log.read_text().splitlines()
    assert first.endswith(" kept") and "given" not in first and second.endswith("given kept") and last == "end"


def test_what_was_relaunched_moves_on_and_comes_home(embedded: EmbeddedCluster, started: Started) -> None:
    who = started.chain(6)
    first = move(embedded, who.pid, "-t", "gpu1", "--strategy", "relaunch")
    started.more("from gpu1")
    home = embedded.json("offload", "return", first["id"], timeout=LIMIT_S)
    assert home["strategy"] == "live" and found(embedded, first["id"])["state"] == "MOVED"
    started.more("at home")
    assert who.is_alive()
    started.end.touch()
    assert started.processes[0].wait(LIMIT_S) == 6
    text = started.log.read_text()
    check_chain(text[text.rindex(chain_line(1, "")) :], 3)


def test_a_child_goes_on_in_its_own_file(embedded: EmbeddedCluster, started: Started) -> None:
    """As `make`, `xargs` or a script with `job > log` have them: it is not its parent's output."""
    script = '"$1" "$2" "$3" 7 > one 2> two; echo "end $?"; cat two >&2'
    argv = ["sh", "-c", script, "sh", str(PYTHON), str(PROGRAMS / "chain.py"), str(started.end)]
    who = started.spawn(argv, wait=False, cwd=started.directory)
    wait_until(lambda: started.size("one"), LIMIT_S, "the child to write something")
    done = move(embedded, who.pid, "-t", "gpu1")
    started.more("on gpu1", "one")
    embedded.grid("offload", "return", done["id"], timeout=LIMIT_S)
    started.more("at home", "one")
    assert not started.size(), "its parent has written nothing yet"
    started.end.touch()
    assert started.processes[0].wait(LIMIT_S) == 0
    assert started.log.read_text() == "end 7\n"
    check_chain((started.directory / "one").read_text(), 3)


WAITS = """
import ctypes, sys, time
libc, began = ctypes.CDLL(None, use_errno=True), time.monotonic()
class Span(ctypes.Structure): _fields_ = [("s", ctypes.c_long), ("ns", ctypes.c_long)]
print("waits", flush=True)
if sys.argv[1] == "poll": found = libc.poll(None, 0, 4000)
else: found = libc.nanosleep(ctypes.byref(Span(4, 0)), None)
print(found, ctypes.get_errno(), time.monotonic() - began >= 4, flush=True)
"""


@pytest.mark.parametrize("call", ["poll", "nanosleep"])
def test_a_wait_is_not_broken_off(embedded: EmbeddedCluster, started: Started, call: str) -> None:
    who = started.spawn([str(PYTHON), "-c", WAITS, call])
    move(embedded, who.pid, "-t", "gpu1")
    assert started.processes[0].wait(LIMIT_S) == 0
    assert started.log.read_text() == "waits\n0 0 True\n"


def test_a_file_that_somebody_goes_on_writing(embedded: EmbeddedCluster, started: Started) -> None:
    """It is read by `tail -f` and by a program; both go on."""
    numbers = started.directory / "numbers"
    numbers.touch()
    script = 'n=0; while [ ! -e "$1" ]; do n=$((n + 1)); echo $n; done > "$2"'
    started.spawn(["sh", "-c", script, "sh", str(started.end), str(numbers)], log="writer", wait=False)
    who = started.spawn(["tail", "-n", "+1", "-f", str(numbers)])
    move(embedded, who.pid, "-t", "gpu1")
    started.more("on gpu1")
    started.end.touch()
    assert started.processes[0].wait(LIMIT_S) == 0
    wait_until(lambda: started.log.read_bytes() == numbers.read_bytes(), LIMIT_S, "all of it to be read")


#: Writes numbered lines until the end is said, and in its log how many; with one that reads them, slower.
def test_a_relaunch_runs_the_same_program_whatever_its_path_says(embedded: EmbeddedCluster, started: Started) -> None:
    """What it was started as (`sh`) is found nowhere there; the file it is was looked for by the plan."""
    script = 'echo "start $PATH"; while [ ! -e "$1" ]; do /bin/sleep 0.05; done; exit 9'
    who = started.spawn(["sh", "-c", script, "sh", str(started.end)], cwd=started.directory)
    env = json.dumps({"env_vars": {"PATH": "/nowhere"}})
    options = ("--strategy", "relaunch", "--capture-state=False", "--runtime-env", env)
    move(embedded, who.pid, "-t", "gpu1", *options)
    wait_until(lambda: started.log.read_text().endswith("start /nowhere\n"), LIMIT_S, "its second beginning")
    started.end.touch()
    assert started.processes[0].wait(LIMIT_S) == 9


# What bad input gets


def test_processes_that_may_not_be_moved(embedded: EmbeddedCluster) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait(LIMIT_S)
    refused(embedded, 3, "Process Not Found", str(gone.pid))
    refused(embedded, 2, "is not a process", "train.py")
    refused(embedded, 2, "is not a process", "0")
    refused(embedded, 3, "gpu9", "gpu9:12345")
    refused(embedded, 4, "first process of its system", "1")
    refused(embedded, 4, "the grid's own", str(embedded.pid_of("daemon")))
    refused(embedded, 4, "cannot be moved", str(embedded.pid_of("raylet:gpu-master")))
    refused(embedded, 4, "cannot be moved", str(embedded.pid_of("agent:gpu-master")))
    kernel = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if is_kernel_thread(pid)]  # noqa: PTH208
    if kernel:
        refused(embedded, 4, "kernel thread", str(kernel[0]))


def is_kernel_thread(pid: int) -> bool:
    stat = read_stat(pid)
    return bool(stat and (stat.ppid == 2 or pid == 2) and stat.comm in ("kthreadd", "rcu_gp", "kcompactd0", "kswapd0"))


def test_targets_and_options_that_cannot_be(embedded: EmbeddedCluster, started: Started) -> None:
    who = started.chain()
    pid = str(who.pid)
    refused(embedded, 3, "there is no node 'gpu9'", pid, "--target-node", "gpu9")
    refused(embedded, 4, "gpu-master", pid, "--target-node", "gpu-master")
    refused(embedded, 2, "--runtime-env is not JSON", pid, "--runtime-env", "{oops")
    refused(embedded, 2, "--runtime-env must be", pid, "--runtime-env", '{"env_vars": {"A": 1}}')
    words = ("--strategy", "live", "--runtime-env", '{"env_vars": {"A": "1"}}')
    refused(embedded, 2, "cannot be moved live", pid, *words)
    refused(embedded, 2, "cannot be moved live", pid, "--strategy", "live", "--capture-state=False")
    started.goes_on(who)
    done = move(embedded, pid, "-t", "gpu1")
    refused(embedded, 4, "was moved to gpu1", pid)
    assert found(embedded, done["id"])["state"] == "CLEANED"
    refused_id = embedded.grid("offload", "return", "offload_1_1", check=False, timeout=LIMIT_S)
    assert refused_id.returncode == 3 and refused_id.stderr.startswith("error:")
    started.end.touch()
    assert started.processes[0].wait(LIMIT_S) == 0
    check_chain(started.log.read_text())


def test_what_cannot_be_carried_is_refused_by_the_plan_and_runs_on(embedded: EmbeddedCluster, started: Started) -> None:
    before = {one["id"] for one in moves(embedded)}
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(LIMIT_S)
        who = started.run("connected.py", "127.0.0.1", str(server.getsockname()[1]), wait=False)
        held, _ = server.accept()
        with held:
            check_refused(embedded, started, who, "log", "TCP")
            asked = embedded.json("offload", "plan", str(who.pid), "--tcp-close", timeout=LIMIT_S)
            assert asked["strategy"] == "live"
            ring = started.run("uring.py", log="ring")
            if started.processes[-1].poll() != 77:
                check_refused(embedded, started, ring, "ring", "io_uring")
    assert {one["id"] for one in moves(embedded)} == before


def check_refused(cluster: EmbeddedCluster, started: Started, who: ProcessId, log: str, reason: str) -> None:
    plan = cluster.grid("offload", "plan", str(who.pid), "--strategy", "live", check=False, timeout=LIMIT_S)
    assert plan.returncode == 4 and reason in plan.stdout, plan.stdout
    refused(cluster, 4, reason, str(who.pid), "--strategy", "live")
    started.goes_on(who, log)


# At the end, so that it sees what the others did


def test_status_tells_statistics_and_every_move(embedded: EmbeddedCluster, started: Started) -> None:
    who = started.chain()
    done = move(embedded, who.pid, "-t", "gpu1")
    told = embedded.json("offload", "status", timeout=LIMIT_S)
    assert told["statistics"]["active"] >= 1 and done["id"] in [one["id"] for one in told["active"]]
    steps = [step["state"] for step in found(embedded, done["id"])["steps"]]
    assert steps == ["PLANNED", "FROZEN", "COPIED", "STAGED", "COMMITTED", "RUNNING", "CLEANED"]
    table = embedded.grid("offload", "status", timeout=LIMIT_S).stdout.splitlines()
    [line] = [line for line in table if line.startswith(done["id"])]
    assert line.split()[1:6] == [str(who.pid), "gpu-master", "gpu1", "CLEANED", "live"]
    kinds = [event["kind"] for event in embedded.json("events", "--limit", "50") if done["id"] in json.dumps(event)]
    assert "offload.started" in kinds and "offload.running" in kinds
    started.end.touch()
    assert until_over(embedded, done["id"])["state"] in OVER
