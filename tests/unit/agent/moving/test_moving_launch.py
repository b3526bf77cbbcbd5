"""Launchers of movers that are loaded before they are needed: used once, let go without a trace, never in the way."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from distributed_grid.agent.moving.launch import Launchers
from distributed_grid.core.process import ProcessId, process_id
from tests.lab.waiting import wait_until
from tests.unit.agent.moving.two_nodes import COUNTER, LIMIT_S, Bench

pytestmark = [pytest.mark.root, pytest.mark.criu]


def waiting(directory: Path) -> list[ProcessId]:
    """The movers for that directory, before or after their orders."""
    found = []
    for name in os.listdir("/proc"):  # noqa: PTH208
        if name.isdigit():
            try:
                words = Path(f"/proc/{name}/cmdline").read_bytes().decode().split("\0")
            except OSError:
                continue
            who = process_id(int(name)) if str(directory) in words else None
            found += [who] if who else []
    return found


def test_a_loaded_launcher_carries_the_move(bench: Bench) -> None:
    child = bench.start(COUNTER)
    bench.wait_log(3)
    for name, side in (("a", "out"), ("b", "in")):
        bench.keepers[name].warm("m", side)
        bench.keepers[name].warm("m", side)
    [loaded] = waiting(bench.home / "a" / "m" / "m")
    assert bench.move(child.pid)["phase"] == "finished"
    assert not loaded.is_alive()
    for name in "ab":
        bench.keepers[name].cool("m")
        assert (bench.home / name / "m" / "m").is_dir()  # what came of it is not touched


def test_one_that_is_not_needed_leaves_nothing(bench: Bench) -> None:
    bench.keepers["a"].warm("m", "out")
    directory = bench.home / "a" / "m" / "m"
    assert len(waiting(directory)) == 1
    bench.keepers["a"].cool("m")
    assert not waiting(directory) and not directory.exists()
    bench.keepers["a"].cool("m")


def test_one_that_died_is_replaced(bench: Bench) -> None:
    child = bench.start(COUNTER)
    bench.wait_log(3)
    bench.keepers["a"].warm("m", "out")
    [loaded] = waiting(bench.home / "a" / "m" / "m")
    loaded.signal(signal.SIGKILL)
    wait_until(lambda: not loaded.is_alive(), LIMIT_S, "it to die")
    assert bench.stage(child.pid)["phase"] == "staged"


def test_one_whose_agent_died_ends_by_itself(tmp_path: Path) -> None:
    launchers = Launchers()
    launchers.warm("out", tmp_path / "m")
    [loaded] = waiting(tmp_path / "m")
    launcher, _ = launchers._waiting["out", tmp_path / "m"]
    assert launcher.stdin
    launcher.stdin.close()  # as its end does
    assert launcher.wait(LIMIT_S) == 0 and not loaded.is_alive()
    launchers.cool(tmp_path / "m")
