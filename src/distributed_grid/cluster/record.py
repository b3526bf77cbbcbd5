"""What `cluster start` set out to start, and how far it got: written before each side effect."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distributed_grid.cluster.files import read_json, write_private
from distributed_grid.cluster.ray_node import RayNodeSpec
from distributed_grid.core.errors import GridError, NotFound

VERSION = 1


@dataclass(slots=True)
class NodeRecord:
    """One node: what it is to be (`spec`, `launcher`, `ssh`, `declared`) and what it is (`state` and below)."""

    spec: RayNodeSpec
    launcher: str = "local"  # or "ssh"
    ssh: dict[str, Any] = field(default_factory=dict)  # host, port, user, key, known_hosts, python
    declared: dict[str, int] | None = None  # cpu_count, gpu_count, memory_bytes; None: measured
    state: str = "down"  # down, starting, up, failed, stopping
    error: dict[str, Any] | None = None  # a GridError as plain data
    agent: dict[str, Any] | None = None  # host, port, pid, boot_id
    ray_node_id: str = ""
    token_path: str = ""  # on the node
    state_dir: str = ""  # on the node

    @property
    def name(self) -> str:
        return self.spec.node

    @property
    def address(self) -> str:
        return self.spec.address

    def fail(self, error: GridError) -> None:
        self.state, self.error, self.agent = "failed", error.to_wire(), None

    def to_wire(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "spec": self.spec.to_wire()}

    @classmethod
    def from_wire(cls, data: Mapping[str, Any]) -> NodeRecord:
        known = {f.name for f in dataclasses.fields(cls)} - {"spec"}
        rest = {key: value for key, value in data.items() if key in known}
        return cls(spec=RayNodeSpec.from_wire(data["spec"]), **rest)


@dataclass(slots=True)
class ClusterRecord:
    cluster_id: str
    embedded: bool
    nodes: dict[str, NodeRecord]
    config_path: str = ""
    state: str = "down"  # down, starting, up, degraded (not all nodes), failed (no head), stopping
    started_at: float = 0.0

    @property
    def head(self) -> NodeRecord:
        return next(one for one in self.nodes.values() if one.spec.is_head)

    @property
    def workers(self) -> list[NodeRecord]:
        return [one for one in self.nodes.values() if not one.spec.is_head]

    @property
    def gcs_address(self) -> str:
        return self.head.spec.gcs_address

    def node(self, name: str) -> NodeRecord:
        try:
            return self.nodes[name]
        except KeyError:
            raise NotFound(
                f"there is no node {name!r}", hint="one of " + ", ".join(self.nodes), code="unknown-node"
            ) from None

    def settle(self) -> None:
        """The cluster's state from its nodes'. "down" is what was asked for; "failed" is to be brought back."""
        if all(one.state == "up" for one in self.nodes.values()):
            self.state = "up"
        else:
            self.state = {"up": "degraded", "down": "down"}.get(self.head.state, "failed")

    def save(self, path: Path) -> None:
        write_private(path, self.to_wire())

    def to_wire(self) -> dict[str, Any]:
        return {
            "version": VERSION, "cluster_id": self.cluster_id, "embedded": self.embedded,
            "config_path": self.config_path, "state": self.state, "started_at": self.started_at,
            "nodes": [one.to_wire() for one in self.nodes.values()],
        }  # fmt: skip

    @classmethod
    def load(cls, path: Path) -> ClusterRecord | None:
        """None where there is none, or one that cannot be read (then the nodes' own marks are what is left)."""
        data = read_json(path)
        if data is None or data.get("version") != VERSION:
            return None
        try:
            nodes = [NodeRecord.from_wire(one) for one in data["nodes"]]
            return cls(
                cluster_id=str(data["cluster_id"]), embedded=bool(data["embedded"]),
                nodes={one.name: one for one in nodes}, config_path=str(data.get("config_path", "")),
                state=str(data.get("state", "down")), started_at=float(data.get("started_at", 0.0)),
            )  # fmt: skip
        except (KeyError, TypeError, ValueError, GridError):
            return None
