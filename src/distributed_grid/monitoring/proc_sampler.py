"""Figures of every process, once per second, from raw /proc at a cost of a few milliseconds.

Each process keeps an open fd on its `stat`, read again with pread: half the cost of opening it anew, and such an fd
can never show a namesake (the kernel answers ESRCH once its process is gone). A text that has not changed is not
parsed again, which is most of them.
"""

from __future__ import annotations

import os
import resource
import time
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from distributed_grid.core.clock import Clock, SystemClock
from distributed_grid.core.process import CLOCK_TICKS_S
from distributed_grid.monitoring.snapshot import ProcessSample

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
WINDOW_S = 60.0
_RING_STEP_S = 5.0
_STAT_BYTES = 1024
#: Of a process with more threads, what these few waited is enough to tell.
MOST_THREADS = 64
_PF_KTHREAD = 0x00200000
#: A kernel thread cannot become anything else; it is looked at this seldom in case its pid was given away.
_KERNEL_EVERY = 16


@dataclass(slots=True, eq=False)
class Proc:
    """What the sampler keeps of one process."""

    pid: int
    fd: int  # -1: opened anew each time
    raw: bytes = b""
    start_ticks: int = 0
    ppid: int = 0
    session: int = 0
    tty_nr: int = 0
    comm: str = ""
    state: str = "?"
    threads: int = 1
    kernel: bool = False
    cpu_ticks: int = 0
    reaped_ticks: int = 0  # of children that ended and were waited for
    rss_bytes: int = 0
    peak_rss_bytes: int = 0
    shared_bytes: int = 0  # read again only when the resident size has changed
    shared_at_rss_bytes: int = -1
    #: Since the tick before; of a process first seen, since its start if that was after it, else nothing.
    cpu_delta_ticks: int = 0
    reaped_delta_ticks: int = 0
    #: (when, cpu_ticks, waited_ns) at changes, at least 5 s apart; the oldest is the last one before the window.
    ring: deque[tuple[float, int, int]] = field(default_factory=deque)

    @property
    def counts(self) -> bool:
        return not self.kernel and self.state not in "ZX"


@dataclass(frozen=True, slots=True)
class ProcessDetails:
    """What is dearer to read, for one process at a time; None where we may not."""

    argv: tuple[str, ...]
    read_bytes: int | None
    write_bytes: int | None
    peak_rss_bytes: int | None


class ProcSampler:
    """`tick()` once per second; between ticks the answers stay the same."""

    def __init__(
        self, *, proc: Path = Path("/proc"), clock: Clock | None = None, max_fds: int | None = None
    ) -> None:
        self._proc = str(proc)
        self._clock = clock or SystemClock()
        if max_fds is None:
            soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            max_fds = 4096 if soft == resource.RLIM_INFINITY else min(4096, soft // 4)
        self._max_fds = max_fds
        self._fds = 0
        self._ticks = 0
        self._at = 0.0
        self.elapsed_s = 0.0
        self._boot_ticks_before = 0.0
        self.procs: dict[int, Proc] = {}
        #: Those that ended between the last two ticks, as last seen.
        self.ended: list[Proc] = []

    def tick(self) -> None:
        """Look at every process once."""
        now = self._clock.monotonic()
        boot_ticks = _boot_ticks()
        self.elapsed_s = now - self._at if self._ticks else 0.0
        first = self._ticks == 0
        self._ticks += 1
        self._at = now
        procs, ended = self.procs, []
        pids = {int(name) for name in os.listdir(self._proc) if name.isdigit()}  # noqa: PTH208
        for pid in procs.keys() - pids:
            ended.append(self._forget(pid))
        pread = os.pread
        for pid in pids:
            known = procs.get(pid)
            if known is not None:
                if known.kernel and (pid + self._ticks) % _KERNEL_EVERY:
                    continue
                try:
                    raw = pread(known.fd, _STAT_BYTES, 0) if known.fd >= 0 else self._read_once(pid)
                except OSError:  # gone; whoever has the pid now is another
                    ended.append(self._forget(pid))
                    known = None
                else:
                    if raw == known.raw:
                        known.cpu_delta_ticks = known.reaped_delta_ticks = 0
                        continue
                    if self._update(known, raw, now):
                        continue
                    ended.append(self._forget(pid))
                    known = None
            fresh = self._open(pid)
            if fresh is not None:
                self._begin(fresh, now, None if first else self._boot_ticks_before)
        self.ended = ended
        self._boot_ticks_before = boot_ticks

    def samples(self, pids: Collection[int] | None = None) -> list[ProcessSample]:
        """The living processes of users (no kernel threads) as last seen, or those of them named."""
        now_ticks = _boot_ticks()
        found = []
        for proc in list(self.procs.values()):
            if not proc.counts or (pids is not None and proc.pid not in pids):
                continue
            try:  # asked anew: a process may have dropped its rights since
                uid = os.stat(f"{self._proc}/{proc.pid}").st_uid  # noqa: PTH116
            except OSError:
                continue
            sample = ProcessSample(
                pid=proc.pid, start_ticks=proc.start_ticks, ppid=proc.ppid, uid=uid, comm=proc.comm,
                state=proc.state, cpu_cores=self._cores(proc.cpu_delta_ticks), cpu_cores_1m=self._mean_cores(proc),
                cpu_wait_1m=self._mean_wait(proc), cpu_time_s=proc.cpu_ticks / CLOCK_TICKS_S, rss_bytes=proc.rss_bytes,
                peak_rss_bytes=proc.peak_rss_bytes, threads=proc.threads,
                age_s=max(0.0, (now_ticks - proc.start_ticks) / CLOCK_TICKS_S),
                session=proc.session, tty_nr=proc.tty_nr,
            )  # fmt: skip
            found.append(sample)
        return found

    def tree_cores(self, members: Iterable[Proc], ended: Iterable[Proc]) -> float:
        """Cores that a set of processes used since the tick before, those that ended within it too.

        A child that ended and was waited for is in its parent's reaped time with its whole life, of which what
        was seen of it before is taken off again. Nothing is below zero: not every parent waits.
        """
        own = reaped = 0
        for proc in members:
            own += proc.cpu_delta_ticks
            reaped += proc.reaped_delta_ticks
        seen = sum(proc.cpu_ticks + proc.reaped_ticks for proc in ended)
        return self._cores(own + max(0, reaped - seen))

    def close(self) -> None:
        for pid in list(self.procs):
            self._forget(pid)

    def _cores(self, ticks: int) -> float:
        return ticks / CLOCK_TICKS_S / self.elapsed_s if self.elapsed_s > 0 else 0.0

    def _mean_cores(self, proc: Proc) -> float:
        """Over the last minute, or since first seen."""
        then, ticks, _ = self._window(proc)
        span_s = min(WINDOW_S, self._at - then)
        return (proc.cpu_ticks - ticks) / CLOCK_TICKS_S / span_s if span_s > 0 else 0.0

    def _mean_wait(self, proc: Proc) -> float:
        """Cores it was ready to use in the last minute and did not get: others had them."""
        then, _, waited = self._window(proc)
        until, _, now = proc.ring[-1]
        return max(0, now - waited) / 1e9 / (until - then) if until > then and self._at - until < WINDOW_S else 0.0

    def _window(self, proc: Proc) -> tuple[float, int, int]:
        """The last entry before the last minute, or the first of all."""
        found = proc.ring[0]
        for entry in proc.ring:
            if entry[0] > self._at - WINDOW_S:
                break
            found = entry
        return found

    def _read_once(self, pid: int) -> bytes:
        fd = os.open(f"{self._proc}/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.read(fd, _STAT_BYTES)
        finally:
            os.close(fd)

    def _open(self, pid: int) -> Proc | None:
        """A process met for the first time; None if it is gone already."""
        try:
            fd = os.open(f"{self._proc}/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        proc = Proc(pid, fd)
        self._fds += 1
        try:
            parsed = _parse(proc, os.pread(fd, _STAT_BYTES, 0))
        except OSError:
            parsed = False
        if not parsed or proc.kernel or self._fds > self._max_fds:
            self._close_fd(proc)
        return proc if parsed else None

    def _begin(self, proc: Proc, now: float, tick_before: float | None) -> None:
        self.procs[proc.pid] = proc
        ours = tick_before is not None and proc.start_ticks >= tick_before - 1
        proc.cpu_delta_ticks = proc.cpu_ticks if ours else 0
        proc.reaped_delta_ticks = proc.reaped_ticks if ours else 0
        born = now - max(0.0, (_boot_ticks() - proc.start_ticks) / CLOCK_TICKS_S)
        proc.ring.append((born, 0, 0) if ours else (now, proc.cpu_ticks, self._waited_ns(proc)))

    def _update(self, proc: Proc, raw: bytes, now: float) -> bool:
        """Take a changed text in; False if it is another process's."""
        start, cpu, reaped = proc.start_ticks, proc.cpu_ticks, proc.reaped_ticks
        if not _parse(proc, raw) or proc.start_ticks != start:
            proc.start_ticks, proc.cpu_ticks, proc.reaped_ticks = start, cpu, reaped
            return False
        proc.cpu_delta_ticks = max(0, proc.cpu_ticks - cpu)
        proc.reaped_delta_ticks = max(0, proc.reaped_ticks - reaped)
        ring = proc.ring
        if proc.cpu_delta_ticks and now - ring[-1][0] >= _RING_STEP_S:
            ring.append((now, proc.cpu_ticks, self._waited_ns(proc)))
            while len(ring) > 2 and ring[1][0] <= now - WINDOW_S:
                ring.popleft()
        return True

    def _waited_ns(self, proc: Proc) -> int:
        """How long its threads have stood in line for a processor; 0 where the kernel does not count that."""
        if proc.kernel:
            return 0
        base = f"{self._proc}/{proc.pid}"
        try:
            places = [base] if proc.threads == 1 else [f"{base}/task/{tid}" for tid in os.listdir(f"{base}/task")]  # noqa: PTH208
        except OSError:
            return 0
        waited = 0
        for place in places[:MOST_THREADS]:
            try:
                with open(f"{place}/schedstat", "rb") as file:
                    waited += int(file.read(64).split()[1])
            except (OSError, IndexError, ValueError):
                continue
        return waited

    def _close_fd(self, proc: Proc) -> None:
        if proc.fd >= 0:
            os.close(proc.fd)
            proc.fd = -1
            self._fds -= 1

    def _forget(self, pid: int) -> Proc:
        proc = self.procs.pop(pid)
        self._close_fd(proc)
        return proc


def _boot_ticks() -> float:
    """Now, on the scale of start times (time since boot, sleep included)."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) * CLOCK_TICKS_S


def _parse(proc: Proc, raw: bytes) -> bool:
    """Fill in from the text of /proc/PID/stat; the name may hold spaces and brackets."""
    close_at = raw.rfind(b")")
    if close_at < 0:
        return False
    f = raw[close_at + 2 :].split(None, 22)
    if len(f) < 22:
        return False
    proc.raw = raw
    proc.comm = raw[raw.index(b"(") + 1 : close_at].decode(errors="replace")
    proc.state = f[0].decode()
    proc.ppid = int(f[1])
    proc.session = int(f[3])
    proc.tty_nr = int(f[4])
    proc.kernel = bool(int(f[6]) & _PF_KTHREAD)
    proc.cpu_ticks = int(f[11]) + int(f[12])
    proc.reaped_ticks = int(f[13]) + int(f[14])
    proc.threads = int(f[17])
    proc.start_ticks = int(f[19])
    proc.rss_bytes = int(f[21]) * PAGE_BYTES
    if proc.rss_bytes > proc.peak_rss_bytes:
        proc.peak_rss_bytes = proc.rss_bytes
    return True


def memory_shares(procs: Iterable[Proc]) -> int:
    """Bytes that processes hold together: their private pages, and the largest shared part once."""
    private = shared = 0
    for proc in procs:
        if proc.shared_at_rss_bytes != proc.rss_bytes:
            proc.shared_bytes = _shared_bytes(proc.pid)
            proc.shared_at_rss_bytes = proc.rss_bytes
        private += max(0, proc.rss_bytes - proc.shared_bytes)
        shared = max(shared, proc.shared_bytes)
    return private + shared


def _shared_bytes(pid: int) -> int:
    """Resident pages of files and shared memory; 0 for one that is gone."""
    try:
        fd = os.open(f"/proc/{pid}/statm", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return 0
    try:
        return int(os.read(fd, 256).split()[2]) * PAGE_BYTES
    except (OSError, IndexError):  # gone in between
        return 0
    finally:
        os.close(fd)


def read_details(pid: int, proc: Path = Path("/proc")) -> ProcessDetails | None:
    """Command line, io and the kernel's own peak; None if the process is gone."""
    base = proc / str(pid)
    try:
        argv = tuple(part.decode(errors="replace") for part in (base / "cmdline").read_bytes().split(b"\0")[:-1])
    except OSError:
        return None
    io = _fields(base / "io")
    peak = _fields(base / "status").get("VmHWM")
    return ProcessDetails(
        argv=argv, read_bytes=io.get("read_bytes"), write_bytes=io.get("write_bytes"),
        peak_rss_bytes=peak * 1024 if peak is not None else None,
    )  # fmt: skip


def _fields(path: Path) -> dict[str, int]:
    """`name: number …` lines; what may not be read is empty."""
    found: dict[str, int] = {}
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return found
    for line in lines:
        name, _, value = line.partition(":")
        words = value.split()
        if words and words[0].isdigit():
            found[name] = int(words[0])
    return found
