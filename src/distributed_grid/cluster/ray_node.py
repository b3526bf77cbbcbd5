"""What one Ray node is to be, and the `ray start` command line and environment that make it so."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distributed_grid.core.errors import UsageError

MARKER = "GRID_RAY_NODE"  # every process of one of our Ray nodes carries it: `<cluster id>/<node>`
TASK_MARKER = "GRID_TASK"  # what carries this is a user's, and Ray's end never ends it
HOST_LABEL = "grid-host"
DEFAULT_PORTS = {"gcs": 6379, "dashboard": 8265, "client": 10001, "dashboard_agent": 52365}

# Small and quick: no usage reports, no idle workers kept ready, a dead node noticed after 9 s instead of 65.
LIGHT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_event_stats": "0",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
    # Ray would otherwise end the agent when memory is short, which is when it is needed most.
    "RAY_memory_monitor_refresh_ms": "0",
    # A dying agent must leave its shims alone.
    "RAY_kill_child_processes_on_worker_exit": "false",
    # Ray's processes rename themselves; without this the name overwrites /proc/PID/environ, and the marker with it.
    "SPT_NOENV": "1",
}


@dataclass(frozen=True, slots=True)
class RayNodeSpec:
    """One Ray node. Empty paths are filled in on the node itself, where its user and home are known."""

    node: str
    role: str  # "head" or "worker"
    address: str
    head_address: str
    cluster_id: str
    ports: dict[str, int] = field(default_factory=lambda: dict(DEFAULT_PORTS))
    num_cpus: int | None = None
    num_gpus: int | None = None
    memory_bytes: int | None = None
    object_store_bytes: int | None = None
    state_dir: str = ""
    temp_dir: str = ""
    token_path: str = ""
    ray_version: str = ""  # the head's; a node with another one is refused

    @property
    def is_head(self) -> bool:
        return self.role == "head"

    @property
    def marker(self) -> str:
        return f"{self.cluster_id}/{self.node}"

    @property
    def gcs_address(self) -> str:
        return f"{self.head_address}:{self.ports['gcs']}"

    def own_ports(self) -> dict[str, int]:
        """The ports that must be free on the node before it starts."""
        names = ("gcs", "dashboard", "client", "dashboard_agent") if self.is_head else ("dashboard_agent",)
        return {name: self.ports[name] for name in names}

    def to_wire(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_wire(cls, data: Mapping[str, Any]) -> RayNodeSpec:
        known = {f.name for f in dataclasses.fields(cls)}
        try:
            return cls(**{key: value for key, value in data.items() if key in known})
        except TypeError as error:
            raise UsageError("the description of the Ray node is not complete", cause=str(error)) from None


def temp_root(cluster_id: str, uid: int | None = None) -> Path:
    """Short on purpose: Ray puts unix sockets 60 characters below it, and their paths end at 107."""
    digest = hashlib.sha256(cluster_id.encode()).hexdigest()[:8]
    return Path(f"/tmp/grid-{os.geteuid() if uid is None else uid}-{digest}")


def start_argv(spec: RayNodeSpec, python: str) -> list[str]:
    """The `ray start` command; a worker's waits for the head's GCS while it loads Ray."""
    argv = [python, "-m", "distributed_grid.cluster.ray_start"]
    if not spec.is_head:
        argv += [f"--wait-for={spec.gcs_address}"]
    return [*argv, *ray_start_options(spec)]


def ray_start_options(spec: RayNodeSpec) -> list[str]:
    """What follows `ray` on its command line."""
    options = ["start"]
    if spec.is_head:
        options += [
            "--head", f"--port={spec.ports['gcs']}",
            "--dashboard-host=127.0.0.1", f"--dashboard-port={spec.ports['dashboard']}",
            f"--ray-client-server-port={spec.ports['client']}",
        ]  # fmt: skip
    else:
        options += [f"--address={spec.gcs_address}"]
    options += [
        f"--node-ip-address={spec.address}", f"--labels={HOST_LABEL}={spec.node}",
        f"--dashboard-agent-listen-port={spec.ports['dashboard_agent']}",
        # 0 lets the kernel choose: several nodes on one machine would share the default range.
        "--min-worker-port=0", "--max-worker-port=0",
        "--disable-usage-stats", "--include-log-monitor=false", "--log-color=false",
    ]  # fmt: skip
    if spec.temp_dir:
        options += [f"--temp-dir={spec.temp_dir}"]
    for name, value in (
        ("num-cpus", spec.num_cpus),
        ("num-gpus", spec.num_gpus),
        ("memory", spec.memory_bytes),
        ("object-store-memory", spec.object_store_bytes),
    ):
        if value is not None:
            options += [f"--{name}={value}"]
    return options


def auth_environment(token_path: str) -> dict[str, str]:
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": token_path}


def clean_environment(base: Mapping[str, str]) -> dict[str, str]:
    """Without what another Ray, or a task of ours, left in it."""
    return {
        key: value for key, value in base.items() if not key.startswith("RAY_") and key not in (MARKER, TASK_MARKER)
    }


def node_environment(spec: RayNodeSpec, base: Mapping[str, str]) -> dict[str, str]:
    """The environment of `ray start`, which every process of the node inherits."""
    return {
        **clean_environment(base),
        **LIGHT,
        **auth_environment(spec.token_path),
        "GRID_HOME": spec.state_dir,
        MARKER: spec.marker,
    }
