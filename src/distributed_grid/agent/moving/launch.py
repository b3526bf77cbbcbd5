"""Starts the processes of moves: by exec of a small launcher, never a bare fork, because the agent has threads.

Loading one takes a tenth of a second of a core, twice in every move. So an agent keeps a spare that has loaded already
and waits for its orders on stdin; it ends with its agent.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from distributed_grid.core.errors import InternalError

LAUNCH_LIMIT_S = 30.0
#: So long after a move began: the next spare must not take a core from it.
REFILL_S = 2.0
LOG = "mover.log"
#: Empty words: room on the spare's command line for the one it takes on, which `ps` does not show.
PADDING = [""] * 1024


class Launchers:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spare: subprocess.Popen[bytes] | None = None
        self._refill: threading.Timer | None = None
        self._kept = False

    def keep_spare(self, after_s: float = REFILL_S) -> None:
        """Have one ready from then on."""
        with self._lock:
            self._kept = True
            if self._refill is None:
                self._refill = threading.Timer(after_s, self._fill)
                self._refill.daemon = True
                self._refill.start()

    def close(self) -> None:
        with self._lock:
            self._kept = False
            refill, self._refill = self._refill, None
            spare, self._spare = self._spare, None
        if refill:
            refill.cancel()
        if spare:
            _end(spare)

    def launch(self, side: str, directory: Path, spec: dict[str, Any]) -> None:
        """Returns once that process is on its own."""
        orders = {"side": side, "dir": str(directory), "spec": spec}
        launcher = self._take_spare() or _spawn(side, str(directory))
        try:
            launcher.communicate(json.dumps(orders).encode(), LAUNCH_LIMIT_S)
        except subprocess.TimeoutExpired:
            _end(launcher)
        if launcher.returncode != 0:
            raise InternalError("the mover did not start", cause=last_words(directory), code="mover")

    def _take_spare(self) -> subprocess.Popen[bytes] | None:
        with self._lock:
            spare, self._spare = self._spare, None
            kept = self._kept
        if kept:
            self.keep_spare()
        if spare is None or spare.poll() is None:
            return spare
        _end(spare)  # somebody killed it
        return None

    def _fill(self) -> None:
        with self._lock:
            self._refill = None
            if self._kept and self._spare is None:
                self._spare = _spawn("--spare", *PADDING)


def _spawn(*words: str) -> subprocess.Popen[bytes]:
    environment = {name: os.environ[name] for name in ("GRID_CRIU", "PATH") if name in os.environ}
    return subprocess.Popen(
        [sys.executable, "-I", "-m", "distributed_grid.agent.moving.mover", *words],
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment, cwd="/",
        start_new_session=True,
    )  # fmt: skip


def _end(launcher: subprocess.Popen[bytes]) -> None:
    launcher.kill()
    launcher.wait()
    if launcher.stdin:
        with contextlib.suppress(BrokenPipeError):
            launcher.stdin.close()


def last_words(directory: Path) -> str:
    try:
        lines = (directory / LOG).read_text(errors="replace").strip().splitlines()
    except OSError:
        return ""
    return lines[-1] if lines else ""
