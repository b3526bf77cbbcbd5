from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from distributed_grid.core.clock import ManualClock
from distributed_grid.monitoring.gpu import GpuReader


class FakeNvml:
    """Answers like NVML; `broken` names the functions that fail."""

    class NVMLError(Exception):
        pass

    def __init__(self, devices: int = 1) -> None:
        self.devices, self.broken, self.inits = devices, set[str](), 0

    def __getattr__(self, name: str) -> Any:
        answers: dict[str, Any] = {
            "nvmlInit": None, "nvmlShutdown": None, "nvmlDeviceGetCount": self.devices,
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=1000, used=250),
            "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=40, memory=10),
            "nvmlDeviceGetUUID": b"GPU-x", "nvmlDeviceGetName": "H200", "nvmlDeviceGetPowerUsage": 70500,
            "nvmlDeviceGetTemperature": 31,
            "nvmlDeviceGetComputeRunningProcesses": [SimpleNamespace(pid=7, usedGpuMemory=200)],
            "nvmlDeviceGetGraphicsRunningProcesses": [SimpleNamespace(pid=9, usedGpuMemory=None)],
            "nvmlDeviceGetProcessUtilization": [
                SimpleNamespace(pid=7, smUtil=30, timeStamp=5), SimpleNamespace(pid=9, smUtil=4294967295, timeStamp=6),
            ],
            "nvmlDeviceGetHandleByIndex": "handle",
        }  # fmt: skip
        if name not in answers:
            raise AttributeError(name)

        def call(*_: Any) -> Any:
            self.inits += name == "nvmlInit"
            if name in self.broken:
                raise self.NVMLError(name)
            return answers[name]

        return call


def test_devices_and_their_processes() -> None:
    reader = GpuReader(library=FakeNvml(2))
    first, second = reader.read()
    assert (first.index, second.index) == (0, 1)
    assert (first.uuid, first.name, first.utilization, first.power_w) == ("GPU-x", "H200", 0.4, 70.5)
    assert (first.memory_total_bytes, first.memory_used_bytes) == (1000, 250)
    assert [(p.pid, p.memory_used_bytes, p.utilization) for p in first.processes] == [(7, 200, 0.3), (9, None, None)]
    reader.close()


def test_a_sensor_that_is_not_there_is_none() -> None:
    nvml = FakeNvml()
    nvml.broken = {
        "nvmlDeviceGetUtilizationRates", "nvmlDeviceGetPowerUsage", "nvmlDeviceGetTemperature",
        "nvmlDeviceGetProcessUtilization", "nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetName",
    }  # fmt: skip
    (gpu,) = GpuReader(library=nvml).read()
    assert (gpu.utilization, gpu.power_w, gpu.temperature_c, gpu.name) == (None, None, None, "")
    assert [p.pid for p in gpu.processes] == [9]


def test_no_driver_is_an_answer_that_is_remembered() -> None:
    nvml, clock = FakeNvml(), ManualClock()
    nvml.broken = {"nvmlInit"}
    reader = GpuReader(library=nvml, clock=clock, retry_s=60)
    assert reader.read() == reader.read() == ()
    assert nvml.inits == 1 and reader.reason == "nvmlInit"
    nvml.broken.clear()
    clock.advance(61)
    assert len(reader.read()) == 1 and reader.reason == ""


def test_a_lost_gpu_and_a_driver_without_any() -> None:
    nvml, clock = FakeNvml(), ManualClock()
    reader = GpuReader(library=nvml, clock=clock)
    assert reader.read()
    nvml.broken = {"nvmlDeviceGetMemoryInfo"}
    assert reader.read() == () and "answer" in reader.reason
    nvml.broken.clear()
    assert reader.read() == ()
    clock.advance(61)
    assert reader.read()
    assert GpuReader(library=FakeNvml(0)).read() == ()


def test_the_real_library_never_raises() -> None:
    reader = GpuReader()
    assert isinstance(reader.read(), tuple)
    reader.close()
    reader.close()
