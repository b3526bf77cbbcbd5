from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.agent.moving.two_nodes import Bench


@pytest.fixture
def bench(grid_home: Path) -> Iterator[Bench]:
    grid_home.mkdir(parents=True)
    memory = Path(tempfile.mkdtemp(prefix="grid-bench-", dir="/dev/shm"))
    made = Bench(grid_home, memory)
    yield made
    made.close()
    assert not list(memory.iterdir())
    memory.rmdir()
