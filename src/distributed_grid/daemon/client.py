"""Talking to the daemon: find it, start it when a command needs it, and keep on when it was killed and came back."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from distributed_grid.cluster.ray_node import clean_environment
from distributed_grid.config.paths import GridPaths
from distributed_grid.core.errors import GridError, Refused, TimedOut, Unavailable
from distributed_grid.wire.channel import ChannelClosed, connect_unix
from distributed_grid.wire.rpc import PROTOCOL, RpcClient

START_LIMIT_S = 30.0
#: A daemon's log that has grown beyond this is put aside when the next daemon starts.
MAX_LOG_BYTES = 16 * 1024 * 1024
#: With less than this a daemon can't even open its journal.
LEAST_FREE_BYTES = 256 * 1024


class DaemonClient:
    """One connection to the daemon; `call` and `stream` as in wire.rpc."""

    def __init__(self, rpc: RpcClient, paths: GridPaths) -> None:
        self._rpc = rpc
        self.paths = paths

    @property
    def hello(self) -> dict[str, Any]:
        return self._rpc.hello

    @property
    def is_open(self) -> bool:
        return self._rpc.is_open

    async def call(self, name: str, *, timeout_s: float | None = 60.0, **arguments: Any) -> Any:
        return await self._rpc.call(name, timeout_s=timeout_s, **arguments)

    def stream(self, name: str, **arguments: Any) -> AsyncIterator[Any]:
        return self._rpc.stream(name, **arguments)

    async def close(self) -> None:
        await self._rpc.close()

    async def __aenter__(self) -> DaemonClient:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.close()


async def connect(
    paths: GridPaths | None = None,
    *,
    autostart: bool = False,
    config_path: str | None = None,
    insist: bool = False,
    any_protocol: bool = False,
) -> DaemonClient:
    """Connect; with `autostart` bring a daemon up first, with that configuration, if there is none.

    `insist`: the configuration was named by the user, so a running daemon must serve it or refuse.
    `any_protocol`: also one of another version, which can at least be told to stop.
    """
    paths = paths or GridPaths.default()
    try:
        client = await _connect_once(paths, any_protocol)
    except Unavailable as error:
        if error.code not in ("no-daemon", "connection-lost"):
            raise
        if not autostart:
            raise Unavailable(
                "the daemon is not running", cause=error.cause, hint="grid daemon start", code="no-daemon"
            ) from None
        await asyncio.to_thread(start_daemon, paths, config_path, insist)
        client = await _connect_once(paths)
    if insist and config_path and str(Path(config_path).absolute()) != client.hello.get("config_path"):
        try:
            await client.call("config_use", path=str(Path(config_path).absolute()))
        except GridError:
            await client.close()
            raise
    return client


async def _connect_once(paths: GridPaths, any_protocol: bool = False) -> DaemonClient:
    rpc = await RpcClient.start(await connect_unix(paths.socket))
    if "refused" in rpc.hello:
        await rpc.close()
        raise GridError.from_wire(rpc.hello["refused"])
    spoken = rpc.hello.get("protocol")
    if spoken != PROTOCOL and not any_protocol:
        await rpc.close()
        raise Refused(
            f"the running daemon speaks protocol {spoken}, this command speaks {PROTOCOL}",
            cause=f"it is version {rpc.hello.get('version', '?')}, pid {rpc.hello.get('pid', '?')}",
            hint="grid daemon stop; grid daemon start",
            code="daemon-protocol",
        )
    return DaemonClient(rpc, paths)


def daemon_holds_lock(paths: GridPaths) -> bool:
    """Whether some process (a daemon, or a program that hosts the control plane) holds the state directory."""
    try:
        fd = os.open(paths.lock, os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(fd)


def start_daemon(paths: GridPaths, config_path: str | None = None, named: bool = True) -> None:
    """Start a daemon in a session of its own and wait until its socket answers; harmless when there is one already.

    Not `named`: that configuration was only found where we are; a cluster that is up may have another.
    """
    paths.ensure()
    argv = [sys.executable, "-m", "distributed_grid.daemon"]
    if config_path:
        argv += ["--config" if named else "--found", str(Path(config_path).absolute())]
    _put_aside_a_long_log(paths.daemon_log)
    deadline = time.monotonic() + START_LIMIT_S
    process, log_from = _spawn(argv, paths)
    while time.monotonic() < deadline:
        if _answers(paths.socket):
            _leave(process, paths)
            return
        code = process.poll()
        if code:
            reason = _why_not(paths, code, log_from)
            if reason.code != "daemon-running":
                raise reason
            # Another one is just starting, and will answer, or just ending: then it is our turn.
            while daemon_holds_lock(paths) and not _answers(paths.socket) and time.monotonic() < deadline:
                time.sleep(0.05)
            if not _answers(paths.socket):
                process, log_from = _spawn(argv, paths)
        time.sleep(0.02)
    raise Unavailable(
        f"the daemon did not come up within {START_LIMIT_S:.0f} s", hint=f"see {paths.daemon_log}", code="daemon-start"
    )


def _spawn(argv: list[str], paths: GridPaths) -> tuple[subprocess.Popen[bytes], int]:
    """The daemon's process, and where in its log its own words begin."""
    # Without Ray's settings and marks: a command may run inside Ray, and the daemon must not end with that.
    environment = {**clean_environment(os.environ), "GRID_HOME": str(paths.home)}
    with open(paths.daemon_log, "ab", opener=_private) as log, open(os.devnull, "rb") as nothing:
        log_from = os.fstat(log.fileno()).st_size
        process = subprocess.Popen(
            argv, stdin=nothing, stdout=log, stderr=log, start_new_session=True, env=environment, cwd="/"
        )
    return process, log_from


def _leave(process: subprocess.Popen[bytes], paths: GridPaths) -> None:
    """A daemon answers. If it is not ours, ours must not take over unasked once the other one is stopped."""
    try:
        holder = paths.lock.read_text().strip()
    except OSError:
        holder = ""
    if holder in ("", str(process.pid)):
        process.returncode = 0  # it lives on without us; no warning about a child nobody waited for
        return
    process.terminate()
    try:
        process.wait(START_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _put_aside_a_long_log(log: Path) -> None:
    try:
        if log.stat().st_size > MAX_LOG_BYTES:
            log.replace(log.with_name(log.name + ".1"))
    except OSError:
        pass  # there is none yet


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _answers(socket_path: Path) -> bool:
    import socket

    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1)
        try:
            probe.connect(str(socket_path))
            return True
        except OSError:
            return False


def _why_not(paths: GridPaths, code: int, log_from: int) -> GridError:
    """The daemon's own last words, if it left any."""
    import json

    try:
        with open(paths.daemon_log, "rb") as log:
            log.seek(log_from)
            lines = log.read().decode(errors="replace").splitlines()
        for line in reversed(lines):
            if line.startswith("fatal: "):
                return GridError.from_wire(json.loads(line[len("fatal: ") :]))
    except (OSError, ValueError):
        pass
    if shutil.disk_usage(paths.home).free < LEAST_FREE_BYTES:  # then it could not write why, either
        return Unavailable(
            f"the disk of {paths.home} is full", cause="the daemon could not start", hint="make room there",
            code="disk-full",
        )  # fmt: skip
    return Unavailable(f"the daemon ended with code {code}", hint=f"see {paths.daemon_log}", code="daemon-start")


class LastingClient:
    """A client for long commands: when the daemon dies it connects again, starting one if need be."""

    def __init__(
        self,
        paths: GridPaths | None = None,
        config_path: str | None = None,
        insist: bool = False,
        patience_s: float = 60.0,
    ) -> None:
        self.paths = paths or GridPaths.default()
        self._config_path = config_path
        self._insist = insist
        self._lock = asyncio.Lock()
        self._patience_s = patience_s
        self._client: DaemonClient | None = None
        self._closed = False

    async def client(self) -> DaemonClient:
        async with self._lock:
            return await self._connected()

    async def _connected(self) -> DaemonClient:
        if self._closed:  # nobody wants a daemon any more, least of all a new one
            raise ChannelClosed("this client was closed")
        if self._client and self._client.is_open:
            return self._client
        if self._client:
            await self._client.close()
        deadline = time.monotonic() + self._patience_s
        while True:
            try:
                self._client = await connect(
                    self.paths, autostart=True, config_path=self._config_path, insist=self._insist
                )
                if self._closed:
                    await self._client.close()
                return self._client
            except (Unavailable, TimedOut):
                if self._closed or time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.2)

    async def call(self, name: str, *, timeout_s: float | None = 60.0, **arguments: Any) -> Any:
        """Only for calls that are safe to repeat."""
        deadline = time.monotonic() + self._patience_s
        while True:
            client = await self.client()
            try:
                return await client.call(name, timeout_s=timeout_s, **arguments)
            except ChannelClosed:
                if self._closed or time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.05)

    async def close(self) -> None:
        """For good."""
        self._closed = True
        if self._client:
            await self._client.close()
