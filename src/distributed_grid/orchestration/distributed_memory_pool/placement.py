"""Which nodes a block goes to: a pure choice over how much room each has."""

from __future__ import annotations

from collections.abc import Mapping

from distributed_grid.agent.memory.accounting import show_bytes
from distributed_grid.agent.memory.errors import NoNodes, PoolFull


def choose_nodes(
    rooms: Mapping[str, int], size_bytes: int, *, preferred: str = "", strict: bool = False, replicas: int = 1
) -> list[str]:
    """All nodes that could take it, best first: the preferred one, then those with most room.

    NoNodes where there is none at all; PoolFull, with the largest that would fit, where too few have the room.
    """
    if not rooms:
        raise NoNodes(
            "No available nodes for memory allocation", cause="no worker is online", hint="grid cluster status"
        )
    asked = {preferred: rooms.get(preferred, 0)} if strict and preferred and replicas == 1 else rooms
    fitting = sorted((node for node in asked if asked[node] >= size_bytes), key=lambda node: (-asked[node], node))
    if strict and preferred and preferred not in fitting:
        fitting = []
    if len(fitting) < replicas:
        by_room = sorted(asked.values(), reverse=True)
        largest = by_room[replicas - 1] if len(by_room) >= replicas else 0
        told = ", ".join(f"{node} {show_bytes(room)}" for node, room in sorted(asked.items()))
        where = f" on {replicas} nodes" if replicas > 1 else ""
        raise PoolFull(
            "Failed to allocate memory block",
            cause=f"{show_bytes(size_bytes)} asked for; the largest that would fit now{where} is "
            f"{show_bytes(largest)} (room: {told})",
            hint="a smaller block, or free others: grid memory list-blocks",
            largest_bytes=largest,
        )
    return sorted(fitting, key=lambda node: node != preferred)
