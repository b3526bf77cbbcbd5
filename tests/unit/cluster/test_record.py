"""The record of a cluster: written whole, private, read again, and doubted where damaged."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from distributed_grid.cluster.plan import make_launchers, plan_cluster, require_local, same_shape
from distributed_grid.cluster.record import ClusterRecord
from distributed_grid.config.models import ClusterConfig
from distributed_grid.config.paths import GridPaths
from distributed_grid.core.errors import ConfigError, NotFound, Unavailable


def embedded() -> ClusterConfig:
    return ClusterConfig.model_validate({"embedded": True, "ray": {"port": 0, "dashboard_port": 0}})


def test_round_trip_and_mode(tmp_path: Path) -> None:
    record = plan_cluster(embedded(), GridPaths(tmp_path))
    record.nodes["gpu1"].fail(Unavailable("no answer", cause="it is off", code="ssh-unreachable"))
    path = tmp_path / "cluster.json"
    record.save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert ClusterRecord.load(path) == record
    assert [one.name for one in tmp_path.iterdir()] == ["cluster.json"]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"version": 99}', '{"version": 1, "nodes": [{}]}'])
def test_damaged_record_is_none(tmp_path: Path, content: str) -> None:
    path = tmp_path / "cluster.json"
    path.write_text(content)
    assert ClusterRecord.load(path) is None


def test_state_follows_the_nodes(tmp_path: Path) -> None:
    record = plan_cluster(embedded(), GridPaths(tmp_path))
    for node in record.nodes.values():
        node.state = "up"
    record.settle()
    assert record.state == "up"
    record.nodes["gpu2"].state = "failed"
    record.settle()
    assert record.state == "degraded"
    record.head.state = "failed"
    record.settle()
    assert record.state == "failed"
    record.head.state = "down"  # stopped, with gpu2 not reached
    record.settle()
    assert record.state == "down"
    with pytest.raises(NotFound, match="gpu9"):
        record.node("gpu9")


def test_embedded_plan(tmp_path: Path) -> None:
    record = plan_cluster(embedded(), GridPaths(tmp_path))
    assert list(record.nodes) == ["gpu-master", "gpu1", "gpu2"]
    assert len({node.address for node in record.nodes.values()}) == 3
    assert all(node.address.startswith("127.0.") for node in record.nodes.values())
    assert len({node.spec.ports["dashboard_agent"] for node in record.nodes.values()}) == 3
    assert {node.spec.gcs_address for node in record.nodes.values()} == {record.gcs_address}
    assert record.head.declared == {"cpu_count": 8, "gpu_count": 1, "memory_bytes": 32 * 1024**3}
    assert same_shape(record, plan_cluster(embedded(), GridPaths(tmp_path)))


def test_ssh_plan(tmp_path: Path) -> None:
    config = ClusterConfig.model_validate({"nodes": [
        {"name": "a", "host": "192.0.2.1", "role": "head"},
        {"name": "b", "host": "192.0.2.2", "user": "lab", "port": 2222, "python": "/opt/py"},
    ]})  # fmt: skip
    record = plan_cluster(config, GridPaths(tmp_path))
    assert (record.head.launcher, record.nodes["b"].launcher) == ("local", "ssh")
    assert record.nodes["b"].spec.gcs_address == "192.0.2.1:6379"
    assert record.nodes["b"].spec.num_cpus is None
    assert record.nodes["b"].spec.state_dir == str(tmp_path)
    assert make_launchers(record)["b"].kind == "ssh"
    other = config.model_copy(update={"nodes": [config.nodes[0], config.nodes[1].model_copy(update={"port": 22})]})
    assert not same_shape(record, plan_cluster(other, GridPaths(tmp_path)))
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1"):
        require_local(record.head.address)
