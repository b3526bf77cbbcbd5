"""A process named so that a reused pid is never taken for it, read straight from /proc."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

CLOCK_TICKS_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class ProcessId:
    """`(pid, start time)`: start time in clock ticks since boot, field 22 of /proc/PID/stat."""

    pid: int
    start_ticks: int

    def is_alive(self) -> bool:
        """Whether that very process is there and not a zombie."""
        stat = read_stat(self.pid)
        return stat is not None and stat.start_ticks == self.start_ticks and stat.state not in "ZX"

    def signal(self, number: int) -> bool:
        """Send a signal to that very process (by pidfd, so never to a namesake); False if it is gone."""
        try:
            fd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return False
        try:
            if not self.is_alive():
                return False
            import signal as signals

            signals.pidfd_send_signal(fd, number)
        except ProcessLookupError:
            return False
        finally:
            os.close(fd)
        return True


@dataclass(frozen=True, slots=True)
class Stat:
    """The fields of /proc/PID/stat that we use."""

    pid: int
    comm: str
    state: str
    ppid: int
    pgrp: int
    session: int
    tty_nr: int
    utime_ticks: int
    stime_ticks: int
    nice: int
    threads: int
    start_ticks: int
    rss_pages: int

    @property
    def id(self) -> ProcessId:
        return ProcessId(self.pid, self.start_ticks)


def parse_stat(line: str) -> Stat:
    open_at, close_at = line.index("("), line.rindex(")")
    f = line[close_at + 2 :].split()
    return Stat(
        pid=int(line[:open_at]), comm=line[open_at + 1 : close_at], state=f[0], ppid=int(f[1]), pgrp=int(f[2]),
        session=int(f[3]), tty_nr=int(f[4]), utime_ticks=int(f[11]), stime_ticks=int(f[12]), nice=int(f[16]),
        threads=int(f[17]), start_ticks=int(f[19]), rss_pages=int(f[21]),
    )  # fmt: skip


def read_stat(pid: int) -> Stat | None:
    try:
        return parse_stat(Path(f"/proc/{pid}/stat").read_text(errors="replace"))
    except (OSError, ValueError, IndexError):
        return None


def process_id(pid: int) -> ProcessId | None:
    stat = read_stat(pid)
    return stat.id if stat else None


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def children_of(pid: int) -> list[int]:
    """Direct children, from every thread of it (CONFIG_PROC_CHILDREN)."""
    found: list[int] = []
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += [int(word) for word in (task / "children").read_text().split()]
    except OSError:
        pass
    return found


def tree_of(pid: int) -> list[int]:
    """The process and all its descendants, parents before children."""
    found = [pid]
    for one in found:
        found += children_of(one)
    return found
