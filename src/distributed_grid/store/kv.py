"""Small facts under a name, as JSON."""

from __future__ import annotations

import json
from typing import Any

from distributed_grid.store.database import Database
from distributed_grid.store.rows import encode_json, encode_text


class KeyValues:
    def __init__(self, database: Database) -> None:
        self._database = database

    def put(self, key: str, value: Any) -> None:
        self._database.write(
            "INSERT INTO kv (key, value) VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value=excluded.value",
            [encode_text(key), encode_json(value)],
        )

    def get(self, key: str, default: Any = None) -> Any:
        rows = self._database.query("SELECT value FROM kv WHERE key = ?", [encode_text(key)])
        return json.loads(rows[0][0]) if rows else default

    def list(self, prefix: str = "") -> dict[str, Any]:
        """All whose key begins with `prefix`, by key."""
        start = encode_text(prefix)
        rows = self._database.query(
            "SELECT key, value FROM kv WHERE substr(key, 1, length(?)) = ? ORDER BY key", [start, start]
        )
        return {key: json.loads(value) for key, value in rows}

    def delete(self, key: str) -> None:
        self._database.write("DELETE FROM kv WHERE key = ?", [encode_text(key)])
