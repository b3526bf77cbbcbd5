"""Before the commit every fault ends with the source running on, and nothing of ours left."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from distributed_grid.agent.moving import criu
from distributed_grid.agent.moving.state import thread_states
from distributed_grid.core.process import ProcessId
from tests.lab.waiting import wait_until
from tests.unit.agent.moving.two_nodes import COUNTER, LIMIT_S, Bench, contiguous

pytestmark = [pytest.mark.root, pytest.mark.criu]


def stand_at(bench: Bench, pid: int, phase: str) -> None:
    if phase in ("copied", "staged"):
        bench.stage(pid)
        return
    bench.begin(pid, halt_at=phase)
    assert bench.keepers["a"].out_wait("m", (phase,), LIMIT_S)["phase"] == phase


def mover(bench: Bench, node: str, file: str) -> ProcessId:
    data = json.loads((bench.home / node / "m/m" / file).read_text())["mover"]
    return ProcessId(data["pid"], data["start_ticks"])


@pytest.mark.parametrize("phase", ["precopy", "frozen", "sent", "staged"])
@pytest.mark.parametrize("kill", [False, True], ids=["called-off", "mover-killed"])
def test_abort_at_each_step(bench: Bench, phase: str, kill: bool) -> None:
    child = bench.start(COUNTER)
    bench.wait_log(3)
    stand_at(bench, child.pid, phase)
    if kill:
        mover(bench, "a", "out.json").signal(signal.SIGKILL)
        mover(bench, "b", "in.json").signal(signal.SIGKILL)
    for _ in range(2):  # a second word changes nothing
        assert bench.keepers["a"].out_abort("m")["phase"] == "aborted"
        assert bench.keepers["b"].in_drop("m")["phase"] == "dropped"
    bench.runs(child.pid)
    contiguous(bench.log())
    assert not (bench.home / "b/s/m").exists()
    maps = Path(f"/proc/{child.pid}/smaps").read_text()
    assert not any(" uw" in line for line in maps.splitlines() if line.startswith("VmFlags"))
    bench.stage(child.pid, move="m2")  # and it can be moved after all
    bench.keepers["b"].in_go("m2")
    bench.keepers["a"].out_finish("m2")
    wait_until(lambda: len(bench.spool(task="m2")) > 5, LIMIT_S, "output on the target")
    contiguous(bench.log() + bench.spool(task="m2"))


def test_a_held_source_stays_held_when_everybody_dies(bench: Bench) -> None:
    child = bench.start(COUNTER)
    bench.wait_log(3)
    stand_at(bench, child.pid, "sent")
    who = mover(bench, "a", "out.json")
    who.signal(signal.SIGKILL)
    wait_until(lambda: not who.is_alive(), LIMIT_S, "the mover to die")
    assert bench.keepers["a"].out_status("m")["mover_alive"] is False
    lines = len(bench.log())
    wait_until(lambda: thread_states(child.pid) == {"T"}, LIMIT_S, "it to be stopped")
    assert len(bench.log()) == lines


def test_a_held_source_cannot_be_woken(bench: Bench) -> None:
    child = bench.start(COUNTER)
    bench.wait_log(3)
    bench.stage(child.pid)
    lines = len(bench.log())
    for _ in range(3):
        os.kill(child.pid, signal.SIGCONT)
        assert thread_states(child.pid) == {"t"}
    assert bench.keepers["a"].out_status("m")["held"] and len(bench.log()) == lines
    bench.keepers["b"].in_go("m")
    bench.keepers["a"].out_finish("m", {"dir": str(bench.home / "stub"), "label": "moved to b"})
    wait_until(lambda: len(bench.spool()) > 5, LIMIT_S, "output on the target")
    contiguous(bench.log() + bench.spool())


def test_a_held_source_that_is_killed_is_gone_for_its_parent_too(bench: Bench) -> None:
    child = bench.start(COUNTER)
    bench.wait_log(3)
    bench.stage(child.pid)
    child.kill()
    assert child.wait(LIMIT_S) == -signal.SIGKILL
    assert not bench.keepers["a"].out_status("m")["alive"]


def test_the_target_dies_while_it_receives(bench: Bench) -> None:
    child = bench.start(COUNTER)
    bench.wait_log(3)
    bench.begin(child.pid, halt_at="precopy")
    bench.keepers["a"].out_wait("m", ("precopy",), LIMIT_S)
    wait_until(lambda: bench.keepers["b"].in_status("m")["phase"] == "receiving", LIMIT_S, "the target to be ready")
    mover(bench, "b", "in.json").signal(signal.SIGKILL)
    wait_until(lambda: bench.keepers["b"].in_status("m")["phase"] in ("lost", "failed"), LIMIT_S, "the loss to show")
    bench.keepers["a"].out_abort("m")
    bench.runs(child.pid)


def test_a_lost_target_aborts_by_itself(bench: Bench) -> None:
    child = bench.start(COUNTER)
    bench.wait_log(3)
    who = ProcessId(child.pid, int(Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19]))
    bench.keepers["a"].out_begin("m", who.pid, who.start_ticks, "127.0.0.1", 1, os.urandom(32), {})
    out = bench.keepers["a"].out_wait("m", timeout_s=LIMIT_S)
    assert out["phase"] == "aborted" and out["error"]["code"] == "move-link"
    bench.runs(child.pid)


def test_the_shim_of_the_copy_dies_before_the_commit(bench: Bench) -> None:
    child = bench.start(COUNTER)
    bench.wait_log(3)
    bench.stage(child.pid)
    shim = json.loads((bench.home / "b/s/m/shim.json").read_text())
    ProcessId(shim["pid"], shim["start_ticks"]).signal(signal.SIGKILL)
    wait_until(lambda: bench.keepers["b"].in_status("m")["phase"] == "lost", LIMIT_S, "the loss to show")
    bench.keepers["b"].in_drop("m")
    bench.keepers["a"].out_abort("m")
    bench.runs(child.pid)
    contiguous(bench.log())


WAITS = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
print("waits", flush=True)
print(libc.poll(None, 0, 3000), ctypes.get_errno(), flush=True)
"""


def test_a_wait_is_not_broken_off_by_a_move_that_is_called_off(bench: Bench) -> None:
    child = bench.start(WAITS)
    bench.wait_log(1)
    bench.stage(child.pid)
    bench.keepers["b"].in_drop("m")
    bench.keepers["a"].out_abort("m")
    assert child.wait(LIMIT_S) == 0 and bench.log() == ["waits", "0", "0"]


#: The first dump ends as one does whose thread never came to a stop; all others are CRIU's own.
NOT_SEIZED = """#!/bin/sh
case " $* " in *" dump "*)
  if [ ! -e {mark} ]; then
    touch {mark}
    while [ "$1" != -D ]; do shift; done
    echo "(00.1) Error (compel/src/lib/infect.c:300): SEIZE 7: can't wait task: Interrupted system call" > "$2/dump.log"
    exit 1
  fi
esac
exec {criu} "$@"
"""


def test_a_thread_that_criu_did_not_see_stop_is_tried_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper = bench.home / "criu"
    wrapper.write_text(NOT_SEIZED.format(mark=bench.home / "mark", criu=criu.require()))
    wrapper.chmod(0o755)
    monkeypatch.setenv("GRID_CRIU", str(wrapper))
    child = bench.start(COUNTER)
    bench.wait_log(3)
    bench.stage(child.pid)
    assert (bench.home / "mark").exists()
    assert bench.keepers["a"].out_status("m")["figures"]["seized_again"] == 1
    bench.keepers["b"].in_go("m")
    bench.keepers["a"].out_finish("m")
    wait_until(lambda: len(bench.spool()) > 5, LIMIT_S, "output on the target")
    contiguous(bench.log() + bench.spool())
