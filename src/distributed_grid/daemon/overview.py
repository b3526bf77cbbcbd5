"""The calls that show the grid, and those that bring the cluster and the daemon up and down."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from distributed_grid import __version__
from distributed_grid.core.errors import Refused, Unavailable
from distributed_grid.monitoring.prometheus import render
from distributed_grid.wire.rpc import PROTOCOL, CallContext, method

if TYPE_CHECKING:
    from distributed_grid.daemon.control import ControlPlane


class OverviewService:
    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane

    # -- the daemon -----------------------------------------------------------------------------------------------

    @method
    async def daemon_status(self, context: CallContext) -> dict[str, Any]:
        plane = self._plane
        return {
            "pid": os.getpid(),
            "version": __version__,
            "protocol": PROTOCOL,
            "started": plane.started,
            "uptime_s": round(time.time() - plane.started, 1),
            "home": str(plane.paths.home),
            "socket": str(plane.socket_path),
            "config_path": str(plane.config.path) if plane.config.path else None,
            "metrics_url": f"http://127.0.0.1:{plane.metrics_port}/metrics" if plane.metrics_port else None,
            "journal_mode": plane.journal.journal_mode,
            "cluster": plane.keeper.state,
            "nodes_online": sum(1 for link in plane.links if link.state.online),
            "nodes": len(plane.links.names()),
        }

    @method
    async def daemon_stop(self, context: CallContext) -> dict[str, Any]:
        if context.uid not in (0, os.geteuid()):
            raise Refused("only the daemon's owner may stop it", code="not-owner")
        asyncio.get_running_loop().call_later(0.05, self._plane.stop_asked.set)
        return {"pid": os.getpid()}

    # -- the cluster ----------------------------------------------------------------------------------------------

    def _owner_only(self, context: CallContext) -> None:
        if context.uid not in (0, os.geteuid()):
            raise Refused("only the daemon's owner may change the cluster", code="not-owner")

    @method
    async def cluster_start(self, context: CallContext) -> AsyncIterator[dict[str, Any]]:
        """Bring up what is not up; each step as it happens, last the result by node."""
        self._owner_only(context)
        async for step in self._plane.keeper.start(self._plane.config):
            yield step
        await self._wait_online()
        yield {"done": self._nodes(), "failed": self._plane.keeper.failures()}

    async def _wait_online(self) -> None:
        """A node counts as up once its figures arrive."""
        waiting = [link for link in self._plane.links if link.node not in self._plane.keeper.failures()]
        limit = time.monotonic() + 30
        while time.monotonic() < limit and not all(link.state.online for link in waiting):
            await asyncio.sleep(0.02)

    @method
    async def cluster_stop(self, context: CallContext) -> AsyncIterator[dict[str, Any]]:
        self._owner_only(context)
        async for step in self._plane.keeper.stop():
            yield step

    @method
    async def cluster_status(self, context: CallContext) -> dict[str, Any]:
        return {**self._plane.keeper.describe(), "nodes": self._nodes(), "at": time.time()}

    @method
    async def status(self, context: CallContext) -> dict[str, Any]:
        plane = self._plane
        tasks = [task for task in await plane.tasks.task_list(context, active=True)]
        return {
            "cluster": plane.keeper.state,
            "name": plane.config.name,
            "embedded": plane.config.embedded,
            "at": time.time(),
            "daemon_pid": os.getpid(),
            "nodes": self._nodes(),
            "tasks": tasks,
            "events": [dataclasses.asdict(row) for row in plane.events.recent(5)],
        }

    def _nodes(self) -> list[dict[str, Any]]:
        plane = self._plane
        snapshots = plane.collector.get_all_latest_snapshots()
        records = plane.keeper.nodes()
        found = []
        for node in plane.config.nodes:
            record = records.get(node.name, {})
            row: dict[str, Any] = {
                "name": node.name, "role": node.role, "host": node.host or record.get("address"), "tags": node.tags,
                "address": record.get("address"), "raylet_pid": record.get("raylet_pid"),
                "gcs_pid": record.get("gcs_pid"),
                "online": False, "since": None, "reason": record.get("error") or "not started", "agent_pid": None,
            }  # fmt: skip
            if node.name in plane.links.names():
                state = plane.links.get(node.name).state
                reason = record.get("error") or state.reason
                row.update(
                    online=state.online, since=state.since, reason="" if state.online else reason,
                    agent_pid=state.agent.get("pid") if state.online else None,
                    agent_version=state.agent.get("version"),
                )  # fmt: skip
            if node.name in snapshots:
                shot = snapshots[node.name]
                row["use"] = shot.to_wire()
                row["age_s"] = round(max(0.0, time.time() - shot.at), 2)
            row["lent"] = plane.lent_on(node.name)
            found.append(row)
        return found

    @method
    async def snapshots_follow(
        self, context: CallContext, *, interval_s: float = 1.0
    ) -> AsyncIterator[list[dict[str, Any]]]:
        while True:
            yield self._nodes()
            await asyncio.sleep(max(0.1, min(interval_s, 3600)))

    @method
    async def cluster_env(self, context: CallContext) -> dict[str, str]:
        """What a plain Ray program needs to reach this cluster."""
        self._owner_only(context)
        if not self._plane.keeper.is_up:
            raise Unavailable("no cluster is up", hint="grid cluster start", code="no-cluster")
        return self._plane.keeper.ray_environment()

    @method
    async def config_use(self, context: CallContext, *, path: str) -> None:
        self._owner_only(context)
        await self._plane.use_config(path)

    # -- what happened --------------------------------------------------------------------------------------------

    @method
    async def events_recent(
        self, context: CallContext, *, limit: int = 50, kind: str = "", node: str = ""
    ) -> list[dict[str, Any]]:
        rows = self._plane.events.recent(max(1, min(limit, 20000)), kind=kind, node=node)
        return [dataclasses.asdict(row) for row in rows]

    @method
    async def events_follow(self, context: CallContext, *, since: int | None = None) -> AsyncIterator[dict[str, Any]]:
        async for row in self._plane.events.subscribe(since=since):
            yield dataclasses.asdict(row)

    # -- measurements ---------------------------------------------------------------------------------------------

    @method
    async def bandwidth_measure(
        self, context: CallContext, *, source: str, target: str, seconds: float = 1.0
    ) -> dict[str, Any]:
        """Send between two nodes for a moment and remember the rate."""
        sink = await self._plane.links.get(target).call("bandwidth_sink", wait_s=5, limit_s=seconds + 10)
        result = await self._plane.links.get(source).call(
            "bandwidth_send", wait_s=5, timeout_s=seconds + 20,
            host=sink["host"], port=sink["port"], key=sink["key"], seconds=seconds,
        )  # fmt: skip
        row = self._plane.journal.links.put(source, target, result["bytes_per_s"])
        return dataclasses.asdict(row)

    @method
    async def bandwidth_list(self, context: CallContext) -> list[dict[str, Any]]:
        return [dataclasses.asdict(row) for row in self._plane.journal.links.list()]

    def render_metrics(self) -> str:
        plane = self._plane
        counters = {
            "nodes_online": sum(1 for link in plane.links if link.state.online),
            "events_total": plane.journal.events.last_seq(),
        }
        return render(plane.collector.get_all_latest_snapshots(), counters)
