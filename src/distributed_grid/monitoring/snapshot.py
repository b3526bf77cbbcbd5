"""What one look at a node gives: plain frozen data that travels between agent, daemon and screen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from distributed_grid.core.process import ProcessId
from distributed_grid.core.resources import ResourceType

_T = TypeVar("_T")


def _known(kind: type[_T], data: Mapping[str, Any]) -> dict[str, Any]:
    """Only the fields that this version knows, so that nodes of another version can still be read."""
    return {f.name: data[f.name] for f in fields(kind) if f.name in data}  # type: ignore[arg-type]


def _flat(value: Any) -> dict[str, Any]:
    return {f.name: getattr(value, f.name) for f in fields(value)}


def _fraction(part: float, whole: float) -> float:
    return min(1.0, max(0.0, part / whole)) if whole > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Psi:
    """Shares of time, in percent as the kernel gives them, in which some or all tasks stood still."""

    some_avg10: float = 0.0
    some_avg60: float = 0.0
    full_avg10: float = 0.0
    full_avg60: float = 0.0
    some_total_us: int = 0
    full_total_us: int = 0


@dataclass(frozen=True, slots=True)
class GpuProcess:
    pid: int
    memory_used_bytes: int | None = None  # the driver does not always tell (MIG, WSL)
    utilization: float | None = None


@dataclass(frozen=True, slots=True)
class GpuSnapshot:
    index: int
    uuid: str
    name: str
    memory_total_bytes: int
    memory_used_bytes: int
    utilization: float | None = None  # 0..1
    temperature_c: float | None = None
    power_w: float | None = None
    processes: tuple[GpuProcess, ...] = ()

    @property
    def pressure(self) -> float:
        """A GPU is taken when its cores or its memory are."""
        return max(self.utilization or 0.0, _fraction(self.memory_used_bytes, self.memory_total_bytes))

    def to_wire(self) -> dict[str, Any]:
        return {**_flat(self), "processes": [_flat(p) for p in self.processes]}

    @staticmethod
    def from_wire(data: Mapping[str, Any]) -> GpuSnapshot:
        known = _known(GpuSnapshot, data)
        known["processes"] = tuple(GpuProcess(**_known(GpuProcess, p)) for p in data.get("processes", ()))
        return GpuSnapshot(**known)


@dataclass(frozen=True, slots=True)
class ProcessSample:
    """One process as last seen. `cpu_cores` is since the sample before: 1.0 is one core kept busy."""

    pid: int
    start_ticks: int
    ppid: int
    uid: int
    comm: str
    state: str
    cpu_cores: float
    cpu_cores_1m: float
    cpu_time_s: float
    rss_bytes: int
    peak_rss_bytes: int  # highest seen by the sampler, not by the kernel
    threads: int
    age_s: float
    session: int = 0
    tty_nr: int = 0
    cpu_wait_1m: float = 0.0  # cores it was ready to use and did not get

    @property
    def id(self) -> ProcessId:
        return ProcessId(self.pid, self.start_ticks)

    def to_wire(self) -> dict[str, Any]:
        return _flat(self)

    @staticmethod
    def from_wire(data: Mapping[str, Any]) -> ProcessSample:
        return ProcessSample(**_known(ProcessSample, data))


@dataclass(frozen=True, slots=True)
class NodeSnapshot:
    """One node at one moment. Totals are what the node may use (machine, cgroup, or as declared)."""

    node: str
    at: float  # the node's own wall clock
    cpu_cores_total: float
    cpu_cores_used: float
    memory_total_bytes: int
    memory_used_bytes: int
    memory_available_bytes: int  # really free for new allocations, never more than total - used
    declared: bool = False
    #: What is really there; smaller than the total where more was declared than the machine has.
    cpu_cores_real: float = 0.0
    memory_real_bytes: int = 0
    gpu_count: int = 0
    gpus: tuple[GpuSnapshot, ...] = ()
    swap_total_bytes: int = 0
    swap_used_bytes: int = 0
    psi_cpu: Psi | None = None
    psi_memory: Psi | None = None
    psi_io: Psi | None = None
    load_1m: float = 0.0
    network_receive_bytes_s: float = 0.0
    network_send_bytes_s: float = 0.0
    disk_read_bytes_s: float = 0.0
    disk_write_bytes_s: float = 0.0
    process_count: int = 0

    @property
    def cpu_pressure(self) -> float:
        """Use against what is there: eight declared cores on a machine of two are full at two."""
        return _fraction(self.cpu_cores_used, _smaller(self.cpu_cores_total, self.cpu_cores_real))

    @property
    def memory_pressure(self) -> float:
        return _fraction(self.memory_used_bytes, _smaller(self.memory_total_bytes, self.memory_real_bytes))

    @property
    def gpu_pressure(self) -> float:
        """Mean over the GPUs: a node with one of four taken has room. No GPU is no pressure."""
        return sum(gpu.pressure for gpu in self.gpus) / len(self.gpus) if self.gpus else 0.0

    def pressure(self, resource: ResourceType) -> float:
        if resource is ResourceType.CPU:
            return self.cpu_pressure
        return self.memory_pressure if resource is ResourceType.MEMORY else self.gpu_pressure

    def to_wire(self) -> dict[str, Any]:
        data = _flat(self)
        data["gpus"] = [gpu.to_wire() for gpu in self.gpus]
        for name in _PSI_FIELDS:
            data[name] = _flat(data[name]) if data[name] is not None else None
        return data

    @staticmethod
    def from_wire(data: Mapping[str, Any]) -> NodeSnapshot:
        known = _known(NodeSnapshot, data)
        known["gpus"] = tuple(GpuSnapshot.from_wire(gpu) for gpu in data.get("gpus", ()))
        for name in _PSI_FIELDS:
            psi = data.get(name)
            known[name] = Psi(**_known(Psi, psi)) if psi is not None else None
        return NodeSnapshot(**known)


_PSI_FIELDS = ("psi_cpu", "psi_memory", "psi_io")


def _smaller(total: float, real: float) -> float:
    return min(total, real) if real > 0 else total
