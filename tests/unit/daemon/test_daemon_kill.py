"""What the daemon has answered outlives its kill -9."""

from __future__ import annotations

from pathlib import Path

from distributed_grid.config.paths import GridPaths
from tests.unit.daemon.daemon_kill_rounds import kill_rounds

ROUNDS = 5  # fifty in tests/chaos


def test_answered_calls_survive_kill_9(grid_home: Path) -> None:
    kill_rounds(GridPaths(grid_home).ensure(), ROUNDS, seed=4)
