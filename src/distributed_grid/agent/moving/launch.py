"""Starts the processes of moves: by exec of a small launcher, never a bare fork, because the agent has threads.

A launcher takes a tenth of a second to load. It may be started while the move is still being planned; it then waits
for its orders, and ends by itself if none come.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from distributed_grid.core.errors import InternalError

LAUNCH_LIMIT_S = 30.0
LOG = "mover.log"


class Launchers:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: By side and directory: those that wait for their orders, and since when.
        self._waiting: dict[tuple[str, Path], tuple[subprocess.Popen[bytes], float]] = {}

    def warm(self, side: str, directory: Path) -> None:
        """Have a launcher ready for that side of the move; harmless if one is."""
        self._drop_old()
        with self._lock:
            if (side, directory) not in self._waiting:
                directory.mkdir(mode=0o700, exist_ok=True)
                self._waiting[side, directory] = _spawn(side, directory), time.monotonic()

    def cool(self, directory: Path) -> None:
        """The move did not come about: nobody waits for it any more, and its directory goes if nothing came into it."""
        with self._lock:
            ended = [self._waiting.pop(key)[0] for key in list(self._waiting) if key[1] == directory]
        for launcher in ended:
            _end(launcher)
        if ended and {one.name for one in directory.iterdir()} <= {LOG}:
            with contextlib.suppress(OSError):
                (directory / LOG).unlink(missing_ok=True)
                directory.rmdir()

    def launch(self, side: str, directory: Path, orders: dict[str, Any]) -> None:
        """Returns once that process is on its own."""
        with self._lock:
            launcher, _ = self._waiting.pop((side, directory), (None, 0.0))
        if launcher is None or launcher.poll() is not None:
            if launcher is not None:
                _end(launcher)
            launcher = _spawn(side, directory)
        try:
            launcher.communicate(json.dumps(orders).encode(), LAUNCH_LIMIT_S)
        except subprocess.TimeoutExpired:
            _end(launcher)
        if launcher.returncode != 0:
            raise InternalError("the mover did not start", cause=last_words(directory), code="mover")

    def _drop_old(self) -> None:
        """Those that have waited for longer than a plan may take; they ended by themselves, or are about to."""
        now = time.monotonic()
        with self._lock:
            old = {key[1] for key, (_, since) in self._waiting.items() if now - since > LAUNCH_LIMIT_S}
        for directory in old:
            self.cool(directory)


def _spawn(side: str, directory: Path) -> subprocess.Popen[bytes]:
    environment = {name: os.environ[name] for name in ("GRID_CRIU", "PATH") if name in os.environ}
    with (directory / LOG).open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-I", "-m", "distributed_grid.agent.moving.mover", side, str(directory)],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=log, env=environment, cwd="/",
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
