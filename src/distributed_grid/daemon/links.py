"""The daemon's line to each node's agent: opened, watched by its own stream of figures, opened again when it breaks."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from distributed_grid.core.errors import GridError, NotFound, TimedOut, Unavailable
from distributed_grid.monitoring.snapshot import NodeSnapshot
from distributed_grid.wire.channel import ChannelClosed, connect
from distributed_grid.wire.rpc import PROTOCOL, RpcClient

log = logging.getLogger(__name__)

#: No figures for this long means that the node is silent and the line is opened anew.
SILENCE_S = 5.0
RETRY_S = 0.5

#: Finds where a node's agent listens now, having Ray bring one up if there is none.
FindEndpoint = Callable[[str], Awaitable[tuple[str, int]]]


@dataclass(slots=True)
class LinkState:
    """What is known about one node's agent."""

    node: str
    online: bool = False
    #: When it came to be online, or offline (wall clock).
    since: float = field(default_factory=time.time)
    reason: str = "not connected yet"
    agent: dict[str, Any] = field(default_factory=dict)


class NodeLink:
    """One node's line. `client()` waits for it to be up; `run` keeps it so."""

    def __init__(
        self,
        node: str,
        find: FindEndpoint,
        secret: Callable[[], bytes],
        on_snapshot: Callable[[NodeSnapshot], None],
        on_change: Callable[[LinkState, bool], Awaitable[None]],
    ) -> None:
        self.state = LinkState(node)
        self._find = find
        self._secret = secret
        self._on_snapshot = on_snapshot
        self._on_change = on_change
        self._client: RpcClient | None = None
        self._up = asyncio.Event()
        self._endpoint: tuple[str, int] | None = None

    @property
    def node(self) -> str:
        return self.state.node

    def suggest(self, endpoint: tuple[str, int]) -> None:
        """Where the agent was last known to listen: tried first."""
        self._endpoint = endpoint

    async def run(self) -> None:
        while True:
            try:
                await self._connect()
                await self._watch()
            except GridError as error:
                await self._tell_down(error)
            except Exception as error:  # the line is kept for as long as the node is wanted, whatever happens on it
                log.exception("the line to %s failed", self.node)
                await self._tell_down(Unavailable(f"the line to {self.node} failed", cause=str(error)))
            await asyncio.sleep(RETRY_S)

    async def _tell_down(self, error: GridError) -> None:
        try:
            await self._down(error)
        except GridError as fault:
            log.warning("%s is offline, which could not be told: %s", self.node, fault.message)

    async def _connect(self) -> None:
        tried = self._endpoint
        self._endpoint = None
        if tried is None:
            tried = await self._find(self.node)
        client = await RpcClient.start(await connect(*tried, self._secret(), timeout_s=5))
        if client.hello.get("protocol") != PROTOCOL or client.hello.get("node") != self.node:
            await client.close()
            raise Unavailable(
                f"what answers for {self.node} is not its agent",
                cause=f"it says it is {client.hello.get('node')!r}, protocol {client.hello.get('protocol')}",
                hint="grid cluster stop; grid cluster start",
                code="wrong-agent",
            )
        self._client = client
        self.state.agent = {**client.hello, "endpoint": list(tried)}

    async def _watch(self) -> None:
        assert self._client is not None
        try:
            async with contextlib.aclosing(self._client.stream("watch")) as figures:  # type: ignore[type-var]
                while True:
                    async with asyncio.timeout(SILENCE_S):
                        item = await anext(figures)
                    self._on_snapshot(NodeSnapshot.from_wire(item))
                    if not self.state.online:
                        was_known = bool(self.state.reason != "not connected yet")
                        self.state.online, self.state.since, self.state.reason = True, time.time(), ""
                        self._up.set()
                        await self._on_change(self.state, was_known)
        except TimeoutError:
            raise TimedOut(f"{self.node} has been silent for {SILENCE_S:g} s", code="node-silent") from None
        except StopAsyncIteration:
            raise ChannelClosed(f"{self.node}'s agent ended its stream") from None
        finally:
            await self._drop()

    async def _drop(self) -> None:
        client, self._client = self._client, None
        self._up.clear()
        if client:
            await client.close()

    async def _down(self, error: GridError) -> None:
        reason = f"{error.message}: {error.cause}" if error.cause else error.message
        was_online = self.state.online
        self.state.online, self.state.reason = False, reason
        if was_online:
            self.state.since = time.time()
            await self._on_change(self.state, True)

    async def client(self, wait_s: float = 0.0) -> RpcClient:
        """The open line; waits up to `wait_s` for it, else says why there is none."""
        if self._client is None or not self._up.is_set():
            try:
                async with asyncio.timeout(wait_s):
                    await self._up.wait()
            except TimeoutError:
                pass
        if self._client is None:
            raise self._offline()
        return self._client

    def _offline(self) -> Unavailable:
        return Unavailable(
            f"{self.node} is not online", cause=self.state.reason, hint="grid status", code="node-offline"
        )

    def ask(self, name: str, **arguments: Any) -> asyncio.Future[Any]:
        """Sent in this very turn of the loop, if the line is open."""
        if self._client is None:
            raise self._offline()
        return self._client.ask(name, **arguments)

    async def call(self, name: str, *, timeout_s: float = 30.0, wait_s: float = 0.0, **arguments: Any) -> Any:
        client = await self.client(wait_s)
        try:
            return await client.call(name, timeout_s=timeout_s, **arguments)
        except ChannelClosed as error:
            raise ChannelClosed(f"{self.node} stopped answering", cause=error.message, code="node-lost") from None

    async def stream(self, name: str, *, wait_s: float = 0.0, **arguments: Any) -> AsyncIterator[Any]:
        async with contextlib.aclosing((await self.client(wait_s)).stream(name, **arguments)) as items:  # type: ignore[type-var]
            async for item in items:
                yield item


class NodeLinks:
    """All lines, each kept by a task of its own."""

    def __init__(self, make: Callable[[str], NodeLink]) -> None:
        self._make = make
        self._links: dict[str, NodeLink] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def __iter__(self) -> Any:
        return iter(self._links.values())

    def names(self) -> list[str]:
        return list(self._links)

    def get(self, node: str) -> NodeLink:
        try:
            return self._links[node]
        except KeyError:
            if self._links:
                cause, hint = f"the nodes are {', '.join(self._links)}", "grid status"
            else:  # a daemon for each user: who was let in to somebody else's has to name it
                cause = "the cluster is not up"
                hint = "grid cluster start; or, to use somebody else's, GRID_HOME=DIRECTORY"
            raise NotFound(f"there is no node {node!r}", cause=cause, hint=hint, code="unknown-node") from None

    def open(self, node: str, endpoint: tuple[str, int] | None = None) -> NodeLink:
        link = self._links.get(node)
        if link is None:
            link = self._links[node] = self._make(node)
        if endpoint:
            link.suggest(endpoint)
        task = self._tasks.get(node)
        if task is None or task.done():
            self._tasks[node] = asyncio.create_task(link.run(), name=f"link-{node}")
        return link

    async def close_all(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._links.clear()
        self._tasks.clear()
