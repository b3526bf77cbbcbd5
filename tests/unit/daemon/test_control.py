"""The control plane without a cluster: what it does while its journal cannot be written, and what it shows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from distributed_grid.cluster.bridge_client import BridgeClient
from distributed_grid.cluster.plan import plan_cluster
from distributed_grid.config.models import ClusterConfig
from distributed_grid.config.paths import GridPaths
from distributed_grid.core.errors import GridError
from distributed_grid.daemon import control
from distributed_grid.daemon.control import ControlPlane
from distributed_grid.daemon.doctor import DoctorService
from distributed_grid.daemon.links import LinkState
from distributed_grid.store.snapshot import disk_full
from distributed_grid.wire.rpc import CallContext

EMBEDDED = {"embedded": True, "ray": {"port": 0}}


@pytest_asyncio.fixture
async def plane(grid_home: Path) -> AsyncIterator[ControlPlane]:
    found = ControlPlane(ClusterConfig(), GridPaths(grid_home).ensure())
    await found.start()
    yield found
    await found.stop()


@pytest.fixture
def no_room(plane: ControlPlane, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The journal takes no event until this is undone."""

    def full(*_words: Any, **_data: Any) -> None:
        raise disk_full(plane.paths.journal)

    monkeypatch.setattr(plane.journal.events, "add", full)
    return monkeypatch


async def test_a_node_that_goes_silent_on_a_full_disk_is_looked_after(
    plane: ControlPlane, no_room: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    no_room.setattr(plane.keeper, "node_went_silent", told.append)
    no_room.setattr(plane.offload, "node_is_down", lambda node: plane.events.publish("offload.lost", node))
    await plane._on_link(LinkState("gpu1", online=False, reason="silent"), True)
    assert told == ["gpu1"]


async def test_a_node_that_answers_on_a_full_disk_is_taken_over(
    plane: ControlPlane, no_room: pytest.MonkeyPatch
) -> None:
    told: list[str] = []

    async def take(node: str) -> None:
        told.append(node)

    no_room.setattr(plane.keeper, "node_is_back", told.append)
    no_room.setattr(plane.tasks, "adopt", take)
    no_room.setattr(plane.memory, "node_is_up", take)
    no_room.setattr(plane.offload, "node_is_up", told.append)
    await plane._on_link(LinkState("gpu1", online=True), True)
    assert told == ["gpu1"] * 4


async def test_a_configuration_is_taken_and_told_or_not_at_all(
    plane: ControlPlane, no_room: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("daemon: {allow_users: [1234]}\n")
    before, new = plane.config, ClusterConfig.from_yaml(file)
    with pytest.raises(GridError):
        await plane._on_config(new)
    assert plane.config is before and plane.socket_path.stat().st_mode & 0o777 == 0o600
    no_room.undo()
    await plane._on_config(new)
    assert plane.config is new and plane.socket_path.stat().st_mode & 0o777 == 0o666
    plane.socket_path.unlink()  # by somebody who tidies up
    await plane._on_config(before)
    assert plane.config is before


async def test_a_watch_that_fails_begins_anew(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    again = asyncio.Event()
    faults = iter([ValueError("a fault of ours")])

    async def watch(*_words: Any, **_data: Any) -> None:
        for fault in faults:
            raise fault
        again.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(control, "WATCH_AGAIN_S", 0.0)
    monkeypatch.setattr(control, "watch_config", watch)
    file = tmp_path / "c.yaml"
    file.write_text("")
    await plane.use_config(str(file))
    await asyncio.wait_for(again.wait(), 60)


async def test_our_own_metrics_have_our_name_once(plane: ControlPlane) -> None:
    lines = plane.overview.render_metrics().splitlines()
    names = {line.split()[0] for line in lines if not line.startswith("#")}
    assert {"grid_nodes_online", "grid_events_total"} <= names
    assert not [name for name in names if name.startswith("grid_grid")]


async def test_ray_is_asked_at_the_head_that_runs_whatever_the_file_says(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = plan_cluster(ClusterConfig.model_validate(EMBEDDED), plane.paths)
    record.state = "up"
    nodes = [{"name": "renamed", "role": "head"}, {"name": "gpu1", "role": "worker"}]
    plane.config = ClusterConfig.model_validate({**EMBEDDED, "nodes": nodes})
    joined: list[str] = []

    async def connect(_bridge: BridgeClient, address: str, _head: str, **_options: Any) -> None:
        joined.append(address)

    async def call(_bridge: BridgeClient, what: str, **_options: Any) -> dict[str, Any]:
        return {what: []}

    monkeypatch.setattr(BridgeClient, "connect", connect)
    monkeypatch.setattr(BridgeClient, "call", call)
    with monkeypatch.context() as patch:
        patch.setattr(plane.keeper, "_record", record)
        assert await DoctorService(plane).nodes(CallContext()) == []
    assert joined == [record.gcs_address]
