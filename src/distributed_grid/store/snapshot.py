"""JSON files that people and scripts read: replaced whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from distributed_grid.core.errors import GridError


def disk_full(path: Path) -> GridError:
    """The one error for a full disk, whoever meets it."""
    return GridError(
        f"the disk is full: {path} could not be written; nothing was changed",
        hint=f"free some space on the file system of {path.parent}, then try again",
        code="disk-full",
    )


def is_disk_full(error: OSError) -> bool:
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def fsync_directory(directory: Path) -> None:
    """Make names made, renamed or removed in it last."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json_atomically(path: Path, data: Any, *, durable: bool = True) -> None:
    """Replace `path` (0600) by `data`; a reader, also after a power cut if `durable`, sees the old or the new whole."""
    content = (json.dumps(data, indent=2, allow_nan=False) + "\n").encode()
    temporary = None
    try:
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
        temporary = Path(name)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        temporary.replace(path)
        if durable:
            fsync_directory(path.parent)
    except OSError as error:
        if temporary is not None:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
        if is_disk_full(error):
            raise disk_full(path) from error
        raise GridError(f"{path} could not be written", cause=str(error), code="snapshot") from error


def read_json(path: Path, default: Any = None) -> Any:
    """What the file holds; `default` if it is missing, unreadable or damaged, for it is never the truth."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return default
