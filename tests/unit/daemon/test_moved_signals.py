"""What is sent to the pid at home reaches the moved program at least once, whatever fails on the way."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from distributed_grid.core.errors import GridError, NotFound, Refused, TimedOut, Unavailable
from distributed_grid.daemon import moved
from distributed_grid.daemon.moved import Followers
from distributed_grid.store.moves import MoveRow

ROW = MoveRow("m", "CLEANED", "home", 7, 1, "gpu1", 0, time.time(), time.time(), {"stub": True})


class World:
    """The stub's agent and the target's, in one: each listed error meets one call, in turn."""

    def __init__(self, *errors: tuple[str, GridError]) -> None:
        self.errors = list(errors)
        self.sent = [10, 12, 15]
        self.heard = 0
        self.got: list[int] = []
        self.idle = asyncio.Event()

    def find(self, move_id: str) -> MoveRow:
        return ROW

    def get(self, node: str) -> World:
        self._meet(f"link:{node}")
        return self

    def _meet(self, name: str) -> None:
        if self.errors and self.errors[0][0] == name:
            raise self.errors.pop(0)[1]

    async def stream(self, name: str, **_: Any) -> AsyncIterator[dict[str, Any]]:
        yield {"pid": 7, "offsets": {}}
        for number, signal in list(enumerate(self.sent, 1))[self.heard :]:
            yield {"signal": signal, "number": number}
        if self.heard == len(self.sent):
            self.idle.set()
            await asyncio.Event().wait()

    async def call(self, name: str, *, number: int = 0, upto: int = 0, **_: Any) -> bool:
        before = len(self.errors)
        if name == "task_signal":
            self._meet("before")
            self.got.append(number)
        self._meet(name)
        if name == "stub_heard":
            self.heard = max(self.heard, upto)
        return len(self.errors) == before


async def relayed(world: World, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    monkeypatch.setattr(moved, "RETRY_S", 0.0)
    nothing = cast(Any, None)
    followers = Followers(cast(Any, world), cast(Any, world), nothing, nothing, nothing, nothing)
    relay = asyncio.create_task(followers._relay_signals(ROW))
    try:
        await asyncio.wait_for(world.idle.wait(), 30)
    finally:
        relay.cancel()
        await asyncio.gather(relay, return_exceptions=True)
    assert not world.errors
    return world.got


@pytest.mark.parametrize(
    "error",
    [
        ("before", Unavailable("cut")),
        ("link:gpu1", NotFound("no node", code="unknown-node")),
        ("link:home", NotFound("no node", code="unknown-node")),
        ("stub_heard", Unavailable("the stub is stopped", code="stub")),
    ],
)
async def test_a_fault_on_the_way_costs_no_signal(
    error: tuple[str, GridError], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await relayed(World(error, error), monkeypatch) == [10, 12, 15]


async def test_one_that_may_have_arrived_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await relayed(World(("task_signal", TimedOut("slow"))), monkeypatch) == [10, 10, 12, 15]


async def test_one_that_can_never_arrive_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = Refused("another user's by now", code="signal-refused")
    assert await relayed(World(("before", refused)), monkeypatch) == [12, 15]
