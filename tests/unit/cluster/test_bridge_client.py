"""Who asks the bridge for something while it joins its cluster waits for that, and no longer than his own limit."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from distributed_grid.cluster.bridge_client import BridgeClient
from distributed_grid.core.errors import TimedOut


class Slow(BridgeClient):
    """Joins when it is let."""

    def __init__(self, place: Path) -> None:
        super().__init__(place / "token", place / "log")
        self.asked: list[str] = []
        self.may_join = asyncio.Event()

    async def spawn(self) -> None:
        return None

    @property
    def pid(self) -> int | None:
        return 1

    async def _ask(self, verb: str, timeout_s: float, **arguments: Any) -> dict[str, Any]:
        self.asked.append(verb)
        if verb == "connect":
            await self.may_join.wait()
        return {"verb": verb}


async def test_a_call_waits_until_it_has_joined(tmp_path: Path) -> None:
    bridge = Slow(tmp_path)
    joining = asyncio.create_task(bridge.connect("10.0.0.1:6379", "10.0.0.1"))
    await asyncio.sleep(0)
    with pytest.raises(TimedOut):
        await bridge.call("nodes", timeout_s=0.01)
    asked = asyncio.create_task(bridge.call("nodes"))
    await asyncio.sleep(0)
    assert bridge.asked == ["connect"]
    bridge.may_join.set()
    assert await asked == {"verb": "nodes"}
    await joining
    assert bridge.asked == ["connect", "nodes"]
