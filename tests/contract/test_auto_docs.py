"""Every command line of the design of automatic offload, as typed there.

There is a daemon but no node, so that nothing can be moved: the clusters of the tests share this machine with others.
"""

from __future__ import annotations

import json
import os
import subprocess
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from distributed_grid.config.models import ClusterConfig
from distributed_grid.config.paths import GridPaths
from distributed_grid.core.orchestrator import GridOrchestrator
from distributed_grid.daemon.client import connect
from distributed_grid.demo.tour import Terminal
from tests.conftest import short_directory
from tests.lab.clusters import EMBEDDED_CONFIG, EmbeddedCluster
from tests.lab.waiting import wait_until

LIMIT_S = 60.0
ENABLED = "✓ Auto-offload enabled for gpu-master (memory: 70%, cpu: 80%)\n"


def make(config: str | None) -> Iterator[EmbeddedCluster]:
    made = EmbeddedCluster(short_directory(), config)
    yield made
    made.grid("daemon", "stop", check=False)
    made.remove()


@pytest.fixture
def grid() -> Iterator[EmbeddedCluster]:
    yield from make(f"# mine\n{EMBEDDED_CONFIG}  # any port\n")


@pytest.fixture
def bare() -> Iterator[EmbeddedCluster]:
    """No configuration at all."""
    yield from make(None)


def thresholds(grid: EmbeddedCluster) -> dict[str, float]:
    told: dict[str, float] = grid.json("offload", "auto", "--status")["thresholds"]
    return told


def test_enable_status_disable(grid: EmbeddedCluster) -> None:
    assert grid.grid("daemon", "status", check=False).returncode == 5
    assert grid.grid("offload", "auto", "--enable").stdout == ENABLED  # starts the daemon
    daemon = grid.pid_of("daemon")
    assert grid.grid("offload", "auto", "--enable", "--threshold", "70").stdout == ENABLED
    several = ("offload", "auto", "--enable", "--threshold", "cpu=80", "memory=65", "gpu=90")
    assert grid.grid(*several).stdout == ENABLED.replace("70%, cpu: 80%", "65%, cpu: 80%, gpu: 90%")
    assert thresholds(grid) == {"cpu": 0.8, "memory": 0.65, "gpu": 0.9}
    shown = grid.grid("offload", "auto", "--status").stdout
    assert shown.startswith("Auto-offload: enabled for gpu-master\n") and "65%" in shown
    assert grid.config is not None
    text = grid.config.read_text()
    assert "head_only_mode: true" in text and text.startswith("# mine\n") and "# any port" in text
    assert ClusterConfig.from_yaml(grid.config).resource_sharing.head_only_mode
    state = json.loads((grid.home / "grid_offload_state.json").read_text())
    assert state["enabled"] and state["active_offloads"] == [] and "history" in state
    assert grid.grid("offload", "auto", "--disable").stdout == "✓ Auto-offload disabled\n"
    assert not grid.json("offload", "auto", "--status")["enabled"]
    assert grid.pid_of("daemon") == daemon  # reconfigured, never started anew


def test_enable_needs_a_configuration(bare: EmbeddedCluster) -> None:
    done = bare.grid("offload", "auto", "--enable", check=False)
    assert done.returncode != 0 and "there is no configuration and no cluster" in done.stderr
    assert bare.grid("daemon", "status", check=False).returncode == 5


async def test_a_program_that_hosts_the_grid_has_it_too(grid_home: Path) -> None:
    auto = {"enabled": True, "thresholds": {"memory": 66}}
    config = ClusterConfig.model_validate({"resource_sharing": {"auto_offload": auto}})
    async with GridOrchestrator(config) as orchestrator:
        assert orchestrator.hosts_control_plane
        async with await connect(GridPaths.default()) as client:
            status: dict[str, Any] = await client.call("auto_status")
    assert status["enabled"] and status["head_only_mode"] and status["thresholds"]["memory"] == 0.66


def on_a_terminal(grid: EmbeddedCluster, *words: str) -> Terminal:
    ours, theirs = os.openpty()
    termios.tcsetwinsize(theirs, (30, 100))
    environment = {**grid.environment(), "TERM": "xterm-256color"}
    process: subprocess.Popen[bytes] = subprocess.Popen(
        grid.argv(*words), env=environment, cwd=grid.cwd, stdin=theirs, stdout=theirs, stderr=theirs,
        start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    return Terminal(process, ours)


def test_watch_with_and_without_a_daemon(grid: EmbeddedCluster) -> None:
    once = grid.json("offload", "watch", "--once")
    assert once["source"] == "local" and once["nodes"][0]["levels"]["memory"] > 0  # measured by itself, read-only
    assert grid.grid("daemon", "status", check=False).returncode == 5
    screen = on_a_terminal(grid, "offload", "watch")
    try:
        wait_until(lambda: screen.showed("GRID OFFLOAD MONITOR"), LIMIT_S, "the dashboard")
        wait_until(lambda: screen.showed("Auto: ○ READ-ONLY"), LIMIT_S, "it to say that it only looks")
        grid.grid("offload", "auto", "--enable")
        wait_until(lambda: screen.showed("Auto: ● ENABLED"), LIMIT_S, "it to follow the daemon that is there now")
        screen.press("q")
        assert screen.wait(LIMIT_S) == 0
    finally:
        screen.close()
    screen = on_a_terminal(grid, "offload", "watch", "--interval", "2")
    try:
        wait_until(lambda: screen.showed("Auto: ● ENABLED"), LIMIT_S, "the dashboard")
        screen.press("q")
        assert screen.wait(LIMIT_S) == 0
    finally:
        screen.close()
