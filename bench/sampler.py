"""Measuring a node once per second costs under 1 % of a core with 500 processes; beside one plain look at /proc."""

from __future__ import annotations

import os
import statistics
import subprocess
import time
from collections.abc import Callable

from bench._measure import Report
from distributed_grid.monitoring.node_sampler import MIN_STEP_S, NodeSampler

PROCESSES = 500
ROUNDS = 15


def run(report: Report) -> None:
    idle = [subprocess.Popen(["sleep", "600"], stdin=subprocess.DEVNULL) for _ in range(PROCESSES)]
    try:
        sampler = NodeSampler("bench")
        ours, peer = [], []
        for _ in range(ROUNDS):
            time.sleep(MIN_STEP_S * 1.5)
            ours.append(_cpu_s(sampler.sample))
            peer.append(_cpu_s(_read_all_stats))
        sampler.close()
    finally:
        for process in idle:
            process.kill()
        for process in idle:
            process.wait(30)
    tick_s = statistics.median(ours)
    report.ratio("sampler tick / plain read of every stat", tick_s, statistics.median(peer), limit=1.0)
    report.value("sampler at 1 Hz, percent of a core", tick_s * 100, limit=1.0, unit="%")


def _cpu_s(action: Callable[[], object]) -> float:
    """CPU time, not wall time: other programs on the machine do not count."""
    began = time.process_time()
    action()
    return time.process_time() - began


def _read_all_stats() -> None:
    for name in os.listdir("/proc"):  # noqa: PTH208
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    file.read()
            except OSError:
                pass
