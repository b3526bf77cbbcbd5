"""Small private files, replaced whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from distributed_grid.core.errors import GridError


def write_private(path: Path, content: bytes | dict[str, Any]) -> None:
    """Mode 0600, on disk before it has its name."""
    data = content if isinstance(content, bytes) else json.dumps(content, indent=1).encode() + b"\n"
    try:
        _write(path, data)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        hint = "make room there and try again" if full else f"look at the rights of {path.parent}"
        raise GridError(
            f"{path} could not be written", cause=error.strerror or str(error), hint=hint,
            code="disk-full" if full else "write-failed",
        ) from error  # fmt: skip


def _write(path: Path, data: bytes) -> None:
    fd, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mkstemp makes it 0600
    try:
        with os.fdopen(fd, "wb") as out:
            out.write(data)
            out.flush()
            os.fsync(out.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def read_json(path: Path) -> dict[str, Any] | None:
    """What is there, or None where there is nothing, or nothing that can be read as one."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
