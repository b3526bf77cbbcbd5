"""The directory of memory blocks: where each lies and whose it is, journalled before anything is done about it.

States of a block: allocating -> ready -> freeing -> gone from the journal; ready <-> lost while its node is away.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import heapq
import logging
import os
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from distributed_grid.agent.memory.accounting import show_bytes
from distributed_grid.agent.memory.errors import BlockLost, BlockNotFound, NoNodes
from distributed_grid.agent.memory.packing import codec_of
from distributed_grid.agent.memory.protocol import pool_key, user_key
from distributed_grid.core.errors import GridError, Refused, Unavailable, UsageError
from distributed_grid.core.process import boot_id, process_id
from distributed_grid.daemon.memory_care import MemoryCare
from distributed_grid.daemon.memory_room import LEAST_AT_REST_BYTES, PoolRoom
from distributed_grid.daemon.tasks import user_name
from distributed_grid.orchestration.distributed_memory_pool.blocks import (
    PAGE_BLOCKS,
    check_meta,
    check_size,
    wire_id,
)  # fmt: skip
from distributed_grid.orchestration.distributed_memory_pool.placement import choose_nodes
from distributed_grid.store.blocks import BlockRow
from distributed_grid.wire.channel import read_secret
from distributed_grid.wire.rpc import CallContext, method

if TYPE_CHECKING:
    from distributed_grid.daemon.control import ControlPlane

log = logging.getLogger(__name__)

MOST_REPLICAS = 3
#: An agent that starts its memory server on a busy machine may need this long.
ALLOCATE_LIMIT_S = 90.0
STOP_LIMIT_S = 10.0


class MemoryDirectory:
    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane
        self._store = plane.journal.blocks
        #: The journal's rows; every change goes through `put` and `remove`, which write them first.
        self.rows: dict[str, BlockRow] = {row.id: row for row in self._store.list(oldest_first=True)}
        named = [row for row in self.rows.values() if row.data.get("name") and row.state != "freeing"]
        self._names = {(row.uid, row.data["name"]): row.id for row in named}
        #: Room is asked for and taken in one go.
        self._allocating = asyncio.Lock()
        self.room = PoolRoom(self, plane)
        self.care = MemoryCare(self, plane)
        for row in list(self.rows.values()):
            if row.state == "allocating":  # nobody was told of it
                self.put(row, state="freeing")

    # -- the rows -------------------------------------------------------------------------------------------------

    def put(self, row: BlockRow, *, state: str | None = None, **data: Any) -> BlockRow:
        """Write a row, changed as told; names follow."""
        row = _changed(row, state, **data)
        self.put_all([row])
        return row

    def put_all(self, rows: Iterable[BlockRow], remove: Iterable[str] = ()) -> None:
        """All of it or nothing; what is known here follows only when it is on disk."""
        rows, remove = list(rows), list(remove)
        with self._plane.journal.transaction():
            for row in rows:
                self._store.put(row)
            for block_id in remove:
                self._store.delete(block_id)
        for block_id in [*remove, *(row.id for row in rows)]:
            old = self.rows.get(block_id)
            if old and self._names.get((old.uid, old.data.get("name", ""))) == block_id:
                del self._names[old.uid, old.data["name"]]
        for block_id in remove:
            self.rows.pop(block_id, None)
        for row in rows:
            self.rows[row.id] = row
            if row.data.get("name") and row.state != "freeing":
                self._names[row.uid, row.data["name"]] = row.id

    def remove(self, block_id: str) -> None:
        self.put_all([], remove=[block_id])

    def copies_on(self, node: str, states: Iterable[str] = ("ready",)) -> list[BlockRow]:
        chosen = [row for row in self.rows.values() if row.state in states]
        return [row for row in chosen if any(copy["node"] == node for copy in row.data["copies"])]

    def promised_on(self, node: str) -> int:
        """What blocks were promised of a node's memory: one counter for the pool and for lending."""
        return self.room.promised_on(node)

    def resident_on(self, node: str) -> int:
        return self.room.resident_on(node)

    def _own(
        self, context: CallContext, block_id: str, *, owner_too: bool = False, freeing_too: bool = False
    ) -> BlockRow:
        """This user's block; another's is as if it were not there (for the daemon's owner: to be freed only)."""
        row = self.rows.get(block_id)
        allowed = row is not None and (context.uid == row.uid or (owner_too and context.uid in (0, os.geteuid())))
        hidden = ("allocating",) if freeing_too else ("allocating", "freeing")
        if row is None or not allowed or row.state in hidden:
            raise BlockNotFound(
                f"there is no block {block_id}", cause="it was freed, or never was", hint="grid memory list-blocks"
            )
        return row

    # -- calls ----------------------------------------------------------------------------------------------------

    @method
    async def memory_open(self, context: CallContext) -> dict[str, Any]:
        """What a client needs to prove to memory servers who it is."""
        try:
            secret = read_secret(self._plane.paths.token)
        except OSError:
            raise Unavailable("no cluster is up", hint="grid cluster start", code="no-cluster") from None
        return {"uid": context.uid, "key": user_key(pool_key(secret), context.uid)}

    @method
    async def memory_allocate(
        self, context: CallContext, *, block_id: str, size_bytes: int, preferred_node: str = "", strict: bool = False,
        replicas: int = 1, owner_pid: int = 0, key: str = "", meta: dict[str, Any] | None = None, at_rest: str = "",
    ) -> dict[str, Any]:  # fmt: skip
        """Safe to repeat with the same `block_id`."""
        number, size = wire_id(block_id), check_size(size_bytes)
        if not 1 <= replicas <= MOST_REPLICAS:
            raise UsageError(f"1 to {MOST_REPLICAS} replicas, not {replicas}", code="bad-replicas")
        codec_of(at_rest)
        check_meta(meta)
        known = self.rows.get(block_id)
        if known is not None and known.uid == context.uid and known.state == "freeing":
            await self.care.finish_freeing(block_id)  # what a daemon that was killed over it had begun
            known = self.rows.get(block_id)
        if known is not None and known.uid == context.uid and known.state == "ready":
            return _told(known)
        if known is not None:
            raise Refused("another block has that id", code="block-exists")
        # By the kernel's word: a program in a pid namespace of its own does not know its pid here.
        owner = process_id(context.pid) if owner_pid and context.pid > 0 else None
        if owner_pid and owner is None:
            log.warning("the process that owns %s can't be seen from here: it lives until it is freed", block_id)
        async with self._allocating:
            needed = min(size, LEAST_AT_REST_BYTES) if at_rest else size
            self.room.check_user(context.uid, size * replicas)
            rooms = await self.room.by_node(preferred_node)
            nodes = choose_nodes(rooms, needed, preferred=preferred_node, strict=strict, replicas=replicas)
            data = {
                "generation": 1, "copies": [], "replicas": replicas, "name": "", "meta": meta or {},
                "owner": [owner.pid, owner.start_ticks] if owner else None, "at_rest": at_rest,
                "trying": nodes[:replicas],  # where it may lie though no copy is listed
            }  # fmt: skip
            row = BlockRow(block_id, nodes[0], context.uid, "allocating", size, time.time(), data)
            self.put(row)
            try:
                with contextlib.ExitStack() as stack:
                    self.put(await self._place(row, number, nodes, stack), state="ready")
            except BaseException:  # cancelled too, for the caller hung up: nobody will ever know of it
                left = self.rows.get(block_id)
                if left is not None and left.state == "allocating":
                    self.put(left, state="freeing")  # and care frees it
                raise
        if key:
            await self.memory_rename(context, block_id=block_id, key=key)
        return _told(self.rows[block_id])

    async def _place(
        self, row: BlockRow, number: int, nodes: list[str], stack: contextlib.ExitStack
    ) -> BlockRow:
        """On as many of `nodes`, in turn, as it wants replicas; else nowhere. `stack`: holds the room meanwhile."""
        copies: list[dict[str, Any]] = []
        unsure: list[str] = []
        last: GridError | None = None
        for node in nodes:
            if len(copies) == row.data["replicas"]:
                break
            try:
                stack.enter_context(self.room.hold(node, row))
                if node not in row.data["trying"]:
                    row = self.put(row, trying=[*row.data["trying"], node])
                copy = await self.allocate_on(node, row, number, generation=1)
                await self.room.let_grow(row, [node])
                copies.append(copy)
            except GridError as error:
                last = error
                unsure.append(node)
        if len(copies) < row.data["replicas"]:
            self.put(row, state="freeing")
            await self.care.finish_freeing(row.id)
            raise last or NoNodes("No available nodes for memory allocation")
        return self.put(dataclasses.replace(row, node=copies[0]["node"]), copies=copies, trying=unsure)

    async def allocate_on(self, node: str, row: BlockRow, number: int, generation: int) -> dict[str, Any]:
        """Have a node's server make the block; the copy as the journal keeps it."""
        link = self._plane.links.get(node)
        # A client can map what is on its own host, but a mapping can't be held still while a copy is made.
        at_rest = row.data.get("at_rest", "")
        shared = row.data["replicas"] == 1 and not at_rest and link.state.agent.get("boot_id") == boot_id()
        server = await link.call(
            "memory_allocate", timeout_s=ALLOCATE_LIMIT_S, block=number, uid=row.uid, generation=generation,
            size_bytes=row.size_bytes, shared=shared, at_rest=at_rest, tls=self._plane.config.memory_pool.tls,
            **self.room.limits(node),
        )  # fmt: skip
        kept = ("node", "host", "port", "local_name", "incarnation", "shared")
        return {name: server[name] for name in kept}

    @method
    async def memory_locate(self, context: CallContext, *, block_id: str, failed_node: str = "") -> dict[str, Any]:
        """Where it lies now. `failed_node`: the caller got no answer there, so look before telling."""
        row = self._own(context, block_id)
        if failed_node:
            await self.care.look_at(failed_node)
            row = self._own(context, block_id)
        if row.state == "lost":
            raise BlockLost(
                f"{block_id} is lost", cause=row.data.get("reason", ""), hint=f"grid memory deallocate {block_id}"
            )
        return _told(row)

    @method
    async def memory_grow(self, context: CallContext, *, block_id: str) -> None:
        """A write found no room for what a packed block would take: let it grow, or say that it can't."""
        row = self._own(context, block_id)
        await self.room.let_grow(row, [copy["node"] for copy in row.data["copies"]])

    @method
    async def memory_deallocate(self, context: CallContext, *, block_id: str) -> None:
        """Safe to repeat until it is gone."""
        row = self._own(context, block_id, owner_too=True, freeing_too=True)
        if row.state != "freeing":
            self.put(row, state="freeing")
        await self.care.finish_freeing(block_id)

    @method
    async def memory_rename(
        self, context: CallContext, *, block_id: str, key: str, meta: dict[str, Any] | None = None, keep: bool = False
    ) -> None:
        """Give a block a name, for good from the moment this returns; what had the name is freed.

        `keep`: from the same moment it outlives its owner.
        """
        check_meta(meta)
        row = self._own(context, block_id)
        if keep:
            row = dataclasses.replace(row, data={**row.data, "owner": None})
        old = self._names.get((context.uid, key)) if key else None
        self._take_name(row, key, meta)
        if old and old != block_id:
            await self.care.finish_freeing(old)

    def _take_name(self, row: BlockRow, key: str, meta: dict[str, Any] | None) -> None:
        old = self._names.get((row.uid, key)) if key else None
        freed = [_changed(self.rows[old], "freeing")] if old and old != row.id else []
        named = {"name": key} if meta is None else {"name": key, "meta": meta}
        self.put_all([*freed, _changed(row, None, **named)])

    @method
    async def memory_find(self, context: CallContext, *, key: str) -> dict[str, Any]:
        block_id = self._names.get((context.uid, key))
        if block_id is None:
            raise BlockNotFound(f"nothing is stored under {key!r}", hint="grid memory list-objects", code="no-object")
        return await self.memory_locate(context, block_id=block_id)

    @method
    async def memory_list(
        self, context: CallContext, *, before: tuple[float, str] | None = None
    ) -> list[dict[str, Any]]:
        """This user's blocks (all, for root and the daemon's owner), newest first, PAGE_BLOCKS at a time.

        `before`: when the last one that is known was created, and its id.
        """
        seen = [
            row for row in self.rows.values()
            if context.uid in (0, os.geteuid(), row.uid) and row.state not in ("allocating", "freeing")
            and (before is None or (row.created, row.id) < before)
        ]  # fmt: skip
        page = heapq.nlargest(PAGE_BLOCKS, seen, key=lambda row: (row.created, row.id))
        return [
            {**_told(row), "uid": row.uid, "user": user_name(row.uid), "reason": row.data.get("reason", "")}
            for row in page
        ]

    @method
    async def memory_stats(self, context: CallContext) -> dict[str, Any]:
        rooms = await self.room.ask(self._plane.links.names())
        mine = [row for row in self.rows.values() if row.uid == context.uid and row.state in ("ready", "lost")]
        return {
            "nodes": rooms,
            "blocks": len(mine),
            "bytes": sum(row.size_bytes for row in mine),
            "lost": sum(1 for row in mine if row.state == "lost"),
            "promised_bytes": sum(room["promised_bytes"] for room in rooms.values()),
            "room_bytes": sum(room["room_bytes"] for room in rooms.values() if room["lends"]),
        }

    # -- what happens around it -----------------------------------------------------------------------------------

    async def node_is_up(self, node: str) -> None:
        await self.care.adopt_if_there(node)
        await self.room.refresh([node])

    async def cluster_down(self) -> None:
        """The cluster is being stopped: its blocks end with it."""

        async def stop(node: str) -> None:
            try:
                await self._plane.links.get(node).call("memory_stop", timeout_s=STOP_LIMIT_S)
            except GridError as error:
                log.warning("the memory server of %s was not told to stop: %s", node, error.message)

        await asyncio.gather(*(stop(node) for node in self._plane.links.names()))
        ended = [row for row in self.rows.values() if row.state == "ready"]
        self.put_all(
            [_changed(row, "lost", reason="the cluster was stopped") for row in ended],
            remove=[row.id for row in self.rows.values() if row.state == "freeing"],
        )
        if ended:
            size = show_bytes(sum(row.size_bytes for row in ended))
            self._plane.events.publish("memory.ended", f"{len(ended)} blocks ({size}) ended with the cluster")


def _changed(row: BlockRow, state: str | None, **data: Any) -> BlockRow:
    return dataclasses.replace(row, state=state or row.state, data={**row.data, **data})


def _told(row: BlockRow) -> dict[str, Any]:
    return {
        "id": row.id, "generation": row.data["generation"], "size_bytes": row.size_bytes, "state": row.state,
        "node": row.node, "copies": row.data["copies"], "replicas": row.data["replicas"], "name": row.data["name"],
        "meta": row.data["meta"], "created": row.created, "owned": bool(row.data["owner"]),
        "at_rest": row.data.get("at_rest", ""),
    }  # fmt: skip
