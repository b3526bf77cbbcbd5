"""What automatic offload looks at, as plain data: nodes, the head's recent use, processes, settings."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Protocol, TypeVar

from distributed_grid.config.models import ClusterConfig
from distributed_grid.core.resources import ResourceType
from distributed_grid.monitoring.snapshot import NodeSnapshot

#: Memory first: running out of it kills, the others only slow down.
RESOURCES = (ResourceType.MEMORY, ResourceType.CPU, ResourceType.GPU)

_T = TypeVar("_T")


def _of(kind: type[_T], data: Mapping[str, Any]) -> _T:
    return kind(**{f.name: data[f.name] for f in fields(kind) if f.name in data})  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class NodeSignals:
    """One node now. Levels are fractions of what it really has; stalls (PSI) are percent of the last 10 s."""

    node: str
    online: bool = True
    online_s: float = 1e9
    age_s: float = 0.0
    cpu: float = 0.0
    memory: float = 0.0
    gpu: float = 0.0
    cpu_cores: float = 1.0
    memory_bytes: int = 1
    memory_available_bytes: int = 0
    gpu_count: int = 0
    gpu_memory_bytes: int = 0
    gpu_memory_free_bytes: int = 0
    #: Promised to others by leases, whether it is in use or not.
    lent_cpu_cores: float = 0.0
    lent_memory_bytes: int = 0
    #: The head holds a boost there: that is room for its processes.
    boosted: bool = False
    memory_some: float = 0.0
    memory_full: float = 0.0
    cpu_some: float = 0.0
    io_some: float = 0.0

    def level(self, resource: ResourceType) -> float:
        return float(getattr(self, resource.value))

    @property
    def cpu_taken(self) -> float:
        """The fraction of its cores that are in use or promised."""
        return max(self.cpu, min(1.0, self.lent_cpu_cores / max(0.01, self.cpu_cores)))

    @property
    def memory_free_bytes(self) -> int:
        return max(0, self.memory_available_bytes - self.lent_memory_bytes)

    @staticmethod
    def of(
        snapshot: NodeSnapshot, *, online: bool = True, online_s: float = 1e9, age_s: float = 0.0,
        lent_cpu_cores: float = 0.0, lent_memory_bytes: int = 0, boosted: bool = False,
    ) -> NodeSignals:  # fmt: skip
        cores, memory = snapshot.cpu_cores_total, snapshot.memory_total_bytes
        if snapshot.cpu_cores_real > 0:
            cores = min(cores, snapshot.cpu_cores_real)
        if snapshot.memory_real_bytes > 0:
            memory = min(memory, snapshot.memory_real_bytes)
        stalled = snapshot.psi_memory
        return NodeSignals(
            node=snapshot.node, online=online, online_s=online_s, age_s=age_s, lent_cpu_cores=lent_cpu_cores,
            lent_memory_bytes=lent_memory_bytes, boosted=boosted,
            cpu=snapshot.cpu_pressure, memory=snapshot.memory_pressure, gpu=snapshot.gpu_pressure,
            cpu_cores=cores, memory_bytes=memory, memory_available_bytes=snapshot.memory_available_bytes,
            gpu_count=len(snapshot.gpus), gpu_memory_bytes=sum(gpu.memory_total_bytes for gpu in snapshot.gpus),
            gpu_memory_free_bytes=max((g.memory_total_bytes - g.memory_used_bytes for g in snapshot.gpus), default=0),
            memory_some=stalled.some_avg10 if stalled else 0.0, memory_full=stalled.full_avg10 if stalled else 0.0,
            cpu_some=snapshot.psi_cpu.some_avg10 if snapshot.psi_cpu else 0.0,
            io_some=snapshot.psi_io.some_avg10 if snapshot.psi_io else 0.0,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Point:
    """The head's levels at one moment."""

    at: float
    cpu: float
    memory: float
    gpu: float

    def level(self, resource: ResourceType) -> float:
        return float(getattr(self, resource.value))


@dataclass(frozen=True, slots=True)
class Candidate:
    """A process that a scan found. `key` names it for good; a reused pid has another."""

    key: str
    pid: int | str
    node: str
    command: str
    type: str = ""
    confidence: float = 1.0
    cpu_cores: float = 0.0
    memory_bytes: int = 0
    gpu_memory_bytes: int = 0
    #: What the planner asks of a target for it: its peak, with headroom.
    need_bytes: int = 0
    age_s: float = 0.0
    movable: bool = True
    why_not: str = ""
    #: `prefer`, `avoid` or `never`, as the process itself says (`GRID_OFFLOAD` in its environment).
    mark: str = ""

    @staticmethod
    def of(found: Mapping[str, Any]) -> Candidate:
        key = found.get("key") or f"{found['node']}:{found.get('host_pid', found['pid'])}:{found.get('start_ticks', 0)}"
        need = (found.get("need") or {}).get("memory_bytes") or found.get("need_bytes") or 0
        return _of(Candidate, {**{k: v for k, v in found.items() if v is not None}, "key": key, "need_bytes": need})


@dataclass(frozen=True, slots=True)
class Inputs:
    """All that one decision rests on. `candidates` is None until a decision has asked for a scan."""

    at: float
    head: NodeSignals
    workers: tuple[NodeSignals, ...] = ()
    points: tuple[Point, ...] = ()
    candidates: tuple[Candidate, ...] | None = None
    #: What is under way between nodes now; empty for nothing.
    busy: str = ""
    #: Measured bytes per second from the head to a worker.
    bandwidth: Mapping[str, float] = field(default_factory=dict)
    #: How many jobs use cores on each node that was looked at; known where the head is short of cores.
    crowds: Mapping[str, int] = field(default_factory=dict)

    def to_wire(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_wire(data: Mapping[str, Any]) -> Inputs:
        found = data.get("candidates")
        return Inputs(
            at=float(data["at"]), head=_of(NodeSignals, data["head"]),
            workers=tuple(_of(NodeSignals, worker) for worker in data.get("workers", ())),
            points=tuple(_of(Point, point) for point in data.get("points", ())),
            candidates=None if found is None else tuple(Candidate.of(one) for one in found),
            busy=str(data.get("busy", "")), bandwidth=dict(data.get("bandwidth", {})),
            crowds=dict(data.get("crowds", {})),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Settings:
    """What the configuration says about automatic offload."""

    enabled: bool = True
    thresholds: Mapping[str, float] = field(default_factory=lambda: {"cpu": 0.8, "memory": 0.7, "gpu": 0.9})
    check_interval_s: float = 5.0
    cooldown_s: float = 30.0
    #: Younger processes stay, unless memory will run out before they are old enough.
    min_age_s: float = 60.0
    #: Where there are any, nothing is moved whose command line fits none of them.
    only: tuple[str, ...] = ()
    never: tuple[str, ...] = ()
    prefer: tuple[str, ...] = ()
    avoid: tuple[str, ...] = ()

    @staticmethod
    def of(config: ClusterConfig) -> Settings:
        auto, offload = config.resource_sharing.auto_offload, config.offload
        return Settings(
            enabled=auto.enabled, thresholds=auto.thresholds.model_dump(),
            check_interval_s=auto.check_interval_seconds, cooldown_s=auto.cooldown_seconds,
            min_age_s=offload.detect.min_age_seconds, only=tuple(offload.only),
            never=tuple(offload.never), prefer=tuple(offload.prefer), avoid=tuple(offload.avoid),
        )  # fmt: skip

    def threshold(self, resource: ResourceType) -> float:
        return self.thresholds[resource.value]

    def clear_level(self, resource: ResourceType) -> float:
        """Where pressure ends, and what is freed down to: far enough below that use at the limit does not flap."""
        return max(self.threshold(resource) - 0.05, self.threshold(resource) * 0.8)

    def hard_level(self, resource: ResourceType) -> float:
        """From here on memory does not wait to be sure."""
        return (1 + self.threshold(resource)) / 2

    def limit(self, resource: ResourceType) -> float:
        """What the forecast counts towards."""
        return max(0.9, self.hard_level(resource))


class Mover(Protocol):
    """What moves processes; the daemon's offload service."""

    async def offload_scan(self, *, node: str | None = None, everything: bool = False) -> list[dict[str, Any]]: ...

    async def offload_plan(
        self, *, pid: int | str, target_node: str | None = None, options: dict[str, Any] | None = None
    ) -> dict[str, Any]: ...

    def offload_execute(
        self,
        *,
        pid: int | str,
        target_node: str | None = None,
        options: dict[str, Any] | None = None,
        automatic: bool = False,
        reason: str = "",
    ) -> AsyncIterator[dict[str, Any]]: ...

    async def offload_status(self, *, limit: int = 20, brief: bool = False) -> dict[str, Any]: ...
