from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from distributed_grid.core.clock import ManualClock
from distributed_grid.core.process import CLOCK_TICKS_S, read_stat
from distributed_grid.monitoring.proc_sampler import PAGE_BYTES, ProcSampler, memory_shares, read_details

LIMIT_S = 60.0


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.05)


@contextmanager
def child(code: str) -> Iterator[subprocess.Popen[str]]:
    """A Python that has said `ready`."""
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", f"print('ready', flush=True)\n{code}"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate(timeout=LIMIT_S)


def open_fds() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def stat_text(pid: int, *, start: int, cpu: int = 0, reaped: int = 0, rss: int = 1, flags: int = 0) -> str:
    return f"{pid} (a (b) c) S 1 {pid} {pid} 0 -1 {flags} 0 0 0 0 {cpu} 0 {reaped} 0 20 0 3 0 {start} 9 {rss} 1 2\n"


class FakeProc:
    """A directory that looks like /proc; without cached fds, since only the real one tells of the dead."""

    def __init__(self, root: Path) -> None:
        self.root, self.clock = root, ManualClock()
        self.sampler = ProcSampler(proc=root, clock=self.clock, max_fds=0)

    def put(self, pid: int, **fields: int) -> None:
        (self.root / str(pid)).mkdir(exist_ok=True)
        (self.root / str(pid) / "stat").write_text(stat_text(pid, **fields))

    def drop(self, pid: int) -> None:
        (self.root / str(pid) / "stat").unlink()
        (self.root / str(pid)).rmdir()


def test_figures_from_recorded_text(tmp_path: Path) -> None:
    fake = FakeProc(tmp_path)
    fake.put(10, start=5, cpu=100, rss=7)
    fake.put(11, start=6, flags=0x00200000)
    fake.sampler.tick()
    first = fake.sampler.samples()
    assert [(s.pid, s.comm, s.cpu_cores, s.rss_bytes, s.threads) for s in first] == [
        (10, "a (b) c", 0.0, 7 * PAGE_BYTES, 3)
    ]
    fake.clock.advance(2.0)
    fake.put(10, start=5, cpu=100 + CLOCK_TICKS_S, rss=3)
    fake.sampler.tick()
    (seen,) = fake.sampler.samples()
    assert (seen.cpu_cores, seen.rss_bytes, seen.peak_rss_bytes) == (0.5, 3 * PAGE_BYTES, 7 * PAGE_BYTES)
    fake.clock.advance(1.0)
    fake.sampler.tick()
    assert fake.sampler.samples()[0].cpu_cores == 0.0


def test_mean_over_the_last_minute(tmp_path: Path) -> None:
    fake = FakeProc(tmp_path)
    fake.put(10, start=5)
    fake.sampler.tick()
    for second in range(1, 121):  # half a core for a minute, then nothing
        fake.clock.advance(1.0)
        fake.put(10, start=5, cpu=min(second, 60) * CLOCK_TICKS_S // 2)
        fake.sampler.tick()
        if second == 60:
            assert fake.sampler.samples()[0].cpu_cores_1m == pytest.approx(0.5, abs=0.01)
        if second == 90:
            assert fake.sampler.samples()[0].cpu_cores_1m == pytest.approx(0.25, abs=0.05)
    assert fake.sampler.samples()[0].cpu_cores_1m == pytest.approx(0.0, abs=0.05)
    assert len(fake.sampler.procs[10].ring) <= 14


def test_a_reused_pid_is_a_new_process(tmp_path: Path) -> None:
    fake = FakeProc(tmp_path)
    fake.put(10, start=5, cpu=500, rss=100)
    fake.sampler.tick()
    fake.put(10, start=99, cpu=700, rss=1)
    fake.clock.advance(1.0)
    fake.sampler.tick()
    (seen,) = fake.sampler.samples()
    assert (seen.start_ticks, seen.cpu_cores, seen.peak_rss_bytes) == (99, 0.0, PAGE_BYTES)
    assert [(p.pid, p.start_ticks, p.cpu_ticks) for p in fake.sampler.ended] == [(10, 5, 500)]


def test_damaged_text_and_vanishing_processes_are_no_harm(tmp_path: Path) -> None:
    fake = FakeProc(tmp_path)
    fake.put(10, start=5)
    (tmp_path / "12").mkdir()
    (tmp_path / "13").mkdir()
    (tmp_path / "13/stat").write_text("13 (cut")
    fake.sampler.tick()
    assert list(fake.sampler.procs) == [10]
    fake.drop(10)
    fake.sampler.tick()
    assert not fake.sampler.procs and [p.pid for p in fake.sampler.ended] == [10]


def test_a_child_that_ended_counts_once(tmp_path: Path) -> None:
    fake = FakeProc(tmp_path)
    fake.put(10, start=5)
    fake.put(11, start=6, cpu=100)
    fake.sampler.tick()
    fake.clock.advance(1.0)
    fake.drop(11)  # it used 150 in all, of which 100 were seen before
    fake.put(10, start=5, cpu=10, reaped=150)
    fake.sampler.tick()
    cores = fake.sampler.tree_cores(fake.sampler.procs.values(), fake.sampler.ended)
    assert cores == pytest.approx(60 / CLOCK_TICKS_S)


def test_a_busy_child_is_seen_truly() -> None:
    sampler = ProcSampler()
    with child("import sys\nblock = b'x' * (64 << 20)\nwhile True: pass") as busy:
        sampler.tick()
        before = sampler.procs[busy.pid].cpu_ticks
        counted_s = 0.0

        def worked() -> bool:
            nonlocal counted_s
            sampler.tick()
            (seen,) = sampler.samples({busy.pid})
            counted_s += seen.cpu_cores * sampler.elapsed_s
            return counted_s >= 0.5 and seen.rss_bytes >= 64 << 20

        until(worked)
        (seen,) = sampler.samples({busy.pid})
        assert counted_s == pytest.approx((sampler.procs[busy.pid].cpu_ticks - before) / CLOCK_TICKS_S)
        assert seen.ppid == os.getpid() and seen.uid == os.geteuid() and seen.comm.startswith("python")
        assert 0 < seen.cpu_cores_1m < 4
        assert memory_shares([sampler.procs[busy.pid]]) >= 64 << 20
    sampler.tick()
    assert busy.pid not in sampler.procs
    sampler.close()


def test_what_waits_for_a_core_is_seen_to_want_it() -> None:
    clock = ManualClock()
    sampler = ProcSampler(clock=clock)
    core = min(os.sched_getaffinity(0))
    code = f"import os\nos.sched_setaffinity(0, [{core}])\nwhile True: pass"
    with child(code) as one, child(code) as two, child(code) as three:
        sampler.tick()
        before = sampler.procs[one.pid].cpu_ticks
        until(lambda: (stat := read_stat(one.pid)) is not None and stat.utime_ticks >= before + 20)
        clock.advance(10.0)
        sampler.tick()
        for seen in sampler.samples({one.pid, two.pid, three.pid}):
            assert seen.cpu_wait_1m > seen.cpu_cores_1m > 0, seen
    sampler.close()


def test_one_born_between_two_ticks_counts_from_its_birth() -> None:
    sampler = ProcSampler()
    sampler.tick()
    with child("while True: pass") as busy:
        until(lambda: (stat := read_stat(busy.pid)) is not None and stat.utime_ticks >= 10)
        sampler.tick()
        assert sampler.procs[busy.pid].cpu_delta_ticks >= 10
        assert 0 < sampler.samples({busy.pid})[0].cpu_cores_1m < 1.5  # over its life, not over an instant
    sampler.close()


def test_fds_are_bounded_and_given_back() -> None:
    with child("input()"):
        before = open_fds()
        sampler = ProcSampler(max_fds=1)
        for _ in range(3):
            sampler.tick()
            assert open_fds() <= before + 1
        assert len(sampler.procs) > 1
        sampler.close()
        assert open_fds() <= before


def test_details_on_demand() -> None:
    with child("input()") as one:
        details = read_details(one.pid)
        assert details is not None
        assert details.argv[:3] == (sys.executable, "-S", "-c")
        assert details.peak_rss_bytes is not None and details.peak_rss_bytes > 0
        pid = one.pid
    assert read_details(pid) is None


REUSE = """
import os, signal, time
from distributed_grid.monitoring.proc_sampler import ProcSampler

def fork():
    pid = os.fork()
    if pid == 0:
        signal.pause()
    return pid

sampler = ProcSampler()
old = fork()
sampler.tick()
first = sampler.procs[old]
assert first.fd >= 0
os.kill(old, 9)
os.waitpid(old, 0)
time.sleep(0.05)  # start times are in steps of 10 ms
with open("/proc/sys/kernel/ns_last_pid", "w") as file:
    file.write(str(old - 1))
new = fork()
assert new == old, (new, old)
sampler.tick()
second = sampler.procs[new]
assert second is not first and second.start_ticks > first.start_ticks
assert first in sampler.ended and first.fd == -1
os.kill(new, 9)
os.waitpid(new, 0)
sampler.close()
print("told apart")
"""


@pytest.mark.root
def test_a_pid_really_reused_is_told_apart() -> None:
    done = subprocess.run(
        ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", sys.executable, "-c", REUSE],
        capture_output=True, text=True, timeout=LIMIT_S,
    )  # fmt: skip
    assert done.stdout == "told apart\n", done.stderr
