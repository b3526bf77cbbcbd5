from __future__ import annotations

import json

import pytest

from distributed_grid.core.resources import GB, ResourceType
from distributed_grid.monitoring.snapshot import GpuProcess, GpuSnapshot, NodeSnapshot, ProcessSample, Psi


def snapshot(**changes: object) -> NodeSnapshot:
    values: dict[str, object] = {
        "node": "gpu1", "at": 1.5, "cpu_cores_total": 8.0, "cpu_cores_used": 2.0,
        "memory_total_bytes": 32 * GB, "memory_used_bytes": 8 * GB, "memory_available_bytes": 24 * GB,
    }  # fmt: skip
    return NodeSnapshot(**{**values, **changes})  # type: ignore[arg-type]


GPU = GpuSnapshot(0, "GPU-1", "H200", 100, 25, 0.5, 40.0, 300.0, (GpuProcess(7, 20, 0.1), GpuProcess(8)))


def test_survives_the_wire_as_plain_data() -> None:
    there = snapshot(gpus=(GPU,), psi_memory=Psi(1.0, 2.0, 0.5, 0.25, 10, 5), declared=True)
    data = json.loads(json.dumps(there.to_wire()))
    assert NodeSnapshot.from_wire(data) == there
    process = ProcessSample(1, 2, 3, 0, "x", "S", 0.5, 0.2, 9.0, 10, 20, 1, 3.0, 4, 5)
    assert ProcessSample.from_wire(json.loads(json.dumps(process.to_wire()))) == process
    assert process.id.start_ticks == 2


def test_reads_what_another_version_wrote() -> None:
    data = snapshot().to_wire()
    data["invented_later"] = 1
    del data["psi_cpu"], data["gpus"], data["load_1m"]
    assert NodeSnapshot.from_wire(data) == snapshot()


def test_pressure_is_use_of_what_is_really_there() -> None:
    assert snapshot().cpu_pressure == 0.25
    assert snapshot().memory_pressure == 0.25
    assert snapshot(cpu_cores_real=2.0).cpu_pressure == 1.0
    assert snapshot(memory_real_bytes=16 * GB).memory_pressure == 0.5
    assert snapshot(cpu_cores_used=99.0).cpu_pressure == 1.0
    assert snapshot(cpu_cores_total=0.0).cpu_pressure == 0.0


def test_gpu_pressure_is_the_mean_of_what_is_fuller() -> None:
    idle = GpuSnapshot(1, "GPU-2", "H200", 100, 0)
    assert snapshot().gpu_pressure == 0.0
    assert snapshot(gpus=(GPU, idle)).pressure(ResourceType.GPU) == pytest.approx(0.25)
    assert GpuSnapshot(0, "", "", 100, 90, 0.1).pressure == 0.9
