"""A pool to try: real memory servers, the real directory, a real socket; only Ray and the agents' wire are left out."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from distributed_grid.agent.memory.launch import ServerRecord, read_record
from distributed_grid.agent.memory.service import MemoryService
from distributed_grid.config.models import ClusterConfig
from distributed_grid.config.paths import GridPaths
from distributed_grid.core.errors import NotFound, Unavailable
from distributed_grid.core.process import ProcessId, boot_id
from distributed_grid.daemon.events import EventHub
from distributed_grid.daemon.memory import MemoryDirectory
from distributed_grid.orchestration.distributed_memory_pool.sync import SyncMemoryPool
from distributed_grid.store.journal import Journal
from distributed_grid.wire.channel import Channel, serve_unix
from distributed_grid.wire.rpc import CallContext, RpcServer
from tests.lab.waiting import wait_until

GB = 1024**3
NODES = ("gpu-master", "gpu1", "gpu2")


@dataclass
class Link:
    """An agent's calls without the wire between."""

    service: MemoryService
    state: Any
    shared: bool

    async def call(self, name: str, *, timeout_s: float = 30, wait_s: float = 0, **arguments: Any) -> Any:
        if not self.state.online:
            raise Unavailable(f"{self.state.node} is not online", code="node-offline")
        call = asyncio.ensure_future(getattr(self.service, name)(CallContext(), **arguments))
        call.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(call)
        finally:
            call.cancel()  # as over the wire: who gives up does not wait until the other end has


class Links:
    def __init__(self) -> None:
        self.links: dict[str, Link] = {}

    def get(self, node: str) -> Link:
        if node not in self.links:
            raise NotFound(f"there is no node named {node!r}", code="unknown-node")
        return self.links[node]

    def names(self) -> list[str]:
        return list(self.links)


@dataclass
class World:
    """Three nodes on this host and their directory, which can be ended and started again."""

    home: Path
    shared: bool = True
    available_bytes: int = 4 * GB
    links: Links = field(default_factory=Links)
    uid: int = field(default_factory=os.getuid)

    def __post_init__(self) -> None:
        self.paths = GridPaths(self.home).ensure()
        self.paths.token.write_bytes(b"a token of this test")
        self.config = ClusterConfig()
        self.snapshots = {node: SimpleNamespace(memory_pressure=0.1) for node in NODES}
        for node in NODES:
            latest = SimpleNamespace(memory_available_bytes=self.available_bytes)
            agent: Any = SimpleNamespace(
                name=node, node_dir=self.paths.node_dir(node), address="127.0.0.1", latest=latest
            )
            state = SimpleNamespace(node=node, online=True, agent={"boot_id": boot_id() if self.shared else "other"})
            self.links.links[node] = Link(MemoryService(agent, self.paths.token), state, self.shared)
        self.start()

    # -- the daemon -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="directory")
        self._thread.start()
        assert self._ready.wait(60)

    async def _serve(self) -> None:
        self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        for link in self.links.links.values():  # its lock is of the loop that it is first used in
            link.service = MemoryService(link.service._node, self.paths.token)
        journal = Journal.open(self.paths.journal)
        self.events = EventHub(journal.events)
        plane: Any = SimpleNamespace(
            journal=journal, events=self.events, links=self.links, config=self.config, paths=self.paths,
            collector=SimpleNamespace(get_all_latest_snapshots=lambda: self.snapshots),
        )  # fmt: skip
        self.directory = MemoryDirectory(plane)
        rpc = RpcServer(self.directory, hello=lambda: {})

        async def on_channel(channel: Channel) -> None:
            await rpc.serve(channel, CallContext(uid=self.uid, pid=channel.peer_credentials()[1]))

        for node in NODES:
            if self.links.get(node).state.online:
                await self.directory.node_is_up(node)
        listener = await serve_unix(self.paths.socket, on_channel)
        care = asyncio.create_task(self.directory.care.run())
        self._ready.set()
        await self._ended.wait()
        care.cancel()
        await asyncio.gather(care, return_exceptions=True)
        await listener.close()
        journal.close()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(60)

    def run(self, work: Callable[[], Any]) -> Any:
        """A coroutine on the directory's loop, to its end."""
        return asyncio.run_coroutine_threadsafe(work(), self._loop).result(60)

    def told(self, kind: str) -> list[str]:
        async def recent() -> list[str]:
            return [row.text for row in self.events.recent(1000, kind=kind)]

        found: list[str] = self.run(recent)
        return found

    # -- the nodes ------------------------------------------------------------------------------------------------

    def record(self, node: str) -> ServerRecord | None:
        return read_record(self.paths.node_dir(node) / "memory")

    def kill(self, node: str) -> None:
        record = self.record(node)
        if record:
            process = ProcessId(record.pid, record.start_ticks)
            process.signal(signal.SIGKILL)
            wait_until(lambda: not process.is_alive(), 60, "the server to end")
            # Its other threads may still be on their way out, and hold its connections open.
            threads = Path(f"/proc/{record.pid}/task")
            wait_until(lambda: len(list(threads.glob("*"))) <= 1, 60, "its threads to end")

    async def held(self, node: str) -> list[dict[str, Any]]:
        """What a node's server itself says that it holds."""
        answer = await self.links.get(node).call("memory_held")
        blocks: list[dict[str, Any]] = answer["blocks"]
        return blocks

    def backed_bytes(self, node: str) -> int:
        """What the blocks of a node really take, seen from outside: its server's memory and all shared memory."""
        record = self.record(node)
        assert record
        status = Path(f"/proc/{record.pid}/status").read_text().splitlines()
        own = next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon:"))
        files = [*Path(f"/proc/{record.pid}/fd").iterdir(), *Path("/proc/self/map_files").iterdir()]
        shared = {(at.st_dev, at.st_ino): at.st_blocks * 512 for at in map(_stat_of_block, files) if at}
        return own + sum(shared.values())

    def pool(self, **options: Any) -> SyncMemoryPool:
        made = SyncMemoryPool(self.config, **options)
        made.initialize()
        return made

    def close(self) -> None:
        self.stop()
        for node in NODES:
            self.kill(node)


def _stat_of_block(file: Path) -> os.stat_result | None:
    try:
        return file.stat() if "grid-block" in str(file.readlink()) else None
    except OSError:
        return None
