"""How a Python program speaks to the control plane: over the daemon's socket, or through an orchestrator it has."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator
from typing import Any, Protocol

from distributed_grid.config.paths import GridPaths
from distributed_grid.core.errors import GridError, Unavailable
from distributed_grid.wire.channel import ChannelClosed, connect_unix
from distributed_grid.wire.rpc import RpcClient


class Caller(Protocol):
    """Anything that reaches the daemon: this module's line, a `GridOrchestrator`, a daemon client."""

    async def call(self, name: str, *, timeout_s: float | None = 60.0, **arguments: Any) -> Any: ...


async def request_lease(caller: Caller, *, wait_s: float = 0.0, **arguments: Any) -> dict[str, Any]:
    """A lease as the daemon shows it. Cancelled (Ctrl-C), nothing stays granted, nor what was just being granted."""
    lease_id = str(uuid.uuid4())
    try:
        view: dict[str, Any] = await caller.call(
            "lease_request", timeout_s=wait_s + 90, lease_id=lease_id, wait_s=wait_s, **arguments
        )
        return view
    except asyncio.CancelledError:
        with contextlib.suppress(GridError):
            await caller.call("lease_release", lease_id=lease_id, force=True, timeout_s=10)
        raise


class ResourceSharingProtocol:
    """A line to the daemon, opened when it is first needed and again when the daemon was away."""

    def __init__(self, paths: GridPaths | None = None) -> None:
        self._paths = paths or GridPaths.default()
        self._client: RpcClient | None = None
        self._lock = asyncio.Lock()

    async def initialize(self) -> None:
        await self.client()

    async def client(self) -> RpcClient:
        if self._client is not None and self._client.is_open:
            return self._client
        async with self._lock:
            if self._client is not None and self._client.is_open:
                return self._client
            await self._drop()
            try:
                client = await RpcClient.start(await connect_unix(self._paths.socket))
            except Unavailable as error:
                raise Unavailable(
                    "the daemon is not running", cause=error.cause, hint="grid daemon start", code="no-daemon"
                ) from None
            if "refused" in client.hello:
                await client.close()
                raise GridError.from_wire(client.hello["refused"])
            self._client = client
            return client

    async def call(self, name: str, *, timeout_s: float | None = 60.0, **arguments: Any) -> Any:
        client = await self.client()
        try:
            return await client.call(name, timeout_s=timeout_s, **arguments)
        except ChannelClosed:
            raise Unavailable("the daemon went away", hint="grid daemon status", code="daemon-lost") from None

    async def stream(self, name: str, **arguments: Any) -> AsyncIterator[Any]:
        async for item in (await self.client()).stream(name, **arguments):
            yield item

    async def shutdown(self) -> None:
        async with self._lock:
            await self._drop()

    async def _drop(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.close()
