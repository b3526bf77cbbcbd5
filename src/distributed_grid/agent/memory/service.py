"""The agent's calls about blocks: it reckons what the node can promise and has the memory server do it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from distributed_grid.agent.memory.accounting import Books
from distributed_grid.agent.memory.connection import MemoryConnection
from distributed_grid.agent.memory.errors import BlockNotFound, ServerLost
from distributed_grid.agent.memory.launch import ServerRecord, ensure_server, read_record
from distributed_grid.agent.memory.protocol import ADMIN_UID, pool_key, user_key
from distributed_grid.agent.node import AgentNode
from distributed_grid.wire.channel import read_secret
from distributed_grid.wire.rpc import CallContext, method

DIRECTORY = "memory"
T = TypeVar("T")


class MemoryService:
    def __init__(self, node: AgentNode, token_path: Path) -> None:
        self._node = node
        self._token_path = token_path
        self._directory = node.node_dir / DIRECTORY
        #: One at a time, so that the same room is never promised twice, and nothing is freed before it is there.
        self._lock = asyncio.Lock()

    def _key(self) -> bytes:
        return pool_key(read_secret(self._token_path))

    def _connect(self, record: ServerRecord) -> MemoryConnection:
        return MemoryConnection.open(record.host, record.port, ADMIN_UID, user_key(self._key(), ADMIN_UID))

    def _ask(self, record: ServerRecord, name: str, **arguments: Any) -> dict[str, Any]:
        connection = self._connect(record)
        try:
            return connection.admin(name, **arguments)
        finally:
            connection.close()

    async def _alone(self, work: Callable[[], T]) -> T:
        """In a thread. Also one that nobody waits for any more ends before the next begins."""
        async with self._lock:
            thread = asyncio.ensure_future(asyncio.to_thread(work))
            try:
                return await asyncio.shield(thread)
            except asyncio.CancelledError:
                while not thread.done():
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.wait([thread])
                raise

    def _running(self) -> ServerRecord:
        record = read_record(self._directory)
        if record is None:
            raise BlockNotFound(f"{self._node.name} holds no blocks", code="no-memory-server")
        return record

    def _books(self, stats: dict[str, Any], reserve_bytes: int, limit_bytes: int | None) -> Books:
        shot = self._node.latest
        return Books(
            shot.memory_available_bytes, stats["promised_bytes"], stats["resident_bytes"], reserve_bytes, limit_bytes
        )

    def _room(self, reserve_bytes: int, limit_bytes: int | None) -> dict[str, Any]:
        record = read_record(self._directory)
        names = ("blocks", "promised_bytes", "resident_bytes", "packed_bytes", "connections")
        stats: dict[str, Any] = dict.fromkeys(names, 0)
        if record:
            with contextlib.suppress(ServerLost):
                stats = self._ask(record, "stats")
        room = self._books(stats, reserve_bytes, limit_bytes).room()
        return {**stats, "room_bytes": room, "server": record.to_wire() if record else None}

    @method
    async def memory_room(
        self, context: CallContext, *, reserve_bytes: int = 0, limit_bytes: int | None = None
    ) -> dict[str, Any]:
        """What is promised, used and still free for blocks."""
        return await asyncio.to_thread(self._room, reserve_bytes, limit_bytes)

    @method
    async def memory_allocate(
        self, context: CallContext, *, block: int, uid: int, generation: int, size_bytes: int, shared: bool = False,
        at_rest: str = "", reserve_bytes: int = 0, limit_bytes: int | None = None, tls: bool = False,
    ) -> dict[str, Any]:  # fmt: skip
        """Safe to repeat; where the block lies: the server's record, and whether it is shared as was wished.

        `at_rest`: lz4 or zstd, to keep it packed. `tls`: a server that is started for it encrypts.
        """

        def allocate() -> dict[str, Any]:
            record = ensure_server(self._directory, self._node.name, self._node.address, self._key(), tls=tls)
            stats = self._ask(record, "stats", block=block)
            books = self._books(stats, reserve_bytes, limit_bytes)
            if not stats["held"] and not at_rest:
                books.check(size_bytes, self._node.name)
            made = self._ask(
                record, "allocate", block=block, uid=uid, generation=generation, size_bytes=size_bytes, shared=shared,
                most_bytes=books.promised_bytes + books.room(), at_rest=at_rest,
            )  # fmt: skip
            return {**record.to_wire(), "shared": made["shared"]}

        return await self._alone(allocate)

    @method
    async def memory_growth(
        self, context: CallContext, *, growth_bytes: int, reserve_bytes: int = 0, limit_bytes: int | None = None
    ) -> dict[str, Any]:
        """Let blocks that are kept packed grow by so much, or by what there is; that, and what they take now."""

        def grow() -> dict[str, Any]:
            record = self._running()
            books = self._books(self._ask(record, "stats"), reserve_bytes, limit_bytes)
            growth = min(growth_bytes, books.room())
            told = self._ask(record, "set_growth", growth_bytes=growth, promised_bytes=books.promised_bytes)
            return {**told, "growth_bytes": growth}

        return await self._alone(grow)

    @method
    async def memory_free(self, context: CallContext, *, block: int) -> bool:
        """False: it was not there."""

        def free() -> bool:
            record = read_record(self._directory)
            return record is not None and bool(self._ask(record, "free", block=block)["freed"])

        return await self._alone(free)

    @method
    async def memory_held(self, context: CallContext, *, after: int = -1) -> dict[str, Any]:
        """The server's record and its blocks by rising ids, those after one, as many as fit; none where none runs."""
        record = read_record(self._directory)
        if record is None:
            return {"server": None, "blocks": [], "more": False}
        found = await asyncio.to_thread(lambda: self._ask(record, "list", after=after))
        return {"server": record.to_wire(), **found}

    @method
    async def memory_server(self, context: CallContext) -> dict[str, Any] | None:
        """The record of the server whose process is there; it is not asked for anything."""
        record = read_record(self._directory)
        return record.to_wire() if record else None

    @method
    async def memory_admin(self, context: CallContext, *, call: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """The steps of making a copy: track, changed, freeze, thaw, set_generation, copy; torn and mend."""
        return await asyncio.to_thread(lambda: self._ask(self._running(), call, **arguments))

    @method
    async def memory_stop(self, context: CallContext) -> bool:
        """End the server and with it all its blocks; the cluster goes down."""
        record = read_record(self._directory)
        if record is None:
            return False
        (self._directory / "server.json").unlink(missing_ok=True)
        with contextlib.suppress(ServerLost):
            await asyncio.to_thread(self._ask, record, "stop")
        return True
