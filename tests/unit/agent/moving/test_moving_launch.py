"""The launcher of movers that an agent keeps loaded: used once, replaced, gone with its agent."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from distributed_grid.agent.moving.launch import Launchers
from distributed_grid.core.process import ProcessId
from tests.lab.waiting import wait_until
from tests.unit.agent.moving.two_nodes import COUNTER, LIMIT_S, Bench

pytestmark = [pytest.mark.root, pytest.mark.criu]


@pytest.fixture
def launchers(bench: Bench) -> Iterator[Launchers]:
    made = bench.keepers["a"].launchers
    yield made
    made.close()


def spare_of(launchers: Launchers) -> int:
    launchers.keep_spare(0.0)
    return wait_until(lambda: launchers._spare.pid if launchers._spare else 0, LIMIT_S, "a spare")


def words_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode().rstrip("\0").split("\0")


def test_a_spare_carries_the_move_under_its_own_name(bench: Bench, launchers: Launchers) -> None:
    child = bench.start(COUNTER)
    bench.wait_log(3)
    spare = spare_of(launchers)
    wait_until(lambda: words_of(spare)[4:5] == ["--spare"], LIMIT_S, "the spare to show itself")
    bench.begin(child.pid, halt_at="frozen")
    out = bench.keepers["a"].out_wait("m", ("frozen",), LIMIT_S)
    assert out["phase"] == "frozen", out
    mover = ProcessId(**bench.keepers["a"]._out("m")["mover"])
    assert words_of(mover.pid)[2:] == ["-m", "distributed_grid.agent.moving.mover", "out", str(bench.home / "a/m/m")]
    assert not Path(f"/proc/{spare}").exists()
    assert bench.keepers["a"].out_abort("m")["phase"] == "aborted"


def test_a_spare_that_was_killed_is_not_missed(bench: Bench, launchers: Launchers) -> None:
    child = bench.start(COUNTER)
    bench.wait_log(3)
    spare = spare_of(launchers)
    assert launchers._spare
    launchers._spare.send_signal(signal.SIGKILL)
    wait_until(lambda: launchers._spare and launchers._spare.poll() is not None, LIMIT_S, "it to die")
    assert bench.stage(child.pid)["phase"] == "staged"
    assert spare_of(launchers) != spare


def test_a_spare_ends_with_its_agent(launchers: Launchers) -> None:
    spare_of(launchers)
    spare = launchers._spare
    assert spare and spare.stdin
    spare.stdin.close()  # as the agent's death does
    assert spare.wait(LIMIT_S) == 0
