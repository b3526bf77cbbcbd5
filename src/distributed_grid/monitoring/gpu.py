"""GPUs by NVML: each device and who uses it. No library, no driver and no GPU are normal answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from distributed_grid.core.clock import Clock, SystemClock
from distributed_grid.monitoring.snapshot import GpuProcess, GpuSnapshot

#: How long "there is no GPU" is believed: a driver may be loaded later, but asking costs.
RETRY_S = 60.0


class GpuReader:
    """Keeps NVML open; nothing that it or a sensor says is raised."""

    def __init__(self, *, clock: Clock | None = None, library: Any = None, retry_s: float = RETRY_S) -> None:
        self._clock = clock or SystemClock()
        self._library = library
        self._retry_s = retry_s
        self._handles: list[Any] | None = None
        self._not_before = float("-inf")
        self._seen_us: dict[int, int] = {}
        #: Why there are none, in the driver's words.
        self.reason = ""

    def read(self) -> tuple[GpuSnapshot, ...]:
        handles = self._open()
        found = []
        for index, handle in enumerate(handles):
            memory = self._ask("nvmlDeviceGetMemoryInfo", handle)
            if memory is None:  # fallen off the bus, or the driver went: begin anew later
                self._close("a GPU does not answer")
                return ()
            found.append(self._device(index, handle, memory))
        return tuple(found)

    def close(self) -> None:
        self._close("closed")

    def _open(self) -> list[Any]:
        if self._handles is not None:
            return self._handles
        now = self._clock.monotonic()
        if now < self._not_before:
            return []
        self._not_before = now + self._retry_s
        if self._library is None:
            try:
                import pynvml
            except ImportError:
                self.reason = "the NVML bindings are not installed"
                return []
            self._library = pynvml
        nvml = self._library
        try:
            nvml.nvmlInit()
        except (nvml.NVMLError, OSError) as error:
            self.reason = str(error)
            return []
        try:
            self._handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        except nvml.NVMLError as error:
            self._close(str(error))
            return []
        if not self._handles:
            self._close("the driver knows no GPU")
            return []
        self.reason = ""
        return self._handles

    def _close(self, reason: str) -> None:
        if self._library is not None:
            self._ask("nvmlShutdown")
        self._handles = None
        self._seen_us.clear()
        self.reason = reason
        self._not_before = self._clock.monotonic() + self._retry_s

    def _ask(self, function: str, *args: Any) -> Any:
        """One sensor; None where this device, driver or library does not have it."""
        nvml = self._library
        call: Callable[..., Any] | None = getattr(nvml, function, None)
        if call is None:
            return None
        try:
            return call(*args)
        except (nvml.NVMLError, OSError):
            return None

    def _device(self, index: int, handle: Any, memory: Any) -> GpuSnapshot:
        rates = self._ask("nvmlDeviceGetUtilizationRates", handle)
        power_mw = self._ask("nvmlDeviceGetPowerUsage", handle)
        temperature = self._ask("nvmlDeviceGetTemperature", handle, 0)  # 0: the die's own sensor
        return GpuSnapshot(
            index=index,
            uuid=_text(self._ask("nvmlDeviceGetUUID", handle)),
            name=_text(self._ask("nvmlDeviceGetName", handle)),
            memory_total_bytes=int(memory.total),
            memory_used_bytes=int(memory.used),
            utilization=rates.gpu / 100 if rates is not None else None,
            temperature_c=float(temperature) if temperature is not None else None,
            power_w=power_mw / 1000 if power_mw is not None else None,
            processes=self._processes(index, handle),
        )

    def _processes(self, index: int, handle: Any) -> tuple[GpuProcess, ...]:
        memory: dict[int, int | None] = {}
        for function in ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses"):
            for process in self._ask(function, handle) or []:
                memory[int(process.pid)] = process.usedGpuMemory
        if not memory:
            return ()
        busy: dict[int, float] = {}
        # Samples since the last call; NOT_FOUND (so None) when nothing ran in between.
        for sample in self._ask("nvmlDeviceGetProcessUtilization", handle, self._seen_us.get(index, 0)) or []:
            self._seen_us[index] = max(self._seen_us.get(index, 0), int(sample.timeStamp))
            if sample.smUtil <= 100:  # drivers have been seen to give garbage here
                busy[int(sample.pid)] = max(busy.get(int(sample.pid), 0.0), sample.smUtil / 100)
        return tuple(
            GpuProcess(pid=pid, memory_used_bytes=memory[pid], utilization=busy.get(pid)) for pid in sorted(memory)
        )


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value or "")
