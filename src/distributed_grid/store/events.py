"""Events: what happened, in order, the newest ones kept."""

from __future__ import annotations

import builtins
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from distributed_grid.core.clock import Clock
from distributed_grid.store.database import Database
from distributed_grid.store.rows import encode_json, encode_text

EVENTS_KEPT = 20_000
# Pruned a few at a time, so that no single write is long.
_PRUNE_EVERY = 64


@dataclass(frozen=True, slots=True)
class EventRow:
    seq: int
    at: float
    kind: str
    node: str
    text: str
    data: dict[str, Any] = field(default_factory=dict)


class Events:
    def __init__(self, database: Database, clock: Clock, keep: int = EVENTS_KEPT) -> None:
        self._database = database
        self._clock = clock
        self._keep = keep

    def add(self, kind: str, text: str, *, node: str = "", data: Mapping[str, Any] | None = None) -> EventRow:
        at = self._clock.time()
        content = dict(data or {})
        with self._database.transaction():
            seq = self._database.write(
                "INSERT INTO events (at, kind, node, text, data) VALUES (?, ?, ?, ?, ?)",
                [at, encode_text(kind), encode_text(node), encode_text(text), encode_json(content)],
            )
            if seq % _PRUNE_EVERY == 0:
                self._database.write("DELETE FROM events WHERE seq <= ?", [seq - self._keep])
        return EventRow(seq, at, kind, node, text, content)

    def list(
        self, *, after_seq: int = 0, limit: int = 1000, kind: str = "", node: str = ""
    ) -> builtins.list[EventRow]:
        """The first `limit` events after `after_seq`, oldest first."""
        return self._select("ASC", after_seq, limit, kind, node)

    def latest(self, limit: int = 50, *, kind: str = "", node: str = "") -> builtins.list[EventRow]:
        """The newest `limit` events, oldest first."""
        return self._select("DESC", 0, limit, kind, node)[::-1]

    def last_seq(self) -> int:
        return int(self._database.query("SELECT coalesce(max(seq), 0) FROM events")[0][0])

    def _select(self, way: str, after_seq: int, limit: int, kind: str, node: str) -> builtins.list[EventRow]:
        rows = self._database.query(
            "SELECT seq, at, kind, node, text, data FROM events "
            f"WHERE seq > ? AND ? IN ('', kind) AND ? IN ('', node) ORDER BY seq {way} LIMIT ?",
            [after_seq, kind, node, limit],
        )
        return [EventRow(seq, at, k, n, text, json.loads(data)) for seq, at, k, n, text, data in rows]
