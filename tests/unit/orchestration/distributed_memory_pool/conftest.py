"""Pools to try, with all that belongs to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from distributed_grid.daemon import memory_care
from distributed_grid.orchestration.distributed_memory_pool.sync import SyncMemoryPool
from tests.unit.orchestration.distributed_memory_pool.world import World


@pytest.fixture
def make_world(grid_home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., World]]:
    monkeypatch.setattr(memory_care, "ROUND_S", 0.2)
    made: list[World] = []

    def make(**options: Any) -> World:
        made.append(World(grid_home, **options))
        return made[-1]

    yield make
    for world in made:
        world.close()


@pytest.fixture(params=["shared", "wire"])
def world(request: pytest.FixtureRequest, make_world: Callable[..., World]) -> World:
    """Once as on one host, once as over a network."""
    return make_world(shared=request.param == "shared")


@pytest.fixture
def pool(world: World) -> Iterator[SyncMemoryPool]:
    with world.pool() as made:
        yield made
