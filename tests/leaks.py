"""What tests leave behind: processes, mounts, sockets, cgroups, directories, and this process's threads and fds.

A process is ours by a mark in its environment, by an ancestor, or by the run's own directory in its command line, so
that somebody else's processes on the machine never count.
"""

from __future__ import annotations

import gc
import os
import signal
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path

from distributed_grid.core.process import ProcessId, Stat, read_stat
from tests.lab.init import cgroup_mounts

RUN_ID = uuid.uuid4().hex[:6]
MARK = f"run-{RUN_ID}"
KEPT_MARK = f"{MARK}.kept"  # of clusters that serve the whole session
RUN_DIRECTORY = Path("/tmp") / f"gt-{RUN_ID}"  # short: unix sockets below it have 107 bytes for their path
GRACE_S = 20.0

_HARMLESS_FDS = ("/dev/null", "/dev/urandom", "/dev/random", "/dev/tty", "/dev/pts/", "/proc/")
_HARMLESS_COMMANDS = ("multiprocessing.resource_tracker",)

Leaks = dict[tuple[str, object], str]


class Kept:
    """What the session's own clusters hold until its end."""

    def __init__(self) -> None:
        self.fds: set[tuple[int, str]] = set()
        self.pids: list[Callable[[], Iterable[int]]] = []  # each tells its processes of the moment
        self.names: set[str] = set()  # parts of names of directories, cgroups, mounts

    def keep(
        self,
        *,
        fds: Iterable[int] = (),
        pids: Callable[[], Iterable[int]] | None = None,
        names: Iterable[str] = (),
    ) -> None:
        wanted = set(fds)
        self.fds |= {(fd, target) for fd, target in open_fds().items() if fd in wanted}
        self.pids += [pids] if pids else []
        self.names |= set(names)

    def clear(self) -> None:
        self.__init__()  # type: ignore[misc]


KEPT = Kept()


def open_fds() -> dict[int, str]:
    found: dict[int, str] = {}
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115
        except OSError:
            continue  # the one that listed them
    return found


def our_processes(with_kept: bool) -> dict[ProcessId, str]:
    """The live processes of this run, each with its command line."""
    stats: dict[int, Stat] = {}
    for name in os.listdir("/proc"):  # noqa: PTH208
        if name.isdigit() and (stat := read_stat(int(name))) is not None:
            stats[stat.pid] = stat
    exempt = {os.getpid()}
    if not with_kept:
        exempt |= {pid for pids in KEPT.pids for pid in pids()}
    found: dict[ProcessId, str] = {}
    for pid, stat in stats.items():
        if pid in exempt or stat.state in "ZX":
            continue
        environment, command = _read(pid, "environ"), _read(pid, "cmdline").replace("\0", " ").strip()
        if any(word in command for word in _HARMLESS_COMMANDS):
            continue
        marked = f"GRID_TEST_RUN={MARK}" in environment or f"{RUN_DIRECTORY}/" in command
        kept = f"GRID_TEST_RUN={KEPT_MARK}" in environment or any(name in command for name in KEPT.names)
        if kept and not with_kept:
            continue
        if marked or _descends(pid, os.getpid(), stats):
            found[stat.id] = f"pid {pid}: {command or stat.comm}"
    return found


def _descends(pid: int, ancestor: int, stats: dict[int, Stat]) -> bool:
    seen: set[int] = set()
    while pid in stats and pid not in seen:
        seen.add(pid)
        pid = stats[pid].ppid
        if pid == ancestor:
            return True
    return False


def _read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def _named() -> Leaks:
    """Things that outlive processes, found by the run's name in theirs."""
    found: Leaks = {}
    ours = (str(RUN_DIRECTORY), RUN_ID, f"gridlab-{os.getpid()}-")
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        point = line.split(" ")[4]
        if any(name in point for name in ours):
            found["mount", point] = point
    for name in os.listdir("/run/netns") if Path("/run/netns").is_dir() else ():  # noqa: PTH208
        if any(part in name for part in ours):
            found["network namespace", name] = name
    for line in Path("/proc/net/unix").read_text(errors="replace").splitlines()[1:]:
        words = line.split(" ")
        if any(name in words[-1] for name in ours):
            found["unix socket", words[-1]] = words[-1]
    for point, _, _ in cgroup_mounts():
        for directory in Path(point).rglob(f"gridlab-{os.getpid()}-*"):
            found["cgroup", str(directory)] = str(directory)
    of_labs = Path(tempfile.gettempdir()).glob(f"gridlab-{os.getpid()}-*")
    for directory in [*RUN_DIRECTORY.glob("*"), *of_labs]:
        if directory.name != "user":
            found["directory", str(directory)] = str(directory)
    return found


def snapshot(with_kept: bool = False) -> Leaks:
    """Everything of ours that is there now."""
    found = _named()
    if not with_kept:
        found = {key: name for key, name in found.items() if not any(part in name for part in KEPT.names)}
    for process, command in our_processes(with_kept).items():
        found["process", process] = command
    for thread in threading.enumerate():
        found["thread", thread] = thread.name
    for fd, target in open_fds().items():
        if not target.startswith(_HARMLESS_FDS) and (with_kept or (fd, target) not in KEPT.fds):
            found["file descriptor", (fd, target)] = f"{fd} -> {target}"
    return found


def left_since(before: Leaks, with_kept: bool = False, grace_s: float = GRACE_S) -> list[str]:
    """What is there now and was not before, each with its name, once it had time to go by itself."""
    deadline = time.monotonic() + grace_s
    while True:
        new = {key: name for key, name in snapshot(with_kept).items() if key not in before}
        if not new or time.monotonic() > deadline:
            break
        gc.collect()  # a closed loop or socket may only wait for that
        time.sleep(0.1)
    for kind, thing in new:
        if kind == "process" and isinstance(thing, ProcessId):
            thing.signal(signal.SIGKILL)  # it must not harm the tests that follow
    return [f"{kind}: {name}" for (kind, _), name in sorted(new.items(), key=lambda item: (item[0][0], item[1]))]
