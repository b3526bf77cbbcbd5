"""GridOrchestrator: with a daemon running, and hosting the control plane itself."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from distributed_grid.config import ClusterConfig, load_cluster_config
from distributed_grid.config.paths import GridPaths
from distributed_grid.core import GridOrchestrator
from distributed_grid.core.errors import NotFound, Refused, TimedOut, UsageError
from distributed_grid.daemon.client import daemon_holds_lock
from tests.lab.clusters import GRID, EmbeddedCluster


def two_nodes() -> ClusterConfig:
    nodes = [{"name": "one", "role": "head"}, {"name": "two"}]
    return ClusterConfig.model_validate({"embedded": True, "nodes": nodes})


async def test_uses_the_running_daemon(embedded: EmbeddedCluster) -> None:
    config = load_cluster_config(embedded.config, env={})
    pid = embedded.pid_of("daemon")
    async with GridOrchestrator(config, paths=GridPaths(embedded.home)) as grid:
        assert not grid.hosts_control_plane
        status = await grid.status()
        assert status["daemon_pid"] == pid and all(node["online"] for node in status["nodes"])
        done = await grid.execute("gpu1", ["sh", "-c", "echo out; echo err >&2; exit 5"])
        assert (done.exit_code, done.stdout, done.stderr, done.node) == (5, "out\n", "err\n", "gpu1")
        assert (await grid.execute("gpu2", "echo 'two words'")).stdout == "two words\n"
        with pytest.raises(TimedOut):
            await grid.execute("gpu1", ["sleep", "600"], timeout_s=0.5)
        with pytest.raises(NotFound):
            await grid.execute("gpu9", ["true"])
        assert all(node["online"] for node in await grid.cluster_start())
    assert embedded.pid_of("daemon") == pid


async def test_another_configuration_is_refused(embedded: EmbeddedCluster) -> None:
    grid = GridOrchestrator(two_nodes(), paths=GridPaths(embedded.home))
    with pytest.raises(Refused) as caught:
        await grid.initialize()
    assert caught.value.code == "other-config" and "one, two" in caught.value.cause and caught.value.hint
    await grid.shutdown()


async def test_hosts_the_control_plane_where_there_is_no_daemon(grid_home: Path, tmp_path: Path) -> None:
    grid = GridOrchestrator(ClusterConfig())
    await grid.initialize()
    try:
        await grid.initialize()  # a second time does nothing
        assert grid.hosts_control_plane and daemon_holds_lock(GridPaths(grid_home))
        assert (await grid.status())["daemon_pid"] == os.getpid()
        async with GridOrchestrator(ClusterConfig()) as second:  # never two: the second one uses the first
            assert not second.hosts_control_plane
            assert (await second.status())["cluster"] == "down"
        # Commands reach it too; in a thread, because this loop answers them.
        told = await _grid(grid_home, tmp_path, "daemon", "status", "--format", "json")
        assert json.loads(told)["pid"] == os.getpid()
        with pytest.raises(Refused):
            await GridOrchestrator(two_nodes()).initialize()
    finally:
        await grid.shutdown()
    await grid.shutdown()
    assert not daemon_holds_lock(GridPaths(grid_home)) and not (grid_home / "grid_daemon.sock").exists()
    with pytest.raises(UsageError):
        await grid.status()


async def _grid(home: Path, cwd: Path, *argv: str) -> str:
    import asyncio

    def work() -> str:
        env = {**os.environ, "GRID_HOME": str(home)}
        return subprocess.run([GRID, *argv], env=env, cwd=cwd, capture_output=True, text=True, timeout=60).stdout

    return await asyncio.to_thread(work)
