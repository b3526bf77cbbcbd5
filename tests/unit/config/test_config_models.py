"""The model: nodes, units, the one head-only flag, what goes together."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from distributed_grid.config.models import AutoOffloadConfig, ClusterConfig, NodeConfig, ResourceSharingConfig
from distributed_grid.core.errors import NotFound
from distributed_grid.core.resources import ResourceType

REAL: list[dict[str, Any]] = [
    {"name": "gpu-master", "role": "head", "host": "10.0.0.1"},
    {"name": "gpu1", "host": "10.0.0.2"},
]


def test_without_anything_it_is_the_embedded_cluster() -> None:
    config = ClusterConfig()
    assert config.embedded
    assert [node.name for node in config.nodes] == ["gpu-master", "gpu1", "gpu2"]
    assert config.head.name == "gpu-master" and [node.name for node in config.workers] == ["gpu1", "gpu2"]
    assert {(node.cpu_count, node.gpu_count, node.memory_gb) for node in config.nodes} == {(8, 1, 32.0)}
    assert config.execution.resource_sharing is config.resource_sharing


def test_listed_nodes_are_real_unless_said_otherwise() -> None:
    assert not ClusterConfig.model_validate({"nodes": REAL}).embedded
    assert ClusterConfig.model_validate({"nodes": REAL, "embedded": True}).embedded


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"nodes": REAL[:1]}, "at least 2 nodes"),
        ({"nodes": [REAL[1], {**REAL[1], "name": "gpu2"}]}, "none has it"),
        ({"nodes": [REAL[0], {**REAL[0], "name": "gpu2"}]}, "gpu-master, gpu2 have it"),
        ({"nodes": [*REAL, REAL[1]]}, "two nodes are called gpu1"),
        ({"nodes": [REAL[0], {"name": "gpu1"}]}, "gpu1 has no `host`"),
        ({"embedded": False}, "must be listed"),
        ({"nodes": [REAL[0], {"name": "../x", "host": "h"}]}, "letters, digits"),
        ({"nodes": [REAL[0], {"name": "gpu1", "host": "-oProxyCommand=x"}]}, "does not begin with"),
        ({"alerts": {"memory": 170}}, "less than or equal to 1"),
        ({"resource_sharing": {"pressure_thresholds": {"cpu": {"high": 0.5, "low": 0.6}}}}, "must not be above high"),
        ({"resource_sharing": {"policy": "greedy"}}, "balanced"),
        ({"ray": {"start_timeout_seconds": float("inf")}}, "finite"),
    ],
)
def test_what_does_not_go_together_is_refused(data: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        ClusterConfig.model_validate(data)


@pytest.mark.parametrize("written", [0.7, 70, 70.0, "70%", "70", "0.7"])
def test_fractions_and_percentages_are_one(written: Any) -> None:
    auto = AutoOffloadConfig.model_validate({"thresholds": {"memory": written}})
    assert (auto.thresholds.memory, auto.thresholds.cpu, auto.thresholds.gpu) == (0.7, 0.8, 0.9)


def test_a_high_level_below_the_default_low_takes_it_along() -> None:
    sharing = ResourceSharingConfig.model_validate({"pressure_thresholds": {"cpu": {"high": 20}}})
    assert sharing.pressure_thresholds.cpu.low == sharing.pressure_thresholds.cpu.high == 0.2


@pytest.mark.parametrize(
    ("data", "flag"),
    [
        ({}, False),
        ({"auto_offload": {"enabled": True}}, True),
        ({"auto_offload": {"head_only_mode": True}}, True),
        ({"head_only_mode": True}, True),
        ({"head_only_mode": True, "auto_offload": {"head_only_mode": False}}, False),
        ({"head_only_mode": False, "auto_offload": {"head_only_mode": True}}, True),
        ({"head_only_mode": False, "auto_offload": {"enabled": True}}, False),
    ],
)
def test_head_only_mode_is_one_flag(data: dict[str, Any], flag: bool) -> None:
    sharing = ResourceSharingConfig.model_validate(data)
    assert sharing.head_only_mode is sharing.auto_offload.head_only_mode is flag
    again = ResourceSharingConfig.model_validate(sharing.model_dump())
    assert again == sharing


def test_what_a_node_may_share() -> None:
    node = NodeConfig.model_validate({"name": "a", "share": {"cpu": 1, "gpu": False, "memory": "512MiB"}})
    assert [node.share.limit(kind) for kind in (ResourceType.CPU, ResourceType.GPU, ResourceType.MEMORY)] == [1, 0, 0.5]
    assert NodeConfig.model_validate({"name": "a"}).share.limit(ResourceType.CPU) is None
    assert NodeConfig.model_validate({"name": "a", "share": False}).share.limit(ResourceType.MEMORY) == 0


def test_other_spellings_of_a_node() -> None:
    nodes = [{"name": "a", "role": "head", "cpu": 4, "gpu": 0, "memory": "16GB"}, {"name": "b"}]
    head = ClusterConfig.model_validate({"embedded": True, "nodes": nodes}).head
    assert (head.cpu_count, head.gpu_count, head.memory_gb) == (4, 0, 16.0)


def test_a_configuration_survives_a_round_trip_as_data() -> None:
    config = ClusterConfig.model_validate({"nodes": REAL, "execution": {"resource_sharing": {"rebalance_interval": 9}}})
    assert ClusterConfig.model_validate(config.model_dump(mode="json")) == config


def test_unknown_node_names_the_nearest() -> None:
    with pytest.raises(NotFound) as caught:
        ClusterConfig().node("gpu-mastr")
    assert caught.value.hint == "did you mean gpu-master?"
