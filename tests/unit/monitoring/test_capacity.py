from __future__ import annotations

import os
from pathlib import Path

from distributed_grid.monitoring.capacity import (
    CgroupLimits,
    binding,
    capacity_of,
    find_groups,
    find_limits,
    group_cpu_s,
    group_memory_bytes,
    group_pids,
    own_limits,
    parse_cpu_list,
    usable_cpus,
)

V2_MOUNT = "31 23 0:28 / /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNTS = """\
32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct
34 31 0:31 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset
35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory
41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw
"""


def tree(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


def test_v2_takes_the_tightest_on_the_way_up(tmp_path: Path) -> None:
    tree(tmp_path, {
        "lab/cpu.max": "150000 100000", "lab/memory.max": "max",
        "lab/job/cpu.max": "max 100000", "lab/job/memory.max": "2147483648", "lab/job/memory.current": "1000000",
        "lab/job/memory.stat": "anon 5\ninactive_file 400000\nactive_file 1", "lab/job/cpuset.cpus.effective": "0-2,5",
        "lab/cpu.stat": "usage_usec 2500000\nuser_usec 1",
    })  # fmt: skip
    limits = find_limits("0::/lab/job\n", V2_MOUNT, tmp_path)
    group = tmp_path / "sys/fs/cgroup/lab"
    assert limits == CgroupLimits(
        1.5, group, group, frozenset({0, 1, 2, 5}), 2147483648, group / "job", unified=group / "job"
    )
    assert group_memory_bytes(group / "job") == 600000
    assert group_cpu_s(group) == 2.5
    got = capacity_of(limits, 4, 8 << 30)
    assert (got.cpu_cores, got.memory_bytes) == (1.5, 2 << 30)


def test_v1_hybrid(tmp_path: Path) -> None:
    tree(tmp_path, {
        "cpu,cpuacct/h1/cpu.cfs_quota_us": "50000", "cpu,cpuacct/h1/cpu.cfs_period_us": "100000",
        "cpu,cpuacct/h1/cpuacct.usage": "3000000000", "cpu,cpuacct/h1/cgroup.procs": "10\n11",
        "cpu,cpuacct/h1/sub/cgroup.procs": "12", "cpu,cpuacct/cpu.cfs_quota_us": "-1",
        "memory/h1/memory.limit_in_bytes": "9223372036854771712", "memory/h1/memory.usage_in_bytes": "5000",
        "memory/h1/memory.stat": "inactive_file 1\ntotal_inactive_file 2000", "cpuset/cpuset.cpus": "0-1",
        "memory/memory.limit_in_bytes": "9223372036854771712", "unified/cgroup.procs": "",
    })  # fmt: skip
    limits = find_limits("4:memory:/h1\n3:cpuset:/\n2:cpu,cpuacct:/h1\n0::/\n", V1_MOUNTS, tmp_path)
    assert limits.cpu_cores == 0.5 and limits.cpus == frozenset({0, 1})
    assert limits.memory_bytes is None and limits.memory_group is None
    assert limits.cpu_account is not None and group_cpu_s(limits.cpu_account) == 3.0
    assert group_memory_bytes(tmp_path / "sys/fs/cgroup/memory/h1") == 3000
    assert limits.cpu_group is not None and group_pids(limits.cpu_group) == {10, 11, 12}


def test_v1_quota_without_accounts_of_the_same_group(tmp_path: Path) -> None:
    line = "3{0} 31 0:3{0} / /sys/fs/cgroup/{1} rw - cgroup cgroup rw,{1}\n"
    mounts = line.format(2, "cpu") + line.format(3, "cpuacct")
    tree(tmp_path, {
        "cpu/h1/cpu.cfs_quota_us": "50000", "cpu/h1/cpu.cfs_period_us": "100000", "cpuacct/cpuacct.usage": "1",
    })  # fmt: skip
    limits = find_limits("2:cpuacct:/\n1:cpu:/h1\n", mounts, tmp_path)
    assert limits.cpu_cores == 0.5 and limits.cpu_account is None


def test_a_container_sees_only_its_part_mounted(tmp_path: Path) -> None:
    tree(tmp_path, {"memory/memory.limit_in_bytes": "4096", "memory/in/memory.limit_in_bytes": "8192"})
    mount = "35 31 0:32 /docker/abc /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    top = tmp_path / "sys/fs/cgroup/memory"
    assert find_groups("4:memory:/docker/abc/in", mount, tmp_path)["memory"] == (top / "in", top)
    assert find_groups("4:memory:/docker/abcdef", mount, tmp_path)["memory"] == (top, top)
    assert find_groups("4:memory:/../../x", mount, tmp_path)["memory"] == (top, top)
    limits = find_limits("4:memory:/docker/abc/in", mount, tmp_path)
    assert (limits.memory_bytes, limits.memory_group) == (4096, top)


def test_nothing_mounted_is_no_limit() -> None:
    assert find_limits("0::/\n", "") == CgroupLimits()
    assert find_limits("garbage", "more garbage\n - \n") == CgroupLimits()


def test_a_limit_wider_than_the_machine_does_not_bind(tmp_path: Path) -> None:
    limits = CgroupLimits(2.0, tmp_path, tmp_path, None, 1000, tmp_path, tmp_path)
    assert binding(limits, 4, 2000) == limits
    assert binding(limits, 2, 1000) == CgroupLimits(unified=tmp_path)


def test_cpu_lists_and_usable_cpus() -> None:
    assert parse_cpu_list("0-3,8\n") == frozenset({0, 1, 2, 3, 8})
    assert parse_cpu_list("") == frozenset()
    assert usable_cpus(CgroupLimits(cpus=frozenset({0, 9})), frozenset({0, 1})) == {0}
    assert usable_cpus(CgroupLimits(cpus=frozenset({9})), frozenset({0, 1})) == {0, 1}


def test_our_own_can_be_read() -> None:
    limits = own_limits()
    assert limits.cpu_cores is None or limits.cpu_cores > 0
    assert usable_cpus(limits, frozenset(range(os.cpu_count() or 1)))
