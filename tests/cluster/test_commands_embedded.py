"""Every command of the spine on a real embedded cluster: what it answers, and what bad input gets."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from distributed_grid.wire.rpc import pack
from tests.lab.clusters import GRID, PYTHON, EmbeddedCluster
from tests.lab.waiting import wait_until

NODES = ["gpu-master", "gpu1", "gpu2"]


# -- what the commands answer --------------------------------------------------------------------------------------


def test_status_in_three_views(embedded: EmbeddedCluster) -> None:
    status = embedded.json("status")
    assert status["cluster"] == "up" and status["embedded"]
    assert [node["name"] for node in status["nodes"]] == NODES
    for node in status["nodes"]:
        assert node["online"] and node["since"] and node["age_s"] < 30
        assert node["use"]["cpu_cores_total"] == 8 and node["use"]["memory_total_bytes"] == 32 * 1024**3
    table = embedded.grid("status").stdout
    assert "declared" in table and all(name in table for name in NODES)

    cluster = embedded.json("cluster", "status")
    assert cluster["state"] == "up" and cluster["ray_address"] and "127.0.0.1" in cluster["dashboard_url"]
    assert "declared" in embedded.grid("cluster", "status").stdout

    ray = embedded.json("distribute", "status")
    assert {node["node"]: node["alive"] for node in ray["nodes"]} == dict.fromkeys(NODES, True)
    assert all(node["resources"]["CPU"] == 8 for node in ray["nodes"])


def test_distribute_test_runs_on_every_node(embedded: EmbeddedCluster) -> None:
    before = len(embedded.json("jobs", "list", "--all"))
    results = embedded.json("distribute", "test", timeout=120)
    assert [(result["node"], result["ok"]) for result in results] == [(name, True) for name in NODES]
    assert all(result["seconds"] > 0 and os.uname().nodename in result["said"] for result in results)
    assert len(embedded.json("jobs", "list", "--all")) == before, "the test leaves its commands in the list"


def test_the_end_of_a_command_that_nobody_follows_is_known(embedded: EmbeddedCluster) -> None:
    task = embedded.grid("execute", "-n", "gpu1", "-d", "sh", "-c", "exit 4").stdout.strip()

    def ended() -> bool:
        rows = {row["id"]: row for row in embedded.json("jobs", "list", "--all")}
        return (rows[task]["state"], rows[task]["exit_code"]) == ("exited", 4)

    wait_until(ended, what="its end in the list", every_s=0.5)


def test_a_command_whose_output_nobody_reads_any_more_ends(embedded: EmbeddedCluster) -> None:
    program = "while :; do echo a word of its own; sleep 0.1; done"
    with subprocess.Popen(
        [GRID, "execute", "-n", "gpu1", "sh", "-c", program], env=embedded.environment(), cwd=embedded.cwd,
        stdout=subprocess.PIPE,
    ) as running:  # fmt: skip
        assert running.stdout is not None and running.stdout.readline() == b"a word of its own\n"
        running.stdout.close()
        assert running.wait(120) == 0
    assert program not in [row["argv"][-1] for row in embedded.json("jobs", "list")]


def test_execute_output_and_exit_code(embedded: EmbeddedCluster) -> None:
    done = embedded.grid("execute", "-n", "gpu1", "sh", "-c", "echo out; echo err >&2; exit 3", check=False)
    assert (done.returncode, done.stdout, done.stderr) == (3, "out\n", "err\n")
    told = json.loads(
        embedded.grid("execute", "-n", "gpu2", "-e", "A=b c", "--format", "json", "sh", "-c", 'echo "$A"').stdout
    )
    assert (told["node"], told["exit_code"], told["stdout"]) == ("gpu2", 0, "b c\n")
    marked = embedded.grid("execute", "-n", "gpu1", "printenv", "GRID_OFFLOAD", env={"GRID_OFFLOAD": "never"})
    assert marked.stdout == "never\n"


def test_execute_on_all_nodes(embedded: EmbeddedCluster) -> None:
    done = embedded.grid("execute", "--all-nodes", "echo", "here")
    assert sorted(done.stdout.splitlines()) == [f"[{name}] here" for name in NODES]


def test_execute_ends_after_its_timeout(embedded: EmbeddedCluster) -> None:
    done = embedded.grid("execute", "-n", "gpu1", "--timeout", "1", "sleep", "600", check=False)
    assert done.returncode == 7 and "more than 1 s" in done.stderr


def test_jobs_list_logs_cancel_remove(embedded: EmbeddedCluster) -> None:
    task = embedded.grid("execute", "-n", "gpu1", "-d", "sh", "-c", "echo begun; sleep 600").stdout.strip()
    wait_until(lambda: embedded.grid("jobs", "logs", task).stdout == "begun\n", what="the job's output")
    assert task in [job["id"] for job in embedded.json("jobs", "list")]
    refused = embedded.grid("jobs", "remove", task, check=False)
    assert refused.returncode == 4 and "try:" in refused.stderr
    embedded.grid("jobs", "cancel", task)
    assert embedded.grid("jobs", "attach", task, check=False).returncode != 0
    assert task not in [job["id"] for job in embedded.json("jobs", "list")]
    embedded.grid("jobs", "remove", task)
    assert embedded.grid("jobs", "logs", task, check=False).returncode == 3


def test_events(embedded: EmbeddedCluster) -> None:
    kinds = [event["kind"] for event in embedded.json("events", "--limit", "2000")]
    assert "cluster.started" in kinds and kinds.count("node.online") >= 3
    only = embedded.json("events", "--kind", "node.online", "--node", "gpu1")
    assert {(event["kind"], event["node"]) for event in only} == {("node.online", "gpu1")}


def test_doctor_finds_no_problem(embedded: EmbeddedCluster) -> None:
    found = embedded.json("doctor", timeout=170)
    assert found["problems"] == 0, found
    checks = {(one["check"], one["node"]) for one in found["findings"]}
    for name in NODES:
        assert {(check, name) for check in ("agent", "ray", "clock", "disk", "files", "criu", "gpu")} <= checks
    levels = {one["check"]: one["level"] for one in found["findings"]}
    assert (levels["token"], levels["ports"], levels["daemon"], levels["config"]) == ("ok",) * 4
    shared = [one["text"] for one in found["findings"] if one["check"] == "files"]
    assert shared == ["sees the files of the head"] * 3
    assert not list(embedded.home.glob(".grid-nonce-*"))
    only = embedded.json("doctor", "--node", "gpu2", timeout=170)
    assert {one["node"] for one in only["findings"]} == {"", "gpu2"}


def test_bandwidth_is_measured_and_remembered(embedded: EmbeddedCluster) -> None:
    rows = embedded.json("cluster", "bandwidth", "--seconds", "0.1", timeout=120)
    pairs = {("gpu-master", "gpu1"), ("gpu1", "gpu-master"), ("gpu-master", "gpu2"), ("gpu2", "gpu-master")}
    assert {(row["source"], row["target"]) for row in rows} == pairs
    assert all(row["bytes_per_s"] > 0 for row in rows)
    assert embedded.json("cluster", "bandwidth", "--last") == rows


RAY_SCRIPT = """
import ray
ray.init(logging_level="error", log_to_driver=False)

@ray.remote(num_cpus=1)
def double(value):
    return 2 * value

print(ray.get(double.remote(21)), len([node for node in ray.nodes() if node["Alive"]]))
"""


def test_env_lets_a_plain_ray_program_in(embedded: EmbeddedCluster) -> None:
    variables = embedded.json("env")
    exports = embedded.grid("env").stdout
    assert all(f"export {name}=" in exports for name in variables)
    token = (embedded.home / "ray_token").read_text().strip()
    assert token not in exports
    done = subprocess.run(
        [PYTHON, "-c", RAY_SCRIPT], env={**embedded.environment(), **variables}, capture_output=True, text=True,
        timeout=170, cwd=embedded.cwd,
    )  # fmt: skip
    assert done.stdout.split() == ["42", "3"], done.stderr


def test_start_again_changes_nothing(embedded: EmbeddedCluster) -> None:
    def raylets() -> list[int]:
        return [embedded.pid_of(f"raylet:{name}") for name in NODES]

    before = raylets()
    assert all(before)
    again = embedded.json("cluster", "start", timeout=170)
    assert again["failed"] == {} and all(node["online"] for node in again["nodes"])
    assert raylets() == before


# -- bad input ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        (["execute", "-n", "gpu9", "true"], 3, "gpu9"),
        (["execute", "-n", "gpu1"], 2, "CMD"),
        (["execute", "-n", "gpu1", "--all-nodes", "true"], 2, "--all-nodes"),
        (["execute", "-n", "gpu1", "-e", "novalue", "true"], 2, "NAME=VALUE"),
        (["execute", "-n", "gpu1", "no-such-command-here"], 3, "no-such-command-here"),
        (["execute", "-n", "gpu1", "--cwd", "/no/such/place", "pwd"], None, "/no/such/place"),
        (["stauts"], 2, "stauts"),
        (["cluster", "strat"], 2, "strat"),
        (["jobs", "cancel", "task_0_none"], 3, "task_0_none"),
        (["doctor", "--node", "gpu9"], 3, "gpu9"),
        (["cluster", "install"], 4, "nothing to install"),
        (["status", "--format", "xml"], 2, "xml"),
        (["status", "--config", "/no/such/file.yaml"], 2, "/no/such/file.yaml"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_input_gets_one_clear_error(
    embedded: EmbeddedCluster, argv: list[str], code: int | None, says: str
) -> None:
    done = embedded.grid(*argv, check=False)
    assert done.returncode == code if code is not None else done.returncode not in (0, 70), done.stderr
    assert done.stdout == ""
    assert "error:" in done.stderr and says in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


def test_errors_name_the_next_step(embedded: EmbeddedCluster) -> None:
    for argv in (["execute", "-n", "gpu9", "true"], ["stauts"], ["cluster", "install"]):
        assert "try:" in embedded.grid(*argv, check=False).stderr


def test_another_configuration_is_refused_while_the_cluster_is_up(embedded: EmbeddedCluster, tmp_path: Path) -> None:
    other = tmp_path / "two.yaml"
    other.write_text("embedded: true\nnodes:\n  - {name: one, role: head}\n  - {name: two}\n")
    done = embedded.grid("status", "--config", str(other), check=False)
    assert done.returncode == 4 and "try: grid cluster stop" in done.stderr
    assert embedded.json("status")["cluster"] == "up"


# -- daemons ------------------------------------------------------------------------------------------------------


def test_a_second_daemon_is_refused(embedded: EmbeddedCluster) -> None:
    first = embedded.pid_of("daemon")
    done = subprocess.run(
        [PYTHON, "-m", "distributed_grid.daemon"], env=embedded.environment(), cwd=embedded.cwd, timeout=60,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 4 and f"pid {first} holds" in done.stderr
    assert "Traceback" not in done.stderr
    assert embedded.pid_of("daemon") == first
    assert embedded.json("daemon", "start")["pid"] == first


def run_grid(home: Path, cwd: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [GRID, *argv], env={**os.environ, "GRID_HOME": str(home)}, cwd=cwd, capture_output=True, text=True, timeout=90
    )


def test_a_dead_daemons_socket_is_no_hindrance(grid_home: Path, tmp_path: Path) -> None:
    grid_home.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(grid_home / "grid_daemon.sock"))
    missing = run_grid(grid_home, tmp_path, "daemon", "status")
    assert missing.returncode == 5 and "try: grid daemon start" in missing.stderr
    assert json.loads(run_grid(grid_home, tmp_path, "daemon", "status", "--format", "json").stdout)["running"] is False
    try:
        assert run_grid(grid_home, tmp_path, "daemon", "start").returncode == 0
        status = run_grid(grid_home, tmp_path, "status", "--format", "json")
        assert json.loads(status.stdout)["cluster"] == "down"
        nothing = run_grid(grid_home, tmp_path, "execute", "-n", "gpu1", "true")
        assert nothing.returncode == 3 and "the cluster is not up" in nothing.stderr
        assert run_grid(grid_home, tmp_path, "env").returncode == 5
        assert run_grid(grid_home, tmp_path, "distribute", "status").returncode == 5
        assert run_grid(grid_home, tmp_path, "cluster", "stop").returncode == 0
    finally:
        stopped = run_grid(grid_home, tmp_path, "daemon", "stop")
    assert stopped.returncode == 0
    assert run_grid(grid_home, tmp_path, "daemon", "stop").returncode == 0


@pytest.fixture
def fake_daemon(grid_home: Path) -> Iterator[Callable[[dict[str, object]], None]]:
    """A server on the daemon's socket that says hello as told and nothing more."""
    grid_home.mkdir(mode=0o700)
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(grid_home / "grid_daemon.sock"))
    server.listen()
    threads: list[threading.Thread] = []

    def serve(hello: dict[str, object]) -> None:
        message = pack({"hello": hello})

        def answer() -> None:
            try:
                while True:
                    stream, _ = server.accept()
                    with stream:
                        stream.sendall(len(message).to_bytes(4, "big") + message)
                        stream.settimeout(30)
                        stream.recv(65536)
            except OSError:
                return

        threads.append(threading.Thread(target=answer, daemon=True))
        threads[0].start()

    yield serve
    server.shutdown(socket.SHUT_RDWR)
    server.close()
    for thread in threads:
        thread.join(40)


def test_a_daemon_of_another_protocol(
    fake_daemon: Callable[[dict[str, object]], None], grid_home: Path, tmp_path: Path
) -> None:
    fake_daemon({"protocol": 0, "version": "0.0.1", "pid": 4321})
    done = run_grid(grid_home, tmp_path, "status")
    assert done.returncode == 4
    assert "protocol 0" in done.stderr and "4321" in done.stderr and "try: grid daemon stop" in done.stderr
