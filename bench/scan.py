"""Claim: a scan of a node with 500 processes costs its agent at most 3 times one plain read of every /proc/*/stat.

The sample that the agent takes each second, whether anybody scans or not, is counted with it.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

from bench._measure import Report
from distributed_grid.agent.inspect.service import InspectService
from distributed_grid.agent.node import AgentNode
from distributed_grid.config.models import DetectConfig
from distributed_grid.core.resources import GB
from distributed_grid.monitoring.node_sampler import MIN_STEP_S, NodeSampler

PROCESSES = int(os.environ.get("BENCH_PROCESSES", "500"))
ROUNDS = 15
LIMIT = 3.0


def run(report: Report) -> None:
    idle = [subprocess.Popen(["sleep", "600"], stdin=subprocess.DEVNULL) for _ in range(PROCESSES)]
    sampler = NodeSampler("bench")
    try:
        service = InspectService(cast(AgentNode, SimpleNamespace(sampler=sampler, latest=sampler.latest)))
        amounts = DetectConfig()
        thresholds: tuple[Any, ...] = (
            amounts.min_cpu_cores * 0.9, int(amounts.min_memory_gb * GB), int(amounts.min_gpu_memory_gb * GB),
            amounts.min_age_seconds, 0,
        )  # fmt: skip

        def scan() -> None:
            sampler.sample()
            service._candidates(*thresholds)

        ours, peer = [], []
        for _ in range(ROUNDS):
            time.sleep(MIN_STEP_S * 1.5)
            ours.append(_cpu_s(scan))
            peer.append(_cpu_s(_read_all_stats))
    finally:
        sampler.close()
        for process in idle:
            process.kill()
        for process in idle:
            process.wait(30)
    report.ratio("scan of 500 processes / plain read of every stat", statistics.median(ours), statistics.median(peer),
                 limit=LIMIT)  # fmt: skip


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
