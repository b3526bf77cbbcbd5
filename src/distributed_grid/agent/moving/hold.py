"""Holds a tree that is about to go: stopped, guarded against whoever would wake it, unseen by its shell.

That is all a relaunch needs of the source; a live move carries its memory as well (source.py). Runs in a process of its
own (see mover.py), to the end as a guard of what it holds. SIGTERM ends it at the next safe point; the tree stays
stopped, whoever dies, until `release` or `replace` in held.py is called for it.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from distributed_grid.agent.moving import shell
from distributed_grid.agent.moving.ptrace import Guard
from distributed_grid.agent.moving.state import State, live_tree, thread_states
from distributed_grid.core.errors import Refused, TimedOut
from distributed_grid.core.process import ProcessId

FREEZE_LIMIT_S = 20.0
WATCH_S = 0.01


class Cancelled(Exception):
    """SIGTERM: somebody called the move off."""


class Holder:
    def __init__(self, spec: dict[str, Any], state: State) -> None:
        self.state = state
        self.root = ProcessId(spec["inner_pid"], spec["start_ticks"])
        self.figures: dict[str, Any] = {}
        self.guard: Guard | None = None
        self.critical = False  # a tracee's registers are not its own: SIGTERM waits
        self.cancelled = False

    def on_term(self, *_: object) -> None:
        self.cancelled = True
        if not self.critical:
            raise Cancelled

    def run(self) -> None:
        try:
            self._run()
        finally:
            self._let_go()

    def _let_go(self) -> None:
        if self.guard:
            self.guard.close()

    def _run(self) -> None:
        stopped_before = self._begin_pause()
        tree = self._stop()
        try:
            self._guard(tree)
        except PermissionError:
            pass  # the kernel lets us trace no process of this user's (ptrace_scope): then it is only watched
        self.state.set(phase="copied", tree=tree, frozen_at=time.time(), stopped_before=stopped_before, woken=False)
        self._stay()

    def _begin_pause(self) -> list[int]:
        """Who of it is stopped already; from here on its shell does not see it stop."""
        stopped_before = [pid for pid in live_tree(self.root) if thread_states(pid) == {"T"}]
        self.state.set(phase="freezing", stopped_before=stopped_before)
        shell.hold(self.root, self.state.path)
        return stopped_before

    def _stop(self) -> list[int]:
        """SIGSTOP until nothing of it runs any more: it may fork meanwhile. The tree, all of it stopped."""
        deadline = time.monotonic() + FREEZE_LIMIT_S
        while True:
            tree = live_tree(self.root)
            if not tree:
                raise Refused(f"process {self.root.pid} ended", code="gone")
            if not _stop_running(tree):
                return tree
            if time.monotonic() > deadline:
                raise TimedOut("the process could not be stopped: it hangs in the kernel", code="freeze")
            time.sleep(0.0005)

    def _guard(self, tree: list[int]) -> None:
        self.critical = True
        try:
            self.guard = Guard(tree)
        finally:
            self.critical = False
        if self.cancelled:
            raise Cancelled
        if not self.guard.stopped:
            raise Refused("somebody woke or ended the process while it was frozen", code="woken")

    def _stay(self) -> None:
        if self.guard:
            self.guard.stay()
        while tree := live_tree(self.root):
            if _stop_running(tree):
                self.state.set(woken=True)
            time.sleep(WATCH_S)


def _stop_running(tree: list[int]) -> bool:
    """SIGSTOP to whoever of it runs; whether anybody did."""
    running = [pid for pid in tree if thread_states(pid) - set("TtZX")]
    for pid in running:
        try:
            os.kill(pid, signal.SIGSTOP)
        except ProcessLookupError:
            pass
    return bool(running)
