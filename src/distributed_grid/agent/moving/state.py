"""The state file of one side of a move, and the processes named in it."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from distributed_grid.core.process import ProcessId, process_id, read_stat, tree_of


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Whole or not at all, readable by us only."""
    temporary = path.with_name(f"{path.name}.tmp{os.getpid()}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(fd, "w") as file:
        json.dump(data, file)
    temporary.rename(path)


def read_json(path: Path) -> dict[str, Any] | None:
    try:
        return dict(json.loads(path.read_text()))
    except (FileNotFoundError, NotADirectoryError):
        return None


class State:
    """A dict on disk: every change is there before the next step."""

    def __init__(self, path: Path, **first: Any) -> None:
        self.path = path
        self.data: dict[str, Any] = read_json(path) or {}
        self.data |= first

    def set(self, **changes: Any) -> None:
        self.data |= changes
        write_json(self.path, self.data)

    def __getitem__(self, key: str) -> Any:
        return self.data[key]


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Between the mover that begins and whoever calls it off: one sees what the other did."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def identity(pid: int) -> dict[str, int]:
    found = process_id(pid)
    return {"pid": pid, "start_ticks": found.start_ticks if found else 0}


def named(data: dict[str, Any] | None) -> ProcessId | None:
    return ProcessId(data["pid"], data["start_ticks"]) if data else None


def inner_pid(pid: int) -> int:
    """Its pid as it sees itself, in its own namespace."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("NSpid:"):
            return int(line.split()[-1])
    return pid


def wait_gone(process: ProcessId, limit_s: float) -> bool:
    deadline = time.monotonic() + limit_s
    while process.is_alive():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


def tracer_of(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return int(text.split("TracerPid:")[1].split()[0])


def live_tree(root: ProcessId) -> list[int]:
    """The tree without its zombies; empty if the root is gone or another has its pid."""
    if not root.is_alive():
        return []
    return [pid for pid in tree_of(root.pid) if (stat := read_stat(pid)) is not None and stat.state not in "ZX"]


def thread_states(pid: int) -> set[str]:
    states = set()
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            states.add((task / "stat").read_text().rpartition(")")[2].split()[0])
    except OSError:
        pass
    return states


def wake_is_due(pid: int) -> bool:
    """Whether somebody sent it a SIGCONT that it cannot take: it is traced, else it would run by now."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    waiting = [int(line.split()[1], 16) for line in lines if line.startswith(("SigPnd:", "ShdPnd:"))]
    return any(mask >> signal.SIGCONT - 1 & 1 for mask in waiting)


def cpu_ticks(pids: list[int]) -> int:
    total = 0
    for pid in pids:
        stat = read_stat(pid)
        total += stat.utime_ticks + stat.stime_ticks if stat else 0
    return total


def resume(root: ProcessId, stopped_before: list[int]) -> int:
    """SIGCONT to the whole tree, children first so that no parent sees a stopped child; how many got it."""
    told = 0
    for pid in reversed(live_tree(root)):
        if inner_pid(pid) in stopped_before:
            continue
        try:
            os.kill(pid, signal.SIGCONT)
            told += 1
        except ProcessLookupError:
            pass
    return told
