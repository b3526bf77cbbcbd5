"""The processes of one Ray node: found by their marker, recorded with start times, ended and nothing else."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from distributed_grid.cluster.ray_node import MARKER, TASK_MARKER
from distributed_grid.core.process import ProcessId, read_stat


@dataclass(frozen=True, slots=True)
class NodeProcess:
    id: ProcessId
    comm: str


def environ_of(pid: int) -> dict[str, str]:
    """A process's environment; empty where it is gone, or not ours to read."""
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (part.partition(b"=") for part in raw.split(b"\0") if part)
    return {key.decode(errors="replace"): value.decode(errors="replace") for key, _, value in pairs}


def _own_line() -> set[int]:
    """This process and all above it: never to be ended, even when they run inside Ray."""
    line: set[int] = set()
    pid = os.getpid()
    while pid > 0 and pid not in line:
        line.add(pid)
        stat = read_stat(pid)
        pid = stat.ppid if stat else 0
    return line


def find_marked(marker: str) -> list[NodeProcess]:
    """All live processes that carry the marker and are no user's task."""
    found: list[NodeProcess] = []
    spared = _own_line()
    needle = f"{MARKER}={marker}".encode()
    for entry in os.listdir("/proc"):  # noqa: PTH208 - thousands of entries, names only
        if not entry.isdigit() or int(entry) in spared:
            continue
        try:
            parts = Path(f"/proc/{entry}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if needle not in parts or any(part.startswith(TASK_MARKER.encode() + b"=") for part in parts):
            continue
        stat = read_stat(int(entry))
        if stat is not None and stat.state not in "ZX":
            found.append(NodeProcess(stat.id, stat.comm))
    return found


def only_ours(recorded: Iterable[ProcessId]) -> list[ProcessId]:
    """Of what was recorded, what is still that very process and no user's task."""
    spared = _own_line()
    return [
        one for one in recorded if one.pid not in spared and one.is_alive() and TASK_MARKER not in environ_of(one.pid)
    ]


def end_processes(marker: str, recorded: Iterable[ProcessId], grace_s: float) -> int:
    """End the node: TERM, then KILL after the grace; returns how many processes there were.

    Scans again until nothing is left, because a raylet may start a worker while it is being ended.
    """
    recorded = list(recorded)
    seen: set[ProcessId] = set()
    termed: set[ProcessId] = set()
    deadline = time.monotonic() + grace_s
    last = deadline + 15.0
    while True:
        left = {one.id for one in find_marked(marker)} | set(only_ours(recorded))
        seen |= left
        now = time.monotonic()
        if not left or now > last:
            return len(seen)
        for one in left:
            if now > deadline:
                one.signal(signal.SIGKILL)
            elif one not in termed:
                one.signal(signal.SIGTERM)
                termed.add(one)
        time.sleep(0.05)


def ray_node_id(processes: Iterable[NodeProcess]) -> str:
    """The id Ray knows the node by: it stands on the raylet's command line."""
    for one in processes:
        if one.comm == "raylet":
            try:
                words = Path(f"/proc/{one.id.pid}/cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            for word in words:
                if word.startswith(b"--node_id="):
                    return word.partition(b"=")[2].decode()
    return ""
