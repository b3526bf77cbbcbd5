"""The offload state as a JSON file that people, scripts and the dashboard read; the daemon alone writes it."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from distributed_grid.core.errors import GridError
from distributed_grid.store.snapshot import read_json, write_json_atomically

log = logging.getLogger(__name__)

HISTORY_KEPT = 100


class StateFile:
    """Written only when something other than the time has changed."""

    def __init__(self, path: Callable[[], Path]) -> None:
        self._path = path
        old = read_json(path(), {})
        history = old.get("history", []) if isinstance(old, dict) else []
        self._history: deque[dict[str, Any]] = deque(
            (one for one in history if isinstance(one, dict)), maxlen=HISTORY_KEPT
        )
        self._last: tuple[Path, dict[str, Any]] | None = None
        self._complained = False

    def note(self, at: float, kind: str, text: str) -> None:
        self._history.append({"at": at, "kind": kind, "text": text})

    def write(self, status: dict[str, Any], active: list[dict[str, Any]], finished: list[dict[str, Any]]) -> None:
        """A file that can't be written harms nothing: said once."""
        content = {
            **status, "active_offloads": [_short(one) for one in active],
            "finished_offloads": [_short(one) for one in finished[:20]], "history": list(self._history),
        }  # fmt: skip
        path = self._path()
        if self._last == (path, content) and path.exists():
            return
        try:
            write_json_atomically(path, {"updated": time.time(), **content})
        except GridError as error:
            if not self._complained:
                log.warning("%s: %s", error.message, error.cause)
            self._complained = True
            return
        self._complained = False
        self._last = (path, content)


_FIELDS = ("id", "pid", "node", "target", "state", "strategy", "command", "created", "updated", "bytes", "pause_s",
           "exit_code", "automatic", "reason")  # fmt: skip


def _short(move: dict[str, Any]) -> dict[str, Any]:
    return {name: move.get(name) for name in _FIELDS}
