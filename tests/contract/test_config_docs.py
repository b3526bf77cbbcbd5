"""The YAML of the five documents, letter by letter, and our own files and pages about the configuration."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from distributed_grid.config import ClusterConfig, load_cluster_config
from distributed_grid.config.layers import dotted, flatten
from distributed_grid.config.reference import describe, table

ROOT = Path(__file__).resolve().parents[2]

AUTO_OFFLOAD = """\
execution:
  resource_sharing:
    # ... existing fields ...

    # New fields for head-only auto-offload
    auto_offload:
      enabled: false                    # Toggled by CLI
      head_only_mode: true              # Only offload FROM head node
      thresholds:
        cpu: 80
        memory: 70
        gpu: 90
      check_interval_seconds: 5         # How often to check pressure
      cooldown_seconds: 30              # Min time between offloads
"""
SHARING = """\
resource_sharing:
  enabled: true
  check_interval: 60  # seconds
  offer_expiry: 300   # seconds
  max_offers_per_node: 5
  thresholds:
    gpu_utilization_max: 20.0    # GPU must be below 20% utilization
    gpu_memory_min_mb: 1024.0    # At least 1GB free GPU memory
    memory_percent_max: 50.0     # Memory must be below 50% used
    memory_min_gb: 2.0           # At least 2GB free memory
    cpu_percent_max: 30.0        # CPU must be below 30% utilization
    cpu_min_cores: 1.0           # At least 1 CPU core free
"""
MEMORY = """\
execution:
  resource_sharing:
    enabled: true
    mode: dynamic_balancing
    policy: balanced
    rebalance_interval_seconds: 30
    thresholds:
      memory_pressure_high: 0.7  # Auto-request when >70%
"""
BOOST = """\
resource_sharing:
  enabled: true
  policy: "balanced"  # Options: balanced, aggressive, conservative
  rebalance_interval: 30  # seconds
  pressure_thresholds:
    cpu:
      high: 0.8
      low: 0.3
    memory:
      high: 0.8
      low: 0.3
    gpu:
      high: 0.8
      low: 0.3
"""


def load(folder: Path, text: str) -> ClusterConfig:
    file = folder / "cluster_config.yaml"
    file.write_text(text)
    return load_cluster_config(file, env={})


def test_auto_offload_yaml(tmp_path: Path) -> None:
    auto = load(tmp_path, AUTO_OFFLOAD).execution.resource_sharing.auto_offload
    assert not auto.enabled and auto.head_only_mode
    assert (auto.thresholds.cpu, auto.thresholds.memory, auto.thresholds.gpu) == (0.8, 0.7, 0.9)
    assert (auto.check_interval_seconds, auto.cooldown_seconds) == (5, 30)


def test_resource_sharing_yaml(tmp_path: Path) -> None:
    sharing = load(tmp_path, SHARING).resource_sharing
    assert sharing.enabled
    assert (sharing.check_interval, sharing.offer_expiry, sharing.max_offers_per_node) == (60, 300, 5)
    idle = sharing.thresholds
    assert (idle.gpu_utilization_max, idle.memory_percent_max, idle.cpu_percent_max) == (0.2, 0.5, 0.3)
    assert (idle.gpu_memory_min_mb, idle.memory_min_gb, idle.cpu_min_cores) == (1024, 2, 1)


def test_distributed_memory_yaml(tmp_path: Path) -> None:
    sharing = load(tmp_path, MEMORY).resource_sharing
    assert (sharing.mode, sharing.policy, sharing.rebalance_interval_seconds) == ("dynamic_balancing", "balanced", 30)
    assert sharing.pressure_thresholds.memory.high == 0.7 and sharing.pressure_thresholds.memory.low == 0.3
    assert sharing.thresholds.memory_percent_max == 0.5


def test_boost_yaml(tmp_path: Path) -> None:
    sharing = load(tmp_path, BOOST).resource_sharing
    levels = sharing.pressure_thresholds
    assert {(kind.high, kind.low) for kind in (levels.cpu, levels.memory, levels.gpu)} == {(0.8, 0.3)}
    assert sharing.rebalance_interval_seconds == 30


def test_both_layouts_in_one_file(tmp_path: Path) -> None:
    sharing = load(tmp_path, SHARING + AUTO_OFFLOAD).resource_sharing
    assert sharing.max_offers_per_node == 5 and sharing.auto_offload.cooldown_seconds == 30


@pytest.mark.parametrize("name", ["my-cluster-enhanced.yaml", "cluster_config.yaml"])
def test_shipped_files_are_the_embedded_cluster_with_every_key(name: str) -> None:
    config = ClusterConfig.from_yaml(str(ROOT / "config" / name))
    expected = ClusterConfig.model_validate({"resource_sharing": {"auto_offload": {"head_only_mode": True}}})
    assert config == expected
    given = {dotted(at) for at in config._origins if at[0] != "nodes"}
    wanted = {key.name for key in describe() if not key.name.startswith("nodes")}
    assert given == wanted - {"resource_sharing.head_only_mode"}  # the nested one is the same flag


def test_starters_are_the_shipped_files() -> None:
    starters = ROOT / "src" / "distributed_grid" / "config" / "starters"
    assert (starters / "embedded.yaml").read_text() == (ROOT / "config" / "cluster_config.yaml").read_text()
    assert (starters / "real-hosts.yaml").read_text() == (ROOT / "config" / "real-hosts.example.yaml").read_text()
    assert not load_cluster_config(ROOT / "config" / "real-hosts.example.yaml", env={}).embedded


def test_every_key_is_documented() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    assert table() in page, "the table in docs/configuration.md is not reference.table()"
    assert all(key.meaning for key in describe())


def test_yaml_of_the_page_is_valid(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    blocks = re.findall(r"^```yaml\n(.*?)^```", page, flags=re.M | re.S)
    assert blocks
    for block in blocks:
        assert load(tmp_path, block).nodes


def test_documented_keys_have_all_effective_values() -> None:
    effective = {re.sub(r"\.\d+\.", "[].", dotted(at)) for at, _ in flatten(ClusterConfig().model_dump(mode="json"))}
    assert effective == {key.name for key in describe()} - {"nodes"}
