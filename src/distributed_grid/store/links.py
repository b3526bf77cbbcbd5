"""Links between nodes: the bandwidth last measured, remembered for planning."""

from __future__ import annotations

import builtins
from dataclasses import dataclass

from distributed_grid.core.clock import Clock
from distributed_grid.store.database import Database


@dataclass(frozen=True, slots=True)
class LinkRow:
    source: str
    target: str
    bytes_per_s: float
    at: float


class Links:
    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    def put(self, source: str, target: str, bytes_per_s: float) -> LinkRow:
        row = LinkRow(source, target, float(bytes_per_s), self._clock.time())
        self._database.write(
            "INSERT INTO bandwidth (source, target, bytes_per_s, at) VALUES (?, ?, ?, ?) "
            "ON CONFLICT (source, target) DO UPDATE SET bytes_per_s=excluded.bytes_per_s, at=excluded.at",
            [row.source, row.target, row.bytes_per_s, row.at],
        )
        return row

    def get(self, source: str, target: str) -> LinkRow | None:
        """None where it was never measured."""
        rows = self._database.query(
            "SELECT source, target, bytes_per_s, at FROM bandwidth WHERE source = ? AND target = ?",
            [source, target],
        )
        return LinkRow(*rows[0]) if rows else None

    def list(self) -> builtins.list[LinkRow]:
        rows = self._database.query(
            "SELECT source, target, bytes_per_s, at FROM bandwidth ORDER BY source, target"
        )
        return [LinkRow(*row) for row in rows]
