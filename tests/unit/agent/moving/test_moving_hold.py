"""The source of a relaunch: held as that of a live move is, with nobody the wiser, and never woken unseen."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from distributed_grid.agent.moving import hold, shell
from distributed_grid.agent.moving.state import State, identity, live_tree, thread_states
from distributed_grid.core.errors import GridError, NotFound, Refused
from distributed_grid.core.process import ProcessId, children_of, process_id
from tests.lab.waiting import wait_until
from tests.unit.agent.moving.two_nodes import COUNTER, LIMIT_S, Bench, contiguous

pytestmark = [pytest.mark.root]

# Starts its program and wakes it whenever it stops, as tmux and screen do; says that it did so.
WAKER = (
    "import os, signal, sys\n"
    "pid = os.spawnv(os.P_NOWAIT, sys.executable, [sys.executable, '-I', '-S', '-c', sys.argv[1]])\n"
    "open(sys.argv[2], 'w').write(str(pid))\n"
    "while True:\n"
    " _, status = os.waitpid(pid, os.WUNTRACED)\n"
    " if not os.WIFSTOPPED(status): break\n"
    " os.kill(pid, signal.SIGCONT)\n"
    " open(sys.argv[2] + '.woken', 'a').write('x')\n"
)


def held(bench: Bench, pid: int, move: str = "m") -> dict[str, Any]:
    who = process_id(pid)
    assert who
    return bench.keepers["a"].out_hold(move, who.pid, who.start_ticks)


def status(bench: Bench) -> dict[str, Any]:
    return bench.keepers["a"].out_status("m")


def test_it_is_held_whoever_wakes_it_and_that_is_told(bench: Bench) -> None:
    child = bench.start("import os\nos.fork()\n" + COUNTER)
    wait_until(lambda: len(children_of(child.pid)) == 1 and len(bench.log()) > 5, LIMIT_S, "two that count")
    before = held(bench, child.pid)
    assert before["phase"] == "copied" and before["mover_alive"] and before["held"] and not before["woken"]
    assert held(bench, child.pid) == before  # asked again, it is the same answer
    lines = len(bench.log())
    for pid in live_tree(ProcessId(child.pid, before["start_ticks"])):
        os.kill(pid, signal.SIGCONT)
        assert thread_states(pid) == {"t"}
    assert status(bench)["held"] and status(bench)["woken"] and len(bench.log()) == lines
    bench.keepers["a"].out_abort("m")
    bench.runs(child.pid)


def test_a_source_without_its_guard_is_told_as_woken(bench: Bench) -> None:
    child = bench.start(COUNTER)
    bench.wait_log(3)
    held(bench, child.pid)
    data = json.loads((bench.home / "a/m/m/out.json").read_text())["mover"]
    mover = ProcessId(data["pid"], data["start_ticks"])
    mover.signal(signal.SIGKILL)
    wait_until(lambda: not mover.is_alive(), LIMIT_S, "the guard to die")
    wait_until(lambda: thread_states(child.pid) == {"T"}, LIMIT_S, "it to be stopped still")
    assert status(bench)["held"] and status(bench)["woken"]
    os.kill(child.pid, signal.SIGCONT)
    wait_until(lambda: not status(bench)["held"], LIMIT_S, "it to be told that it runs")
    bench.keepers["a"].out_abort("m")
    bench.runs(child.pid)


def test_where_it_may_not_be_traced_it_is_stopped_again_and_that_is_told(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(_: list[int]) -> None:
        raise PermissionError

    monkeypatch.setattr(hold, "Guard", refused)
    child = bench.start(COUNTER)
    bench.wait_log(3)
    spec = {"inner_pid": child.pid, **identity(child.pid)}
    directory = bench.home / "a/m/m"
    directory.mkdir()
    state = State(directory / "out.json", mover=identity(os.getpid()), shm=str(directory / "held"), **spec)
    holding = os.fork()
    if holding == 0:
        try:
            state.set(mover=identity(os.getpid()))
            hold.Holder(spec, state).run()
        finally:
            os._exit(0)
    try:
        wait_until((directory / "out.json").exists, LIMIT_S, "its state")
        wait_until(lambda: status(bench)["phase"] == "copied", LIMIT_S, "it to be held")
        assert status(bench)["held"] and not status(bench)["woken"]
        os.kill(child.pid, signal.SIGCONT)
        wait_until(lambda: status(bench)["woken"] and status(bench)["held"], LIMIT_S, "it to be stopped again")
    finally:
        os.kill(holding, signal.SIGKILL)
        os.waitpid(holding, 0)
    bench.keepers["a"].out_abort("m")
    bench.runs(child.pid)
    contiguous(bench.log())


@pytest.mark.parametrize("side", ["out", "hold"])
def test_what_is_called_off_while_its_mover_starts_is_never_stopped(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, side: str
) -> None:
    keeper = bench.keepers["a"]
    launch = keeper.launchers.launch

    def call_off_first(*args: Any) -> None:
        assert keeper.out_abort("m")["phase"] == "aborted"
        launch(*args)

    monkeypatch.setattr(keeper.launchers, "launch", call_off_first)
    child = bench.start(COUNTER)
    bench.wait_log(3)
    if side == "out":
        keeper.out_begin("m", **identity(child.pid), host="127.0.0.1", port=1, key=b"", options={})
    else:
        with pytest.raises(GridError):
            held(bench, child.pid)
    wait_until(lambda: not status(bench)["mover_alive"], LIMIT_S, "the mover to end")
    assert status(bench)["phase"] == "aborted"
    bench.runs(child.pid)


def test_what_is_gone_cannot_be_held(bench: Bench) -> None:
    child = bench.start(COUNTER)
    bench.wait_log(3)
    held(bench, child.pid)
    child.kill()
    child.wait(LIMIT_S)
    gone = wait_until(lambda: None if (one := status(bench))["alive"] else one, LIMIT_S, "its end to show")
    assert gone
    assert not gone["held"]
    with pytest.raises(NotFound):
        bench.keepers["a"].out_hold("m2", child.pid, 1)


@pytest.mark.criu
@pytest.mark.parametrize("strategy", ["live", "relaunch"])
def test_a_program_whose_parent_wakes_it_is_not_moved(bench: Bench, strategy: str) -> None:
    bench.start(WAKER, COUNTER, str(bench.home / "pid"))
    bench.wait_log(3)
    pid = int((bench.home / "pid").read_text())
    if strategy == "live":
        bench.begin(pid)
        out = bench.keepers["a"].out_wait("m", timeout_s=LIMIT_S)
        assert out["woken"] or (out["phase"] == "aborted" and out["error"]["code"] == "woken"), out
    else:
        try:
            held(bench, pid)
            wait_until(lambda: status(bench)["woken"], LIMIT_S, "it to be told")
        except Refused as error:
            assert error.code == "woken"
    bench.keepers["a"].out_abort("m")
    wait_until((bench.home / "pid.woken").exists, LIMIT_S, "its parent to have tried")
    bench.runs(pid)
    contiguous(bench.log())


def test_a_shell_with_job_control_does_not_see_it_stopped(bench: Bench) -> None:
    ours, theirs = pty.openpty()
    command = ["setsid", "--ctty", "bash", "--norc", "-i"]
    bash = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=bench.home)
    bench.started.append(bash)
    os.close(theirs)
    try:
        (bench.home / "count.py").write_text(COUNTER)
        os.write(ours, f"{sys.executable} -I -S count.py > log; echo over > over\n".encode())
        wait_until((bench.home / "log").exists, LIMIT_S, "the program to start")
        bench.wait_log(3)
        [job] = children_of(bash.pid)
        held(bench, job)
        wait_until(lambda: thread_states(bash.pid) == {"t"}, LIMIT_S, "the shell to be held")
        bench.keepers["a"].out_abort("m")
        bench.runs(job)
        held(bench, job, "m2")
        bench.keepers["a"].out_finish("m2", {"dir": str(bench.home / "stub"), "label": "moved to b"})
        wait_until(lambda: thread_states(bash.pid) != {"t"}, LIMIT_S, "the shell to run on")
        fields = Path(f"/proc/{job}/stat").read_text().rpartition(")")[2].split()
        assert fields[2] == fields[5]  # the stub's group has the terminal
        assert not (bench.home / "over").exists()
        os.kill(job, signal.SIGKILL)
        wait_until((bench.home / "over").exists, LIMIT_S, "the shell's next command")
    finally:
        os.close(ours)


def test_the_shell_is_held_however_long_the_copy_takes() -> None:
    for phase in ("new", "freezing", "frozen", "sent", "copied", "replacing", "failed"):
        assert shell.holds_on(phase, 0.0)
    assert not shell.holds_on("copied", shell.HOLD_LIMIT_S)  # in doubt: it may take days
    assert not shell.holds_on("aborted", 0.0) and not shell.holds_on("finished", 0.0)
