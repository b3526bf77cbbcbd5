"""Starts a node's memory server, one at most, and finds the one that is there: by a record and a lock."""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed_grid.cluster.files import read_json, write_private
from distributed_grid.core.errors import Unavailable
from distributed_grid.core.process import ProcessId, boot_id, process_id

if TYPE_CHECKING:
    from distributed_grid.agent.memory.server import MemoryServer

RECORD, LOCK, LOG = "server.json", "server.lock", "server.log"
START_LIMIT_S = 60.0


@dataclass(frozen=True, slots=True)
class ServerRecord:
    node: str
    pid: int
    start_ticks: int
    boot_id: str
    host: str
    port: int
    local_name: str
    incarnation: int

    def is_alive(self) -> bool:
        return self.boot_id == boot_id() and ProcessId(self.pid, self.start_ticks).is_alive()

    def to_wire(self) -> dict[str, Any]:
        return asdict(self)


def read_record(directory: Path) -> ServerRecord | None:
    """The server that runs now, or None."""
    data = read_json(directory / RECORD)
    try:
        record = ServerRecord(**data) if data else None
    except TypeError:  # of another version
        return None
    return record if record and record.is_alive() else None


def write_record(directory: Path, node: str, host: str, server: MemoryServer) -> None:
    me = process_id(os.getpid())
    assert me is not None
    record = ServerRecord(
        node, me.pid, me.start_ticks, boot_id(), host, server.port, server.local_name, server.incarnation
    )
    write_private(directory / RECORD, record.to_wire())


def is_mine(directory: Path, incarnation: int) -> bool:
    data = read_json(directory / RECORD)
    return data is not None and data.get("incarnation") == incarnation


def ensure_server(directory: Path, node: str, host: str, key: bytes, *, tls: bool = False) -> ServerRecord:
    """The node's server; started, with the pool's key, if there is none. Safe to call from several at once.

    `tls`: one that is started encrypts its connections.
    """
    found = read_record(directory)
    if found:
        return found
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    with open(os.open(directory / LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600), "ab") as errors:
        # Neither Ray's settings nor the marks by which a node's processes are found: it outlives Ray's restarts.
        launcher = subprocess.Popen(
            [sys.executable, "-I", "-m", "distributed_grid.agent.memory", str(directory), node, host, *["tls"] * tls],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=errors, env={}, cwd="/", close_fds=True,
            start_new_session=True,
        )  # fmt: skip
    try:
        launcher.communicate(key, START_LIMIT_S)
    except subprocess.TimeoutExpired:
        launcher.kill()
        launcher.communicate()
    code = launcher.returncode
    deadline = time.monotonic() + 5  # another launcher may have won, and its server be about to write its record
    while (found := read_record(directory)) is None and code == 0 and time.monotonic() < deadline:
        time.sleep(0.02)
    if found is None:
        lines = (directory / LOG).read_text(errors="replace").strip().splitlines()
        raise Unavailable(
            f"the memory server of {node} did not start",
            cause=lines[-1] if lines else f"its launcher ended with {code}",
            hint=f"see {directory / LOG} on {node}",
            code="memory-server",
        )
    return found


def launch(run: Callable[[Callable[[], None]], None], directory: Path) -> int:
    """Detach a server from the one who asked for it; 0 once it serves, or when another already does."""
    os.closerange(3, max(256, resource.getrlimit(resource.RLIMIT_NOFILE)[0]))
    os.umask(0o077)
    reading, writing = os.pipe()
    if os.fork():  # a child of Ray's worker would be ended with it; a grandchild is nobody's
        os.close(writing)
        return 0 if os.read(reading, 1) else 1
    os.close(reading)
    os.setsid()
    lock = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # held for life
    except BlockingIOError:
        os.write(writing, b"o")
        return 0
    _shed()

    def ready() -> None:
        os.write(writing, b"r")
        os.close(writing)

    run(ready)
    return 0


def _shed() -> None:
    """What a Ray worker hands down: the OOM killer's preference, niceness, signals that are ignored or blocked."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("0")
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, 0)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # one for each block that is mapped on its host
