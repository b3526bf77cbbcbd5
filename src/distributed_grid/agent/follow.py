"""Follows a task's output and end by reading its spool, so that any agent, also a new one, can go on at an offset."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from distributed_grid.agent.spool import EXIT, STDERR, STDOUT, read_status
from distributed_grid.core.errors import NotFound

CHUNK_BYTES = 256 * 1024
FIRST_DELAY_S, LAST_DELAY_S, GROWTH = 0.004, 0.1, 1.2
STATUS_EVERY_S = 1.0  # a shim that was killed writes nothing: ask /proc now and then


async def follow(task_dir: Path, stdout_from: int = 0, stderr_from: int = 0) -> AsyncIterator[dict[str, Any]]:
    """Chunks `{"stream", "offset", "data"}` as they are written, at last `{"exit": status}`.

    The end is the main process's; what it had written by then is whole. Looks every 4 ms while there is output,
    more and more rarely down to every 100 ms while there is none.
    """
    with Output(task_dir, stdout_from, stderr_from) as output:
        delay_s = FIRST_DELAY_S
        next_status = time.monotonic() + STATUS_EVERY_S
        while True:
            ended = (task_dir / EXIT).exists()  # asked before reading: all it wrote is then there
            if not ended and time.monotonic() >= next_status:
                next_status = time.monotonic() + STATUS_EVERY_S
                ended = read_status(task_dir).ended
            while chunks := output.next_chunks():
                for chunk in chunks:
                    yield chunk
                delay_s = FIRST_DELAY_S
                await asyncio.sleep(0)  # endless output must not hold up everybody else
            if ended:
                yield {"exit": read_status(task_dir).to_wire()}
                return
            await asyncio.sleep(delay_s)
            delay_s = min(LAST_DELAY_S, delay_s * GROWTH)


async def read_so_far(task_dir: Path, stdout_from: int = 0, stderr_from: int = 0) -> AsyncIterator[dict[str, Any]]:
    """The chunks that are there by now."""
    with Output(task_dir, stdout_from, stderr_from) as output:
        left_bytes = output.left_bytes()  # a program may write faster than we read
        while left_bytes > 0 and (chunks := output.next_chunks()):
            for chunk in chunks:
                yield chunk
                left_bytes -= len(chunk["data"])
            await asyncio.sleep(0)


class Output:
    """A task's two output files, each read on from its offset."""

    def __init__(self, task_dir: Path, stdout_from: int, stderr_from: int) -> None:
        read_status(task_dir)  # NotFound, before anything is promised
        self._offsets = {STDOUT: stdout_from, STDERR: stderr_from}
        self._files: dict[str, int] = {}
        try:
            for stream in self._offsets:
                self._files[stream] = os.open(task_dir / stream, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            self.__exit__()
            raise NotFound(f"the task {task_dir.name!r} was removed", code="task-not-found") from None

    def __enter__(self) -> Output:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self._files.values():
            os.close(fd)

    def left_bytes(self) -> int:
        return sum(max(0, os.fstat(fd).st_size - self._offsets[stream]) for stream, fd in self._files.items())

    def next_chunks(self) -> list[dict[str, Any]]:
        """At most one of each stream; empty at the end of both."""
        found: list[dict[str, Any]] = []
        for stream, fd in self._files.items():
            if os.fstat(fd).st_size < self._offsets[stream]:
                self._offsets[stream] = 0  # the program cut it (`> /dev/stderr` does): go on with what is new
            if data := os.pread(fd, CHUNK_BYTES, self._offsets[stream]):
                found.append({"stream": stream, "offset": self._offsets[stream], "data": data})
                self._offsets[stream] += len(data)
        return found
