"""The daemon's side of the bridge: spawns it, calls it with a limit, replaces it when it is dead."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

from distributed_grid.cluster.ray_node import LIGHT, auth_environment, clean_environment
from distributed_grid.core.errors import GridError, TimedOut, Unavailable

_LINE_LIMIT_BYTES = 16 * 1024**2


class BridgeClient:
    """One bridge process. It may be spawned before the cluster is up: it loads Ray meanwhile."""

    def __init__(self, token_path: Path, log_path: Path) -> None:
        self._token_path, self._log_path = token_path, log_path
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._numbers = itertools.count(1)
        self._cluster: tuple[str, str] | None = None
        self._starting = asyncio.Lock()
        self._joining = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process and self._process.returncode is None else None

    @property
    def is_joined(self) -> bool:
        """Whether it was told to join a cluster since it was last closed."""
        return self._cluster is not None

    async def spawn(self) -> None:
        """Start the process if it is not running; returns at once."""
        async with self._starting:
            if self.pid is not None and self._reader is not None and not self._reader.done():
                return
            await self._end()
            with open(self._log_path, "wb", opener=lambda path, flags: os.open(path, flags, 0o600)) as log:
                self._process = await asyncio.create_subprocess_exec(
                    sys.executable, "-m", "distributed_grid.cluster.bridge",
                    stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=log,
                    env={**clean_environment(os.environ), **LIGHT, **auth_environment(str(self._token_path))},
                    start_new_session=True, cwd="/", limit=_LINE_LIMIT_BYTES,
                )  # fmt: skip
            self._reader = asyncio.create_task(self._read(self._process))

    async def connect(self, address: str, node_ip: str, *, fresh: bool = False, timeout_s: float = 60.0) -> None:
        """Join a cluster; `fresh` after a head's restart, when the old connection is worth nothing."""
        if fresh or (self._cluster is not None and self._cluster != (address, node_ip)):
            await self.close()
        self._cluster = (address, node_ip)
        await self.spawn()
        try:
            async with self._joining:  # who asks for something else meanwhile waits for it
                await self._ask("connect", timeout_s, address=address, node_ip=node_ip)
        except GridError as error:
            if error.code == "ray-error":  # it did not join: the next one who asks begins anew
                await self.close()
            raise

    async def call(self, verb: str, *, timeout_s: float = 30.0, **arguments: Any) -> dict[str, Any]:
        """Ask the bridge; one that is dead, or dies over it, is replaced, joined to the cluster and asked once more.

        All that the bridge does can be done twice.
        """
        cluster = self._cluster
        deadline = asyncio.get_running_loop().time() + timeout_s
        try:
            if self.pid is None and cluster is not None:
                await self.connect(*cluster, timeout_s=timeout_s)
            await self.spawn()
            async with asyncio.timeout(timeout_s), self._joining:
                pass
            return await self._ask(verb, timeout_s, **arguments)
        except TimeoutError:
            raise TimedOut(
                f"Ray was not joined within {timeout_s:.0f} s", hint="grid doctor", code="bridge-timeout"
            ) from None
        except Unavailable as error:
            left_s = deadline - asyncio.get_running_loop().time()
            if error.code != "bridge-lost" or self._cluster != cluster or left_s <= 0:
                raise
        if self._reader is not None:
            await asyncio.wait({self._reader}, timeout=5.0)  # its end is seen, so that it is not asked again
        if cluster is not None:
            await self.connect(*cluster, timeout_s=left_s)
        await self.spawn()
        return await self._ask(verb, max(1.0, deadline - asyncio.get_running_loop().time()), **arguments)

    async def close(self) -> None:
        """End the process; the client can be used again."""
        async with self._starting:
            self._cluster = None
            await self._end()

    async def _ask(self, verb: str, timeout_s: float, **arguments: Any) -> dict[str, Any]:
        process = self._process
        if process is None or process.stdin is None:
            raise Unavailable("the Ray bridge is not running", code="bridge-lost")
        number = next(self._numbers)
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            async with asyncio.timeout(timeout_s):
                process.stdin.write(json.dumps({**arguments, "id": number, "do": verb}).encode() + b"\n")
                await process.stdin.drain()
                answer = await future
        except TimeoutError:
            raise TimedOut(
                f"Ray did not answer {verb!r} within {timeout_s:.0f} s", hint="grid doctor", code="bridge-timeout"
            ) from None
        except OSError as error:
            raise Unavailable("the Ray bridge is gone", cause=str(error), code="bridge-lost") from error
        finally:
            self._waiting.pop(number, None)
        if "error" in answer:
            raise GridError.from_wire(answer["error"])
        return dict(answer["ok"])

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        try:
            while line := await process.stdout.readline():
                answer = json.loads(line)
                future = self._waiting.get(int(answer.get("id", 0)))
                if future is not None and not future.done():
                    future.set_result(answer)
        except (ValueError, OSError):  # a line that is none: the bridge is out of step, and replaced
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        await process.wait()
        if process is self._process:
            gone = Unavailable("the Ray bridge is gone", hint=f"see {self._log_path}", code="bridge-lost").to_wire()
            for future in self._waiting.values():
                if not future.done():
                    future.set_result({"error": gone})

    async def _end(self) -> None:
        process, self._process = self._process, None
        reader, self._reader = self._reader, None
        if process is not None:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()  # it keeps nothing; the agents are detached
            if process.stdin is not None:
                process.stdin.close()
            await process.wait()
        if reader is not None:
            await reader
        gone = Unavailable("the Ray bridge was closed", code="bridge-closed").to_wire()
        for future in self._waiting.values():
            if not future.done():
                future.set_result({"error": gone})
