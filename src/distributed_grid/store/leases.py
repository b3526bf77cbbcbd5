"""Leases: what is lent to whom until when, and the fencing numbers that order them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from distributed_grid.core.clock import Clock
from distributed_grid.store.database import Database
from distributed_grid.store.kv import KeyValues
from distributed_grid.store.rows import Table

_FENCE_KEY = "lease.fence"
#: Fences are set aside in the journal so many at once: not every grant writes that too. Few: they are milliseconds, and
#: one from the future would beat those that follow a lost journal.
FENCES_AT_ONCE = 100


@dataclass(frozen=True, slots=True)
class LeaseRow:
    id: str
    kind: str
    state: str
    node: str
    holder: str
    uid: int
    fence: int
    created: float
    expires: float | None = None
    data: dict[str, Any] = field(default_factory=dict)


class Leases(Table[LeaseRow]):
    noun = "lease"
    table = "leases"
    row_type = LeaseRow
    json_columns = frozenset({"data"})

    def __init__(self, database: Database, clock: Clock) -> None:
        super().__init__(database)
        self._clock = clock
        self._fence = 0  # the last one, once it is known
        self._set_aside = 0  # up to this one the journal says that they are used

    def next_fence(self) -> int:
        """A number larger than any given out before. Not within a transaction: what is set aside must stay so."""
        if not self._fence:
            highest = self._database.query("SELECT coalesce(max(fence), 0) FROM leases")[0][0]
            self._fence = max(int(KeyValues(self._database).get(_FENCE_KEY, 0)), highest)
        # At least the time in ms: agents remember fences, so they must also grow across a lost journal.
        fence = max(self._fence + 1, int(self._clock.time() * 1000))
        if fence > self._set_aside:
            with self._database.transaction(durable=False):  # on disk with, or before, the lease that has it
                KeyValues(self._database).put(_FENCE_KEY, fence + FENCES_AT_ONCE)
            self._set_aside = fence + FENCES_AT_ONCE
        self._fence = fence
        return fence

    def synced(self) -> asyncio.Future[None]:
        """Done once all leases written so far are on disk. Not to be cancelled: others may wait for the same."""
        return self._database.synced()

    def grow_log(self) -> None:
        """Once, before requests come: an fsync is quicker then."""
        self._database.grow_wal()
