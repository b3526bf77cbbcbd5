"""The memory pool between hosts: bytes that outlive their writer, a head that stays small, a host without power."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from distributed_grid.core.process import tree_of
from tests.cluster.test_ssh_cluster import online
from tests.lab.clusters import PYTHON, LabCluster
from tests.lab.waiting import wait_until

pytestmark = pytest.mark.root
MIB = 1024**2

OPEN = """
import sys, time
from distributed_grid.config import load_cluster_config
from distributed_grid.orchestration.distributed_memory_pool import BlockLost, SyncMemoryPool
pool = SyncMemoryPool(load_cluster_config(sys.argv[1])); pool.initialize()
def part(i): return bytes([i % 251]) * 2**24
"""
WRITE = OPEN + """
size = int(sys.argv[2]) * 2**20
block = pool.allocate(size, "gpu2", strict=True)
print(block, flush=True); sys.stdin.readline()
for i in range(size // 2**24): pool.write(block, part(i), offset=i * 2**24)
print("written", flush=True); sys.stdin.readline()
"""
READ = OPEN + """
block = sys.argv[2]
for i in range(pool.info(block)["size_bytes"] // 2**24): assert pool.read(block, 2**24, offset=i * 2**24) == part(i)
pool.deallocate(block)
print("the same")
"""
LOSE = OPEN + """
alone = pool.allocate(2**20, "gpu2", strict=True)
twice = pool.allocate(2**20, "gpu2", strict=True, replicas=2)
for block in (alone, twice): pool.write(block, part(7)[:2**20])
print("ready", flush=True); sys.stdin.readline()
deadline = time.monotonic() + 120
while True:
    assert pool.read(twice) == part(7)[:2**20]
    try:
        assert pool.read(alone) == part(7)[:2**20]
    except BlockLost:
        break
    assert time.monotonic() < deadline
pool.write(twice, b"goes on")
assert pool.read(twice, 7) == b"goes on"
for block in (alone, twice): pool.deallocate(block)
print("read on", flush=True)
"""


def start(cluster: LabCluster, program: str, *arguments: object) -> subprocess.Popen[str]:
    argv = [str(PYTHON), "-c", program, cluster.config, *map(str, arguments)]
    return cluster.head.popen(argv, cwd="/root", stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout
    return process.stdout.readline().strip()


def tell(process: subprocess.Popen[str]) -> None:
    assert process.stdin
    process.stdin.write("\n")
    process.stdin.flush()


def end(process: subprocess.Popen[str]) -> int:
    process.communicate(timeout=120)
    return process.returncode


def memory_of(cluster: LabCluster) -> int:
    """What all of a host's processes have, each shared page once, and its shared memory."""
    total = 0
    for pid in tree_of(cluster.head.init_pid):
        try:
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:
            continue  # it ended meanwhile
        total += sum(int(line.split()[1]) * 1024 for line in rollup.splitlines() if line.startswith("Pss:"))
    shared = os.statvfs(f"/proc/{cluster.head.init_pid}/root/dev/shm")
    return total + (shared.f_blocks - shared.f_bfree) * shared.f_frsize


@pytest.mark.parametrize("mib", [256, pytest.param(4096, marks=pytest.mark.chaos)])
def test_the_head_stays_small_and_another_process_reads(mib: int, lab_cluster: LabCluster) -> None:
    writer = start(lab_cluster, WRITE, mib)
    block = line_of(writer)
    assert block.startswith("block_")
    before = memory_of(lab_cluster)
    tell(writer)
    assert line_of(writer) == "written"
    # Others on the head come and go: what stays is what counts.
    wait_until(lambda: memory_of(lab_cluster) - before < 64 * MIB, 60, "the head to be no larger", every_s=0.5)
    tell(writer)
    assert end(writer) == 0
    lab_cluster.kill("daemon")
    argv = [str(PYTHON), "-c", READ, lab_cluster.config, block]
    assert lab_cluster.head.run(argv, cwd="/root", timeout=240).stdout == "the same\n"


def test_a_host_without_power_loses_what_only_it_had(lab_cluster: LabCluster) -> None:
    process = start(lab_cluster, LOSE)
    gpu2 = lab_cluster.lab["gpu2"]
    assert line_of(process) == "ready"
    gpu2.power_off()
    try:
        tell(process)
        assert line_of(process) == "read on"
        assert end(process) == 0
        assert lab_cluster.json("events", "--kind", "memory.lost")
    finally:
        gpu2.power_on()
    wait_until(lambda: online(lab_cluster)["gpu2"], 200, "gpu2 to be brought back", every_s=2)
