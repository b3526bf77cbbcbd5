"""Keeps the shell that started a process from seeing it stopped for the move.

A shell with job control takes the terminal away from a job that stops, and goes on with its next command; `su` and its
like stop themselves, and nobody wakes them. So it is held in ptrace, untouched, for as long as the process is stopped;
when it looks, the process runs on, or its stub does.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from distributed_grid.agent.moving.ptrace import traced
from distributed_grid.agent.moving.state import named, read_json
from distributed_grid.core.process import ProcessId, read_stat

#: Counted from when all of it is on the target, or its mover is dead: the daemon gives the rest two minutes, and a move
#: that is in doubt may take days. Then the shell says "Stopped", and `fg` brings the job back.
HOLD_LIMIT_S = 180.0
_POLL_S = 0.01
STOP_WITH_THEIR_CHILD = frozenset({"su", "runuser", "sudo", "doas", "script", "nsenter", "unshare"})


def shell_of(root: ProcessId) -> int:
    """The pid of the shell that has this process as a job in its terminal, or of who stops with it; 0: nobody."""
    job = read_stat(root.pid)
    shell = read_stat(job.ppid) if job and job.ppid > 1 else None
    if not job or not shell:
        return 0
    has_terminal = job.tty_nr and (shell.tty_nr, shell.session) == (job.tty_nr, job.session)
    return shell.pid if (has_terminal and shell.pgrp != job.pgrp) or shell.comm in STOP_WITH_THEIR_CHILD else 0


def hold(root: ProcessId, state_file: Path) -> None:
    """Hold its shell until the state file says that the move is over here.

    By a child of ours that outlives us; returns once the shell is held. If the child is killed the shell runs on.
    """
    shell = shell_of(root)
    if not shell:
        return
    reading, writing = os.pipe()
    if os.fork() == 0:
        try:
            os.dup2(writing, 0)
            os.closerange(3, 1 << 16)
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            with traced(shell):
                os.close(0)
                _await_end(root, state_file)
        finally:
            os._exit(0)
    os.close(writing)
    os.read(reading, 1)  # closed: it is held, or cannot be
    os.close(reading)


def _await_end(root: ProcessId, state_file: Path) -> None:
    since: float | None = None
    while root.is_alive() and (state := read_json(state_file)) is not None:
        mover = named(state.get("mover"))
        if since is None and (state["phase"] == "copied" or not (mover and mover.is_alive())):
            since = time.monotonic()
        if not holds_on(state["phase"], 0.0 if since is None else time.monotonic() - since):
            return
        time.sleep(_POLL_S)


def holds_on(phase: str, waited_s: float) -> bool:
    """Whether the shell is still held, in this phase and so long after its mover had no more to do."""
    return phase not in ("aborted", "finished") and waited_s < HOLD_LIMIT_S
