"""GridOrchestrator before it is initialized."""

from __future__ import annotations

from pathlib import Path

import pytest

import distributed_grid
from distributed_grid.core import GridOrchestrator
from distributed_grid.core.errors import UsageError


async def test_not_initialized(grid_home: Path) -> None:
    grid = GridOrchestrator()
    for call in (grid.status(), grid.cluster_start(), grid.execute("gpu1", ["true"])):
        with pytest.raises(UsageError) as caught:
            await call
        assert caught.value.code == "not-initialized" and "initialize()" in caught.value.hint
    await grid.shutdown()
    assert not grid_home.exists()


def test_public_name() -> None:
    assert distributed_grid.GridOrchestrator is GridOrchestrator
