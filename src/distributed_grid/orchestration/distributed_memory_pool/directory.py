"""The daemon's directory of blocks, asked over its socket by blocking calls: no event loop, no Ray."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import msgpack

from distributed_grid.agent.memory import errors as _errors  # noqa: F401 - known before one comes over the socket
from distributed_grid.core.errors import GridError, TimedOut, Unavailable
from distributed_grid.orchestration.distributed_memory_pool import forks
from distributed_grid.orchestration.distributed_memory_pool.transfers import current

_LENGTH = struct.Struct("!I")
MAX_FRAME_BYTES = 16 * 1024 * 1024
#: A daemon that was killed is waited for, and started again, this long.
PATIENCE_S = 45.0
START_LIMIT_S = 60.0


class _Line:
    """One connection; a call at a time."""

    def __init__(self, path: Path) -> None:
        self._sock = socket.socket(socket.AF_UNIX)
        self._number = 0
        try:
            self._sock.settimeout(10)
            self._sock.connect(str(path))
            self.hello: dict[str, Any] = self._receive().get("hello", {})
        except OSError as error:
            self._sock.close()
            cause = f"{path}: {error.strerror or error}"
            hint = "grid cluster start"
            raise Unavailable("the daemon is not running", cause=cause, hint=hint, code="no-daemon") from None
        if "refused" in self.hello:
            self._sock.close()
            raise GridError.from_wire(self.hello["refused"])

    def _receive(self) -> dict[str, Any]:
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        if length > MAX_FRAME_BYTES:
            raise ConnectionError("a message that is too long")
        message = msgpack.unpackb(self._exactly(length), raw=False, strict_map_key=False)
        if not isinstance(message, dict):
            raise ConnectionError("a message that is not a map")
        return message

    def _exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            part = self._sock.recv(size - len(data))
            if not part:
                raise ConnectionError("the daemon closed the connection")
            data += part
        return bytes(data)

    def call(self, name: str, arguments: dict[str, Any], timeout_s: float) -> Any:
        self._number += 1
        body = msgpack.packb({"i": self._number, "m": name, "a": arguments}, use_bin_type=True)
        self._sock.settimeout(timeout_s)
        self._sock.sendall(_LENGTH.pack(len(body)) + body)
        while True:
            message = self._receive()
            if message.get("i") == self._number:
                break
        if "e" in message:
            raise GridError.from_wire(message["e"])
        return message.get("r")

    def abort(self) -> None:
        """From another thread: whoever waits on it is told at once that it is lost."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()


class Directory:
    """Calls that are all safe to repeat, from any thread; goes on when the daemon was killed and came back."""

    def __init__(self, path: Path, config_path: str | None = None, *, autostart: bool = True) -> None:
        self._path = path
        self._config_path = config_path
        self._autostart = autostart
        self._idle: list[_Line] = []
        self._all: weakref.WeakSet[_Line] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._closed = False
        forks.watch(self)

    def after_fork(self) -> None:
        self._lock = threading.Lock()
        self._idle = []
        for line in list(self._all):
            line.close()

    def call(
        self, name: str, *, timeout_s: float = 60.0, done_if: type[GridError] | None = None, **arguments: Any
    ) -> Any:
        """`done_if`: what a second try says where the first one, whose answer was lost, had done it."""
        deadline = time.monotonic() + PATIENCE_S
        cancellation, again = current.get(), False
        while True:
            line = self._take(deadline)
            try:
                if cancellation:
                    cancellation.attach(line)
                answer = line.call(name, arguments, timeout_s)
            except TimeoutError:
                line.close()
                raise TimedOut(f"the daemon did not answer {name} within {timeout_s:g} s") from None
            except (OSError, ValueError, msgpack.UnpackException) as error:
                line.close()
                if time.monotonic() > deadline or (cancellation and cancellation.cancelled):
                    raise Unavailable("lost the connection to the daemon", cause=str(error)) from None
                again = True
                continue
            except GridError as error:
                self._give(line)
                if again and done_if is not None and isinstance(error, done_if):
                    return None
                raise
            except BaseException:
                line.close()
                raise
            finally:
                if cancellation:
                    cancellation.attach(None)
            self._give(line)
            return answer

    def _take(self, deadline: float) -> _Line:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        tried = False
        while True:
            try:
                line = _Line(self._path)
                self._all.add(line)
                return line
            except Unavailable:
                cancellation = current.get()
                if not self._autostart or time.monotonic() > deadline or (cancellation and cancellation.cancelled):
                    raise
            if not tried:
                tried = True
                self._start()
            time.sleep(0.1)

    def _give(self, line: _Line) -> None:
        with self._lock:
            if not self._closed and len(self._idle) < 4:
                self._idle.append(line)
                return
        line.close()

    def _start(self) -> None:
        """By the command, as a user would: whoever comes second finds the first one's daemon."""
        argv = [sys.executable, "-m", "distributed_grid.cli"]
        argv += ["--config", self._config_path] if self._config_path else []
        with contextlib.suppress(subprocess.TimeoutExpired):
            done = subprocess.run(
                [*argv, "daemon", "start"], stdin=subprocess.DEVNULL, capture_output=True, text=True,
                timeout=START_LIMIT_S, env=os.environ,
            )  # fmt: skip
            if done.returncode != 0:
                cause = (done.stderr.strip().splitlines() or ["no reason given"])[0]
                raise Unavailable("the daemon is not running", cause=cause, hint="grid daemon start", code="no-daemon")

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for line in idle:
            line.close()
