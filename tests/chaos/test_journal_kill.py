"""kill -9 in the middle of 200 journalled writes, fifty times: of the journal's writer, and of the daemon itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from distributed_grid.config.paths import GridPaths
from tests.unit.daemon.daemon_kill_rounds import kill_rounds as kill_daemon_rounds
from tests.unit.store.kill_rounds import kill_rounds


@pytest.mark.chaos
@pytest.mark.timeout(1800)  # thousands of fsyncs, on whatever disk there is
@pytest.mark.parametrize("wal", [True, False])
def test_acknowledged_writes_survive_fifty_kills(tmp_path: Path, wal: bool) -> None:
    kill_rounds(tmp_path / "journal.sqlite3", 50, seed=3, wal=wal)


@pytest.mark.chaos
@pytest.mark.timeout(1800)
def test_answered_calls_survive_fifty_kills_of_the_daemon(grid_home: Path) -> None:
    kill_daemon_rounds(GridPaths(grid_home).ensure(), 50, seed=5)
