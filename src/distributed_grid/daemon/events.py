"""What happened, told once: each event goes to the journal and to everybody who is subscribed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

from distributed_grid.store.events import EventRow, Events

log = logging.getLogger("grid.events")

#: A subscriber that takes nothing for this many events is dropped, so that it can't hold the daemon's memory.
SUBSCRIBER_LIMIT = 5000


class EventHub:
    def __init__(self, store: Events) -> None:
        self._store = store
        self._subscribers: set[asyncio.Queue[EventRow | None]] = set()

    def publish(self, kind: str, text: str, *, node: str = "", **data: Any) -> EventRow:
        row = self._store.add(kind, text, node=node, data=data)
        log.info("%s%s: %s", kind, f" [{node}]" if node else "", text)
        for queue in list(self._subscribers):
            if queue.qsize() >= SUBSCRIBER_LIMIT:
                self._subscribers.discard(queue)
                queue.put_nowait(None)
            else:
                queue.put_nowait(row)
        return row

    def recent(self, limit: int, *, kind: str = "", node: str = "") -> list[EventRow]:
        """The newest ones, oldest of them first."""
        return self._store.latest(limit, kind=kind, node=node)

    async def subscribe(self, *, since: int | None = None) -> AsyncIterator[EventRow]:
        """Events from now on, or from after sequence number `since`, without a gap."""
        queue: asyncio.Queue[EventRow | None] = asyncio.Queue()
        self._subscribers.add(queue)
        try:
            last = 0
            while since is not None:
                rows = self._store.list(after_seq=since)
                for row in rows:
                    last = row.seq
                    yield row
                since = last if rows else None
            while (next_row := await queue.get()) is not None:
                if next_row.seq > last:
                    yield next_row
        finally:
            self._subscribers.discard(queue)
