"""Claim: with three nodes and 500 processes the idle daemon takes under 2 % of a core and under 200 MB."""

from __future__ import annotations

import subprocess
import time

from bench._cluster import cluster
from bench._measure import Report, core_share, pss_bytes

PROCESSES = 500
WATCHED_S = 20.0
SETTLE_S = 10.0  # what a new daemon does once is not idling
CORE_LIMIT_PERCENT, MEMORY_LIMIT_MB = 2.0, 200.0


def run(report: Report) -> None:
    with cluster() as one:
        idle = [subprocess.Popen(["sleep", "600"], stdin=subprocess.DEVNULL) for _ in range(PROCESSES)]
        try:
            pid = int(one.json("daemon", "status")["pid"])
            time.sleep(SETTLE_S)
            share = core_share(pid, over_s=WATCHED_S)
            memory_bytes = pss_bytes(pid)
        finally:
            for process in idle:
                process.kill()
            for process in idle:
                process.wait(30)
    report.value("daemon idle: percent of a core", share * 100, limit=CORE_LIMIT_PERCENT, unit="%")
    report.value("daemon idle: memory (PSS)", memory_bytes / 1e6, limit=MEMORY_LIMIT_MB, unit="MB")
