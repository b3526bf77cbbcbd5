"""How much room there is for blocks: by node and by user, in one account with what lending has promised.

What counts for a node is every block's size, or, of one that is kept packed, what it takes and what it was allowed to
grow by. Room is held from the moment it is found until the block is in the directory, so nobody else is promised it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from distributed_grid.agent.memory.accounting import show_bytes
from distributed_grid.agent.memory.errors import PoolFull
from distributed_grid.config.models import NodeConfig
from distributed_grid.core.errors import GridError
from distributed_grid.store.blocks import BlockRow

if TYPE_CHECKING:
    from distributed_grid.daemon.control import ControlPlane
    from distributed_grid.daemon.lending import LendingService
    from distributed_grid.daemon.memory import MemoryDirectory

log = logging.getLogger(__name__)

GB = 1024**3
#: A block that is kept packed begins with this much, and is allowed more as it is written.
LEAST_AT_REST_BYTES = 1024**2
GROWTH_BYTES = 256 * 1024**2
HELD = ("ready", "allocating", "freeing")


class PoolRoom:
    def __init__(self, directory: MemoryDirectory, plane: ControlPlane) -> None:
        self._directory = directory
        self._plane = plane
        self._held: dict[str, int] = {}  # by node: found for blocks that are being made
        self._packed: dict[str, int] = {}  # by node: what packed blocks took when last asked
        self._growth: dict[str, int] = {}  # by node: what they may have grown by since
        self._resident: dict[str, int] = {}
        self._growing = asyncio.Lock()

    @property
    def _lending(self) -> LendingService | None:
        return getattr(self._plane, "lending", None)

    def _unlent(self, node: str) -> int | None:
        return self._lending.loop.room_for_pool(node) if self._lending is not None else None

    # -- one account ----------------------------------------------------------------------------------------------

    def needed(self, row: BlockRow) -> int:
        return min(row.size_bytes, LEAST_AT_REST_BYTES) if row.data.get("at_rest") else row.size_bytes

    def promised_on(self, node: str) -> int:
        rows = self._directory.copies_on(node, HELD)
        whole = sum(row.size_bytes for row in rows if not row.data.get("at_rest"))
        packed = self._packed.get(node, 0) + self._growth.get(node, 0)
        return whole + packed + self._held.get(node, 0)

    def resident_on(self, node: str) -> int:
        """Of that, what is backed by memory: it shows in the node's own figures."""
        return min(self._resident.get(node, 0), self.promised_on(node))

    def held_by(self, uid: int) -> int:
        """What a user's blocks are worth, copies too; of packed ones what they are unpacked."""
        rows = [row for row in self._directory.rows.values() if row.uid == uid and row.state in HELD]
        return sum(row.size_bytes * row.data["replicas"] for row in rows)

    def check_user(self, uid: int, more_bytes: int) -> None:
        most_gb = self._plane.config.memory_pool.per_user_gb
        if most_gb is None:
            return
        room = int(most_gb * GB) - self.held_by(uid)
        if more_bytes > room:
            raise PoolFull(
                "Failed to allocate memory block",
                cause=f"{show_bytes(more_bytes)} asked for; each user may have {most_gb:g} GB, "
                f"of which {show_bytes(max(0, room))} are left",
                hint="free others: grid memory list-blocks",
            )

    @contextlib.contextmanager
    def hold(self, node: str, row: BlockRow) -> Iterator[None]:
        """Room for a block on a node, if lending has not promised it; lending sees at once that it is taken."""
        size = self.needed(row)
        room = self._unlent(node)
        if room is not None and size > room:
            raise PoolFull(
                "Failed to allocate memory block",
                cause=f"{show_bytes(size)} asked for, {node} has {show_bytes(room)} that are not lent",
                hint="a smaller block, or free others: grid memory list-blocks, grid resource-sharing status",
                room_bytes=room,
            )
        self._held[node] = self._held.get(node, 0) + size
        if self._lending is not None:
            self._lending.loop.refresh()
        try:
            yield
        finally:
            self._held[node] -= size

    # -- what nodes say -------------------------------------------------------------------------------------------

    def _config_of(self, node: str) -> NodeConfig | None:
        return next((one for one in self._plane.config.nodes if one.name == node), None)

    def limits(self, node: str, *, growing: bool = False) -> dict[str, Any]:
        """What the agent is told to leave alone. `growing`: what packed blocks may grow by is what is asked for."""
        config = self._config_of(node)
        reserve = self._plane.config.memory_pool.reserve_gb
        limit: int | None = None
        if config is not None:
            reserve = max(reserve, config.share.reserve_memory_gb)
            if not isinstance(config.share.memory, bool):
                limit = int(config.share.memory * GB)
        unused = self._lending.loop.unused_bytes(node) if self._lending is not None else 0
        unused += 0 if growing else self._growth.get(node, 0)
        return {"reserve_bytes": int(reserve * GB) + unused, "limit_bytes": limit}

    def lends(self, node: str) -> bool:
        config = self._config_of(node)
        return config is not None and not config.is_head and config.share.memory is not False

    async def by_node(self, preferred: str) -> dict[str, int]:
        """The workers that lend memory and answer, and the preferred one even if it is the head."""
        if preferred:
            self._plane.links.get(preferred)  # an unknown name is told before anything else
        wanted = [node for node in self._plane.links.names() if self.lends(node) or node == preferred]
        return {node: room["room_bytes"] for node, room in (await self.ask(wanted)).items()}

    async def ask(self, nodes: Iterable[str]) -> dict[str, dict[str, Any]]:
        async def ask_one(node: str) -> dict[str, Any] | None:
            try:
                link = self._plane.links.get(node)
                found: dict[str, Any] = await link.call("memory_room", timeout_s=15, **self.limits(node))
            except GridError as error:
                log.warning("%s does not tell its room: %s", node, error.message)
                return None
            self._resident[node] = found["resident_bytes"]
            unlent = self._unlent(node)
            room = found["room_bytes"] if unlent is None else min(found["room_bytes"], unlent)
            return {**found, "room_bytes": room, "lends": self.lends(node)}

        wanted = list(nodes)
        answers = await asyncio.gather(*(ask_one(node) for node in wanted))
        return {node: answer for node, answer in zip(wanted, answers, strict=True) if answer is not None}

    # -- packed blocks --------------------------------------------------------------------------------------------

    async def let_grow(self, row: BlockRow, nodes: list[str]) -> None:
        """If it is kept packed; PoolFull where a node has no room at all."""
        for node in nodes if row.data.get("at_rest") else ():
            if await self._grow(node) < LEAST_AT_REST_BYTES:
                raise PoolFull("Failed to allocate memory block", cause=f"{node} has no room left", room_bytes=0)

    async def _grow(self, node: str) -> int:
        """Counted before the server is told of it, so that it is never promised to two."""
        async with self._growing:
            before, unlent = self._growth.get(node, 0), self._unlent(node)
            asked = GROWTH_BYTES if unlent is None else min(GROWTH_BYTES, before + unlent)
            self._growth[node] = max(before, asked)
            told = await self._plane.links.get(node).call(
                "memory_growth", timeout_s=15, growth_bytes=asked, **self.limits(node, growing=True)
            )
            self._packed[node], self._growth[node] = told["packed_bytes"], told["growth_bytes"]
            return int(told["growth_bytes"])

    async def refresh(self, nodes: Iterable[str]) -> None:
        """Follow what packed blocks take, and let them grow on."""
        for node in {*nodes, *self._growth}:
            try:
                if any(row.data.get("at_rest") for row in self._directory.copies_on(node)):
                    await self._grow(node)
                else:
                    self._packed.pop(node, None)
                    self._growth.pop(node, None)
            except GridError as error:
                log.info("what packed blocks take on %s is not known: %s", node, error.message)
