"""How far a transfer is, on stderr, once it takes long enough that somebody wonders."""

from __future__ import annotations

import sys
import time

from distributed_grid.core.resources import format_bytes, format_duration

#: Shorter transfers say nothing.
QUIET_S = 1.0
ON_TERMINAL_S = 0.2
IN_A_LOG_S = 10.0


def progress_line(what: str, done_bytes: int, total_bytes: int | None, elapsed_s: float) -> str:
    """`what: 512 MB of 2.0 GB, 25%, 256 MB/s, 6s left`; without a total only what came so far."""
    rate = done_bytes / elapsed_s if elapsed_s > 0 else 0.0
    if total_bytes is None:
        return f"{what}: {format_bytes(done_bytes)}, {format_bytes(rate)}/s"
    share = done_bytes / total_bytes if total_bytes else 1.0
    left = f", {format_duration((total_bytes - done_bytes) / rate)} left" if rate else ""
    of = f"{format_bytes(done_bytes)} of {format_bytes(total_bytes)}"
    return f"{what}: {of}, {share:.0%}, {format_bytes(rate)}/s{left}"


class Progress:
    """One line that is written anew on a terminal; a line now and then elsewhere."""

    def __init__(self, what: str, total_bytes: int | None = None) -> None:
        self._what, self._total_bytes = what, total_bytes
        self._began = time.monotonic()
        self._next_s = QUIET_S
        self._shown = False
        self._terminal = sys.stderr.isatty()
        self.done_bytes = 0

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began

    def add(self, count: int) -> None:
        self.done_bytes += count
        elapsed_s = self.elapsed_s
        if elapsed_s < self._next_s:
            return
        self._next_s = elapsed_s + (ON_TERMINAL_S if self._terminal else IN_A_LOG_S)
        line = progress_line(self._what, self.done_bytes, self._total_bytes, elapsed_s)
        sys.stderr.write(f"\r\x1b[K{line}" if self._terminal else f"{line}\n")
        sys.stderr.flush()
        self._shown = True

    def close(self) -> None:
        """Nothing of it stays on a terminal."""
        if self._shown and self._terminal:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
        self._shown = False
