"""What holds a copy while its GPU is given back: one thread runs, the others do not, and nothing runs on by itself.

With a GPU and its driver, scripts/check_gpu_move.py shows the rest.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from distributed_grid.agent.moving import gpu
from distributed_grid.core.process import read_stat
from tests.lab.waiting import wait_until

pytestmark = pytest.mark.root
PROGRAM = """
import os, sys, threading, time
def tick():
    n = 0
    while True:
        n += 1
        print("tick", n, threading.get_native_id(), file=sys.stderr, flush=True)
        time.sleep(0.005)
threading.Thread(target=tick, daemon=True).start()
for line in sys.stdin: print(line.strip(), flush=True)
"""


class Program:
    """Its main thread answers what it is told; another ticks."""

    def __init__(self, directory: Path) -> None:
        self.said, self.ticks = directory / "said", directory / "ticks"
        with self.said.open("wb") as out, self.ticks.open("wb") as errors:
            argv = [sys.executable, "-I", "-S", "-c", PROGRAM]
            self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=out, stderr=errors)
        wait_until(self.count, 30, "its first tick")
        self.pid = self.process.pid
        self.thread = int(self.ticks.read_text().split()[2])
        self.process.send_signal(signal.SIGSTOP)
        wait_until(self.stopped, 30, "it to stop")

    def count(self) -> int:
        return self.ticks.read_text().count("\n")

    def stopped(self) -> bool:
        return all(
            Path(f"/proc/{self.pid}/task/{task}/stat").read_text().rpartition(")")[2].split()[0] == "T"
            for task in os.listdir(f"/proc/{self.pid}/task")  # noqa: PTH208
        )

    def tell(self, word: bytes) -> None:
        assert self.process.stdin
        self.process.stdin.write(word + b"\n")
        self.process.stdin.flush()


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Program]:
    made = Program(tmp_path)
    yield made
    made.process.kill()
    made.process.wait(30)
    assert made.process.stdin
    made.process.stdin.close()


def test_one_thread_runs_and_all_of_it_is_stopped_again(program: Program) -> None:
    before = program.count()
    held = gpu._Held([program.pid])
    program.tell(b"during")
    with subprocess.Popen(["sleep", "0.3"]) as work:
        held.let_run([program.thread], work)
    wait_until(lambda: program.count() > before, 30, "the one thread to run")
    held.stop([program.thread])
    wait_until(program.stopped, 30, "all of it to be stopped")
    ticks = program.count()
    time.sleep(0.1)
    assert program.count() == ticks and program.said.read_text() == ""
    program.process.send_signal(signal.SIGCONT)
    wait_until(lambda: program.said.read_text() == "during\n" and program.count() > ticks, 30, "all of it to go on")


def test_it_dies_with_its_holder_and_never_runs_by_itself(program: Program) -> None:
    child = os.fork()
    if child == 0:
        try:
            gpu._Held([program.pid])
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert program.process.wait(30) == -signal.SIGKILL
    assert read_stat(program.pid) is None and program.said.read_text() == ""


def test_without_a_driver_that_is_said() -> None:
    with pytest.raises(gpu.GpuError, match="driver"):
        gpu.call("check")
