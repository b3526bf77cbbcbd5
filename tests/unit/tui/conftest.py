"""A feed that a test fills by hand, and what stands on a screen as text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from textual.app import App

from distributed_grid.core.clock import ManualClock
from distributed_grid.core.errors import GridError, Unavailable
from distributed_grid.monitoring.snapshot import GpuSnapshot, NodeSnapshot
from distributed_grid.tui.view import View

GB = 1024**3
NOW = 1_700_000_400.0


def node_row(
    name: str, role: str, cpu: float, memory: float, gpu: float | None, *, online: bool = True
) -> dict[str, Any]:
    gpus = () if gpu is None else (GpuSnapshot(0, "u", "g", 100, 0, gpu),)
    shot = NodeSnapshot(
        name, NOW, 16, 16 * cpu, 64 * GB, int(64 * GB * memory), int(64 * GB * (1 - memory)),
        gpu_count=len(gpus), gpus=gpus,
    )  # fmt: skip
    return {"name": name, "role": role, "online": online, "reason": "" if online else "the link is down",
            "age_s": 0.4, "use": shot.to_wire()}  # fmt: skip


def move(
    pid: int, target: str, command: str, *, state: str = "RUNNING", ago_s: float = 332.5, **more: Any
) -> dict[str, Any]:
    created = NOW - ago_s
    return {
        "id": f"offload_1700000000_{pid}", "pid": pid, "node": "gpu-master", "target": target, "state": state,
        "strategy": "live", "command": command, "created": created, "updated": created, "bytes": 3 * GB,
        "pause_s": 1.5, "exit_code": None, "automatic": True, "reason": "memory 89% (threshold 70%)", **more,
    }  # fmt: skip


class FakeFeed:
    """Answers calls from `answers` (a value, an error or a list for a stream), and keeps what was asked."""

    def __init__(self) -> None:
        self.clock = ManualClock(NOW)
        self.view = View(source="daemon", trouble="", clock=self.clock)
        self.on_change: Callable[[], None] = lambda: None
        self.answers: dict[str, Any] = {}
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.refreshed = 0

    async def run(self) -> None:
        await asyncio.Event().wait()

    def refresh(self) -> None:
        self.refreshed += 1
        self.on_change()

    def _answer(self, name: str, arguments: dict[str, Any]) -> Any:
        self.asked.append((name, arguments))
        answer = self.answers.get(name, Unavailable(f"no {name}"))
        if isinstance(answer, GridError):
            raise answer
        return answer

    async def call(self, name: str, *, timeout_s: float = 60.0, **arguments: Any) -> Any:
        return self._answer(name, arguments)

    async def stream(self, name: str, **arguments: Any) -> AsyncIterator[Any]:
        for item in self._answer(name, arguments):
            yield item


@pytest.fixture
def feed() -> FakeFeed:
    """The documents' own picture."""
    made = FakeFeed()
    rows = [
        node_row("gpu-master", "head", 0.62, 0.89, 0.31), node_row("gpu1", "worker", 0.23, 0.45, 0.12),
        node_row("gpu2", "worker", 0.67, 0.52, 0.88),
    ]  # fmt: skip
    for _ in range(30):
        made.view.take_nodes(rows)
    made.view.take_moves({
        "active": [move(4521, "gpu1", "python train.py"), move(4892, "gpu2", "jupyter kernel", ago_s=131.5)],
        "finished": [move(4521, "gpu2", "python train.py", state="ENDED", ago_s=4000.0)],
    })  # fmt: skip
    texts = ["Memory pressure detected (89%)", "Offloaded PID 4521 to gpu1", "Offloaded PID 4892 to gpu2"]
    for number, text in enumerate(texts):
        made.view.events.append({"seq": number, "at": 1_700_000_000.0 + number, "kind": "x", "text": text})
    made.view.auto = {
        "enabled": True, "dry_run": False, "thresholds": {"cpu": 0.8, "memory": 0.7, "gpu": 0.9}, "hard": [],
        "forecasts": {"memory": "memory reaches 90% in 3m 40s"},
    }  # fmt: skip
    return made


def screen_text(app: App[Any]) -> str:
    """What stands on the screen, line by line."""
    strips = app.screen._compositor.render_strips()
    return "\n".join("".join(segment.text for segment in strip).rstrip() for strip in strips)
