"""Leases: what is lent to whom until when, and the fencing numbers that order them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from distributed_grid.core.clock import Clock
from distributed_grid.store.database import Database
from distributed_grid.store.kv import KeyValues
from distributed_grid.store.rows import Table

#: The highest fence of the leases that were deleted.
_FENCE_KEY = "lease.fence"


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

    def next_fence(self) -> int:
        """A number larger than any given out before: the journal has it with the lease that was written with it."""
        if not self._fence:
            highest = self._database.query("SELECT coalesce(max(fence), 0) FROM leases")[0][0]
            self._fence = max(int(KeyValues(self._database).get(_FENCE_KEY, 0)), highest)
        # At least the time in ms: agents remember fences, so they must also grow across a lost journal.
        self._fence = max(self._fence + 1, int(self._clock.time() * 1000))
        return self._fence

    def delete(self, row_id: str) -> None:
        """Take the row away, but for its fence."""
        with self._database.transaction():
            row, kept = self.find(row_id), KeyValues(self._database)
            if row is not None and row.fence > int(kept.get(_FENCE_KEY, 0)):
                kept.put(_FENCE_KEY, row.fence)
            super().delete(row_id)

    def synced(self) -> asyncio.Future[None]:
        """Done once all leases written so far are on disk. Not to be cancelled: others may wait for the same."""
        return self._database.synced()

    def grow_log(self) -> None:
        """Once, before requests come: an fsync is quicker then."""
        self._database.grow_wal()
