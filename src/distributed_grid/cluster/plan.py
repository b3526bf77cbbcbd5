"""From the configuration to the record of a cluster that is to be: who starts where, and how it is reached."""

from __future__ import annotations

import ipaddress
import secrets
import socket
from collections.abc import Mapping
from pathlib import Path

from distributed_grid.cluster.embedded import OBJECT_STORE_BYTES, choose_addresses, choose_node_ports
from distributed_grid.cluster.launcher import LocalLauncher, NodeLauncher
from distributed_grid.cluster.probe import version_of
from distributed_grid.cluster.ray_node import DEFAULT_PORTS, RayNodeSpec
from distributed_grid.cluster.record import ClusterRecord, NodeRecord
from distributed_grid.config.models import ClusterConfig, NodeConfig
from distributed_grid.config.paths import GridPaths
from distributed_grid.core.errors import ConfigError
from distributed_grid.core.resources import GB


def plan_cluster(config: ClusterConfig, paths: GridPaths, cluster_id: str = "") -> ClusterRecord:
    """A fresh record, nothing started. Chooses free addresses and ports where the cluster is embedded."""
    names = [node.name for node in config.nodes]
    head = config.head.name
    if config.embedded:
        addresses = choose_addresses(names, config.ray.port)
        ports = choose_node_ports(names, head, config.ray.port, config.ray.dashboard_port)
    else:
        addresses = host_addresses(config)
        gcs = config.ray.port or DEFAULT_PORTS["gcs"]
        own = {**DEFAULT_PORTS, "gcs": gcs, "dashboard": config.ray.dashboard_port or DEFAULT_PORTS["dashboard"]}
        ports = {name: dict(own) for name in names}
    record = ClusterRecord(
        cluster_id=cluster_id or secrets.token_hex(6), embedded=config.embedded, nodes={},
        config_path=str(config.path or ""),
    )  # fmt: skip
    for node in config.nodes:
        local = config.embedded or node.name == head
        spec = RayNodeSpec(
            node=node.name, role=node.role, address=addresses[node.name], head_address=addresses[head],
            cluster_id=record.cluster_id, ports=ports[node.name], num_cpus=node.cpu_count, num_gpus=node.gpu_count,
            memory_bytes=round(node.memory_gb * GB) if node.memory_gb else None,
            object_store_bytes=config.ray.object_store_bytes or (OBJECT_STORE_BYTES if config.embedded else None),
            state_dir=str(paths.home) if local else remote_state_dir(paths),
            ray_version=version_of("ray"),
        )  # fmt: skip
        record.nodes[node.name] = NodeRecord(
            spec=spec, launcher="local" if local else "ssh", ssh={} if local else ssh_settings(node),
            declared=declared_capacity(node),
        )  # fmt: skip
    return record


def same_shape(one: ClusterRecord, other: ClusterRecord) -> bool:
    """Whether both describe the same nodes, reached the same way; ports and addresses of an embedded one may differ."""

    def shape(record: ClusterRecord) -> list[tuple[object, ...]]:
        return [
            (node.name, node.spec.role, node.launcher, node.ssh, node.declared, node.spec.object_store_bytes,
             None if record.embedded else (node.address, node.spec.ports))
            for node in record.nodes.values()
        ]  # fmt: skip

    return one.embedded == other.embedded and shape(one) == shape(other)


def declared_capacity(node: NodeConfig) -> dict[str, int] | None:
    found = {
        "cpu_count": node.cpu_count, "gpu_count": node.gpu_count,
        "memory_bytes": round(node.memory_gb * GB) if node.memory_gb else None,
    }  # fmt: skip
    return {key: value for key, value in found.items() if value is not None} or None


def ssh_settings(node: NodeConfig) -> dict[str, object]:
    return {
        "host": str(node.host), "port": node.port, "user": node.user, "key": str(node.key) if node.key else None,
        "known_hosts": str(node.known_hosts) if node.known_hosts else None, "python": node.python,
    }  # fmt: skip


def remote_state_dir(paths: GridPaths) -> str:
    """A node's own `~/.distributed_grid`, or the head's GRID_HOME where that was set to something else."""
    return "" if paths.home == Path.home() / ".distributed_grid" else str(paths.home)


def host_addresses(config: ClusterConfig) -> dict[str, str]:
    """Each node's IPv4 address; the head's must be one that the workers can reach."""
    found: dict[str, str] = {}
    for node in config.nodes:
        try:
            found[node.name] = socket.getaddrinfo(node.host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0]  # type: ignore[assignment]
        except OSError as error:
            if node.name == config.head.name:
                raise ConfigError(
                    f"the head's host {node.host!r} has no address", cause=str(error),
                    hint="write its IP address in `host`", code="head-address",
                ) from error  # fmt: skip
            found[node.name] = str(node.host)  # told apart later, as a failure of this node alone
    head = config.head.name
    if ipaddress.ip_address(found[head]).is_loopback:
        for worker in [node for node in config.nodes if node.name != head][:1]:
            found[head] = address_towards(found[worker.name]) or found[head]
    return found


def address_towards(host: str) -> str:
    """The address of ours that packets to `host` leave from; no packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
            return str(probe.getsockname()[0])
        except OSError:
            return ""


def require_local(address: str) -> None:
    """The head is the machine that the daemon runs on."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError as error:
            raise ConfigError(
                f"the head's address {address} is not one of this machine's", cause=str(error),
                hint="run grid on the head, or correct the head's `host`", code="head-elsewhere",
            ) from error  # fmt: skip


def make_launchers(record: ClusterRecord) -> dict[str, NodeLauncher]:
    """One per node; asyncssh is loaded only where it is needed."""
    made: dict[str, NodeLauncher] = {}
    for node in record.nodes.values():
        made[node.name] = LocalLauncher(node.name) if node.launcher == "local" else _ssh(node)
    return made


def _ssh(node: NodeRecord) -> NodeLauncher:
    from distributed_grid.cluster.ssh import SshLauncher

    settings: Mapping[str, object] = node.ssh
    return SshLauncher(node.name, state_dir=node.spec.state_dir, **settings)  # type: ignore[arg-type]
