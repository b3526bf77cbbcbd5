"""Moves of running processes: the state each one is in, and the story of how it came there."""

from __future__ import annotations

import builtins
from dataclasses import dataclass, field
from typing import Any

from distributed_grid.core.clock import Clock
from distributed_grid.store.database import Database
from distributed_grid.store.rows import Table, encode_text


@dataclass(frozen=True, slots=True)
class MoveRow:
    id: str
    state: str
    node: str
    pid: int
    start_ticks: int
    target: str
    uid: int
    created: float
    updated: float
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MoveStep:
    move: str
    seq: int
    state: str
    at: float
    story: str


class Moves(Table[MoveRow]):
    noun = "offload"
    table = "moves"
    row_type = MoveRow
    json_columns = frozenset({"data"})

    def __init__(self, database: Database, clock: Clock) -> None:
        super().__init__(database)
        self._clock = clock

    def start(self, row: MoveRow, story: str) -> MoveRow:
        """Record a new move with its first step."""
        with self._database.transaction():
            self.put(row)
            self._add_step(row.id, row.state, row.created, story)
        return row

    def step(self, move_id: str, state: str, story: str, **changes: Any) -> MoveRow:
        """Record that the move enters `state`; on disk when this returns, so before the side effect."""
        now = self._clock.time()
        with self._database.transaction():
            row = self.update(move_id, state=state, updated=now, **changes)
            self._add_step(move_id, state, now, story)
        return row

    def steps(self, move_id: str) -> builtins.list[MoveStep]:
        """All steps of one move, in order."""
        rows = self._database.query(
            "SELECT move, seq, state, at, story FROM move_steps WHERE move = ? ORDER BY seq", [move_id]
        )
        return [MoveStep(*row) for row in rows]

    def _add_step(self, move_id: str, state: str, at: float, story: str) -> None:
        self._database.write(
            "INSERT INTO move_steps (move, seq, state, at, story) "
            "SELECT ?1, coalesce(max(seq), 0) + 1, ?2, ?3, ?4 FROM move_steps WHERE move = ?1",
            [move_id, state, at, encode_text(story)],
        )
