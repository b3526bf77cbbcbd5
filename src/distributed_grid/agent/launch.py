"""Starts a shim from the agent's process, which has threads: by exec of a small launcher, never by a bare fork."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

from distributed_grid.core.errors import GridError

SHIM = Path(__file__).with_name("shim.py")
LAUNCH_LIMIT_S = 30.0  # the launcher itself gives up waiting for the program after 8 s


def launch(task_dir: Path) -> None:
    """Return once the program runs, or its failure is on disk, or another shim already has the task."""
    log = task_dir / "shim.log"
    with open(os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600), "ab") as errors:
        # An empty environment: neither Ray's settings nor the marks by which a node's processes are stopped.
        launcher = subprocess.Popen(
            [sys.executable, "-I", "-S", str(SHIM), "--launch", str(task_dir)],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors,
            env={}, cwd="/", close_fds=True, start_new_session=True,
        )  # fmt: skip
    if not _ended_within(launcher.pid, LAUNCH_LIMIT_S):
        launcher.kill()  # only the launcher: if there is a shim by now, it goes on and is found by its files
    code = launcher.wait()
    if code != 0:
        raise GridError(
            "the process could not be started",
            cause=_last_line(log) or f"its launcher ended with {code}",
            code="shim",
        )


def _ended_within(pid: int, limit_s: float) -> bool:
    """Wait without the growing naps of `Popen.wait(timeout)`, which cost up to 50 ms."""
    fd = os.pidfd_open(pid)
    try:
        watch = select.poll()
        watch.register(fd, select.POLLIN)
        return bool(watch.poll(limit_s * 1000))
    finally:
        os.close(fd)


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else ""
