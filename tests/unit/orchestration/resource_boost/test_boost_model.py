"""Boosts as the documents name them, and the snapshot file that scripts may read."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from distributed_grid.core.errors import GridError, Unavailable
from distributed_grid.orchestration.resource_boost import (
    AllocationPriority,
    ResourceBoostManager,
    ResourceBoostPersistence,
    ResourceBoostRequest,
    ResourceType,
)


def view(boost_id: str, expires_at: float | None) -> dict[str, Any]:
    return {
        "boost_id": boost_id, "source_node": "gpu2", "target_node": "gpu-master", "resource_type": "memory",
        "amount": 4.0, "priority": "high", "allocated_at": 1.0, "expires_at": expires_at, "is_active": True,
    }  # fmt: skip


def test_defaults_of_a_request() -> None:
    request = ResourceBoostRequest("gpu-master", ResourceType.CPU, 2.0)
    assert request.priority is AllocationPriority.NORMAL
    assert request.duration_seconds is None and request.preferred_source is None


def test_the_file_shows_what_has_not_expired(tmp_path: Path) -> None:
    file = ResourceBoostPersistence(tmp_path / "resource_boosts.json")
    assert file.load_boosts() == {}
    boosts = {"a": view("a", time.time() + 1000), "b": view("b", time.time() - 1), "c": view("c", None)}
    file.path.write_text(json.dumps({"version": 1, "boosts": boosts}))
    found = file.load_boosts()
    assert sorted(found) == ["a", "c"]
    assert (found["a"].resource_type, found["a"].priority) == (ResourceType.MEMORY, AllocationPriority.HIGH)
    assert 0 < (found["a"].remaining_seconds or 0) <= 1000


@pytest.mark.parametrize("text", ["{", "[]", '{"boosts": {"a": {}}}', '{"boosts": 3}'])
def test_a_damaged_file_is_told(text: str, tmp_path: Path) -> None:
    file = ResourceBoostPersistence(tmp_path / "resource_boosts.json")
    file.path.write_text(text)
    with pytest.raises(GridError, match="Persistence file corrupted"):
        file.load_boosts()


async def test_without_a_daemon_it_says_so(grid_home: Path) -> None:
    manager = ResourceBoostManager()
    with pytest.raises(Unavailable, match="the daemon is not running"):
        await manager.get_active_boosts()
