"""A control group per task, version 1 or 2, where we may make one: memory and CPU limits, and the freezer."""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

V1_CONTROLLERS = ("memory", "cpu", "freezer")
CPU_PERIOD_US = 100_000
PARENT = "grid"
SHIMS = "shims"  # the shims' own group: outside a task's limits, and outside the service that started the agent


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """A place where a group of ours can be made: one version 1 controller, or the version 2 tree."""

    controller: str  # "" is version 2
    base: Path

    def group(self, name: str) -> Path:
        return self.base / PARENT / name


@dataclass(frozen=True, slots=True)
class CgroupLimits:
    memory_bytes: int = 0  # 0: no limit
    cpu_cores: float = 0.0
    nice: int = 0  # between groups their weight counts, not the niceness of what is in them


def find_hierarchies(mountinfo: str, own_cgroups: str) -> list[Hierarchy]:
    """From /proc/self/mountinfo and /proc/self/cgroup. Below our own group, so that a container's limits still hold;
    in version 2 beside it, because a group with processes cannot have limited children."""
    own: dict[str, str] = {}
    for line in own_cgroups.splitlines():
        _, controllers, path = line.split(":", 2)
        own.update(dict.fromkeys(controllers.split(","), path))
    found: dict[str, Hierarchy] = {}
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        kind, _, options = right.split(" ", 2)
        root, mount_point = left.split(" ")[3:5]
        names = [""] if kind == "cgroup2" else options.split(",") if kind == "cgroup" else []
        for name in names:
            if name in own and (name == "" or name in V1_CONTROLLERS) and name not in found:
                path = own[name]
                if root != "/":  # the mount shows only a part of the tree
                    path = path[len(root) :] if path.startswith(root) else "/"
                if name == "":
                    path = str(Path(path).parent)
                found[name] = Hierarchy(name, Path(mount_point) / path.strip("/"))
    v1 = [found[name] for name in V1_CONTROLLERS if name in found]
    return v1 or ([found[""]] if "" in found else [])


def our_hierarchies() -> list[Hierarchy]:
    try:
        return find_hierarchies(
            Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text()
        )
    except (OSError, ValueError):
        return []


def create(
    hierarchies: list[Hierarchy], name: str, limits: CgroupLimits, shared: str = ""
) -> tuple[list[Path], list[Path], bool]:
    """The task's groups, the shims' groups, and whether the memory limit holds; empty where we may not.

    All tasks with the same `shared` have their groups below one of that name, which has the memory limit as well.
    """
    task: list[Path] = []
    shims: list[Path] = []
    limited = False
    for hierarchy in hierarchies:
        try:
            _make(hierarchy, SHIMS)
            group = _make(hierarchy, f"{shared}/{name}" if shared else name)
        except OSError:
            continue
        shims.append(hierarchy.group(SHIMS))
        task.append(group)
        # The shared one after it has a group below: until then whoever leaves it may take it away.
        holds = [_set(group, hierarchy.controller, limits)]
        if shared:
            holds.append(_set(group.parent, hierarchy.controller, CgroupLimits(limits.memory_bytes)))
        limited = limited or all(holds)
    return task, shims, limited


def _set(group: Path, controller: str, limits: CgroupLimits) -> bool:
    """Whether the memory limit holds."""
    done = {file: _put(group / file, text) for file, text in _settings(controller, limits)}
    return done.get("memory.limit_in_bytes", False) or done.get("memory.max", False)


def _settings(controller: str, limits: CgroupLimits) -> Iterator[tuple[str, str]]:
    quota = str(max(1000, round(limits.cpu_cores * CPU_PERIOD_US)))
    part = 0.8**limits.nice  # as the kernel weighs one step of niceness
    if limits.memory_bytes and controller == "memory":
        yield "memory.limit_in_bytes", str(limits.memory_bytes)
        yield "memory.memsw.limit_in_bytes", str(limits.memory_bytes)  # else it would only swap
    if limits.memory_bytes and controller == "":
        yield "memory.max", str(limits.memory_bytes)
        yield "memory.swap.max", "0"
    if limits.cpu_cores and controller == "cpu":
        yield "cpu.cfs_period_us", str(CPU_PERIOD_US)
        yield "cpu.cfs_quota_us", quota
    if limits.cpu_cores and controller == "":
        yield "cpu.max", f"{quota} {CPU_PERIOD_US}"
    if limits.nice and controller == "cpu":
        yield "cpu.shares", str(round(1024 * part))
    if limits.nice and controller == "":
        yield "cpu.weight", str(max(1, round(100 * part)))


def _make(hierarchy: Hierarchy, name: str) -> Path:
    group = hierarchy.group(name)
    for _ in range(5):  # another agent may be removing the empty parent at this moment
        try:
            group.parent.mkdir(parents=True, exist_ok=True)
            if hierarchy.controller == "":
                for parent in dict.fromkeys((hierarchy.base, hierarchy.base / PARENT, group.parent)):
                    for controller in ("memory", "cpu"):
                        _put(parent / "cgroup.subtree_control", f"+{controller}")
            group.mkdir(exist_ok=True)
            return group
        except FileNotFoundError:
            continue
    raise OSError(errno.ENOENT, "cannot make a control group", str(group))


def destroy(groups: list[Path], limit_s: float = 1.0) -> None:
    """Remove a task's groups, and ours above them once they are empty. A dying process may hold one a moment longer."""
    deadline = time.monotonic() + limit_s
    for group in groups:
        while not _rmdir(group) and time.monotonic() < deadline:
            time.sleep(0.01)
        ours = group.parent
        if ours.name != PARENT:  # shared with other tasks
            _rmdir(ours)
            ours = ours.parent
        if _rmdir(ours / SHIMS):
            _rmdir(ours)


def _rmdir(path: Path) -> bool:
    """True unless it is still in use."""
    try:
        path.rmdir()
    except OSError as error:
        return error.errno != errno.EBUSY
    return True


def _put(path: Path, text: str) -> bool:
    try:
        path.write_text(text)
    except OSError:
        return False
    return True
