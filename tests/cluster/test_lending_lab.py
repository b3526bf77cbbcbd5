"""Lending between hosts over SSH: the documents' commands with amounts that fit, and a worker that is lost."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from distributed_grid.core.errors import ExitCode
from tests.cluster.lendings import give_all_back, lending
from tests.lab.clusters import LabCluster
from tests.lab.waiting import wait_until

#: Hosts of the lab share the machine's cores: whatever else it does, they lend what is free.
SHARING = "resource_sharing:\n  policy: aggressive\n"
PROGRAM = "import os, socket\nprint('ran on', os.environ['GRID_NODE'], socket.gethostname())\n"


def has_offers(cluster: LabCluster) -> bool:
    """Of memory: cores they may have none, for as long as the machine's other work has them all."""
    offers = {(one["node"], one["type"]) for one in lending(cluster)["offers"] if one["amount"] >= 1}
    return {("gpu1", "memory"), ("gpu2", "memory")} <= offers


def runs(cluster: LabCluster, *words: str) -> None:
    """Its file was sent there; or the machine's other work had all cores, and it was refused in time."""
    done = cluster.grid("run-shared", *words, "--wait-time", "60", "python3", "train.py", check=False, timeout=150)
    if done.returncode == ExitCode.NO_RESOURCES and "cpu" in words:
        assert "waited 60 s" in done.stderr
        return
    assert done.stdout in ("ran on gpu1 gpu1\n", "ran on gpu2 gpu2\n"), done.stderr


def boosted(cluster: LabCluster, *words: str) -> dict[str, Any]:
    """A boost of a core, or if the machine's other work has them all, of memory."""
    for what in (["cpu", "1.0"], ["memory", "0.5"]):
        request = ["boost", "request", "gpu-master", *what, "--wait-time", "60", *words, "--format", "json"]
        done = cluster.grid(*request, check=False, timeout=150)
        if done.returncode != ExitCode.NO_RESOURCES:
            break
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture
def grid(lab_cluster: LabCluster) -> Iterator[LabCluster]:
    before = lab_cluster.head.read(lab_cluster.config)
    lab_cluster.head.write(lab_cluster.config, before + SHARING, mode=0o600)
    lab_cluster.head.write("/root/train.py", PROGRAM)
    try:
        wait_until(lambda: lending(lab_cluster)["policy"] == "aggressive", 60, "the configuration to be read")
        wait_until(lambda: has_offers(lab_cluster), 150, "both workers to offer", every_s=0.5)
        yield lab_cluster
        give_all_back(lab_cluster)
    finally:
        lab_cluster.head.write(lab_cluster.config, before, mode=0o600)


def test_the_documents_commands_on_three_hosts(grid: LabCluster) -> None:
    for words in (
        ["--resource-type", "memory", "--amount", "0.25", "--priority", "medium"],
        ["--resource-type", "cpu", "--amount", "1", "--priority", "low"],
        ["-r", "cpu", "-a", "1", "-n", "gpu1", "-n", "gpu2"],
    ):
        runs(grid, *words)
    assert "Resource offers" in grid.grid("shared-status").stdout
    request = ["resource-sharing", "request", "--node", "gpu-master", "--type", "memory", "--amount", "0.5"]
    allocation = grid.grid(*request, "--priority", "high").stdout.rpartition("allocation id: ")[2].strip()
    assert allocation[:8] in grid.grid("resource-sharing", "status").stdout
    assert "Released" in grid.grid("resource-sharing", "release", allocation).stdout
    boost = boosted(grid, "--priority", "high", "--duration", "1800")
    grid.grid("boost", "request", "gpu-master", "memory", "0.5", "--source", "gpu2")
    assert "Active boosts: 2" in grid.grid("boost", "status", "--node", "gpu-master").stdout
    ran = grid.grid("boost", "run", boost["id"][:8], "--", "sh", "-c", "hostname; id -un; exit 7", check=False)
    assert (ran.returncode, ran.stdout) == (7, f"{boost['node']}\nroot\n"), "as the user that SSH names"
    assert "Released" in grid.grid("boost", "release", boost["id"][:8]).stdout


def test_a_lost_worker_is_told_and_retried_elsewhere(grid: LabCluster) -> None:
    """Whichever of the two it is on goes off; the other one runs it again."""
    script = "echo up $GRID_NODE; test -e /root/second || sleep 600; echo done $GRID_NODE"
    with grid.popen(
        "run-shared", "-r", "memory", "-a", "0.25", "--retry", "sh", "-c", script,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as running:  # fmt: skip
        assert running.stdout is not None
        first = running.stdout.readline().split()[1]
        second = {"gpu1": "gpu2", "gpu2": "gpu1"}[first]
        grid.lab[second].write("/root/second", "")
        grid.lab[first].power_off()
        try:
            out, err = running.communicate(timeout=200)
        finally:
            grid.lab[first].power_on()
    assert (running.returncode, out) == (0, f"up {second}\ndone {second}\n"), err
    assert "running it again" in err
    wait_until(lambda: grid.node(first)["online"], 200, f"{first} to be brought back", every_s=2)
