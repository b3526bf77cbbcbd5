from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from distributed_grid.core.clock import ManualClock
from distributed_grid.core.resources import GB
from distributed_grid.monitoring.capacity import Capacity, CgroupLimits
from distributed_grid.monitoring.node_sampler import NodeSampler, grow_trees, share_gpus
from distributed_grid.monitoring.proc_sampler import Proc
from distributed_grid.monitoring.snapshot import GpuProcess, GpuSnapshot

LIMIT_S = 60.0
DECLARED = Capacity(8.0, 32 * GB, 1)
#: A shell-like parent whose child holds 64 MiB and computes.
PARENT = """
import subprocess, sys
code = "b = b'x' * (64 << 20)\\nprint('ready', flush=True)\\nwhile True: pass"
child = subprocess.Popen([sys.executable, "-S", "-c", code])
try:
    input()
finally:
    child.kill()
    child.wait()
"""
DAEMON = """
import os, sys
pid = os.fork()
if pid == 0:
    os.setsid()
    sys.stdin.read()
else:
    print(pid, flush=True)
    os.waitpid(pid, 0)
"""


@contextmanager
def busy_tree() -> Iterator[int]:
    parent = subprocess.Popen(
        [sys.executable, "-S", "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert parent.stdout is not None and parent.stdout.readline() == "ready\n"
        yield parent.pid
    finally:
        parent.communicate("\n", timeout=LIMIT_S)


@contextmanager
def closing(sampler: NodeSampler) -> Iterator[NodeSampler]:
    try:
        yield sampler
    finally:
        sampler.close()


def until(sampler: NodeSampler, condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end, f"it did not happen: {sampler.latest}"
        time.sleep(0.25)
        sampler.sample()


def test_the_whole_machine() -> None:
    with closing(NodeSampler("here", limits=CgroupLimits)) as sampler, busy_tree() as root:
        first = sampler.latest
        assert sampler.sample() is first or sampler.latest.at > first.at
        until(sampler, lambda: sampler.latest.cpu_cores_used > 0.1)
        seen = sampler.latest
        assert seen.node == "here" and not seen.declared
        assert seen.cpu_cores_total == seen.cpu_cores_real == len(os.sched_getaffinity(0))
        assert 0 < seen.memory_used_bytes < seen.memory_total_bytes
        assert seen.memory_used_bytes + seen.memory_available_bytes <= seen.memory_total_bytes
        assert seen.process_count >= 3 and 0 <= seen.cpu_pressure <= 1
        assert root in {process.pid for process in sampler.processes()}


def test_a_worker_is_what_its_shims_started_and_the_head_is_the_rest() -> None:
    clock = ManualClock()
    with busy_tree() as root:
        worker = NodeSampler("gpu1", declared=DECLARED, belongs=lambda: {root})
        head = NodeSampler("gpu-master", declared=DECLARED, belongs=lambda: {root}, everything_else=True)
        idle = NodeSampler("gpu2", declared=DECLARED, belongs=set, clock=clock)
        with closing(worker), closing(head), closing(idle):
            until(worker, lambda: worker.latest.cpu_cores_used > 0.1)
            seen = worker.latest
            assert (seen.cpu_cores_total, seen.memory_total_bytes, seen.gpu_count, seen.declared) == (
                8.0, 32 * GB, 1, True,
            )  # fmt: skip
            assert 64 << 20 <= seen.memory_used_bytes < 1 << 30
            assert seen.process_count == 2
            assert len(worker.processes()) == 2
            others = {process.pid for process in head.processes()}
            assert os.getpid() in others and not others & {process.pid for process in worker.processes()}
            clock.advance(1.0)
            quiet = idle.sample()
            assert (quiet.cpu_cores_used, quiet.memory_used_bytes, quiet.process_count) == (0.0, 0, 0)
            assert quiet.memory_available_bytes <= 32 * GB


def test_one_that_outlived_its_parents_still_belongs() -> None:
    """The child leaves its tree by the death of its parent; it is the same node's as before."""
    parent = subprocess.Popen(
        [sys.executable, "-S", "-c", DAEMON], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdin is not None and parent.stdout is not None
    orphan = int(parent.stdout.readline())
    with closing(NodeSampler("gpu1", belongs=lambda: {parent.pid})) as sampler:
        try:
            assert {p.pid for p in sampler.processes()} == {parent.pid, orphan}
            parent.kill()
            parent.wait(LIMIT_S)
            until(sampler, lambda: {p.pid for p in sampler.processes()} == {orphan})
        finally:
            parent.stdin.close()
            parent.stdout.close()
        until(sampler, lambda: sampler.processes() == [])


def test_a_cgroup_makes_the_node_smaller(tmp_path: Path) -> None:
    (tmp_path / "memory.current").write_text(f"{GB // 4}\n")
    (tmp_path / "memory.stat").write_text("inactive_file 0\n")
    (tmp_path / "cpu.stat").write_text("usage_usec 1000000\n")
    limits = CgroupLimits(0.5, tmp_path, tmp_path, None, GB // 2, tmp_path, tmp_path)
    clock = ManualClock()
    with closing(NodeSampler("small", limits=lambda: limits, clock=clock)) as sampler:
        (tmp_path / "cpu.stat").write_text("usage_usec 900000000\n")
        clock.advance(1.0)
        seen = sampler.sample()
        assert (seen.cpu_cores_total, seen.memory_total_bytes) == (0.5, GB // 2)
        assert (seen.memory_used_bytes, seen.memory_pressure) == (GB // 4, 0.5)
        assert seen.memory_available_bytes <= GB // 4
        assert 0 <= seen.cpu_cores_used <= 0.5


def test_a_quota_without_accounts_adds_its_processes_up(tmp_path: Path) -> None:
    with busy_tree() as root:
        child = int(Path(f"/proc/{root}/task/{root}/children").read_text().split()[0])
        (tmp_path / "cgroup.procs").write_text(f"{child}\n")
        limits = CgroupLimits(cpu_cores=0.5, cpu_group=tmp_path)
        with closing(NodeSampler("small", limits=lambda: limits)) as sampler:
            until(sampler, lambda: sampler.latest.cpu_cores_used > 0.05)
            assert sampler.latest.cpu_cores_used <= 0.5


def test_trees_by_parent_and_by_session() -> None:
    def proc(pid: int, ppid: int, session: int) -> Proc:
        return Proc(pid, -1, ppid=ppid, session=session)

    procs = {p.pid: p for p in (proc(1, 0, 1), proc(10, 1, 10), proc(11, 10, 10), proc(12, 11, 12), proc(13, 1, 10))}
    assert grow_trees(procs, {10}, {10}) == {10, 11, 12, 13}
    assert grow_trees(procs, {11}, set()) == {11, 12}
    assert grow_trees(procs, {99}, {99}) == set()


def test_a_gpu_is_shared_by_whose_processes_are_on_it() -> None:
    gpu = GpuSnapshot(0, "u", "H200", 1000, 700, 0.9, processes=(GpuProcess(7, 400), GpuProcess(8, 200)))
    (worker,) = share_gpus((gpu,), {7}, everything_else=False)
    (head,) = share_gpus((gpu,), {7}, everything_else=True)
    (idle,) = share_gpus((gpu,), set(), everything_else=False)
    assert (worker.memory_used_bytes, worker.utilization, [p.pid for p in worker.processes]) == (400, 0.9, [7])
    assert (head.memory_used_bytes, head.utilization, [p.pid for p in head.processes]) == (300, 0.9, [8])
    assert (idle.memory_used_bytes, idle.utilization, idle.processes) == (0, 0.0, ())
    assert head.pressure == pytest.approx(0.9)
