# ruff: noqa: PTH208
"""What CRIU does not carry of a thread: the cores it keeps to, and its priority at the disks (x86_64).

Imported by the shim: standard library only, no pathlib.
"""

from __future__ import annotations

import ctypes
import os

_IOPRIO_SET, _IOPRIO_GET, _OF_THREAD = 251, 252, 1
_CLASS_SHIFT = 13
_libc = ctypes.CDLL(None)


def read(pids: list[int]) -> dict[str, list[list[int]]]:
    """By thread, as its own namespace knows it: [cores, [priority]], each empty where it is as for everybody."""
    found = {}
    everywhere = os.sched_getaffinity(0)
    for pid in pids:
        try:
            for tid in map(int, os.listdir(f"/proc/{pid}/task")):
                cores, priority = os.sched_getaffinity(tid), _libc.syscall(_IOPRIO_GET, _OF_THREAD, tid)
                mine = [sorted(cores) if cores < everywhere else [], [priority] if priority >> _CLASS_SHIFT > 0 else []]
                if any(mine):
                    found[str(tid)] = mine
        except OSError:
            continue  # it has just ended
    return found


def give(settings: dict[str, list[list[int]]]) -> None:
    """As far as this node has those cores, and lets us."""
    here = os.sched_getaffinity(0)
    for tid, (cores, priority) in settings.items():
        try:
            if cores and here.issuperset(cores):
                os.sched_setaffinity(int(tid), cores)
        except OSError:
            pass  # a thread that CRIU left out
        for one in priority:
            _libc.syscall(_IOPRIO_SET, _OF_THREAD, int(tid), one)
