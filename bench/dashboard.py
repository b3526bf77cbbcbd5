"""Claims: the dashboard costs under 3 % of a core at 500 processes and one frame per second; keys show within 50 ms.

Its figures come as always, over the daemon's socket, from a process that answers like a daemon with 500 moves.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from bench._measure import Report
from distributed_grid.config.paths import GridPaths
from distributed_grid.daemon.server import DaemonServer
from distributed_grid.monitoring.snapshot import NodeSnapshot
from distributed_grid.store.audit import AuditLog
from distributed_grid.tui.feed import Feed
from distributed_grid.tui.offload_dashboard import OffloadDashboard
from distributed_grid.tui.widgets.rows import RowList
from distributed_grid.wire.rpc import CallContext, method

CORE_LIMIT = 0.03
KEY_LIMIT_S = 0.05
SECONDS = 20.0
KEYS = 100
MOVES = 500
GB = 1024**3


class Answers:
    """What the dashboard asks a daemon for: three nodes, 500 processes that were moved, an event each second."""

    def _nodes(self) -> list[dict[str, Any]]:
        now = time.time()
        level = 0.5 + int(now) % 20 / 100
        rows = []
        for name, role in (("gpu-master", "head"), ("gpu1", "worker"), ("gpu2", "worker")):
            shot = NodeSnapshot(name, now, 16, 16 * level, 64 * GB, int(64 * GB * level), 16 * GB)
            rows.append({"name": name, "role": role, "online": True, "age_s": 0.1, "use": shot.to_wire()})
        return rows

    def _move(self, pid: int, now: float) -> dict[str, Any]:
        states = ("PLANNED", "FROZEN", "COPIED", "STAGED", "COMMITTED", "RUNNING", "CLEANED")
        return {
            "id": f"offload_1700000000_{pid}", "pid": pid, "node": "gpu-master", "target": "gpu1", "state": "CLEANED",
            "user": "ann", "strategy": "live", "command": f"python train.py --run {pid}", "created": now - pid,
            "updated": now - pid, "bytes": pid << 20, "pause_s": 0.4, "exit_code": None, "stub": True,
            "automatic": True, "reason": "memory 89% (threshold 70%)", "target_pid": pid, "target_lost": False,
            "figures": {"wire_bytes": pid << 20, "bytes": pid << 20, "passes": [{"bytes": pid << 20, "s": 1.5}] * 3},
            "steps": [{"state": one, "at": now - pid, "story": "as it was told then"} for one in states],
        }  # fmt: skip

    @method
    async def offload_status(self, context: CallContext, *, limit: int = 20, brief: bool = False) -> dict[str, Any]:
        now = time.time()
        moves = [self._move(pid, now) for pid in range(1, MOVES + 1)]
        if brief:
            moves = [{key: value for key, value in move.items() if key not in ("figures", "steps")} for move in moves]
        return {"statistics": {}, "active": moves, "finished": []}

    @method
    async def auto_status(self, context: CallContext) -> dict[str, Any]:
        return {"enabled": True, "dry_run": False, "thresholds": {"cpu": 0.8, "memory": 0.7, "gpu": 0.9}, "hard": [],
                "forecasts": {"memory": "memory reaches 90% in 3m 40s"}, "pressure": []}  # fmt: skip

    @method
    async def events_recent(self, context: CallContext, *, limit: int = 50) -> list[dict[str, Any]]:
        return []

    @method
    async def events_follow(self, context: CallContext, *, since: int = 0) -> AsyncIterator[dict[str, Any]]:
        for number in range(1, 1_000_000):
            yield {"seq": number, "at": time.time(), "kind": "x", "text": f"event {number}", "node": "", "data": {}}
            await asyncio.sleep(1)

    @method
    async def snapshots_follow(
        self, context: CallContext, *, interval_s: float = 1.0
    ) -> AsyncIterator[list[dict[str, Any]]]:
        while True:
            yield self._nodes()
            await asyncio.sleep(interval_s)


async def serve(home: Path) -> None:
    paths = GridPaths(home).ensure()
    audit = AuditLog(paths.audit_log)
    server = DaemonServer(paths.socket, paths.socket, [Answers()], audit, list, dict)
    await server.start()
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.close()
    audit.close()


@contextlib.contextmanager
def served() -> Iterator[GridPaths]:
    """A process of its own, so that what it takes does not count."""
    with tempfile.TemporaryDirectory(prefix="grid-bench-", dir="/tmp") as home:
        argv = [sys.executable, "-m", "bench.dashboard", home]
        with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None and process.stdin is not None
            if process.stdout.readline() != b"ready\n":
                raise RuntimeError("the daemon's stand-in did not start")
            yield GridPaths(Path(home))
            process.stdin.close()


async def measure(paths: GridPaths) -> tuple[float, float]:
    """Share of a core over some seconds, and the 95th percentile of key to drawn line."""
    feed = Feed(1.0, paths=paths)
    app = OffloadDashboard(feed)
    async with app.run_test(size=(120, 40)) as pilot:
        while len(feed.view.active) < MOVES or not feed.view.nodes:
            await pilot.pause(0.1)
        await asyncio.sleep(2)
        began, used = time.perf_counter(), time.process_time()
        await asyncio.sleep(SECONDS)
        share = (time.process_time() - used) / (time.perf_counter() - began)
        rows, times = app.query_one("#moves", RowList), []
        for number in range(KEYS):
            key, wanted = ("down", 1) if number % 2 == 0 else ("up", 0)
            pressed = time.perf_counter()
            app.simulate_key(key)
            while rows.cursor != wanted or app.screen._compositor._dirty_regions:
                await asyncio.sleep(0)
            times.append(time.perf_counter() - pressed)
            await asyncio.sleep(0.02)  # so that frames come in between, as they do
    return share, statistics.quantiles(times, n=20)[-1]


def run(report: Report) -> None:
    with served() as paths:
        share, key_s = asyncio.run(measure(paths))
    report.value("dashboard, 500 processes, 1 frame/s", share, limit=CORE_LIMIT, unit="core")
    report.value("key to screen, 95th percentile", key_s, limit=KEY_LIMIT_S, unit="s")


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1])))
