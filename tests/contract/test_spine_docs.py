"""The documents' promises that the spine keeps (G1 to G6, S6, M4, B20, B21, O26, O29), as written there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tomllib
import urllib.error
import urllib.request
from importlib import metadata
from pathlib import Path

import pytest

from distributed_grid.config import ClusterConfig
from tests.lab.clusters import GRID, PYTHON, EmbeddedCluster
from tests.lab.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def in_checkout(embedded: EmbeddedCluster, *argv: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """A line of the documents, typed in a clone of the project, on this cluster."""
    path = f"{GRID.parent}:{os.environ['PATH']}"
    return subprocess.run(
        argv, env={**embedded.environment(), "PATH": path}, cwd=ROOT, capture_output=True, text=True, timeout=timeout,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip


def test_g1_entry_point() -> None:
    assert PROJECT["scripts"]["grid"] == "distributed_grid.cli:main"
    (found,) = [one for one in metadata.entry_points(group="console_scripts") if one.name == "grid"]
    assert found.value == "distributed_grid.cli:main"
    done = subprocess.run(["grid", "--help"], env={**os.environ, "PATH": str(GRID.parent)}, capture_output=True,
                          text=True, timeout=60)  # fmt: skip
    assert done.returncode == 0 and "grid cluster start" in done.stdout


def test_g1_poetry() -> None:
    """`poetry run` needs nothing but PEP 621 and an installed script."""
    assert "tool" not in PROJECT and PROJECT["name"] == "distributed-grid"
    if poetry := shutil.which("poetry"):
        env = {**os.environ, "VIRTUAL_ENV": str(GRID.parents[1])}
        done = subprocess.run([poetry, "run", "grid", "version"], cwd=ROOT, env=env, capture_output=True, text=True,
                              timeout=120)  # fmt: skip
        assert done.returncode == 0, done.stderr


def test_g2_package_and_python() -> None:
    import distributed_grid

    assert PROJECT["requires-python"] == ">=3.11"
    assert distributed_grid.__version__ == PROJECT["version"] == metadata.version("distributed-grid")
    assert distributed_grid.ClusterConfig is ClusterConfig


@pytest.mark.parametrize("name", ["config/my-cluster-enhanced.yaml", "config/cluster_config.yaml"])
def test_g3_config_option(embedded: EmbeddedCluster, name: str) -> None:
    for argv in (["--config", name, "status"], ["status", "--config", name], ["cluster", "status", "--config", name]):
        done = in_checkout(embedded, "grid", *argv)
        assert done.returncode == 0, done.stderr
        assert "gpu-master" in done.stdout


def test_g4_nodes(embedded: EmbeddedCluster) -> None:
    roles = {node["name"]: node["role"] for node in embedded.json("status")["nodes"]}
    assert roles == {"gpu-master": "head", "gpu1": "worker", "gpu2": "worker"}
    with pytest.raises(ValueError, match="at least 2 nodes"):
        ClusterConfig.model_validate({"embedded": True, "nodes": [{"name": "alone", "role": "head"}]})


def test_g5_errors_are_explained_in_the_logs(grid_home: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("embeded: true\n")
    failed = subprocess.run([GRID, "--config", wrong, "daemon", "start"], capture_output=True, text=True, timeout=60)
    assert failed.returncode == 2 and "embeded" in failed.stderr and "Traceback" not in failed.stderr
    logs = subprocess.run([GRID, "logs"], capture_output=True, text=True, timeout=60)
    assert logs.returncode == 0 and "embeded" in logs.stdout and str(wrong) in logs.stdout


def test_g6_requests_are_audited(embedded: EmbeddedCluster) -> None:
    embedded.grid("execute", "-n", "gpu1", "echo", "audited-word")
    lines = [json.loads(line) for line in embedded.grid("logs", "audit", "--lines", "200").stdout.splitlines()]
    asked = [line for line in lines if line["method"] == "task_start" and "audited-word" in str(line["target"])]
    assert len(asked) == 1
    assert asked[0]["uid"] == os.geteuid() and asked[0]["target"]["node"] == "gpu1"
    assert asked[0]["outcome"] == "accepted" and asked[0]["at"] > 0


def test_s6_workers_online(embedded: EmbeddedCluster) -> None:
    done = in_checkout(embedded, "grid", "status")
    assert done.returncode == 0, done.stderr
    lines = {line.split()[0]: line for line in done.stdout.splitlines() if line.strip()}
    assert all(" online " in lines[name] for name in ("gpu1", "gpu2"))


def test_m4_distribute_status_with_ray_status(embedded: EmbeddedCluster) -> None:
    done = in_checkout(embedded, "grid", "distribute", "status")
    assert done.returncode == 0, done.stderr
    assert sum(" alive " in line for line in done.stdout.splitlines()) == 3
    wait_until(lambda: "24.0 CPU" in ray_status(embedded), 60, "`ray status` to show the cores of the three nodes")


def ray_status(embedded: EmbeddedCluster) -> str:
    """What Ray's own command says; its report is written every few seconds."""
    done = in_checkout(embedded, "bash", "-c", 'eval "$(grid env)" && ray status')
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_b20_cluster_status(embedded: EmbeddedCluster) -> None:
    done = in_checkout(embedded, "grid", "cluster", "status")
    assert done.returncode == 0, done.stderr
    assert "cores" in done.stdout and "GB" in done.stdout


def test_b21_validator(embedded: EmbeddedCluster) -> None:
    done = in_checkout(embedded, str(PYTHON), "scripts/validate_ray_cluster.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "BAD" not in done.stdout


def test_o26_ray_dashboard(embedded: EmbeddedCluster) -> None:
    assert ClusterConfig().ray.dashboard_port == 8265
    url = embedded.json("cluster", "status")["dashboard_url"]
    token = (embedded.home / "ray_token").read_text().strip()
    request = urllib.request.Request(f"{url}/api/version", headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert json.load(answer)["ray_version"] == metadata.version("ray")
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(f"{url}/api/version", timeout=60)
    caught.value.close()
    assert caught.value.code in (401, 403)


def test_o29_bandwidth(embedded: EmbeddedCluster) -> None:
    done = in_checkout(embedded, "grid", "cluster", "bandwidth", "--seconds", "0.1")
    assert done.returncode == 0, done.stderr
    assert sum("/s" in line for line in done.stdout.splitlines()[1:]) == 4
