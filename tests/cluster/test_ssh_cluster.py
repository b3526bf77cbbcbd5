"""A cluster over real SSH on three hosts: start, status, execute on each, a host that is off, stop."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.lab.clusters import LabCluster
from tests.lab.hosts import Lab
from tests.lab.waiting import wait_until

pytestmark = pytest.mark.root


def online(cluster: LabCluster) -> dict[str, bool]:
    return {node["name"]: node["online"] for node in cluster.json("status")["nodes"]}


def test_every_node_is_up_and_runs_commands(lab_cluster: LabCluster) -> None:
    assert online(lab_cluster) == {"gpu-master": True, "gpu1": True, "gpu2": True}
    for name in lab_cluster.names:
        assert lab_cluster.grid("execute", "-n", name, "hostname").stdout == f"{name}\n"
    many = lab_cluster.grid("execute", "--all-nodes", "hostname").stdout
    assert sorted(many.splitlines()) == [f"[{name}] {name}" for name in sorted(lab_cluster.names)]


def test_a_node_has_a_state_of_its_own(lab_cluster: LabCluster) -> None:
    gpu1 = lab_cluster.lab["gpu1"]
    mode = gpu1.run(["stat", "-c", "%a", "/root/.distributed_grid", "/root/.distributed_grid/ray_token"]).stdout.split()
    assert mode == ["700", "600"]
    said = lab_cluster.grid("execute", "-n", "gpu1", "--", "sh", "-c", "echo here > /root/mark; cat /root/mark").stdout
    assert said == "here\n"
    assert gpu1.read("/root/mark") == "here\n"
    assert lab_cluster.head.run(["test", "-e", "/root/mark"], check=False).returncode == 1


def test_the_agents_logs_over_the_network(lab_cluster: LabCluster) -> None:
    for name in ("gpu-master", "gpu1"):
        said = lab_cluster.grid("logs", "agent", "-n", name, "--lines", "100000").stdout
        assert f"{name}, version" in said
        file = lab_cluster.grid("logs", "agent", "-n", name, "--path").stdout.strip().partition(":")[2]
        assert f"{name}, version" in lab_cluster.lab[name].run(["cat", file]).stdout


def test_a_host_that_goes_off_is_named_and_comes_back(lab_cluster: LabCluster) -> None:
    gpu2 = lab_cluster.lab["gpu2"]
    gpu2.power_off()
    try:
        wait_until(lambda: online(lab_cluster)["gpu2"] is False, 60, "gpu2 to be seen as offline", every_s=1)
        done = lab_cluster.grid("execute", "-n", "gpu2", "true", check=False, timeout=90)
        assert done.returncode == 5 and "gpu2 is not online" in done.stderr
        assert lab_cluster.grid("execute", "-n", "gpu1", "echo", "fine").stdout == "fine\n"
    finally:
        gpu2.power_on()
    wait_until(lambda: online(lab_cluster)["gpu2"], 200, "gpu2 to be brought back", every_s=2)
    assert lab_cluster.grid("execute", "-n", "gpu2", "hostname").stdout == "gpu2\n"


def check_wrong_key(cluster: LabCluster) -> None:
    """With a key that nobody knows the head is up and each worker is named with the reason."""
    head = cluster.head
    head.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", "/root/other_key"])
    head.write("/root/wrong.yaml", head.read(cluster.config).replace("/root/.ssh/id_ed25519", "/root/other_key"))
    grid, env = [cluster.argv()[0], "--config", "/root/wrong.yaml"], {"GRID_HOME": "/root/second"}
    try:
        done = head.run([*grid, "cluster", "start"], env=env, check=False, timeout=170)
        assert done.returncode == 5, done.stdout + done.stderr
        assert "gpu1 is not up" in done.stdout and "gpu2 is not up" in done.stdout
        assert "Traceback" not in done.stderr
    finally:
        head.run([*grid, "cluster", "stop"], env=env, check=False, timeout=120)
        head.run([*grid, "daemon", "stop"], env=env, check=False, timeout=60)


def test_failures_are_told_by_node_and_the_rest_comes_up(lab_cluster: LabCluster) -> None:
    gpu2 = lab_cluster.lab["gpu2"]
    lab_cluster.grid("cluster", "stop", timeout=120)
    check_wrong_key(lab_cluster)
    gpu2.power_off()
    try:
        done = lab_cluster.grid("cluster", "start", check=False, timeout=170)
        assert done.returncode == 5, done.stderr
        assert "gpu2 is not up" in done.stdout
        assert online(lab_cluster) == {"gpu-master": True, "gpu1": True, "gpu2": False}
        reason = lab_cluster.node("gpu2")["reason"]
        assert reason and "gpu2" in reason
    finally:
        gpu2.power_on()
    wait_until(lambda: online(lab_cluster)["gpu2"], 200, "gpu2 to be brought up once it is back", every_s=2)


def test_commands_run_as_the_user_that_the_node_is_reached_as(make_lab: Callable[..., Lab]) -> None:
    """As in the README: the head's own user is not known on the worker, where the grid has no root."""
    lab = make_lab("gpu-master", "gpu1")
    lab["gpu1"].add_user("lab")
    cluster = LabCluster(lab, users={"gpu1": "lab"}, more="resource_sharing:\n  policy: aggressive\n")
    try:
        cluster.start()
        for name, user in (("gpu-master", "root"), ("gpu1", "lab")):
            assert cluster.grid("execute", "-n", name, "id", "-un").stdout == f"{user}\n"
        shared = ["run-shared", "-r", "cpu", "-a", "1", "-n", "gpu1", "id", "-un"]
        assert cluster.grid(*shared, timeout=170).stdout == "lab\n"
    finally:
        cluster.stop()
