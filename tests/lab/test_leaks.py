"""The check for leaks finds what it is there for, and nothing else."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from pathlib import Path

from tests import leaks
from tests.lab.waiting import wait_until


def test_a_detached_process_is_found_and_ended() -> None:
    before = leaks.snapshot()
    subprocess.run(["sh", "-c", "setsid sleep 348 >/dev/null 2>&1 &"], check=True, timeout=30)
    wait_until(lambda: any(name.endswith(": sleep 348") for name in leaks.our_processes(False).values()), 30, "it")
    [left] = leaks.left_since(before, grace_s=0)
    assert left.startswith("process: pid") and left.endswith(": sleep 348")
    wait_until(lambda: leaks.left_since(before, grace_s=0) == [], 30, "the process to be gone")


def test_a_process_that_lost_its_mark_is_found_by_its_parent() -> None:
    before = leaks.snapshot()
    with subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE, env={}) as process:
        found = leaks.left_since(before, grace_s=0)
        assert [name for name in found if f"pid {process.pid}:" in name]
    assert leaks.left_since(before) == []


def test_files_threads_and_sockets_are_found(grid_home: Path) -> None:
    before = leaks.snapshot()
    grid_home.mkdir()
    done = threading.Event()
    thread = threading.Thread(target=done.wait, args=(60,), name="left-over")
    thread.start()
    read, write = os.pipe()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(grid_home / "left.sock"))
        left = "\n".join(leaks.left_since(before, grace_s=0))
    for name in ("thread: left-over", f"file descriptor: {read} -> pipe", f"unix socket: {grid_home}/left.sock"):
        assert name in left
    assert f"directory: {grid_home}" in left
    os.close(read)
    os.close(write)
    done.set()
    thread.join(30)
    (grid_home / "left.sock").unlink()
    grid_home.rmdir()
    assert leaks.left_since(before) == []


def test_tests_are_kept_from_the_users_own_state() -> None:
    for name in ("HOME", "GRID_HOME"):
        assert Path(os.environ[name]).is_relative_to(leaks.RUN_DIRECTORY)
