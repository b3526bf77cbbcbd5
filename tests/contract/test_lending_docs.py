"""Every command line of the documents on lending and boosts, as typed there, on the embedded cluster."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from pytest import MonkeyPatch

from distributed_grid.config import ClusterConfig
from distributed_grid.config.find import find_config_file
from tests.lab.clusters import EMBEDDED_CONFIG, EmbeddedCluster
from tests.lab.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = "import os\nprint('ran on', os.environ['GRID_NODE'])\n"


@pytest.fixture
def grid(embedded: EmbeddedCluster) -> Iterator[EmbeddedCluster]:
    for name in ("train.py", "process_data.py", "parallel_task.py", "train_model.py"):
        (embedded.cwd / name).write_text(PROGRAM)

    def idle() -> bool:
        return len(embedded.json("shared-status")["offers"]) == 6

    wait_until(idle, 120, "both workers to offer all types", every_s=0.5)
    yield embedded
    for lease in embedded.json("shared-status")["allocations"]:
        embedded.grid("resource-sharing", "release", "--force", lease["id"])


def typed(cluster: EmbeddedCluster, line: str) -> str:
    """As in the documents (some put `poetry run` first), but for the interpreter's name."""
    words = ["python3" if word == "python" else word for word in shlex.split(line)]
    return cluster.grid(*words, timeout=120).stdout


def test_resource_sharing_guide(grid: EmbeddedCluster) -> None:
    for line in (
        "run-shared --resource-type gpu --amount 1 --priority high python train.py",
        "run-shared --resource-type memory --amount 4 --priority medium python process_data.py",
        "run-shared --resource-type cpu --amount 2 --priority low python parallel_task.py",
        "run-shared -r gpu -a 1 -n gpu1 -n gpu2 python train.py",
    ):
        assert typed(grid, line) in ("ran on gpu1\n", "ran on gpu2\n")
    shown = typed(grid, "shared-status")
    assert "Resource offers" in shown and "Active allocations" in shown
    assert "gpu1" in typed(grid, "status")


def test_distributed_memory_guide(grid: EmbeddedCluster) -> None:
    config = f"--config {grid.config}"
    request = f"resource-sharing request --node gpu-master --type memory --amount 10.0 --priority high {config}"
    allocation = typed(grid, request).rpartition("allocation id: ")[2].strip()
    typed(grid, request.replace("10.0", "15.0"))
    for line in (f"resource-sharing status {config}", "resource-sharing status"):
        shown = typed(grid, line)
        assert allocation[:8] in shown and "10.0 GB memory" in shown and "15.0 GB memory" in shown
    assert "Released" in typed(grid, f"resource-sharing release {allocation}")
    assert "lends nothing new" in typed(grid, "resource-sharing cooldown -n gpu1")
    assert "lends again" in typed(grid, "resource-sharing cooldown -n gpu1 --end")


def test_resource_boost_guide(grid: EmbeddedCluster) -> None:
    typed(grid, "boost request gpu-master cpu 2.0 --priority high")
    typed(grid, "boost request gpu-master gpu 1 --duration 1800")
    typed(grid, "boost request gpu-master memory 4.0 --source gpu2")
    plain = grid.json("boost", "request", "gpu-master", "cpu", "4.0")
    assert plain["priority"] == "normal" and plain["expires"] - plain["created"] == 3600.0
    shown = typed(grid, "boost status")
    assert "Active boosts: 4" in shown and "cpu: 6 cores" in shown and "gpu: 1 GPU" in shown and "memory: 4 GB" in shown
    assert typed(grid, "boost status --node gpu-master") == shown
    boost = typed(grid, "boost request gpu-master gpu 1 --priority critical --duration 3600")
    boost_id = boost.partition("boost id: ")[2].splitlines()[0]
    assert typed(grid, f"boost run {boost_id} -- python train_model.py").startswith("ran on gpu")
    typed(grid, "boost request gpu-master memory 8.0 --source gpu2 --duration 7200")
    typed(grid, "boost request gpu-master cpu 4.0 --priority high --duration 1800")
    assert "Active boosts: 7" in typed(grid, "boost status")
    assert "Released" in typed(grid, f"boost release {boost_id}")
    assert "online" in typed(grid, "cluster status")
    assert "Active boosts: 6" in typed(grid, "boost status --node gpu-master")
    assert "Resource offers" in typed(grid, "resource-sharing status")


def test_the_shipped_configuration_is_what_they_are_typed_on(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    """Without an option it is found, and declares what the test cluster has."""
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("GRID_CONFIG", raising=False)
    found = find_config_file(None)
    assert found is not None and found.absolute() == ROOT / "config" / "my-cluster-enhanced.yaml"
    (tmp_path / "ours.yaml").write_text(EMBEDDED_CONFIG)
    shipped, ours = ClusterConfig.from_yaml(found), ClusterConfig.from_yaml(tmp_path / "ours.yaml")
    assert shipped.embedded and shipped.nodes == ours.nodes
    assert shipped.resource_sharing.thresholds == ours.resource_sharing.thresholds
