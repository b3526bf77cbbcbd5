# ruff: noqa: PTH108
"""A task's standard input as its shim hands it on: from the parts that agents left in the task's directory to the FIFO.

A part is a file in `input/`, named after the offset at which it begins; an empty one is the end. The shim outlives the
agents, so it alone knows how far the program's input has come, and nothing is lost or there twice when one of them
dies. Imported by the shim: standard library only, no pathlib.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import signal
import termios

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection
if TYPE_CHECKING or __package__:
    from distributed_grid.agent.program import libc
else:  # under shim.py
    from program import libc

FIFO, PARTS = "stdin", "input"
_SFD_CLOEXEC = os.O_CLOEXEC


def part_name(offset: int) -> str:
    return f"{offset:020d}"


class Parts:
    """The parts of an input in order, each once; the last one stays in its file, which tells agents how far we are."""

    def __init__(self, task_dir: str) -> None:
        self._dir = f"{task_dir}/{PARTS}"
        self._at = 0  # where the next part begins
        self._read = ""
        self.ended = False

    def next(self) -> bytes:
        """The next part; empty if it is not there yet, or there is no more."""
        part = f"{self._dir}/{part_name(self._at)}"
        try:
            with open(part, "rb") as file:
                data = file.read()
        except OSError:
            return b""
        self.ended = not data
        if data and self._read:
            try:
                os.unlink(self._read)
            except OSError:
                pass
        if data:
            self._read = part
            self._at += len(data)
        return data


class Feed:
    """Holds the writing end, so that the program sees no end before it is said."""

    def __init__(self, task_dir: str, watched: Collection[int]) -> None:
        self._fifo = f"{task_dir}/{FIFO}"
        self._parts = Parts(task_dir)
        self._rest = b""
        # For reading too: it never waits for a reader, and one that has gone is no error of ours.
        self._fd = os.open(self._fifo, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        mask = sum(1 << (number - 1) for number in watched)
        self._signals = libc.signalfd(-1, mask.to_bytes(128, "little"), _SFD_CLOEXEC)  # ready when one is pending

    def hand_on(self, watched: Collection[int]) -> None:
        """What is there, as fast as the program takes it; back when there is no more, or a signal wants the shim."""
        while self._fd >= 0 and (self._rest or self._next()):
            try:
                self._rest = self._rest[os.write(self._fd, self._rest) :]
            except BlockingIOError:
                select.select([self._signals], [self._fd], [])
            if signal.sigpending() & set(watched):
                return

    def _next(self) -> bool:
        self._rest = self._parts.next()
        if self._parts.ended:
            os.close(self._fd)
            self._fd = -1
        return bool(self._rest)

    def unread_bytes(self) -> int:
        """What lies in the FIFO: neither ours nor the program's."""
        fd = os.open(self._fifo, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            return unread_bytes(fd)
        finally:
            os.close(fd)


def unread_bytes(fd: int) -> int:
    """What lies in a pipe, by either end of it."""
    count = ctypes.c_int()
    fcntl.ioctl(fd, termios.FIONREAD, count)
    return count.value
