from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest

from distributed_grid.core.clock import ManualClock
from distributed_grid.core.errors import Unavailable
from distributed_grid.core.resources import ResourceType
from distributed_grid.monitoring.resource_metrics import CollectorThresholds, PressureEvent, ResourceMetricsCollector
from distributed_grid.monitoring.snapshot import NodeSnapshot

THRESHOLDS = CollectorThresholds(memory_high=0.7, memory_low=0.6)


class Bed:
    def __init__(self, **options: object) -> None:
        self.clock = ManualClock()
        self.events: list[PressureEvent] = []
        self.collector = ResourceMetricsCollector(
            THRESHOLDS, head_node_id="gpu-master", clock=self.clock, on_pressure=self.events.append, **options  # type: ignore[arg-type]
        )

    def snapshot(self, memory: float, node: str = "gpu-master", cpu: float = 0.0) -> NodeSnapshot:
        used = int(memory * 1000)
        return NodeSnapshot(node, self.clock.time(), 10.0, cpu * 10, 1000, used, 1000 - used)

    def feed(self, memory: float, node: str = "gpu-master", cpu: float = 0.0) -> None:
        self.clock.advance(1.0)
        self.collector.feed(self.snapshot(memory, node, cpu))

    def told(self) -> list[tuple[str, str, bool]]:
        found = [(e.node, e.resource.value, e.cleared) for e in self.events]
        self.events.clear()
        return found


def test_an_event_on_crossing_high_and_one_below_low() -> None:
    bed = Bed()
    for memory in (0.5, 0.7, 0.71, 0.9, 0.65, 0.71, 0.6):  # at the limit is not above it; between is neither
        bed.feed(memory)
    assert bed.told() == [("gpu-master", "memory", False)]
    assert [e.pressure for e in bed.collector.active_pressure()] == [0.71]
    bed.feed(0.59)
    assert bed.told() == [("gpu-master", "memory", True)]
    assert bed.collector.active_pressure() == []
    bed.feed(0.8, cpu=0.95)
    assert bed.told() == [("gpu-master", "cpu", False), ("gpu-master", "memory", False)]


def test_head_only_mode_tells_of_the_head_alone() -> None:
    bed = Bed(head_only_mode=True)
    bed.feed(0.9, "gpu1")
    bed.collector._trigger_pressure_event("gpu1", ResourceType.MEMORY, 0.9)
    assert bed.told() == []
    assert set(bed.collector.get_all_latest_snapshots()) == {"gpu1"}
    bed.feed(0.9)
    assert bed.told() == [("gpu-master", "memory", False)]
    assert bed.collector._head_only_mode and bed.collector._head_node_id == "gpu-master"
    assert bed.collector._thresholds.memory_high == 0.7


def test_switching_to_head_only_ends_the_workers_pressure() -> None:
    bed = Bed()
    bed.feed(0.9, "gpu1")
    bed.told()
    bed.collector.configure({"memory": 95}, head_node_id="gpu-master", head_only_mode=True)
    assert bed.told() == [("gpu1", "memory", True)]
    assert bed.collector._thresholds.memory_high == 0.95
    bed.feed(0.9)
    assert bed.told() == []


def test_age_history_and_forgetting() -> None:
    bed = Bed()
    assert bed.collector.age_s("gpu1") is None and bed.collector.get_history("gpu1") == []
    bed.feed(0.5, "gpu1")
    same = bed.collector.get_all_latest_snapshots()["gpu1"]
    bed.clock.advance(7.0)
    bed.collector.feed(same)  # the same figures again do not make them young
    assert bed.collector.age_s("gpu1") == 7.0
    bed.collector.feed(replace(same, at=same.at - 3600, memory_used_bytes=900))  # a clock set back is no reason to stop
    assert bed.collector.age_s("gpu1") == 0.0
    assert [p.memory_pressure for p in bed.collector.get_history("gpu1")] == [0.5, 0.9]
    bed.told()
    bed.collector.forget("gpu1")
    assert bed.told() == [("gpu1", "memory", True)]
    assert bed.collector.get_all_latest_snapshots() == {}


async def test_the_loop_asks_its_source_and_outlives_its_failures() -> None:
    asked = 0
    enough = asyncio.Event()

    async def source() -> list[NodeSnapshot]:
        nonlocal asked
        asked += 1
        if asked == 1:
            raise Unavailable("no agent answers")
        if asked == 2:
            await asyncio.sleep(3600)
        enough.set()
        return [bed.snapshot(0.9)]

    bed = Bed(source=source, interval_s=0.001, source_timeout_s=0.01)
    assert await bed.collector._collect_all_metrics() == {}
    assert bed.collector.source_error == "no agent answers"
    await bed.collector.start()
    await bed.collector.start()
    async with asyncio.timeout(60):
        await enough.wait()
        while not bed.events:
            await asyncio.sleep(0.01)
    await bed.collector.stop()
    await bed.collector.stop()
    assert bed.told() == [("gpu-master", "memory", False)]
    assert bed.collector.source_error == ""


@pytest.mark.parametrize(
    "config",
    [
        {"cpu": 80, "memory": 65, "gpu": 90},
        SimpleNamespace(memory=SimpleNamespace(high=0.65, low=0.55)),
        {"memory": {"high": 0.65, "low": 55}},
    ],
)
def test_thresholds_in_every_spelling(config: object) -> None:
    thresholds = CollectorThresholds.from_config(config)
    assert thresholds.high(ResourceType.MEMORY) == 0.65
    assert thresholds.low(ResourceType.MEMORY) == pytest.approx(0.55)
    assert thresholds.cpu_high == 0.8 and thresholds.gpu_low == pytest.approx(0.8)
