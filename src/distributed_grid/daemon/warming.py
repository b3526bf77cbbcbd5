"""While a move is planned, both sides load what they will need for it; what the plan refuses is let go again."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from distributed_grid.core.errors import GridError
from distributed_grid.daemon.links import NodeLinks

log = logging.getLogger(__name__)

CALL_LIMIT_S = 20.0


class Warming:
    """For one move that may come about. A help only: whatever fails here costs the move some time, no more."""

    def __init__(self, links: NodeLinks, taken: set[str]) -> None:
        self._links = links
        #: Ids of moves that are still planned, so that no two get the same.
        self._taken = taken
        self._move_id = ""
        self._calls: dict[str, asyncio.Task[None]] = {}

    def named(self, move_id: str) -> None:
        self._move_id = move_id
        self._taken.add(move_id)

    def side(self, node: str, side: str) -> None:
        if self._move_id and node not in self._calls:
            work = self._call(node, "move_warm", {"move_id": self._move_id, "side": side})
            self._calls[node] = asyncio.create_task(work, name="warm-a-move")

    async def end(self) -> None:
        """The move is over, or never began: what was not used goes."""
        if not self._move_id:
            return
        await asyncio.gather(*self._calls.values())
        await asyncio.gather(*(self._call(node, "move_cool", {"move_id": self._move_id}) for node in self._calls))
        self._taken.discard(self._move_id)

    async def _call(self, node: str, name: str, arguments: dict[str, Any]) -> None:
        try:
            await self._links.get(node).call(name, timeout_s=CALL_LIMIT_S, **arguments)
        except GridError as error:
            log.info("%s on %s: %s", name, node, error.message)
