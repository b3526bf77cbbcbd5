"""What a job reads from its standard input, as the agent takes it: each part once, in order, whoever dies meanwhile.

Parts lie in the task's directory until its shim has handed them on (feed.py), so what was accepted is not ours to lose.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from distributed_grid.agent.feed import PARTS, part_name
from distributed_grid.core.errors import TimedOut, Unavailable, UsageError

#: A job that does not read gets no more than so many parts ahead.
PARTS_AHEAD = 8
#: The caller asks again after so long.
WAIT_LIMIT_S, POLL_S, MOST_POLL_S = 600.0, 0.01, 0.2


async def accept(
    task_dir: Path, data: bytes, offset: int, last: bool, is_over: Callable[[], bool], wake: Callable[[], None]
) -> bool:
    """Take what begins at `offset` of the whole input; a repeat is dropped, `last` is the end of it.

    Whether somebody is there to read it.
    """
    folder, pause_s = task_dir / PARTS, POLL_S
    deadline = time.monotonic() + WAIT_LIMIT_S
    while True:
        if is_over() or not folder.is_dir():
            return False
        parts = sorted(folder.glob("[0-9]*"))
        if len(parts) < PARTS_AHEAD:
            break
        if time.monotonic() > deadline:
            raise TimedOut(f"{task_dir.name} does not read its input", code="job-input")
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, MOST_POLL_S)
    accepted, ended = accepted_bytes(folder)
    if offset > accepted:
        raise UsageError(f"{task_dir.name} has {accepted} bytes of its input, not {offset}", code="job-input")
    if not ended and data and offset == accepted:
        _put(folder, accepted, data)
        accepted += len(data)
    if not ended and last and offset + len(data) == accepted:
        _put(folder, accepted, b"")
    wake()
    return True


def accepted_bytes(folder: Path) -> tuple[int, bool]:
    """How much of the whole input has been taken, and whether that is all of it."""
    parts = sorted(folder.glob("[0-9]*"))
    if not parts:
        return 0, False
    size_bytes = parts[-1].stat().st_size
    return int(parts[-1].name) + size_bytes, size_bytes == 0


def _put(folder: Path, offset: int, data: bytes) -> None:
    """There as a whole, or not at all."""
    fresh = folder / f".{part_name(offset)}"
    try:
        fresh.write_bytes(data)
        fresh.replace(folder / part_name(offset))
    except OSError as error:
        cause = error.strerror or str(error)
        raise Unavailable("its input can't be written on its node", cause=cause, code="job-input") from error
