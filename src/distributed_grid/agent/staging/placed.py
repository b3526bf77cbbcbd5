"""Which files on this node came from another one for a move: these may be replaced, all others are somebody's own."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

LIMIT = 50_000


class Placed:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._marks: dict[str, list[int]] = {}
        with contextlib.suppress(OSError, ValueError):
            self._marks = json.loads(path.read_bytes())

    def mark(self, path: str) -> list[int] | None:
        return self._marks.get(path)

    def set(self, marks: dict[str, list[int]]) -> None:
        if not marks:
            return
        for path, mark in marks.items():
            self._marks.pop(path, None)  # the oldest come first
            self._marks[path] = mark
        for path in list(self._marks)[: max(0, len(self._marks) - LIMIT)]:
            del self._marks[path]
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fresh = self._path.with_suffix(".new")
        fresh.write_text(json.dumps(self._marks))
        fresh.chmod(0o600)
        fresh.rename(self._path)
