"""All nodes' figures in one place: the latest, how old they are, their history, and when pressure begins and ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from distributed_grid.core.clock import Clock, SystemClock
from distributed_grid.core.errors import GridError
from distributed_grid.core.resources import ResourceType
from distributed_grid.monitoring.history import HistoryPoint, NodeHistory
from distributed_grid.monitoring.snapshot import NodeSnapshot

Source = Callable[[], Awaitable[Iterable[NodeSnapshot]]]
#: A gap between high and low where only high was given: without one, use at the limit would flap.
DEFAULT_GAP = 0.1


@dataclass(frozen=True, slots=True)
class CollectorThresholds:
    """Fractions of what a node has: pressure begins above high and ends below low."""

    cpu_high: float = 0.8
    cpu_low: float = 0.7
    memory_high: float = 0.7
    memory_low: float = 0.6
    gpu_high: float = 0.9
    gpu_low: float = 0.8

    @classmethod
    def from_config(cls, config: Any) -> CollectorThresholds:
        """From the config's pressure levels (`memory.high`, `memory.low`) or its triggers (`memory`), or a mapping.

        A value above 1 is a percentage; what is not there keeps its default.
        """
        values: dict[str, float] = {}
        for name in ("cpu", "memory", "gpu"):
            levels = _item(config, name)
            if levels is None:
                continue
            high = _fraction(levels if isinstance(levels, int | float) else _item(levels, "high"))
            low = _fraction(None if isinstance(levels, int | float) else _item(levels, "low"))
            if high is None:
                high = getattr(cls(), f"{name}_high")
            values[f"{name}_high"] = high
            values[f"{name}_low"] = min(high, low) if low is not None else max(0.0, high - DEFAULT_GAP)
        return cls(**values)

    def high(self, resource: ResourceType) -> float:
        return float(getattr(self, f"{resource.value}_high"))

    def low(self, resource: ResourceType) -> float:
        return float(getattr(self, f"{resource.value}_low"))


def _item(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)


def _fraction(value: float | None) -> float | None:
    return None if value is None else value / 100 if value > 1 else float(value)


@dataclass(frozen=True, slots=True)
class PressureEvent:
    """Pressure on a node began, or (`cleared`) ended."""

    node: str
    resource: ResourceType
    pressure: float
    at: float
    cleared: bool = False

    def to_wire(self) -> dict[str, Any]:
        return {
            "node": self.node, "resource": self.resource.value, "pressure": self.pressure, "at": self.at,
            "cleared": self.cleared,
        }  # fmt: skip


@dataclass(slots=True)
class _Node:
    snapshot: NodeSnapshot
    fed_at: float  # the collector's monotonic clock
    history: NodeHistory


class ResourceMetricsCollector:
    """Lives in the daemon. Fed by `feed`, or by its own loop from `source`."""

    def __init__(
        self,
        thresholds: CollectorThresholds | Any = None,
        *,
        head_node_id: str | None = None,
        head_only_mode: bool = False,
        clock: Clock | None = None,
        on_pressure: Callable[[PressureEvent], None] | None = None,
        source: Source | None = None,
        interval_s: float = 1.0,
        source_timeout_s: float = 10.0,
        hold_s: float = 0.0,
    ) -> None:
        """`hold_s`: pressure, or its end, counts once it has lasted that long, so that a busy moment is no event."""
        self._hold_s = hold_s
        self._turning: dict[tuple[str, ResourceType], float] = {}
        self._thresholds = _thresholds(thresholds)
        self._head_node_id = head_node_id
        self._head_only_mode = head_only_mode
        self._clock = clock or SystemClock()
        self._on_pressure = on_pressure
        self._source = source
        self._interval_s = interval_s
        self._source_timeout_s = source_timeout_s
        self._nodes: dict[str, _Node] = {}
        self._pressed: dict[tuple[str, ResourceType], PressureEvent] = {}
        self._running = False
        self._task: asyncio.Task[None] | None = None
        #: Why the last round of the loop brought nothing; empty when it did.
        self.source_error = ""

    def configure(self, thresholds: Any, *, head_node_id: str | None, head_only_mode: bool) -> None:
        """Take a changed configuration; pressure of nodes that no longer count ends."""
        self._thresholds = _thresholds(thresholds)
        self._head_node_id, self._head_only_mode = head_node_id, head_only_mode
        for node, resource in list(self._pressed):
            if not self._counts(node):
                self._clear(node, resource)

    def feed(self, snapshot: NodeSnapshot) -> None:
        """Take a node's figures; the same ones twice change nothing."""
        known = self._nodes.get(snapshot.node)
        if known is None:
            known = self._nodes[snapshot.node] = _Node(snapshot, self._clock.monotonic(), NodeHistory())
        elif snapshot.at == known.snapshot.at:
            return
        known.snapshot, known.fed_at = snapshot, self._clock.monotonic()
        known.history.add(HistoryPoint.of(snapshot, self._clock.time()))
        if self._counts(snapshot.node):
            self._check(snapshot)

    def forget(self, node_id: str) -> None:
        """A node has left the cluster."""
        self._nodes.pop(node_id, None)
        for node, resource in list(self._pressed):
            if node == node_id:
                self._clear(node, resource)

    def get_all_latest_snapshots(self) -> dict[str, NodeSnapshot]:
        return {name: node.snapshot for name, node in self._nodes.items()}

    def get_latest_snapshot(self, node_id: str) -> NodeSnapshot | None:
        node = self._nodes.get(node_id)
        return node.snapshot if node else None

    def age_s(self, node_id: str) -> float | None:
        """How long ago the node's figures came; None for a node never heard of."""
        node = self._nodes.get(node_id)
        return self._clock.monotonic() - node.fed_at if node else None

    def get_history(self, node_id: str, since_s: float = 600.0) -> list[HistoryPoint]:
        """The last `since_s` seconds, oldest first."""
        node = self._nodes.get(node_id)
        return node.history.points(self._clock.time() - since_s) if node else []

    def active_pressure(self) -> list[PressureEvent]:
        """What has begun and not ended."""
        return list(self._pressed.values())

    async def start(self) -> None:
        if self._task is None:
            self._running = True
            self._task = asyncio.create_task(self._monitoring_loop(), name="resource-metrics")

    async def stop(self) -> None:
        self._running = False
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _monitoring_loop(self) -> None:
        while self._running:
            await self._collect_all_metrics()
            await asyncio.sleep(self._interval_s)

    async def _collect_all_metrics(self) -> dict[str, NodeSnapshot]:
        """Ask the source once; a source that fails or hangs leaves the figures to age."""
        if self._source is not None:
            try:
                async with asyncio.timeout(self._source_timeout_s):
                    snapshots = await self._source()
            except (GridError, OSError, TimeoutError) as error:
                self.source_error = str(error) or type(error).__name__
            else:
                self.source_error = ""
                for snapshot in snapshots:
                    self.feed(snapshot)
        return self.get_all_latest_snapshots()

    def _counts(self, node_id: str) -> bool:
        """In head-only mode workers are measured, but nothing is made of their pressure."""
        return not self._head_only_mode or node_id == self._head_node_id

    def _check(self, snapshot: NodeSnapshot) -> None:
        now = self._clock.monotonic()
        for resource in ResourceType:
            key, pressure = (snapshot.node, resource), snapshot.pressure(resource)
            pressed = key in self._pressed
            low, high = self._thresholds.low(resource), self._thresholds.high(resource)
            turned = pressure < low if pressed else pressure > high
            if not turned:
                self._turning.pop(key, None)
            elif now - self._turning.setdefault(key, now) >= self._hold_s:
                del self._turning[key]
                if pressed:
                    self._clear(snapshot.node, resource, pressure)
                else:
                    self._trigger_pressure_event(snapshot.node, resource, pressure)

    def _trigger_pressure_event(self, node_id: str, resource: ResourceType, pressure: float) -> None:
        if not self._counts(node_id):
            return
        event = PressureEvent(node_id, resource, pressure, self._clock.time())
        self._pressed[(node_id, resource)] = event
        if self._on_pressure:
            self._on_pressure(event)

    def _clear(self, node_id: str, resource: ResourceType, pressure: float = 0.0) -> None:
        del self._pressed[(node_id, resource)]
        if self._on_pressure:
            self._on_pressure(PressureEvent(node_id, resource, pressure, self._clock.time(), cleared=True))


def _thresholds(given: Any) -> CollectorThresholds:
    if isinstance(given, CollectorThresholds):
        return given
    return CollectorThresholds() if given is None else CollectorThresholds.from_config(given)
