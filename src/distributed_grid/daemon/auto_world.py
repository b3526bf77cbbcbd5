"""What automatic offload sees and touches in the daemon, so that its loop can be tested without one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from distributed_grid.config.models import ClusterConfig
from distributed_grid.monitoring.resource_metrics import ResourceMetricsCollector
from distributed_grid.orchestration.auto_offload.signals import Inputs, NodeSignals, Point
from distributed_grid.wire.rpc import CallContext

if TYPE_CHECKING:
    from distributed_grid.daemon.control import ControlPlane

HISTORY_S = 600.0


class Publisher(Protocol):
    def publish(self, kind: str, text: str, *, node: str = "", **data: Any) -> Any: ...


class Store(Protocol):
    def get(self, key: str, default: Any = None) -> Any: ...

    def put(self, key: str, value: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class World:
    """What the loop sees and touches."""

    config: Callable[[], ClusterConfig]
    collector: ResourceMetricsCollector
    #: Whether a node is online, and since when (wall clock) it is so.
    link: Callable[[str], tuple[bool, float]]
    #: Measured bytes per second between two nodes; None where never measured.
    bandwidth: Callable[[str, str], float | None]
    #: What of a node is lent to others, as cores (`cpu`) and `memory_bytes`.
    lent: Callable[[str], Mapping[str, float]]
    #: Nodes on which the head holds a boost.
    boosted: Callable[[], Sequence[str]]
    events: Publisher
    store: Store
    state_path: Callable[[], Path]


def world_of(plane: ControlPlane) -> World:
    def link(node: str) -> tuple[bool, float]:
        if node not in plane.links.names():
            return False, 0.0
        state = plane.links.get(node).state
        return state.online, state.since

    def bandwidth(source: str, target: str) -> float | None:
        row = plane.journal.links.get(source, target)
        return row.bytes_per_s if row else None

    return World(
        config=lambda: plane.config, collector=plane.collector, link=link, bandwidth=bandwidth,
        lent=lambda node: plane.lending.taken(node), boosted=lambda: plane.lending.boosted_nodes(),
        events=plane.events, store=plane.journal.kv,
        state_path=lambda: plane.config.daemon.offload_state_path or plane.paths.offload_state,
    )  # fmt: skip


class OwnMover:
    """The offload service, called as the daemon's owner."""

    def __init__(self, service: Any) -> None:
        self._service = service
        self._context = CallContext(uid=os.geteuid(), pid=os.getpid(), peer="auto-offload")

    async def offload_scan(self, *, node: str | None = None, everything: bool = False) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = await self._service.offload_scan(self._context, node=node, everything=everything)
        return found

    async def offload_plan(
        self, *, pid: int | str, target_node: str | None = None, options: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        plan: dict[str, Any] = await self._service.offload_plan(
            self._context, pid=pid, target_node=target_node, options=options
        )
        return plan

    async def offload_execute(
        self,
        *,
        pid: int | str,
        target_node: str | None = None,
        options: dict[str, Any] | None = None,
        automatic: bool = False,
        reason: str = "",
    ) -> AsyncIterator[dict[str, Any]]:
        steps = self._service.offload_execute(
            self._context, pid=pid, target_node=target_node, options=options, automatic=automatic, reason=reason
        )
        async with contextlib.aclosing(steps):
            async for step in steps:
                yield step

    async def offload_status(self, *, limit: int = 20, brief: bool = False) -> dict[str, Any]:
        found: dict[str, Any] = await self._service.offload_status(self._context, limit=limit, brief=brief)
        return found


def gather(world: World, now: float, busy: str) -> Inputs | None:
    """All signals as they are; None while there are no figures of the head."""
    config, collector = world.config(), world.collector
    snapshots = collector.get_all_latest_snapshots()
    head = config.head.name
    if head not in snapshots:
        return None

    boosted = frozenset(world.boosted())

    def signals(node: str) -> NodeSignals:
        online, since = world.link(node)
        online_s = max(0.0, now - since) if online else 0.0
        lent = world.lent(node)
        return NodeSignals.of(
            snapshots[node], online=online, online_s=online_s, age_s=collector.age_s(node) or 0.0,
            lent_cpu_cores=float(lent["cpu"]), lent_memory_bytes=int(lent["memory_bytes"]), boosted=node in boosted,
        )  # fmt: skip

    workers = [node.name for node in config.workers if node.name in snapshots]
    return Inputs(
        at=now, head=signals(head), workers=tuple(signals(node) for node in workers),
        points=tuple(
            Point(one.at, one.cpu_pressure, one.memory_pressure, one.gpu_pressure)
            for one in collector.get_history(head, HISTORY_S)
        ),
        busy=busy, bandwidth={node: rate for node in workers if (rate := world.bandwidth(head, node))},
    )  # fmt: skip
