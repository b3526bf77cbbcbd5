"""Claims: `grid status`, `grid --help` and `grid execute`, each against what a user of Ray or Python would type."""

from __future__ import annotations

import sys

from bench._cluster import BIN, GRID, cluster
from bench._measure import Report, command, sample_pair

STATUS_LIMIT, HELP_LIMIT, EXECUTE_LIMIT = 0.25, 6.0, 0.3
RAY = str(BIN / "ray")


def run(report: Report) -> None:
    ours, peer = sample_pair(command([GRID, "--help"]), command([sys.executable, "-c", "pass"]), times=15)
    report.ratio("`grid --help` / `python -c pass`", ours.median_s, peer.median_s, limit=HELP_LIMIT)
    with cluster() as one:
        ray_env = one.ray_env()
        ours, peer = sample_pair(
            command([GRID, "status"], env=one.env), command([RAY, "status"], env=ray_env), times=7
        )
        report.ratio("`grid status` / `ray status`", ours.median_s, peer.median_s, limit=STATUS_LIMIT)
        submit = [RAY, "job", "submit", "--address", one.dashboard(), "--", "true"]
        ours, peer = sample_pair(
            command([GRID, "execute", "-n", "gpu1", "true"], env=one.env), command(submit, env=ray_env)
        )
        report.ratio("`grid execute` / `ray job submit`", ours.median_s, peer.median_s, limit=EXECUTE_LIMIT)
