"""Whoever waits for a move that somebody else calls off gets an answer."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from distributed_grid.core.errors import Refused
from distributed_grid.daemon.mover import MoveRequest
from distributed_grid.daemon.offload import OffloadService
from distributed_grid.wire.rpc import CallContext

ROOT = CallContext(uid=0)


class Moves(dict[str, Any]):
    def find(self, move_id: str) -> Any:
        return self.get(move_id)


class HeldMover:
    """A move that stands at its copy until it is called off."""

    def __init__(self, moves: Moves) -> None:
        self._moves = moves

    async def move(self, request: MoveRequest, progress: Any) -> Any:
        self._moves[request.move_id] = SimpleNamespace(id=request.move_id, state="FROZEN")
        progress({"state": "FROZEN", "step": "copying"})
        try:
            await asyncio.Event().wait()
        finally:
            self._moves[request.move_id].state = "ABORTED"


class Planner:
    async def plan(self, *_: Any) -> tuple[dict[str, Any], MoveRequest]:
        return {}, MoveRequest("offload_1_7", "gpu-master", 7, 1, "gpu1", 0, "live", "python x.py")

    def check_not_moving(self, *_: Any) -> None:
        pass


@pytest.fixture
def service() -> OffloadService:
    made = object.__new__(OffloadService)
    moves: Any = Moves()
    made._moves, made.planner, made.mover = moves, Planner(), HeldMover(moves)  # type: ignore[assignment]
    made._running, made._carrying, made._progress = {}, set(), {}
    return made


async def test_a_move_that_is_called_off_ends_with_an_error_not_with_silence(service: OffloadService) -> None:
    steps = service.offload_execute(ROOT, pid=7)
    assert await anext(steps) == {"plan": {}}
    assert (await anext(steps))["state"] == "FROZEN"
    [task] = service._carrying
    task.cancel()
    with pytest.raises(Refused) as caught:
        await anext(steps)
    assert caught.value.code == "cancelled" and "called off" in caught.value.message


async def test_whoever_hangs_up_calls_it_off(service: OffloadService) -> None:
    seen: list[Any] = []

    async def wait() -> None:
        async for step in service.offload_execute(ROOT, pid=7):
            seen.append(step)

    waiting = asyncio.create_task(wait())
    async with asyncio.timeout(30):
        while len(seen) < 2:
            await asyncio.sleep(0)
        [task] = service._carrying
        waiting.cancel()
        await asyncio.wait({waiting, task})
    assert waiting.cancelled() and task.cancelled()
