"""An embedded cluster for one bench: a state directory and ports of its own, taken down again whatever happens."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from distributed_grid.cluster.ray_node import temp_root
from distributed_grid.cluster.record import ClusterRecord
from distributed_grid.config.paths import GridPaths

BIN = Path(sys.executable).parent  # not resolved: the virtual environment's own
GRID = str(BIN / "grid")
LIMIT_S = 170.0

# Any free port, so that another cluster on this machine is not in the way.
CONFIG = "embedded: true\nray:\n  port: 0\n  dashboard_port: 0\n"


class BenchCluster:
    """Three nodes on this machine, reached by the real command."""

    def __init__(self, root: Path, config: str = CONFIG) -> None:
        self.home = root / "home"
        self.config = root / "cluster.yaml"
        self.config.write_text(config)

    @property
    def env(self) -> dict[str, str]:
        """The environment of a `grid` command for this cluster."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("GRID_", "RAY_"))}
        return {**kept, "GRID_HOME": str(self.home), "GRID_CONFIG": str(self.config)}

    def grid(self, *argv: str, limit_s: float = LIMIT_S) -> str:
        done = subprocess.run(
            [GRID, *argv], env=self.env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=limit_s
        )
        if done.returncode != 0:
            raise RuntimeError(f"grid {' '.join(argv)} gave {done.returncode}: {done.stderr[-2000:]}")
        return done.stdout

    def json(self, *argv: str, limit_s: float = LIMIT_S) -> Any:
        return json.loads(self.grid(*argv, "--format", "json", limit_s=limit_s))

    def ray_env(self) -> dict[str, str]:
        """What `eval "$(grid env)"` leaves in a shell."""
        return {**self.env, **self.json("env")}

    def record(self) -> ClusterRecord:
        record = ClusterRecord.load(GridPaths(self.home).cluster_record)
        if record is None:
            raise RuntimeError("there is no cluster")
        return record

    def dashboard(self) -> str:
        """The address of Ray's dashboard, where `ray job submit` goes."""
        ports = next(node.spec.ports for node in self.record().nodes.values() if node.spec.is_head)
        return f"http://127.0.0.1:{ports['dashboard']}"


@contextlib.contextmanager
def cluster(config: str = CONFIG) -> Iterator[BenchCluster]:
    """A cluster that is up. The path is short because unix sockets live below it."""
    root = Path(tempfile.mkdtemp(prefix="gb-", dir="/tmp"))
    one = BenchCluster(root, config)
    places: list[Path] = []
    try:
        one.grid("cluster", "start")
        places.append(temp_root(one.record().cluster_id))
        yield one
    finally:
        for argv in (["cluster", "stop"], ["daemon", "stop"]):
            with contextlib.suppress(RuntimeError, subprocess.TimeoutExpired):
                one.grid(*argv, limit_s=90)
        for place in (*places, root):
            shutil.rmtree(place, ignore_errors=True)
