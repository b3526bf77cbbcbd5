"""Blocks of the memory pool: where each one lives and whose it is; the bytes are on the node."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from distributed_grid.store.rows import Table


@dataclass(frozen=True, slots=True)
class BlockRow:
    id: str
    node: str
    uid: int
    state: str
    size_bytes: int
    created: float
    data: dict[str, Any] = field(default_factory=dict)


class Blocks(Table[BlockRow]):
    noun = "block"
    table = "blocks"
    row_type = BlockRow
    json_columns = frozenset({"data"})
