"""Tasks: the processes that agents started for someone, as the daemon remembers them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from distributed_grid.store.rows import Table


@dataclass(frozen=True, slots=True)
class TaskRow:
    id: str
    node: str
    uid: int
    argv: list[str]
    state: str
    created: float
    started: float | None = None
    ended: float | None = None
    exit_code: int | None = None
    detail: dict[str, Any] = field(default_factory=dict)


class Tasks(Table[TaskRow]):
    noun = "task"
    table = "tasks"
    row_type = TaskRow
    json_columns = frozenset({"argv", "detail"})

    def prune(self, keep: int) -> None:
        """Forget the oldest ended tasks beyond `keep`; one that has not ended is never forgotten."""
        self._database.write(
            "DELETE FROM tasks WHERE id IN (SELECT id FROM tasks WHERE ended IS NOT NULL "
            "ORDER BY ended DESC, rowid DESC LIMIT -1 OFFSET ?)",
            [keep],
        )
