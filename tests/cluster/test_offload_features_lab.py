"""Moving between hosts that share nothing: one directory for several processes, large directories, locks, refusals."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster.offloads import LIMIT_S, PROGRAMS, found, move, moves, until_over
from tests.lab.clusters import PYTHON, LabCluster
from tests.lab.waiting import wait_until

pytestmark = [pytest.mark.root, pytest.mark.criu]
_numbers = itertools.count(1)

# Each has a file that it appends to and one that it replaces, and all read the same settings.
WORKER = """
import os, sys, time
name, number = sys.argv[2], 0
log = open(f"{name}.log", "a")
while not os.path.exists(sys.argv[1]):
    number += 1
    word = open("settings.txt").read().strip()
    log.write(f"{number} {word}\\n")
    log.flush()
    with open(f"{name}.new", "w") as file:
        file.write(str(number))
    os.rename(f"{name}.new", f"{name}.last")
    print(number, flush=True)
    time.sleep(0.05)
"""
# Listens on the address of its host, which the target has not.
BOUND = """
import socket, sys, time
kept = socket.create_server((sys.argv[1], 0))
while True:
    print(1, flush=True)
    time.sleep(0.1)
"""
# Has a file in its memory as a program's code.
MAPPED = """
import mmap, sys, time
with open(sys.argv[1], "rb") as file:
    kept = mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC)
while True:
    print(1, flush=True)
    time.sleep(0.1)
"""


class Place:
    """A directory on the head and programs in it; all gone afterwards."""

    def __init__(self, cluster: LabCluster) -> None:
        self.cluster, self.head = cluster, cluster.head
        self.path = f"/root/place{next(_numbers)}"
        self.end = f"/run/end{self.path.rpartition('/')[2]}"
        self.pids: list[int] = []
        self.head.run(["mkdir", "-p", self.path])

    def start(self, argv: list[str], log: str = "log") -> int:
        """Its pid on the head, once it has written something to `log` there."""
        script = f'setsid "$@" >{log} 2>&1 </dev/null & echo $!'
        done = self.head.run(["/bin/sh", "-c", script, "start", *argv], cwd=self.path)
        pid = int(done.stdout)
        self.pids.append(pid)
        wait_until(lambda: self.text(log), LIMIT_S, f"{argv} to write something")
        return pid

    def text(self, name: str) -> str:
        path = f"{self.path}/{name}"
        return self.head.read(path) if self.head.exists(path) else ""

    def more(self, log: str = "log") -> None:
        size = len(self.text(log))
        wait_until(lambda: len(self.text(log)) > size, LIMIT_S, f"more in {log}")

    def plan(self, pid: int, *options: str) -> dict[str, Any]:
        done = self.cluster.grid(
            "offload", "plan", str(pid), "-t", "gpu1", *options, "--format", "json", check=False, timeout=LIMIT_S
        )
        told: dict[str, Any] = json.loads(done.stdout)
        assert done.returncode == (4 if told["strategy"] == "refuse" else 0)
        return told

    def close(self) -> None:
        for host in self.cluster.lab.hosts.values():
            host.write(self.end, "")
        for one in self.cluster.json("offload", "status", timeout=LIMIT_S)["active"]:
            if one["pid"] in self.pids:
                self.cluster.grid("offload", "cancel", one["id"], "--grace", "0", check=False, timeout=LIMIT_S)
        for pid in self.pids:
            self.head.run(["kill", "-9", str(pid)], check=False)
        for host in self.cluster.lab.hosts.values():
            host.run(["rm", "-rf", self.path, self.end])


@pytest.fixture
def place(lab_cluster: LabCluster) -> Iterator[Place]:
    made = Place(lab_cluster)
    yield made
    made.close()


@pytest.mark.timeout(600)
def test_processes_of_one_directory_share_it_on_the_other_node_as_they_did_at_home(place: Place) -> None:
    cluster, head = place.cluster, place.head
    head.write(f"{place.path}/worker.py", WORKER)
    head.write(f"{place.path}/settings.txt", "red\n")
    names = ["one", "two", "three"]
    pids = {name: place.start([str(PYTHON), "worker.py", place.end, name], f"{name}.out") for name in names}
    done = {name: move(cluster, pids[name], "-t", "gpu2" if name == "three" else "gpu1", timeout=200) for name in names}
    for name in names:
        place.more(f"{name}.out")
        assert cluster.json("offload", "sync", done[name]["id"], timeout=LIMIT_S)["conflicts"] == []
        place.more(f"{name}.out")
    for host in cluster.lab.hosts.values():
        host.write(place.end, "")
    for name in names:
        assert until_over(cluster, done[name]["id"])["exit_code"] == 0
        lines = place.text(f"{name}.log").splitlines()
        assert lines == [f"{number} red" for number in range(1, len(lines) + 1)] and lines
        assert place.text(f"{name}.last") == str(len(lines))
        assert place.text(f"{name}.out").split() == [str(number) for number in range(1, len(lines) + 1)]
    left = head.run(["ls", place.path]).stdout.split()
    assert not [name for name in left if ".from-" in name or ".of-" in name], left


def test_a_large_directory_has_to_be_asked_for(place: Place) -> None:
    head = place.head
    head.write(f"{place.path}/worker.py", WORKER)
    head.write(f"{place.path}/settings.txt", "red\n")
    head.run(["sh", "-c", "mkdir many; cd many; seq 5100 | xargs touch"], cwd=place.path)
    pid = place.start([str(PYTHON), "worker.py", place.end, "one"])
    asked = place.plan(pid)
    assert asked["strategy"] == "refuse" and "files" in asked["why"] and "--stage-large" in asked["blocking"][-1]
    assert [one["option"] for one in asked["cannot_carry"]] == ["--stage-large"]
    assert place.plan(pid, "--leave-large")["strategy"] == "live"
    place.more()
    done = move(place.cluster, pid, "-t", "gpu1", "--stage-large", timeout=200)
    place.more()
    assert place.cluster.lab["gpu1"].exists(f"{place.path}/many/5100")
    place.cluster.lab["gpu1"].write(place.end, "")
    assert until_over(place.cluster, done["id"])["exit_code"] == 0


def test_a_lock_and_a_file_without_a_name_go_along(place: Place) -> None:
    pid = place.start([str(PYTHON), str(PROGRAMS / "holds.py"), place.end, f"{place.path}/lock", "80"])
    told = place.plan(pid)
    assert told["strategy"] == "live" and any("lock" in text for text in told["notices"])
    done = move(place.cluster, pid, "-t", "gpu1", timeout=200)
    assert found(place.cluster, done["id"])["target"] == "gpu1"
    place.more()
    place.cluster.lab["gpu1"].write(place.end, "")
    assert until_over(place.cluster, done["id"])["exit_code"] == 0
    *numbers, whole, locked = place.text("log").splitlines()
    assert numbers == [str(number) for number in range(1, len(numbers) + 1)]
    assert (whole, locked) == ("whole", "locked")


def test_what_the_other_host_does_not_have_is_told_by_the_plan(place: Place) -> None:
    head, gpu1 = place.head, place.cluster.lab["gpu1"]
    head.write("/opt/place/module.so", "one " * 2000)
    gpu1.write("/opt/place/module.so", "two " * 2000)
    cases = {
        "bound-address": ([str(PYTHON), "-c", BOUND, head.address], head.address),
        "file-differs": ([str(PYTHON), "-c", MAPPED, "/opt/place/module.so"], "module.so differs on gpu1"),
    }
    for code, (argv, text) in cases.items():
        pid = place.start(argv, code)
        told = place.plan(pid)
        assert told["strategy"] == "refuse" and text in told["why"], told["why"]
        assert code in [one["code"] for one in told["cannot_carry"]]
        place.more(code)


def test_no_room_for_its_memory_on_the_target_is_told_by_the_plan(place: Place) -> None:
    gpu1 = place.cluster.lab["gpu1"]
    pid = place.start([str(PYTHON), str(PROGRAMS / "matrix.py"), "50", place.end])
    place.more()
    used = gpu1.run(["df", "-k", "--output=used", "/dev/shm"]).stdout.split()[1]
    gpu1.run(["mount", "-o", f"remount,size={int(used) + 4096}k", "/dev/shm"])
    try:
        told = place.plan(pid)
    finally:
        gpu1.run(["mount", "-o", "remount,size=50%", "/dev/shm"])
    assert told["strategy"] == "refuse" and "/dev/shm on gpu1 has" in told["why"], told["why"]
    place.more()
    assert place.plan(pid)["strategy"] == "live"


# The documents' own line

BATCH = """
grid offload scan --format json > processes.json
jq -r '.[].pid' processes.json | xargs -I {} grid offload execute {}
"""


@pytest.fixture
def low_thresholds(lab_cluster: LabCluster) -> Iterator[None]:
    """150 MB are heavy, and nothing too young; the running daemon takes the change, and takes it back."""
    text = lab_cluster.head.read(lab_cluster.config)
    lower = "offload:\n  detect: {min_cpu_cores: 64, min_memory_gb: 0.15, min_age_seconds: 0}\n"
    reconfigure(lab_cluster, text + lower)
    yield
    reconfigure(lab_cluster, text)


def reconfigure(cluster: LabCluster, text: str) -> None:
    def reloads() -> set[float]:
        events = cluster.json("events", "--limit", "100", timeout=LIMIT_S)
        return {one["at"] for one in events if one["kind"] == "config.reloaded"}

    before = reloads()
    cluster.head.write(cluster.config, text, mode=0o600)
    wait_until(lambda: reloads() - before, LIMIT_S, "the change to be taken", every_s=0.3)


@pytest.mark.timeout(600)
def test_o11_the_batch_line_as_written_moves_three_processes(place: Place, low_thresholds: None) -> None:
    """On a host where nothing else runs that could be moved, so that the line need not be narrowed down."""
    cluster, head = place.cluster, place.head
    names = ["train1", "train2", "train3"]
    argv = [str(PYTHON), str(PROGRAMS / "matrix.py"), "180", place.end]
    pids = {name: place.start([*argv, "0.01", name], name) for name in names}

    def offered() -> set[object]:
        return {one["pid"] for one in cluster.json("offload", "scan", "-n", "gpu-master", timeout=LIMIT_S)}

    wait_until(lambda: offered() == set(pids.values()), LIMIT_S, "the three to be offered, and nothing else", every_s=1)
    env = {"PATH": f"{PYTHON.parent}:/usr/bin:/bin", "GRID_CONFIG": cluster.config, "HOME": "/root"}
    done = head.run(["bash", "-c", f"set -eo pipefail{BATCH}"], env=env, cwd=place.path, timeout=300)
    assert done.stdout.count("Monitor progress: grid offload status") == 3
    active = {one["pid"]: one["target"] for one in cluster.json("offload", "status", timeout=LIMIT_S)["active"]}
    assert {active[pid] for pid in pids.values()} <= {"gpu1", "gpu2"}
    for host in cluster.lab.hosts.values():
        host.write(place.end, "")
    for name, pid in pids.items():
        move_id = next(one["id"] for one in moves(cluster) if one["pid"] == pid)
        assert until_over(cluster, move_id)["exit_code"] == 0
        assert place.text(name).endswith("sum right\n")
