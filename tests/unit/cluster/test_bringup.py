"""The whole embedded cluster with real agents: up, up again, after deaths, down; and a head that cannot start."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from distributed_grid.cluster.bridge_client import BridgeClient
from distributed_grid.cluster.bringup import bring_down, bring_up, restart_all, restart_node
from distributed_grid.cluster.node_processes import find_marked
from distributed_grid.cluster.plan import make_launchers, plan_cluster
from distributed_grid.cluster.record import ClusterRecord, NodeRecord
from distributed_grid.config.models import ClusterConfig
from distributed_grid.config.paths import GridPaths
from distributed_grid.core.errors import GridError
from distributed_grid.core.process import process_id


def embedded() -> ClusterConfig:
    return ClusterConfig.model_validate({"embedded": True, "ray": {"port": 0, "dashboard_port": 0}})


def kill_of(node: NodeRecord, comm: str) -> None:
    [found] = [one for one in find_marked(node.spec.marker) if one.comm == comm]
    assert found.id.signal(signal.SIGKILL)


@pytest.mark.timeout(600)
async def test_embedded_cluster_through_its_life(grid_home: Path) -> None:
    paths = GridPaths(grid_home).ensure()
    bridge = BridgeClient(paths.token, grid_home / "bridge.log")
    steps: list[tuple[str, str]] = []
    try:
        record = await bring_up(embedded(), paths, None, bridge, lambda node, step: steps.append((node, step)))
        assert record.state == "up", record.to_wire()
        assert ("gpu1", "up") in steps
        assert ClusterRecord.load(paths.cluster_record) == record
        agents = {node.name: node.agent["pid"] for node in record.nodes.values() if node.agent}
        assert len(set(agents.values())) == 3

        os.kill(bridge.pid or 0, signal.SIGKILL)  # a dead bridge is replaced when it is next asked
        nodes = {one["node"]: one for one in (await bridge.call("nodes", timeout_s=120))["nodes"] if one["alive"]}
        assert set(nodes) == {"gpu-master", "gpu1", "gpu2"}
        assert nodes["gpu1"]["resources"]["CPU"] == 8

        record = await bring_up(embedded(), paths, None, bridge)  # all is there: found again, not started again
        assert {node.name: node.agent["pid"] for node in record.nodes.values() if node.agent} == agents

        launchers = make_launchers(record)
        kill_of(record.nodes["gpu1"], "raylet")
        await restart_node(record, "gpu1", paths, launchers, bridge)
        assert record.state == "up"
        assert record.nodes["gpu1"].agent and record.nodes["gpu1"].agent["pid"] != agents["gpu1"]

        kill_of(record.head, "gcs_server")
        await restart_all(record, paths, launchers, bridge)
        assert record.state == "up", record.to_wire()
        agents = {node.name: node.agent["pid"] for node in record.nodes.values() if node.agent}
        assert all(process_id(pid) for pid in agents.values())
    finally:
        left = ClusterRecord.load(paths.cluster_record)
        if left is not None:
            await bring_down(left, paths, None, bridge)
            assert left.state == "down"
            await bring_down(left, paths, None, bridge)  # twice is as good as once
            assert [one for node in left.nodes.values() for one in find_marked(node.spec.marker)] == []
        await bridge.close()


class Refusing:
    """A launcher whose head never starts; notes what it was asked."""

    kind = "local"

    def __init__(self, node: str, asked: list[tuple[str, str]]) -> None:
        self.node, self.asked = node, asked

    async def run(self, verb: str, payload: object, timeout_s: float) -> dict[str, object]:
        self.asked.append((self.node, verb))
        if verb == "status":
            return {"up": False}
        if verb == "start" and self.node == "gpu-master":
            raise GridError("no head today", code="disk-full")
        if verb == "start":
            await asyncio.sleep(timeout_s)  # as a worker that waits for its head
        return {}

    async def close(self) -> None:
        return None


async def test_a_head_that_fails_leaves_nothing(grid_home: Path) -> None:
    paths = GridPaths(grid_home).ensure()
    bridge = BridgeClient(paths.token, grid_home / "bridge.log")
    asked: list[tuple[str, str]] = []
    launchers = {name: Refusing(name, asked) for name in ("gpu-master", "gpu1", "gpu2")}
    try:
        with pytest.raises(GridError, match="no head today"):
            await bring_up(embedded(), paths, launchers, bridge)
    finally:
        await bridge.close()
    assert {name for name, verb in asked if verb == "stop"} == {"gpu-master", "gpu1", "gpu2"}
    record = ClusterRecord.load(paths.cluster_record)
    assert record is not None
    assert record.state == "down"  # not "failed", which would be brought back
    assert record.head.error and record.head.error["code"] == "disk-full"
    assert bridge.pid is None


async def test_a_head_that_does_not_come_back_is_never_written_down_as_stopped(grid_home: Path) -> None:
    paths = GridPaths(grid_home).ensure()
    bridge = BridgeClient(paths.token, grid_home / "bridge.log")
    record = plan_cluster(embedded(), paths)
    written: list[str] = []

    class Noting(Refusing):
        async def run(self, verb: str, payload: object, timeout_s: float) -> dict[str, object]:
            if verb == "stop":  # what a daemon would find that is started now
                found = ClusterRecord.load(paths.cluster_record)
                written.append(found.state if found else "")
            return await super().run(verb, payload, timeout_s)

    save = ClusterRecord.save

    def note(self: ClusterRecord, path: Path) -> None:
        written.append(self.state)
        save(self, path)

    try:
        with pytest.MonkeyPatch.context() as patch, pytest.raises(GridError, match="no head today"):
            patch.setattr(ClusterRecord, "save", note)
            await restart_all(record, paths, {name: Noting(name, []) for name in record.nodes}, bridge)
    finally:
        await bridge.close()
    assert set(written) == {"starting", "failed"}


async def test_a_cluster_of_another_shape_is_told_before_it_is_ended(grid_home: Path) -> None:
    paths = GridPaths(grid_home).ensure()
    bridge = BridgeClient(paths.token, grid_home / "bridge.log")
    told: list[str] = []

    async def before_end() -> None:
        found = ClusterRecord.load(paths.cluster_record)
        told.append(found.state if found else "")

    async def start(*names: str) -> None:
        nodes = [{"name": name, "role": "worker" if number else "head"} for number, name in enumerate(names)]
        config = ClusterConfig.model_validate({"embedded": True, "ray": {"port": 0}, "nodes": nodes})
        launchers = {name: Refusing(name, []) for name in names}
        with pytest.raises(GridError, match="no head today"):
            await bring_up(config, paths, launchers, bridge, before_end=before_end)
        record = ClusterRecord.load(paths.cluster_record)
        assert record is not None
        record.state = "up"
        record.save(paths.cluster_record)

    try:
        await start("gpu-master", "gpu1")
        await start("gpu-master", "gpu1")
        assert told == []
        await start("gpu-master", "gpu2")
        assert told == ["up"]
    finally:
        await bridge.close()


async def test_bridge_says_no_before_it_is_connected(grid_home: Path) -> None:
    paths = GridPaths(grid_home).ensure()
    bridge = BridgeClient(paths.token, grid_home / "bridge.log")
    try:
        assert (await bridge.call("ping", timeout_s=60))["connected"] == ""
        for verb, code in (("nodes", "bridge-not-connected"), ("sing", "bridge-verb")):
            with pytest.raises(GridError) as caught:
                await bridge.call(verb, timeout_s=60)
            assert caught.value.code == code
    finally:
        await bridge.close()
