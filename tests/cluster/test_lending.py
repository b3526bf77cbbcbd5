"""Lending on a real cluster: what is lent is really given, to one at a time, and comes back."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import json
import os
import pty
import select
import shlex
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from distributed_grid.config import ClusterConfig
from distributed_grid.config.paths import GridPaths
from distributed_grid.core import GridOrchestrator
from distributed_grid.core.resources import GB
from distributed_grid.orchestration.resource_boost import (
    ResourceBoostManager,
    ResourceBoostPersistence,
    ResourceBoostRequest,
    ResourceType,
)
from distributed_grid.orchestration.resource_sharing import ResourceSharingManager, ResourceSharingProtocol
from tests.cluster.lendings import counted, idle, lending, nothing_lent
from tests.lab.clusters import PYTHON, EmbeddedCluster
from tests.lab.waiting import wait_until

COUNTER = "i=0; while true; do echo $i; i=$((i+1)); sleep 0.05; done"

#: Where the lease is, and where a Ray task that is given its options runs.
RAY_PROGRAM = """
import asyncio, ray
from distributed_grid.orchestration.resource_sharing import ResourceSharingManager

@ray.remote
def where():
    return ray.get_runtime_context().get_node_id()

async def main():
    async with ResourceSharingManager() as sharing:
        lease = await sharing.request({"memory": 1, "cpu": 1}, sources=["gpu2"])
        node = ray.get(where.options(**await lease.ray_options()).remote(), timeout=100)
        labels = {one["NodeID"]: one["Labels"] for one in ray.nodes()}
        print(lease.node, labels[node]["grid-host"])
        await lease.release()

ray.init(log_to_driver=False)
asyncio.run(main())
"""


@pytest.fixture
def grid(embedded: EmbeddedCluster) -> Iterator[EmbeddedCluster]:
    yield from idle(embedded)


def test_a_command_runs_in_its_lease_and_gives_it_back(grid: EmbeddedCluster) -> None:
    script = 'echo "$GRID_NODE:$GRID_LEASE_CORES:$CUDA_VISIBLE_DEVICES"; taskset -cp $$ >&2; pwd; exit 7'
    done = grid.grid("run-shared", "-r", "cpu", "-a", "1", "-n", "gpu2", "sh", "-c", script, check=False)
    assert done.returncode == 7
    where, folder = done.stdout.splitlines()
    assert where == "gpu2:0:"
    assert Path(folder).is_relative_to(grid.home / "nodes" / "gpu2" / "jobs")
    assert done.stderr.strip().rpartition(": ")[2].isdigit(), "one core"
    wait_until(lambda: nothing_lent(grid), 30, "everything to come back", every_s=0.2)
    several = ["--cpu", "2", "--memory", "1", "--gpu", "1"]
    again = grid.grid("run-shared", *several, "--", "sh", "-c", "echo $GRID_LEASE_MEMORY")
    assert again.stdout == f"{GB}\n"


def test_files_input_and_options_are_the_commands_own(grid: EmbeddedCluster) -> None:
    (grid.cwd / "job.py").write_text("import sys, beside\nprint(beside.WORD, sys.argv[1:], sys.stdin.read())\n")
    (grid.cwd / "beside.py").write_text("WORD = 'beside'\n")
    argv = ["run-shared", "-r", "cpu", "-a", "1", "python3", "job.py", "--amount", "3", "-r", "x"]
    done = grid.grid(*argv, input="typed")
    assert done.stdout == "beside ['--amount', '3', '-r', 'x'] typed\n"
    lost = grid.grid("run-shared", "-r", "cpu", "-a", "1", "no-such-command", check=False)
    assert lost.returncode == 3 and "no-such-command" in lost.stderr


@pytest.mark.parametrize("who", ["daemon", "agent:gpu1"])
def test_its_input_is_exact_whoever_dies(grid: EmbeddedCluster, who: str) -> None:
    """More than any buffer on the way holds, to a reader that is slow at first; nothing twice, no early end."""
    data = bytes(range(256)) * 16384
    agent = grid.pid_of("agent:gpu1")
    with grid.popen(
        "run-shared", "-r", "cpu", "-a", "1", "-n", "gpu1", "sh", "-c", "echo up; sleep 2; sha256sum",
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as running:  # fmt: skip
        assert running.stdin is not None and running.stdout is not None
        assert running.stdout.readline() == b"up\n"
        running.stdin.write(data[:700_000])
        running.stdin.flush()
        grid.kill(who)
        out, err = running.communicate(data[700_000:], timeout=200)
    assert (running.returncode, out.split()[0].decode()) == (0, hashlib.sha256(data).hexdigest()), err
    if who != "daemon":
        wait_until(lambda: grid.pid_of("agent:gpu1") not in (0, agent), 120, "the agent to be back", every_s=0.5)
        wait_until(lambda: grid.node("gpu1")["online"], 120, "gpu1 to be online", every_s=0.5)


def test_a_command_that_leaves_its_input_unread(grid: EmbeddedCluster) -> None:
    """`yes | grid run-shared … head -1`: its end is its end, and nobody sees what was on its way."""
    command = shlex.join(grid.argv("run-shared", "-r", "cpu", "-a", "1", "head", "-1"))
    done = subprocess.run(
        ["sh", "-c", f"yes | {command}"], env=grid.environment(), cwd=grid.cwd, capture_output=True, timeout=120
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"y\n", b"")


async def test_four_at_once_have_cores_of_their_own(grid: EmbeddedCluster) -> None:
    config = ClusterConfig.from_yaml(grid.config or "")
    async with GridOrchestrator(config, paths=GridPaths(grid.home)) as orchestrator:
        jobs = [
            orchestrator.run_with_shared_resources(
                command=f"sh -c 'echo out {i}; echo err {i} >&2; sleep 1; exit {i}'", resource_type=ResourceType.CPU,
                amount=2, priority="medium", job_id=f"job{i}",
            )
            for i in range(4)
        ]  # fmt: skip
        results = await asyncio.gather(*jobs)
        async with asyncio.timeout(60):
            while (status := await orchestrator.get_shared_resource_status())["allocations"]:
                await asyncio.sleep(0.1)
    assert [(one.stdout, one.stderr, one.exit_code) for one in results] == [
        (f"out {i}\n", f"err {i}\n", i) for i in range(4)
    ]
    overlapping = max(one.started_at for one in results) < min(one.ended_at for one in results)
    cores = [(one.node, core) for one in results for core in one.cores]
    assert len(cores) == 8
    assert not overlapping or len(set(cores)) == 8
    assert {one["type"] for one in status["offers"]} == {"cpu", "gpu", "memory"}


def test_a_detached_job_is_seen_followed_and_ended(grid: EmbeddedCluster) -> None:
    command = ["--", "sh", "-c", "echo here; sleep 600"]
    task = grid.grid("run-shared", "-r", "memory", "-a", "2", "--detach", *command).stdout.strip()
    wait_until(lambda: grid.grid("jobs", "logs", task).stdout == "here\n", 30, "its output", every_s=0.2)
    (lease,) = lending(grid)["allocations"]
    assert (lease["resource_type"], lease["amount"], lease["tasks"]) == ("memory", 2.0, [task])
    assert grid.grid("resource-sharing", "release", lease["id"], check=False).returncode == 4, "it is in use"
    grid.grid("jobs", "cancel", task)
    wait_until(lambda: nothing_lent(grid), 30, "everything to come back", every_s=0.2)


def test_critical_makes_room_and_the_victim_goes_on(grid: EmbeddedCluster) -> None:
    command = ["-d", "--", "sh", "-c", COUNTER]
    victims = [
        grid.grid("run-shared", "--cpu", "8", "-n", node, "-p", priority, *command).stdout.strip()
        for node, priority in (("gpu1", "low"), ("gpu2", "normal"))
    ]
    assert grid.grid("run-shared", "--cpu", "1", "-p", "high", "--wait-time", "0", "true", check=False).returncode == 6
    said = grid.grid("run-shared", "-r", "cpu", "-a", "2", "-p", "urgent", "sh", "-c", "echo $GRID_NODE")
    assert said.stdout == "gpu1\n", "the low one makes room"

    before = counted(grid, victims[0])
    wait_until(lambda: counted(grid, victims[0]) > before, 60, "the victim to go on", every_s=0.5)
    kinds = [event["kind"] for event in grid.json("events", "--limit", "60")]
    assert "lease.suspended" in kinds and "lease.resumed" in kinds
    for task in victims:
        grid.grid("jobs", "cancel", task)


def test_ctrl_c_while_waiting_leaves_nothing(grid: EmbeddedCluster) -> None:
    request = ["resource-sharing", "request", "--node", "gpu-master", "--type", "gpu", "--amount", "1", "-s", "gpu1"]
    holder = grid.json(*request)
    waiting = grid.popen(
        "run-shared", "-r", "gpu", "-a", "1", "-n", "gpu1", "true", stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert waiting.stderr is not None
    assert waiting.stderr.readline() == b"waiting, place 1 of 1: 1 GPU asked for; gpu1 has nothing free\n"
    assert len(lending(grid)["queue"]) == 1
    waiting.send_signal(signal.SIGINT)
    waiting.communicate(timeout=60)
    assert waiting.returncode == 130
    wait_until(lambda: not lending(grid)["queue"], 30, "the queue to be empty", every_s=0.2)
    grid.grid("resource-sharing", "release", holder["id"][:8])
    wait_until(lambda: nothing_lent(grid), 30, "everything to come back", every_s=0.2)


async def test_called_off_while_it_starts_nothing_runs(grid: EmbeddedCluster) -> None:
    """At any moment of it: while it is granted, sent, started, and just after."""
    async with ResourceSharingManager(protocol=ResourceSharingProtocol(GridPaths(grid.home))) as sharing:
        for delay_ms in range(0, 400, 20):
            running = asyncio.create_task(sharing.run(["sleep", "987"], ResourceType.CPU, 1, job_id="called-off"))
            await asyncio.sleep(delay_ms / 1000)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    def left() -> list[str]:
        return [job["id"] for job in grid.json("jobs", "list") if job["id"].startswith("called-off")]

    wait_until(lambda: not left(), 60, "all of them to be ended", every_s=0.5)
    wait_until(lambda: nothing_lent(grid), 30, "everything to come back", every_s=0.2)


def test_ctrl_c_while_it_starts_leaves_nothing(grid: EmbeddedCluster) -> None:
    for delay_ms in range(200, 1400, 200):
        starting = grid.popen("run-shared", "-r", "cpu", "-a", "1", "sleep", "986", stderr=subprocess.PIPE)
        time.sleep(delay_ms / 1000)
        starting.send_signal(signal.SIGINT)
        said = starting.communicate(timeout=60)[1]
        assert starting.returncode in (130, -signal.SIGINT), said
        assert b"Traceback" not in said or delay_ms < 600, said  # before it, Python itself was just starting
    wait_until(lambda: nothing_lent(grid), 60, "everything to come back", every_s=0.2)
    assert not [job for job in grid.json("jobs", "list") if job["argv"] == ["sleep", "986"]]


def test_retry_runs_it_again_if_it_had_to_make_room(grid: EmbeddedCluster, tmp_path: Path) -> None:
    """It can't be stored on disk, and ends in its own way when it is asked to."""
    first = tmp_path / "first"
    script = (
        f'test -e {first} && echo again with $(cat) && exit 5; read line; echo "$line" > {first}; '
        "(setsid sleep 600 &); trap 'exit 9' TERM; echo up $GRID_NODE; while true; do sleep 0.1; done"
    )
    with grid.popen(
        "run-shared", "-r", "memory", "-a", "24", "-p", "low", "--retry", "sh", "-c", script,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as running:  # fmt: skip
        assert running.stdin is not None and running.stdout is not None
        running.stdin.write("typed\n")
        running.stdin.close()
        node = running.stdout.readline().split()[1]
        request = ["resource-sharing", "request", "--node", "gpu-master", "--type", "memory", "--amount", "16"]
        holder = grid.json(*request, "--priority", "critical", "-s", node, "--wait-time", "60", timeout=120)
        out, err = running.stdout.read(), running.stderr.read() if running.stderr else ""
        assert running.wait(120) == 5, err
    assert out == "again with typed\n" and "preempted" in err and "running it again" in err
    grid.grid("resource-sharing", "release", holder["id"])


def test_one_gpu_is_lent_once(grid: EmbeddedCluster) -> None:
    request = ["boost", "request", "gpu-master", "gpu", "1", "--source", "gpu1"]
    first = grid.json(*request)
    for _ in range(2):
        again = grid.grid(*request, check=False)
        assert again.returncode == 6 and "No nodes have sufficient available resources" in again.stderr
    ran = grid.grid("boost", "run", first["id"][:8], "--", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES")
    assert ran.stdout == "0\n"
    grid.grid("boost", "release", first["id"][:8])
    assert grid.grid("boost", "release", first["id"], check=False).returncode == 4, "already released"


def test_boosts_survive_everything(grid: EmbeddedCluster) -> None:
    for request in (["cpu", "2"], ["gpu", "1", "--source", "gpu2"], ["memory", "4.0", "--source", "gpu1"]):
        grid.grid("boost", "request", "gpu-master", *request)
    before = grid.json("boost", "status")
    assert before["total"] == 3 and before["totals"] == {"cpu": 2, "gpu": 1, "memory": 4.0}
    file = grid.home / "resource_boosts.json"

    def shown() -> Any:
        try:
            return list(json.loads(file.read_text())["boosts"].values())
        except (OSError, ValueError):
            return None

    wait_until(lambda: shown() == before["boosts"], 30, "the file to be written")
    agent = grid.pid_of("agent:gpu1")
    grid.kill("agent:gpu1")
    grid.kill("daemon")
    file.write_text("{damaged")
    assert grid.json("boost", "status") == before
    wait_until(lambda: shown() == before["boosts"], 60, "the file to be written anew")
    file.unlink()
    wait_until(lambda: shown() == before["boosts"], 60, "the file to be written anew")
    wait_until(lambda: grid.pid_of("agent:gpu1") not in (0, agent), 120, "the agent to be back", every_s=0.5)
    assert grid.json("boost", "status") == before
    assert set(ResourceBoostPersistence(file).load_boosts()) == {one["boost_id"] for one in before["boosts"]}


def test_boosts_survive_a_reboot_of_ray(grid: EmbeddedCluster) -> None:
    grid.grid("boost", "request", "gpu-master", "cpu", "2", "--source", "gpu2")
    before, pid = grid.json("boost", "status"), grid.pid_of("gcs")
    grid.kill("gcs")

    def all_back() -> bool:
        nodes = grid.json("cluster", "status")["nodes"]
        return all(node["online"] and node["agent_pid"] for node in nodes) and grid.pid_of("gcs") not in (0, pid)

    wait_until(all_back, 200, "all nodes to be online again", every_s=1)
    assert grid.json("boost", "status") == before
    ran = grid.grid("boost", "run", before["boosts"][0]["boost_id"], "--", "sh", "-c", "echo $GRID_LEASE_CORES")
    assert ran.stdout == "0,1\n"


async def test_a_request_that_is_called_off_leaves_nothing(grid: EmbeddedCluster) -> None:
    """At any moment of it: before, while and just after it is granted."""
    async with ResourceBoostManager(protocol=ResourceSharingProtocol(GridPaths(grid.home))) as boosts:
        for delay_ms in range(0, 30, 2):
            request = ResourceBoostRequest("gpu-master", ResourceType.CPU, 1)
            asking = asyncio.create_task(boosts.request_boost(request))
            await asyncio.sleep(delay_ms / 1000)
            if asking.done():
                await boosts.release_boost(asking.result() or "")
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
    wait_until(lambda: nothing_lent(grid), 30, "everything to come back", every_s=0.2)


def test_the_command_has_a_terminal_if_we_have_one(grid: EmbeddedCluster) -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 77, 0, 0))
    script = "test -t 1 && stty size <&1; read line; echo got $line; exit 5"
    argv = ["setsid", "--ctty", "--wait", *grid.argv("run-shared", "-r", "cpu", "-a", "1", "sh", "-c", script)]
    said = b""
    with subprocess.Popen(
        argv, env=grid.environment(), cwd=grid.cwd, stdin=theirs, stdout=theirs, stderr=theirs
    ) as running:  # fmt: skip
        os.close(theirs)
        os.write(ours, b"typed\n")
        with contextlib.suppress(OSError):  # the end of it, for a terminal
            while select.select([ours], [], [], 120)[0]:
                said += os.read(ours, 4096)
        assert running.wait(60) == 5, said
    os.close(ours)
    assert said.replace(b"\r", b"") == b"typed\n33 77\ngot typed\n"


def test_a_move_prefers_where_the_head_holds_a_boost(grid: EmbeddedCluster) -> None:
    """What the head itself holds is room for its processes; what others hold is not."""
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as program:
        try:
            plan = ["offload", "execute", str(program.pid), "--dry-run"]
            for node in ("gpu1", "gpu2"):
                boost = grid.json("boost", "request", "gpu-master", "memory", "28", "--source", node)
                assert grid.json(*plan)["target"] == node
                grid.grid("boost", "release", boost["id"])
        finally:
            program.kill()


def test_leases_are_found_again_at_the_agents(grid: EmbeddedCluster) -> None:
    boost = grid.json("boost", "request", "gpu-master", "cpu", "3", "--source", "gpu2")
    task = grid.grid("run-shared", "-r", "cpu", "-a", "2", "-n", "gpu1", "-d", "sleep", "600").stdout.strip()
    grid.kill("daemon")
    for journal in grid.home.glob("journal.sqlite3*"):
        journal.unlink()

    def held() -> set[tuple[str, str, str]]:
        return {(one["id"], one["kind"], one["state"]) for one in lending(grid)["allocations"]}

    wait_until(lambda: len(held()) == 2, 90, "the leases to be known again", every_s=0.5)
    assert (boost["id"], "boost", "active") in held()
    wait_until(lambda: task in [job["id"] for job in grid.json("jobs", "list")], 60, "the task", every_s=0.5)
    grid.grid("jobs", "cancel", task)
    wait_until(lambda: held() == {(boost["id"], "boost", "active")}, 60, "the job's lease to go back", every_s=0.5)


async def test_boosts_from_python_expire_by_themselves(grid: EmbeddedCluster) -> None:
    line = ResourceSharingProtocol(GridPaths(grid.home))
    async with ResourceBoostManager(protocol=line) as boosts:
        short = await boosts.request_boost(ResourceBoostRequest("gpu-master", ResourceType.CPU, 1, duration_seconds=1))
        memory = ResourceBoostRequest("gpu-master", ResourceType.MEMORY, 2, preferred_source="gpu2")
        kept = await boosts.request_boost(memory)
        assert short and kept
        assert await boosts.request_boost(ResourceBoostRequest("gpu-master", ResourceType.GPU, 5)) is None
        async with asyncio.timeout(60):
            while [one.boost_id for one in await boosts.get_active_boosts("gpu-master")] != [kept]:
                await asyncio.sleep(0.1)
        assert (await boosts.get_boost_status())["totals"]["memory"] == 2.0
        ran = await boosts.run(kept, ["sh", "-c", "echo $GRID_NODE"])
        assert (ran.node, ran.stdout, ran.success) == ("gpu2", "gpu2\n", True)
        assert await boosts.release_boost(kept)
        assert not await boosts.release_boost(kept) and not await boosts.release_boost("no-such-boost")
    kinds = [event["kind"] for event in grid.json("events", "--limit", "30")]
    assert "boost.expired" in kinds


def test_ray_sets_a_lease_aside_too(grid: EmbeddedCluster, tmp_path: Path) -> None:
    program = tmp_path / "ray_lease.py"
    program.write_text(RAY_PROGRAM)
    variables = dict(
        line.removeprefix("export ").split("=", 1) for line in grid.grid("env").stdout.splitlines() if "=" in line
    )
    env = grid.environment({name: value.strip("'\"") for name, value in variables.items()})
    done = subprocess.run([str(PYTHON), str(program)], env=env, capture_output=True, text=True, timeout=200)
    assert done.stdout.split() == ["gpu2", "gpu2"], done.stderr


async def test_leases_from_python(grid: EmbeddedCluster) -> None:
    async with ResourceSharingManager(protocol=ResourceSharingProtocol(GridPaths(grid.home))) as sharing:
        lease = await sharing.request({"cpu": 2, "memory": "512MiB"}, sources=["gpu2"], priority="urgent")
        assert (lease.node, lease.grant.cores, lease.grant.memory_bytes) == ("gpu2", (0, 1), GB // 2)
        assert [one.id for one in await sharing.get_allocations()] == [lease.id]
        assert await lease.release()
        ran = await sharing.run("sh -c 'exit 5'", ResourceType.CPU, 1)
        assert ran.exit_code == 5 and not ran.success


def test_memory_is_asked_for_and_given_back_by_itself(grid: EmbeddedCluster) -> None:
    """Levels that any use is above, then below: what the machine of the test is doing does not matter."""
    assert grid.config is not None
    before = grid.config.read_text()
    levels = "{before}resource_sharing:\n  pressure_thresholds: {{memory: {{high: {high}, low: {low}}}}}\n"

    def reserved() -> list[dict[str, Any]]:
        return [one for one in lending(grid)["allocations"] if one["kind"] == "auto"]

    try:
        grid.config.write_text(levels.format(before=before, high=0.0002, low=0.0001))
        (lease,) = wait_until(reserved, 90, "memory to be reserved", every_s=0.5)
        assert lease["resource_type"] == "memory" and lease["target"] == "gpu-master"
        grid.config.write_text(levels.format(before=before, high=0.9999, low=0.9998))
        wait_until(lambda: not reserved(), 90, "it to be given back", every_s=0.5)
    finally:
        grid.config.write_text(before)
    kinds = [event["kind"] for event in grid.json("events", "--limit", "60")]
    assert "sharing.reserved" in kinds and "sharing.given_back" in kinds


def test_sharing_that_is_off(grid: EmbeddedCluster) -> None:
    assert grid.config is not None
    before = grid.config.read_text()
    try:
        grid.config.write_text(f"{before}resource_sharing:\n  enabled: false\n")
        wait_until(lambda: not lending(grid)["enabled"], 60, "the configuration to be read", every_s=0.2)
        done = grid.grid("boost", "request", "gpu-master", "cpu", "1", check=False)
        assert done.returncode == 4 and "Resource sharing not enabled" in done.stderr
        assert "Resource sharing not enabled" in grid.grid("shared-status").stdout
    finally:
        grid.config.write_text(before)
        wait_until(lambda: lending(grid)["enabled"], 60, "the configuration to be read again", every_s=0.2)


@pytest.mark.parametrize(
    ("argv", "code", "text"),
    [
        (["boost", "request", "gpu-master", "cpu", "0"], 2, "0 is not an amount of cpu"),
        (["boost", "request", "gpu-master", "gpu", "x"], 2, "x is not an amount of gpu"),
        (["boost", "request", "gpu-master", "tpu", "1"], 2, "unknown resource type 'tpu'"),
        (["boost", "request", "gpu-master", "cpu", "100"], 6, "No nodes have sufficient available resources"),
        (["boost", "request", "gpu-master", "cpu", "100"], 6, "the most that one node lends: 8 cores"),
        (["boost", "request", "nowhere", "cpu", "1"], 3, "Target node not found in cluster"),
        (["boost", "request", "gpu-master", "cpu", "1", "--source", "gpu9"], 3, "gpu9"),
        (["boost", "request", "gpu-master", "cpu", "1", "--source", "gpu-master"], 4, "it is the head"),
        (["boost", "request", "gpu-master", "cpu", "1", "--duration", "-1"], 2, "makes no sense"),
        (["boost", "request", "gpu-master", "cpu", "1", "--duration", "3.2e9"], 2, "too long"),
        (["boost", "request", "gpu-master", "cpu", "1", "--priority", "vital"], 2, "unknown priority"),
        (["boost", "release", "no-such-id"], 3, "no-such-id"),
        (["resource-sharing", "release", "no-such-id"], 3, "no-such-id"),
        (["boost", "run", "no-such-id", "--", "true"], 3, "no-such-id"),
        (["run-shared", "-r", "cpu", "-a", "-1", "true"], 2, "-1 is not an amount of cpu"),
        (["run-shared", "-r", "memory", "-a", "9999", "true"], 6, "No nodes have sufficient available resources"),
        (["run-shared", "true"], 2, "nothing is asked for"),
        (["run-shared", "-r", "cpu", "-a", "1e30", "true"], 6, "No nodes have sufficient available resources"),
        (["boost", "request", "gpu-master", "memory", "1e30"], 6, "No nodes have sufficient available resources"),
        (["run-shared", "-r", "cpu", "-a", "1", "--wait-time", "nan", "true"], 2, "nan"),
        (["boost", "request", "gpu-master", "cpu", "1", "--wait-time", "nan"], 2, "nan"),
    ],
)  # fmt: skip
def test_bad_input_takes_nothing(argv: list[str], code: int, text: str, embedded: EmbeddedCluster) -> None:
    done = embedded.grid(*argv, check=False)
    assert done.returncode == code and text in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
