"""The one model of the configuration: every key, its default and its meaning (docs/configuration.md is made of it)."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, field_validator, model_validator

from distributed_grid.config.layers import canonical_tree
from distributed_grid.config.units import (
    Bytes,
    Cores,
    FilePath,
    Fraction,
    Gigabytes,
    Label,
    Port,
    Seconds,
    Share,
    Word,
)
from distributed_grid.core.errors import NotFound
from distributed_grid.core.resources import ResourceType


class Misfit(ValueError):
    """Keys that are fine alone but not together; says which one to look at."""

    def __init__(self, path: tuple[str | int, ...], message: str) -> None:
        super().__init__(message)
        self.path = path


class Section(BaseModel):
    """A mapping in the YAML: unknown keys are refused, never dropped."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, coerce_numbers_to_str=True)

    @model_validator(mode="before")
    @classmethod
    def _empty(cls, data: Any) -> Any:
        return {} if data is None else data  # a section whose keys are all commented out


class ShareConfig(Section):
    """What a node may lend; `share: false` for nothing, `share: true` for all of it."""

    cpu: Share = Field(default=True, description="Lend cores: yes, no, or at most this many")
    gpu: Share = Field(default=True, description="Lend GPUs: yes, no, or at most this many")
    memory: Share = Field(default=True, description="Lend memory: yes, no, or at most this much")
    reserve_cores: Cores = Field(default=0.0, description="Cores the node always keeps for itself")
    reserve_memory_gb: Gigabytes = Field(default=1.0, description="Memory the node always keeps for itself")

    @model_validator(mode="before")
    @classmethod
    def _switch(cls, data: Any) -> Any:
        return {"cpu": data, "gpu": data, "memory": data} if isinstance(data, bool) else data

    @field_validator("cpu", "gpu", "memory")
    @classmethod
    def _not_negative(cls, value: bool | float) -> bool | float:
        if value < 0:
            raise ValueError("must not be negative")
        return value

    def limit(self, kind: ResourceType) -> float | None:
        """The most of it that may be lent (cores, GPUs, GB); None where there is no limit."""
        value: bool | float = getattr(self, kind.value)
        return (None if value else 0.0) if isinstance(value, bool) else float(value)


class NodeConfig(Section):
    name: Label = Field(description="What the node is called everywhere; unique")
    host: Word | None = Field(default=None, description="Address or name for SSH and Ray; needed unless `embedded`")
    port: Port = Field(default=22, description="SSH port")
    user: Word | None = Field(default=None, description="SSH user; none: what ssh would use")
    key: FilePath | None = Field(default=None, description="SSH private key; none: the SSH agent and the usual keys")
    known_hosts: FilePath | None = Field(default=None, description="Known host keys; none: `~/.ssh/known_hosts`")
    python: Word | None = Field(
        default=None, description="Python on the node; none: what `grid cluster install` put there"
    )
    role: Literal["head", "worker"] = Field(default="worker", description="Exactly one node is the head")
    cpu_count: int | None = Field(default=None, ge=1, description="Declared cores (also `cpu`); none: measured")
    gpu_count: int | None = Field(default=None, ge=0, description="Declared GPUs (also `gpu`); none: measured")
    memory_gb: Gigabytes | None = Field(
        default=None, gt=0, description="Declared memory (also `memory`); none: measured"
    )
    tags: list[str] = Field(default_factory=list, description="Free words, shown in the status")
    share: ShareConfig = Field(default_factory=ShareConfig, description="What the node may lend")

    @property
    def is_head(self) -> bool:
        return self.role == "head"


class IdleThresholds(Section):
    """When a worker is idle enough to offer."""

    gpu_utilization_max: Fraction = Field(default=0.2, description="A GPU is offered below this utilization")
    gpu_memory_min_mb: float = Field(
        default=1024.0, ge=0, description="and with at least this much free GPU memory (MB)"
    )
    memory_percent_max: Fraction = Field(default=0.5, description="Memory is offered below this use")
    memory_min_gb: Gigabytes = Field(default=2.0, description="and with at least this much free")
    cpu_percent_max: Fraction = Field(default=0.3, description="Cores are offered below this use")
    cpu_min_cores: Cores = Field(default=1.0, description="and with at least this many free")


class PressureLevels(Section):
    high: Fraction = Field(default=0.8, description="Pressure begins above this use")
    low: Fraction = Field(default=0.3, description="and is over below this one")

    @model_validator(mode="after")
    def _ordered(self) -> PressureLevels:
        if self.low > self.high:
            if "low" in self.model_fields_set:
                raise Misfit(("low",), f"low ({self.low:g}) must not be above high ({self.high:g})")
            self.low = self.high  # only `high` was given, below our own default
        return self


class MemoryPressureLevels(PressureLevels):
    high: Fraction = Field(
        default=0.7, description="Pressure begins above this use; memory is then asked of the workers"
    )


class PressureThresholds(Section):
    """When a node is under pressure, and when that is over."""

    cpu: PressureLevels = Field(default_factory=PressureLevels, description="Cores")
    memory: MemoryPressureLevels = Field(default_factory=MemoryPressureLevels, description="Memory")
    gpu: PressureLevels = Field(default_factory=PressureLevels, description="GPUs")


class TriggerThresholds(Section):
    """When automatic offload acts."""

    cpu: Fraction = Field(default=0.8, description="Offload above this use of the cores")
    memory: Fraction = Field(default=0.7, description="Offload above this use of the memory")
    gpu: Fraction = Field(default=0.9, description="Offload above this use of the GPUs")


class AutoOffloadConfig(Section):
    enabled: bool = Field(default=False, description="Move work off the head by itself; `grid offload auto` sets it")
    head_only_mode: bool = Field(
        default=True,
        description="The same flag as `resource_sharing.head_only_mode`, and wins over it. Where neither is given, "
        "it is on exactly while automatic offload is enabled",
    )
    thresholds: TriggerThresholds = Field(default_factory=TriggerThresholds, description="When it acts")
    check_interval_seconds: Seconds = Field(default=5.0, description="How often the pressure is checked")
    cooldown_seconds: float = Field(
        default=30.0, ge=0, description="Least time between two moves, from the end of the first"
    )


class ResourceSharingConfig(Section):
    enabled: bool = Field(default=True, description="Workers lend what is idle")
    mode: Literal["dynamic_balancing", "static"] = Field(
        default="dynamic_balancing",
        description="`dynamic_balancing` asks and rebalances by itself; `static` only on request",
    )
    policy: Literal["balanced", "aggressive", "conservative"] = Field(
        default="balanced", description="How readily workers lend and the head borrows"
    )
    check_interval: Seconds = Field(default=60.0, description="How often workers renew their offers")
    offer_expiry: Seconds = Field(default=300.0, description="How long an offer stands")
    max_offers_per_node: int = Field(default=5, ge=1, description="Offers that one node may have open")
    rebalance_interval_seconds: Seconds = Field(
        default=30.0, description="How often lending is rebalanced (also `rebalance_interval`)"
    )
    head_only_mode: bool = Field(
        default=False, description="Only the head is watched, and only its processes are moved"
    )
    thresholds: IdleThresholds = Field(default_factory=IdleThresholds, description="When a worker offers")
    pressure_thresholds: PressureThresholds = Field(
        default_factory=PressureThresholds, description="When a node is under pressure"
    )
    auto_offload: AutoOffloadConfig = Field(default_factory=AutoOffloadConfig, description="Automatic offload")

    @model_validator(mode="after")
    def _one_flag(self) -> ResourceSharingConfig:
        nested = self.auto_offload
        if "head_only_mode" in nested.model_fields_set:
            flag = nested.head_only_mode
        else:
            flag = self.head_only_mode if "head_only_mode" in self.model_fields_set else nested.enabled
        self.head_only_mode = flag
        self.auto_offload = nested.model_copy(update={"head_only_mode": flag})
        return self


class ExecutionConfig(Section):
    """The other home of `resource_sharing`; both are merged, and both show the same."""

    resource_sharing: ResourceSharingConfig = Field(default_factory=ResourceSharingConfig)


class RayConfig(Section):
    port: Port = Field(default=6379, description="Port of the Ray head; 0: any free one")
    dashboard_port: Port = Field(default=8265, description="Ray's dashboard, on loopback of the head; 0: any free one")
    object_store_bytes: Bytes | None = Field(
        default=None, description="Ray's object store on each node; none: 80 MB if embedded, else Ray's own choice"
    )
    start_timeout_seconds: Seconds = Field(default=120.0, description="Most that one node may take to come up")


class DaemonConfig(Section):
    allow_users: list[str | int] = Field(
        default_factory=list, description="Names or uids that may use the daemon besides its owner"
    )
    metrics_port: Port | None = Field(
        default=0,
        description="Prometheus metrics, on loopback; 0: any free port (`grid daemon status` shows it); none: off",
    )
    socket: FilePath | None = Field(
        default=None, description="The daemon's socket; none: `grid_daemon.sock` in the state directory"
    )
    offload_state_path: FilePath | None = Field(
        default=None, description="The offload snapshot; none: `grid_offload_state.json` in the state directory"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="How much the daemon logs"
    )


class DetectConfig(Section):
    """What is worth moving: at least one of the three amounts, for long enough."""

    min_cpu_cores: Cores = Field(default=1.0, description="Cores a process uses or waits for")
    min_memory_gb: Gigabytes = Field(default=2.0, description="Memory a process holds")
    min_gpu_memory_gb: Gigabytes = Field(default=1.0, description="GPU memory a process holds")
    min_age_seconds: float = Field(default=60.0, ge=0, description="How long it has been running")


class OffloadConfig(Section):
    detect: DetectConfig = Field(default_factory=DetectConfig, description="What a scan shows")
    strategy: Literal["auto", "live", "relaunch"] = Field(
        default="auto",
        description="`live` keeps what is in memory, `relaunch` starts anew, `auto` is live where it can be",
    )
    auto_relaunch: bool = Field(
        default=False, description="Automatic offload may start a process again from its beginning"
    )
    encrypt: bool = Field(default=True, description="Encrypt what travels between nodes")
    never: list[str] = Field(
        default_factory=list, description="Never move a process whose command line fits one of these (`*train*`)"
    )
    only: list[str] = Field(default_factory=list, description="Automatic offload takes these alone; none: all it may")
    prefer: list[str] = Field(default_factory=list, description="Automatic offload takes these first")
    avoid: list[str] = Field(default_factory=list, description="Automatic offload takes these last")
    staging_limit_gb: Gigabytes = Field(
        default=2.0, description="Files above this in all are copied only when asked for"
    )
    save_signal: Word | None = Field(
        default=None, description="Signal that lets a program save itself before a relaunch (`SIGUSR1`); none: not sent"
    )
    grace_seconds: float = Field(
        default=10.0, ge=0, description="Time between asking a process to end (or save) and making it"
    )


class MemoryPoolConfig(Section):
    compression: Literal["auto", "off", "lz4", "zstd", "always", "never"] = Field(
        default="auto",
        description="Compress blocks on the way: `auto` where a probe says that it pays (`never`: off, `always`: zstd)",
    )
    reserve_gb: Gigabytes = Field(default=1.0, description="Free memory that blocks leave on every node")
    per_user_gb: Gigabytes | None = Field(
        default=None, description="What the blocks of one user may take in all, copies too; no limit if not given"
    )
    tls: bool = Field(default=False, description="Encrypt blocks on the way; memory servers started from then on do")


class AlertsConfig(Section):
    memory: Fraction = Field(default=0.75, description="Alert when the head's memory use is above this")
    webhook: str | None = Field(
        default=None, pattern="^https?://", description="Address that gets each alert as JSON (POST)"
    )
    command: list[str] | None = Field(
        default=None,
        min_length=1,
        description="Program and arguments run for each alert, with the alert as JSON on its input",
    )


def embedded_nodes() -> list[NodeConfig]:
    """The cluster on this machine; declared, so that it can rehearse what the machine may not have."""
    roles: list[tuple[str, Literal["head", "worker"]]] = [
        ("gpu-master", "head"),
        ("gpu1", "worker"),
        ("gpu2", "worker"),
    ]
    return [NodeConfig(name=name, role=role, cpu_count=8, gpu_count=1, memory_gb=32.0) for name, role in roles]


class ClusterConfig(Section):
    """A cluster and everything that can be set about it."""

    name: Label = Field(default="grid", description="What the cluster is called")
    embedded: bool = Field(
        default=True,
        description="All nodes on this machine, no SSH. Where it is not given: yes if no `nodes` are listed",
    )
    nodes: list[NodeConfig] = Field(
        default_factory=embedded_nodes,
        description="Two or more, one of them the head; not given: gpu-master (head), gpu1 and gpu2, each declared "
        "with 8 cores, 1 GPU and 32 GB",
    )
    resource_sharing: ResourceSharingConfig = Field(
        default_factory=ResourceSharingConfig, description="Lending (also `execution.resource_sharing`)"
    )
    offload: OffloadConfig = Field(default_factory=OffloadConfig, description="Moving running processes")
    memory_pool: MemoryPoolConfig = Field(
        default_factory=MemoryPoolConfig, description="Memory of the workers, from the head"
    )
    alerts: AlertsConfig = Field(default_factory=AlertsConfig, description="Who is told of pressure")
    ray: RayConfig = Field(default_factory=RayConfig, description="How Ray is started")
    daemon: DaemonConfig = Field(default_factory=DaemonConfig, description="The daemon")

    _origins: dict[tuple[str | int, ...], str] = PrivateAttr(default_factory=dict)
    _path: Path | None = PrivateAttr(default=None)
    _digest: str = PrivateAttr(default="")

    @model_validator(mode="before")
    @classmethod
    def _layouts(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        tree = canonical_tree(data)
        if "embedded" not in tree:
            tree["embedded"] = "nodes" not in tree
        return tree

    @model_validator(mode="after")
    def _whole(self) -> ClusterConfig:
        if not self.embedded and "nodes" not in self.model_fields_set:
            raise Misfit(("nodes",), "without `embedded: true` the nodes must be listed")
        if len(self.nodes) < 2:
            raise Misfit(("nodes",), f"at least 2 nodes are needed, a head and a worker; there are {len(self.nodes)}")
        heads = [node.name for node in self.nodes if node.is_head]
        if len(heads) != 1:
            found = f"{', '.join(heads)} have it" if heads else "none has it"
            raise Misfit(("nodes",), f"exactly one node must have `role: head`; {found}")
        seen: set[str] = set()
        for index, node in enumerate(self.nodes):
            if node.name in seen:
                raise Misfit(("nodes", index, "name"), f"two nodes are called {node.name}")
            seen.add(node.name)
            if not self.embedded and node.host is None:
                raise Misfit(("nodes", index), f"{node.name} has no `host`, and the cluster is not `embedded`")
        return self

    def __eq__(self, other: object) -> bool:
        """By what is in effect, not by where it came from."""
        return isinstance(other, ClusterConfig) and self.model_dump() == other.model_dump()

    @classmethod
    def from_yaml(cls, path: str | Path) -> ClusterConfig:
        """Read a file, with the environment's layer above it; the same as `load_cluster_config(path)`."""
        from distributed_grid.config.loader import load_cluster_config

        return load_cluster_config(path)

    @property
    def execution(self) -> ExecutionConfig:
        return ExecutionConfig.model_construct(resource_sharing=self.resource_sharing)

    @property
    def path(self) -> Path | None:
        """The file it came from; None for the embedded default."""
        return self._path

    @property
    def digest(self) -> str:
        """Of that file's bytes, to tell whether it has changed since."""
        return self._digest

    @property
    def head(self) -> NodeConfig:
        return next(node for node in self.nodes if node.is_head)

    @property
    def workers(self) -> list[NodeConfig]:
        return [node for node in self.nodes if not node.is_head]

    def node(self, name: str) -> NodeConfig:
        for node in self.nodes:
            if node.name == name:
                return node
        names = [node.name for node in self.nodes]
        near = get_close_matches(name, names, 1)
        raise NotFound(
            f"there is no node {name!r} in the cluster",
            cause=f"the nodes are {', '.join(names)}",
            hint=f"did you mean {near[0]}?" if near else "grid status shows the nodes",
            code="unknown-node",
        )
