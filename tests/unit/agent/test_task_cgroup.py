"""Where a task's control groups go, on the layouts that machines have."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from distributed_grid.agent.cgroup import CgroupLimits, Hierarchy, create, find_hierarchies
from distributed_grid.agent.spool import TaskSpec
from distributed_grid.agent.tasks import TaskKeeper
from tests.lab.waiting import wait_until

V1 = (
    "32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu,cpuacct\n"
    "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
    "37 31 0:34 / /sys/fs/cgroup/freezer rw,relatime - cgroup cgroup rw,freezer\n"
    "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n"
)


def test_hybrid_takes_version_1_below_our_own_group() -> None:
    own = "6:freezer:/\n4:memory:/lab/a\n1:cpu,cpuacct:/\n0::/\n"
    root = Path("/sys/fs/cgroup")
    assert find_hierarchies(V1, own) == [
        Hierarchy("memory", root / "memory/lab/a"),
        Hierarchy("cpu", root / "cpu"),
        Hierarchy("freezer", root / "freezer"),
    ]


def test_a_container_sees_only_its_part_of_the_tree() -> None:
    mount = "35 31 0:32 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"
    [found] = find_hierarchies(mount, "4:memory:/docker/abc/inner\n")
    assert found.base == Path("/sys/fs/cgroup/memory/inner")


def test_version_2_is_beside_our_own_group() -> None:
    mount = "25 30 0:23 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate\n"
    [found] = find_hierarchies(mount, "0::/system.slice/grid.service\n")
    assert found.group("t") == Path("/sys/fs/cgroup/system.slice/grid/t")
    [found] = find_hierarchies(mount, "0::/\n")
    assert found.base == Path("/sys/fs/cgroup")


def test_no_cgroups_at_all() -> None:
    assert find_hierarchies("22 1 0:20 / / rw - ext4 /dev/sda1 rw\n", "") == []


def test_tasks_of_one_group_share_its_memory_limit(tmp_path: Path) -> None:
    """Two commands in one lease: neither alone nor both together have more than it."""
    for name in ("memory", "cpu"):
        (tmp_path / name).mkdir()
    places = [Hierarchy("memory", tmp_path / "memory"), Hierarchy("cpu", tmp_path / "cpu")]
    for task in ("a", "b"):
        groups, _, limited = create(places, task, CgroupLimits(4096, nice=10), "lease-1")
        assert groups == [tmp_path / "memory/grid/lease-1" / task, tmp_path / "cpu/grid/lease-1" / task] and limited
        for place in (groups[0], groups[0].parent):
            assert (place / "memory.limit_in_bytes").read_text() == "4096"
        assert (groups[1] / "cpu.shares").read_text() == "110"
        assert not (groups[1].parent / "cpu.shares").exists()


@pytest.mark.root
async def test_two_commands_in_one_lease_have_its_memory_once(grid_home: Path) -> None:
    """Each alone fits, both together do not."""
    keeper = TaskKeeper(grid_home / "spool", "gpu1")
    program = "import time; data = b'x' * (70 << 20); print('has', flush=True); time.sleep(600)"
    hog = [sys.executable, "-I", "-S", "-c", program]
    try:
        for name in ("a", "b"):
            status = keeper.start(name, TaskSpec(hog, memory_limit_bytes=100 << 20, group="lease-of-a-test"))
            if not status.memory_limited:
                pytest.skip("no memory control group to be had here")
            if name == "a":
                wait_until((keeper.spool / "a" / "stdout").read_text, 60, "the first to have its memory")
        wait_until(lambda: any(one.ended for one in keeper.list()), 60, "one of them to be ended")
        (ended,) = [one for one in keeper.list() if one.ended]
        assert (ended.signal, ended.oom_killed) == (9, True)
    finally:
        groups = [Path(one).parent for one in json.loads((keeper.spool / "a" / "spec.json").read_text())["cgroups"]]
        for one in keeper.list():
            await keeper.cancel(one.task_id, grace_s=0)
            keeper.remove(one.task_id)
    assert not any(one.exists() for one in groups)
