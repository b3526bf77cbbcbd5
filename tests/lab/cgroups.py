"""A cgroup per lab host in every hierarchy of the machine, v1, v2 or both, with limits where they can be set."""

from __future__ import annotations

import os
from pathlib import Path

from tests.lab.init import cgroup_mounts
from tests.lab.waiting import wait_until


def _own_path(controllers: str) -> str:
    """Where this process is in a hierarchy; `controllers` as the mount names them, empty for v2."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        if set(names.split(",")) == set(controllers.split(",")):
            return path
    return "/"


class HostCgroups:
    """`gridlab-<lab>/<host>` below this process's own cgroup, so that what limits us limits the hosts too."""

    def __init__(self, lab: str, host: str) -> None:
        self.groups: list[Path] = []
        self.limited: dict[str, str] = {}
        for point, kind, controllers in cgroup_mounts():
            own = Path(point, _own_path(controllers).lstrip("/"))
            parent = (own if own.is_dir() else Path(point)) / f"gridlab-{lab}"
            if not os.access(parent.parent, os.W_OK):
                continue
            try:
                parent.mkdir(exist_ok=True)
                (parent / host).mkdir(exist_ok=True)
            except OSError:
                continue  # a read-only hierarchy: the host stays where we are
            if kind == "cgroup2":
                self._delegate(parent)
            elif "cpuset" in controllers.split(","):
                self._inherit_cpuset(parent)
                self._inherit_cpuset(parent / host)
            self._weigh(parent)
            self.groups.append(parent / host)

    @staticmethod
    def _weigh(group: Path) -> None:
        """A group counts as one process where cores are shared out, and a whole lab as one would starve."""
        for name, value in (("cpu.shares", "8192"), ("cpu.weight", "800")):
            if (group / name).exists():
                (group / name).write_text(value)

    @staticmethod
    def _inherit_cpuset(group: Path) -> None:
        """A new v1 cpuset is empty and takes no process."""
        for name in ("cpuset.cpus", "cpuset.mems"):
            (group / name).write_text((group.parent / name).read_text())

    @staticmethod
    def _delegate(parent: Path) -> None:
        for group in (parent.parent, parent):
            for controller in (group / "cgroup.controllers").read_text().split():
                try:
                    (group / "cgroup.subtree_control").write_text(f"+{controller}")
                except OSError:
                    continue  # not ours to hand on: no limits of that kind

    def limit(self, cpus: float | None, memory_mb: int | None) -> None:
        """Set what is asked for; a limit that this machine cannot set is an error."""
        if cpus is not None:
            quota_us = int(cpus * 100_000)
            self._write("cpu", {"cpu.cfs_quota_us": str(quota_us), "cpu.max": f"{quota_us} 100000"})
        if memory_mb is not None:
            size = str(memory_mb << 20)
            self._write("memory", {"memory.limit_in_bytes": size, "memory.max": size})

    def _write(self, what: str, values: dict[str, str]) -> None:
        for group in self.groups:
            for name, value in values.items():
                if (group / name).exists():
                    (group / name).write_text(value)
                    self.limited[what] = str(group / name)
                    return
        raise RuntimeError(f"no cgroup hierarchy here lets a {what} limit be set")

    def remove(self) -> None:
        """Take the groups away, also those that programs made below; their processes must be gone."""
        for group in self.groups:
            wait_until(lambda at=group: _removed(at), 30, f"the cgroup {group} to empty")  # type: ignore[misc]
            try:
                group.parent.rmdir()
            except OSError:
                pass  # another host of this lab is still in it
        self.groups = []


def remove_empty(lab: str) -> None:
    """Take away what a lab that crashed left; its processes are gone, or it stays."""
    for point, _, _ in cgroup_mounts():
        for group in Path(point).rglob(f"gridlab-{lab}"):
            _removed(group)


def _removed(group: Path) -> bool:
    for directory, _, _ in os.walk(group, topdown=False):
        try:
            os.rmdir(directory)  # noqa: PTH106
        except FileNotFoundError:
            continue
        except OSError:
            return False
    return True
