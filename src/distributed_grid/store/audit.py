"""The audit log: one JSON line per request, appended in one write, never changed afterwards."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distributed_grid.core.clock import Clock, SystemClock
from distributed_grid.core.errors import GridError
from distributed_grid.store.snapshot import disk_full, is_disk_full

MAX_BYTES = 16 * 1024 * 1024
KEPT = 8  # older files: audit.log.1 (the newest) to audit.log.8
MAX_LINE_BYTES = 4096


class AuditLog:
    """Appends to `path` (0600), which becomes `path.1` beyond `max_bytes`. Survives kill -9, not a power cut."""

    def __init__(self, path: Path, *, clock: Clock | None = None, max_bytes: int = MAX_BYTES) -> None:
        self.path = path
        self._clock: Clock = clock or SystemClock()
        self._max_bytes = max_bytes
        self._descriptor = -1

    def record(self, *, uid: int, pid: int, method: str, target: Mapping[str, Any], outcome: str) -> None:
        """`target` is the caller's summary of what was asked for; it must hold no secret."""
        entry = {"at": round(self._clock.time(), 3), "uid": uid, "pid": pid, "method": method[:256]}
        line = _line({**entry, "target": dict(target), "outcome": outcome})
        if len(line) > MAX_LINE_BYTES:
            line = _line({**entry, "target": {"too_long_bytes": len(line)}, "outcome": outcome[:256]})
        try:
            size_bytes = self._ready(len(line))
            if os.write(self._descriptor, line) != len(line):
                # A part of a line would spoil the next one too.
                os.ftruncate(self._descriptor, size_bytes)
                raise disk_full(self.path)
        except OSError as error:
            if is_disk_full(error):
                raise disk_full(self.path) from error
            raise GridError(f"{self.path} could not be written", cause=str(error), code="audit") from error

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _ready(self, coming_bytes: int) -> int:
        """Open the right file for the next line; its size now."""
        if self._descriptor < 0:
            self._open()
        found = os.fstat(self._descriptor)
        if found.st_nlink and (not found.st_size or found.st_size + coming_bytes <= self._max_bytes):
            return found.st_size
        if found.st_nlink:  # else someone removed it
            self._rotate()
        self._open()
        return os.fstat(self._descriptor).st_size

    def _rotate(self) -> None:
        for number in range(KEPT - 1, -1, -1):
            file = rotated(self.path, number)
            if file.exists():
                file.replace(rotated(self.path, number + 1))

    def _open(self) -> None:
        self.close()
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._descriptor = os.open(self.path, flags, 0o600)


def rotated(path: Path, number: int) -> Path:
    """The file `number` rotations ago; 0 is the one being written."""
    return path.with_name(f"{path.name}.{number}") if number else path


def read_audit(path: Path, limit: int = 100) -> list[dict[str, Any]]:
    """The newest `limit` entries, oldest first; a line that is no entry is passed over."""
    entries: deque[dict[str, Any]] = deque(maxlen=limit)
    for file in (rotated(path, number) for number in range(KEPT, -1, -1)):
        try:
            lines = file.read_bytes().splitlines()
        except FileNotFoundError:
            continue
        for line in lines[-limit:]:
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            if isinstance(entry, dict):
                entries.append(entry)
    return list(entries)


# default=str: an odd value in a summary must not keep a request out of the log. json.dumps makes an encoder each time.
_to_json = json.JSONEncoder(separators=(",", ":"), default=str).encode


def _line(entry: Mapping[str, Any]) -> bytes:
    return (_to_json(entry) + "\n").encode()
