"""How much a node can still promise: pure arithmetic over what is free and what was promised but not yet used."""

from __future__ import annotations

from dataclasses import dataclass

from distributed_grid.agent.memory.errors import PoolFull


@dataclass(frozen=True, slots=True)
class Books:
    """A node's memory at one moment."""

    available_bytes: int  # free for new use, as measured
    promised_bytes: int  # all blocks together
    resident_bytes: int  # of those, already backed by memory (and so already missing from `available_bytes`)
    reserve_bytes: int = 0  # what the node keeps for itself
    limit_bytes: int | None = None  # what it may lend in all

    def room(self) -> int:
        """The largest block that can be promised now."""
        untouched = max(0, self.promised_bytes - self.resident_bytes)
        room = self.available_bytes - untouched - self.reserve_bytes
        if self.limit_bytes is not None:
            room = min(room, self.limit_bytes - self.promised_bytes)
        return max(0, room)

    def check(self, size_bytes: int, node: str) -> None:
        room = self.room()
        if size_bytes > room:
            raise PoolFull(
                "Failed to allocate memory block",
                cause=f"{show_bytes(size_bytes)} asked for, {node} has room for {show_bytes(room)}",
                hint="a smaller block, or free others: grid memory list-blocks",
                room_bytes=room,
                node=node,
            )


def show_bytes(count: int) -> str:
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
