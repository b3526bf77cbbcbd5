"""Where the grid's own processes stand among others: an overloaded node is the one that needs them most."""

from __future__ import annotations

import contextlib
import os

AHEAD = -10


def go_ahead() -> None:
    """Run before ordinary programs, where we may. For this thread, and what it starts from now on."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, AHEAD)


def fall_back() -> None:
    """Run as any program does: what starts other people's programs must not hand down our place."""
    if os.getpriority(os.PRIO_PROCESS, 0) == AHEAD:
        os.setpriority(os.PRIO_PROCESS, 0, 0)
