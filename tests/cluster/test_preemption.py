"""Room for a critical request: the victim goes to disk, and goes on later with no gap, whoever dies meanwhile."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.lendings import counted, idle, lending
from tests.lab.clusters import EmbeddedCluster
from tests.lab.waiting import wait_until

COUNTER = "i=0; while true; do echo $i; i=$((i+1)); sleep 0.05; done"
LIMIT_S = 120.0


@pytest.fixture
def grid(embedded: EmbeddedCluster) -> Iterator[EmbeddedCluster]:
    yield from idle(embedded)


def start_victim(grid: EmbeddedCluster, *request: str) -> str:
    """A low counter on gpu1 that has counted for a while."""
    victim = grid.grid(
        "run-shared", *request, "-n", "gpu1", "-p", "low", "-d", "--", "sh", "-c", COUNTER
    ).stdout.strip()  # fmt: skip
    wait_until(lambda: counted(grid, victim) > 3, LIMIT_S, "the victim to count", every_s=0.2)
    return victim


def goes_on(grid: EmbeddedCluster, victim: str) -> None:
    before = counted(grid, victim)
    wait_until(lambda: counted(grid, victim) > before + 3, LIMIT_S, "the victim to go on", every_s=0.5)
    grid.grid("jobs", "cancel", victim)


def said(grid: EmbeddedCluster, kind: str, victim: str) -> str:
    texts = [one["text"] for one in grid.json("events", "--limit", "60") if one["kind"] == kind]
    return "\n".join(text for text in texts if victim in text)


@pytest.mark.root
@pytest.mark.criu
def test_memory_is_freed_by_storing_the_victim_on_disk(grid: EmbeddedCluster) -> None:
    victim = start_victim(grid, "--memory", "24", "--cpu", "1")
    ran = grid.grid(
        "run-shared", "-r", "memory", "-a", "16", "-n", "gpu1", "-p", "critical", "sh", "-c", "echo $GRID_NODE",
        timeout=LIMIT_S,
    )  # fmt: skip
    assert ran.stdout == "gpu1\n"
    goes_on(grid, victim)
    assert "stored on disk" in said(grid, "lease.suspended", victim)
    assert said(grid, "lease.resumed", victim)


@pytest.mark.root
@pytest.mark.criu
@pytest.mark.parametrize("who", ["daemon", "agent:gpu1"])
def test_the_victim_comes_back_from_disk_whoever_died(grid: EmbeddedCluster, who: str) -> None:
    victim = start_victim(grid, "--memory", "24")
    request = ["resource-sharing", "request", "--node", "gpu-master", "--type", "memory", "--amount", "16"]
    holder = grid.json(*request, "--priority", "critical", "-s", "gpu1", timeout=LIMIT_S)
    assert "stored on disk" in said(grid, "lease.suspended", victim)
    before = counted(grid, victim)
    grid.kill(who)
    if who != "daemon":
        wait_until(lambda: grid.node("gpu1")["online"], LIMIT_S, "the agent to be back", every_s=0.5)
    assert counted(grid, victim) == before, "it is on disk"
    states = {one["id"]: one["state"] for one in lending(grid)["allocations"]}
    assert states[holder["id"]] == "active" and "suspended" in states.values()
    grid.grid("resource-sharing", "release", holder["id"])
    goes_on(grid, victim)


@pytest.mark.root
@pytest.mark.criu
def test_a_frozen_victim_gives_its_memory_too(grid: EmbeddedCluster) -> None:
    victim = start_victim(grid, "--cpu", "8", "--memory", "24")
    cores = grid.json("boost", "request", "gpu-master", "cpu", "8", "--source", "gpu1", "--priority", "critical")
    assert "is suspended" in said(grid, "lease.suspended", victim)
    memory = grid.json(
        "boost", "request", "gpu-master", "memory", "16", "--source", "gpu1", "--priority", "urgent", timeout=LIMIT_S
    )
    assert "stored on disk" in said(grid, "lease.suspended", victim)
    for boost in (cores, memory):
        grid.grid("boost", "release", boost["id"])
    goes_on(grid, victim)


def test_a_node_that_rests_stops_what_it_runs_and_goes_on_afterwards(grid: EmbeddedCluster) -> None:
    victim = start_victim(grid, "--cpu", "2")
    try:
        grid.grid("resource-sharing", "cooldown", "-n", "gpu1")
        wait_until(lambda: said(grid, "lease.suspended", victim), LIMIT_S, "the victim to stop", every_s=0.2)
        before = counted(grid, victim)
        ran = grid.grid("run-shared", "-r", "cpu", "-a", "1", "sh", "-c", "echo $GRID_NODE")
        assert ran.stdout == "gpu2\n", "the other node lends"
        assert counted(grid, victim) == before
    finally:
        grid.grid("resource-sharing", "cooldown", "-n", "gpu1", "--end")
    goes_on(grid, victim)


def test_what_cannot_be_stored_is_asked_to_end(grid: EmbeddedCluster) -> None:
    """A process that has left its tree can't be stored."""
    script = "(setsid sleep 1000 &); trap 'echo asked; exit 9' TERM; echo up $GRID_NODE; while :; do sleep 0.05; done"
    victim = grid.grid(
        "run-shared", "--gpu", "1", "-n", "gpu1", "-p", "low", "-d", "--", "sh", "-c", script
    ).stdout.strip()  # fmt: skip
    wait_until(lambda: "up" in grid.grid("jobs", "logs", victim).stdout, LIMIT_S, "the victim to be up", every_s=0.2)
    boost = grid.json(
        "boost", "request", "gpu-master", "gpu", "1", "--source", "gpu1", "--priority", "critical", timeout=LIMIT_S
    )
    assert grid.grid("jobs", "logs", victim).stdout == "up gpu1\nasked\n"
    assert "asked to end" in said(grid, "lease.preempted", victim)
    grid.grid("boost", "release", boost["id"])
