"""What a node has: the smaller of the machine and of every cgroup around us, v1, v2 or both."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from pathlib import Path

#: v1 writes "no limit" as the highest multiple of the page size.
_UNLIMITED_BYTES = 1 << 60


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a node may use, or what the config declares that it may."""

    cpu_cores: float
    memory_bytes: int
    gpu_count: int = 0


@dataclass(frozen=True, slots=True)
class CgroupLimits:
    """The tightest limit on the way from our cgroup to the root, and the group that sets it."""

    cpu_cores: float | None = None
    cpu_group: Path | None = None
    #: Where the use of cpu_group can be read; None where v1 keeps accounts elsewhere than quotas.
    cpu_account: Path | None = None
    cpus: frozenset[int] | None = None
    memory_bytes: int | None = None
    memory_group: Path | None = None
    #: Our own v2 group, for its pressure files.
    unified: Path | None = None


def parse_cpu_list(text: str) -> frozenset[int]:
    """`0-3,8` as the kernel writes sets of cores."""
    found: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def _unescape(text: str) -> str:
    for code, char in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, char)
    return text


def find_groups(cgroup: str, mountinfo: str, root: Path = Path("/")) -> dict[str, tuple[Path, Path]]:
    """Controller -> (our group's directory, the mount's); v2 is the controller "".

    A container without a cgroup namespace sees its path from the host's root, but only its own part mounted:
    the mount's root is taken off the path, and a path outside of it means the mount itself.
    """
    mounts: dict[str, tuple[str, Path]] = {}
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        words, kind = left.split(), right.split()
        if len(words) < 5 or len(kind) < 3 or kind[0] not in ("cgroup", "cgroup2"):
            continue
        place = (_unescape(words[3]), root / _unescape(words[4]).lstrip("/"))
        for name in [""] if kind[0] == "cgroup2" else kind[2].split(","):
            mounts.setdefault(name, place)
    found: dict[str, tuple[Path, Path]] = {}
    for line in cgroup.splitlines():
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        for name in names.split(","):
            if name not in mounts:
                continue
            base, mount = mounts[name]
            inside = path[len(base.rstrip("/")) :] if (path + "/").startswith(base.rstrip("/") + "/") else ""
            group = mount / inside.lstrip("/")
            found[name] = (group if ".." not in group.parts and group.is_dir() else mount, mount)
    return found


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _number(text: str | None) -> int | None:
    try:
        return int(text) if text is not None else None
    except ValueError:  # "max"
        return None


def _up(group: Path, mount: Path) -> list[Path]:
    """The group and those around it, up to the mount."""
    found = [group]
    while found[-1] != mount and mount in found[-1].parents:
        found.append(found[-1].parent)
    return found


def _quota(group: Path, v2: bool) -> float | None:
    """Cores that a group may keep busy."""
    if v2:
        words = (_read(group / "cpu.max") or "").split()
        quota, period = (_number(words[0]), _number(words[1])) if len(words) == 2 else (None, None)
    else:
        quota, period = _number(_read(group / "cpu.cfs_quota_us")), _number(_read(group / "cpu.cfs_period_us"))
    return quota / period if quota and period and quota > 0 else None


def find_limits(cgroup: str, mountinfo: str, root: Path = Path("/")) -> CgroupLimits:
    """The limits around a process, from the texts of its /proc/PID/cgroup and mountinfo."""
    groups = find_groups(cgroup, mountinfo, root)
    cpu_cores, cpu_group, cpu_account, cpus = math.inf, None, None, None
    memory_bytes, memory_group = _UNLIMITED_BYTES, None
    for name, v2 in (("cpu", False), ("", True)):
        for group in _up(*groups[name]) if name in groups else []:
            cores = _quota(group, v2)
            if cores is not None and cores < cpu_cores:
                cpu_cores, cpu_group = cores, group
                cpu_account = group if v2 else _account(groups, group)
    for name, file in (("memory", "memory.limit_in_bytes"), ("", "memory.max")):
        for group in _up(*groups[name]) if name in groups else []:
            limit = _number(_read(group / file))
            if limit is not None and 0 < limit < memory_bytes:
                memory_bytes, memory_group = limit, group
    for name, file in (("cpuset", "cpuset.effective_cpus"), ("cpuset", "cpuset.cpus"), ("", "cpuset.cpus.effective")):
        text = _read(groups[name][0] / file) if name in groups else None
        if text and cpus is None:
            cpus = parse_cpu_list(text)
    return CgroupLimits(
        cpu_cores=cpu_cores if cpu_group else None, cpu_group=cpu_group, cpu_account=cpu_account, cpus=cpus,
        memory_bytes=memory_bytes if memory_group else None, memory_group=memory_group,
        unified=groups[""][0] if "" in groups else None,
    )  # fmt: skip


def _account(groups: dict[str, tuple[Path, Path]], quota_group: Path) -> Path | None:
    """The cpuacct group of the same processes as a v1 quota group, if there is one."""
    if "cpuacct" not in groups:
        return None
    (cpu, cpu_mount), (account, account_mount) = groups["cpu"], groups["cpuacct"]
    if cpu.relative_to(cpu_mount) != account.relative_to(account_mount):
        return None
    return account_mount / quota_group.relative_to(cpu_mount)


def own_limits() -> CgroupLimits:
    try:
        return find_limits(Path("/proc/self/cgroup").read_text(), Path("/proc/self/mountinfo").read_text())
    except OSError:
        return CgroupLimits()


def usable_cpus(limits: CgroupLimits, online: frozenset[int]) -> frozenset[int]:
    """The cores we may run on; where no cpuset tells, what the scheduler says."""
    allowed = limits.cpus if limits.cpus is not None else frozenset(os.sched_getaffinity(0))
    return (allowed & online) or online


def binding(limits: CgroupLimits, cpus: int, memory_bytes: int) -> CgroupLimits:
    """Without the limits that are wider than the machine: there, the machine's own figures count."""
    if limits.cpu_cores is not None and limits.cpu_cores >= cpus:
        limits = replace(limits, cpu_cores=None, cpu_group=None, cpu_account=None)
    if limits.memory_bytes is not None and limits.memory_bytes >= memory_bytes:
        limits = replace(limits, memory_bytes=None, memory_group=None)
    return limits


def capacity_of(limits: CgroupLimits, cpus: int, memory_bytes: int, gpu_count: int = 0) -> Capacity:
    """The smaller of the machine and the limits."""
    cores = min(float(cpus), limits.cpu_cores) if limits.cpu_cores is not None else float(cpus)
    memory = min(memory_bytes, limits.memory_bytes) if limits.memory_bytes is not None else memory_bytes
    return Capacity(cpu_cores=cores, memory_bytes=memory, gpu_count=gpu_count)


def group_cpu_s(account: Path) -> float | None:
    """CPU time that a group has used since it was made."""
    v1 = _number(_read(account / "cpuacct.usage"))
    if v1 is not None:
        return v1 / 1e9
    for line in (_read(account / "cpu.stat") or "").splitlines():
        if line.startswith("usage_usec "):
            return int(line.split()[1]) / 1e6
    return None


def group_memory_bytes(group: Path) -> int | None:
    """Memory that a group holds and that could not simply be dropped: without its inactive file cache."""
    used = _number(_read(group / "memory.current"))
    key = "inactive_file"
    if used is None:
        used, key = _number(_read(group / "memory.usage_in_bytes")), "total_inactive_file"
    if used is None:
        return None
    for line in (_read(group / "memory.stat") or "").splitlines():
        name, _, value = line.partition(" ")
        if name == key:
            return max(0, used - int(value))
    return used


def group_pids(group: Path) -> set[int]:
    """Processes in a group and in those beneath it."""
    found: set[int] = set()
    for directory, _, _ in os.walk(group):
        found.update(int(word) for word in (_read(Path(directory) / "cgroup.procs") or "").split())
    return found
