"""Claim: the embedded cluster with agents is ready in at most 1.3 times three bare `ray start` of the same settings."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench._measure import Report
from distributed_grid.cluster.bridge_client import BridgeClient
from distributed_grid.cluster.bringup import bring_down, bring_up, ensure_token
from distributed_grid.cluster.node_processes import end_processes
from distributed_grid.cluster.nodectl import resolve
from distributed_grid.cluster.plan import plan_cluster
from distributed_grid.cluster.ray_node import RayNodeSpec, node_environment, ray_start_options
from distributed_grid.cluster.record import ClusterRecord
from distributed_grid.config.models import ClusterConfig
from distributed_grid.config.paths import GridPaths

LIMIT = 1.3
ROUNDS = 2


def config() -> ClusterConfig:
    return ClusterConfig.model_validate({"embedded": True})


def ours_s(home: Path) -> float:
    """From nothing to three nodes with answering agents."""

    async def once() -> float:
        paths = GridPaths(home).ensure()
        bridge = BridgeClient(paths.token, home / "bridge.log")
        try:
            started = time.monotonic()
            record = await bring_up(config(), paths, None, bridge)
            took = time.monotonic() - started
            if record.state != "up":
                raise RuntimeError(f"not all nodes came up: {record.to_wire()}")
            return took
        finally:
            left = ClusterRecord.load(paths.cluster_record)
            if left is not None:
                await bring_down(left, paths, None, bridge)
            await bridge.close()

    return asyncio.run(once())


def bare_s(home: Path) -> float:
    """The head, then the two workers at once, by Ray's own command."""
    paths = GridPaths(home).ensure()
    ensure_token(paths)
    record = plan_cluster(config(), paths)
    specs = [resolve(node.spec) for node in record.nodes.values()]
    try:
        started = time.monotonic()
        _ray_start(next(one for one in specs if one.is_head))
        with ThreadPoolExecutor() as pool:
            list(pool.map(_ray_start, [one for one in specs if not one.is_head]))
        return time.monotonic() - started
    finally:
        for one in specs:
            end_processes(one.marker, (), 2.0)
        shutil.rmtree(Path(specs[0].temp_dir).parent, ignore_errors=True)


def _ray_start(spec: RayNodeSpec) -> None:
    Path(spec.temp_dir).mkdir(parents=True, mode=0o700)
    subprocess.run(
        [str(Path(sys.executable).with_name("ray")), *ray_start_options(spec)], env=node_environment(spec, os.environ),
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True, timeout=180,
    )  # fmt: skip


def run(report: Report) -> None:
    """Turn about, and the best of each: what is left is the work, not the neighbours' noise."""
    ours, bare = [], []
    for _ in range(ROUNDS):
        with tempfile.TemporaryDirectory(prefix="grid-bench-") as place:
            bare.append(bare_s(Path(place) / "bare"))
            ours.append(ours_s(Path(place) / "ours"))
    report.ratio("embedded cluster ready with agents / three bare `ray start`", min(ours), min(bare), limit=LIMIT)

