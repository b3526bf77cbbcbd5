"""Where the dashboard's figures come from: the daemon's streams, opened again when they break, or this machine."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import platform
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

from distributed_grid.config.paths import GridPaths
from distributed_grid.core.errors import GridError, TimedOut, Unavailable
from distributed_grid.daemon.client import DaemonClient, connect
from distributed_grid.store.snapshot import read_json
from distributed_grid.tui.view import View

log = logging.getLogger(__name__)

ALONE = "read-only, this machine only"
FIRST_EVENTS = 50
MOVES_SHOWN = 100
RETRY_S = 1.0
#: A daemon that sends no frame for so many intervals, or this long, does not answer.
SILENT_INTERVALS, SILENT_S = 3.0, 5.0


class Feed:
    """Keeps a `View` up to date. `on_change` is called after each change."""

    def __init__(
        self,
        interval_s: float = 1.0,
        *,
        paths: GridPaths | None = None,
        head_name: str | None = None,
        state_path: Path | None = None,
    ) -> None:
        self.view = View(patience_s=max(SILENT_S, SILENT_INTERVALS * interval_s))
        self.on_change: Callable[[], None] = lambda: None
        self._interval_s = interval_s
        self._paths = paths or GridPaths.default()
        self._head_name = head_name or platform.node()
        self._state_path = state_path or self._paths.offload_state
        self._client: DaemonClient | None = None
        self._now = asyncio.Event()
        self._sampler: Any = None

    def refresh(self) -> None:
        """Ask at once, whatever the interval."""
        self._now.set()

    async def run(self) -> None:
        """Until it is cancelled. What can't be understood is said, and it goes on: a screen has nobody to raise to."""
        try:
            while True:
                try:
                    await self._follow_daemon()
                except GridError as error:
                    self._lost(error)
                except Exception as error:  # noqa: BLE001
                    self._failed(error)
                try:
                    await self._watch_locally()
                except Exception as error:  # noqa: BLE001
                    self._failed(error)
                    await asyncio.sleep(RETRY_S)
        finally:
            if self._sampler is not None:
                self._sampler.close()

    # -- with a daemon --------------------------------------------------------------------------------------------

    async def _follow_daemon(self) -> None:
        client = await connect(self._paths)
        try:
            self._client = client
            past = await client.call("events_recent", limit=FIRST_EVENTS)
            self.view.take_events(past)
            await self._ask(client)
            self.view.source, self.view.trouble = "daemon", ""
            since = past[-1]["seq"] if past else 0
            await _until_one_ends(self._frames(client), self._events(client, since), self._at_once(client))
        finally:
            self._client = None
            await client.close()

    async def _frames(self, client: DaemonClient) -> None:
        """Nodes and moves together, so that they are drawn once."""
        async for rows in client.stream("snapshots_follow", interval_s=self._interval_s):
            await self._ask(client)
            self.view.take_nodes(rows)
            self.on_change()

    async def _events(self, client: DaemonClient, since: int) -> None:
        async for event in client.stream("events_follow", since=since):
            self.view.events.append(event)
            self.on_change()

    async def _at_once(self, client: DaemonClient) -> None:
        """Asked for by a key: all of it, for the frames may be slow."""
        while True:
            await self._now.wait()
            self._now.clear()
            rows = (await client.call("cluster_status"))["nodes"]
            await self._ask(client)
            self.view.take_nodes(rows)
            self.on_change()

    async def _ask(self, client: DaemonClient, brief: bool = True) -> None:
        self.view.take_moves(await client.call("offload_status", limit=MOVES_SHOWN, brief=brief))
        self.view.auto = await client.call("auto_status")

    def _lost(self, error: GridError) -> None:
        was_daemon = self.view.source == "daemon"
        self.view.source = "local"
        if was_daemon:
            word = "does not answer" if isinstance(error, TimedOut) else "is gone"
            self.view.trouble = f"the daemon {word}, {ALONE}"
        elif error.code in ("no-daemon", "connection-lost"):
            self.view.trouble = f"no daemon: {ALONE}"
        else:
            self.view.trouble = error.message
        self.view.auto = {}
        self.on_change()

    def _failed(self, error: Exception) -> None:
        log.warning("the dashboard's figures failed", exc_info=error)
        self.view.source = "local"
        self.view.trouble = f"what came can't be shown ({type(error).__name__}: {error}), {ALONE}"
        self.on_change()

    # -- without one ----------------------------------------------------------------------------------------------

    async def _watch_locally(self) -> None:
        """This machine's figures until a daemon answers; moves and events as the daemon last wrote them down."""
        await self.look_locally()
        left_s = max(self._interval_s, RETRY_S)
        self._now.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(left_s):
                await self._now.wait()

    async def look_locally(self) -> None:
        from distributed_grid.monitoring.node_sampler import NodeSampler

        if self._sampler is None:
            self._sampler = await asyncio.to_thread(NodeSampler, self._head_name)
            await asyncio.sleep(0.25)  # the first look needs something to compare with
        shot = await asyncio.to_thread(self._sampler.sample)
        row = {"name": self._head_name, "role": "head", "online": True, "use": shot.to_wire(), "age_s": 0.0}
        self.view.take_nodes([row])
        self.view.source = "local"
        kept = await asyncio.to_thread(read_json, self._state_path, {})
        if isinstance(kept, dict):
            self.view.take_moves({"active": kept.get("active_offloads"), "finished": kept.get("finished_offloads")})
            self.view.take_events(kept.get("history"))
        self.on_change()

    # -- what the keys need ---------------------------------------------------------------------------------------

    def _daemon(self) -> DaemonClient:
        if self._client is None:
            raise Unavailable("the daemon is not running", hint="grid daemon start", code="no-daemon")
        return self._client

    async def call(self, name: str, *, timeout_s: float = 60.0, **arguments: Any) -> Any:
        return await self._daemon().call(name, timeout_s=timeout_s, **arguments)

    def stream(self, name: str, **arguments: Any) -> AsyncIterator[Any]:
        return self._daemon().stream(name, **arguments)

    async def once(self) -> View:
        """One whole picture, for `--once`."""
        try:
            client = await connect(self._paths)
        except Unavailable:
            self._lost(Unavailable("", code="no-daemon"))
            try:
                await self.look_locally()
            finally:
                if self._sampler is not None:
                    self._sampler.close()
            return self.view
        async with client:
            self.view.take_events(await client.call("events_recent", limit=FIRST_EVENTS))
            await self._ask(client, brief=False)
            self.view.take_nodes((await client.call("cluster_status"))["nodes"])
        self.view.source, self.view.trouble = "daemon", ""
        return self.view


async def _until_one_ends(*work: Coroutine[Any, Any, None]) -> None:
    """A task group would keep a cancellation to itself that comes just when one of them fails (Python 3.11)."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
