"""Addresses and ports for several Ray nodes on one machine, beside any other Ray that is there."""

from __future__ import annotations

import random
from collections.abc import Sequence

from distributed_grid.cluster.ports import choose_ports, port_is_free
from distributed_grid.cluster.ray_node import DEFAULT_PORTS

OBJECT_STORE_BYTES = 80_000_000


def choose_addresses(nodes: Sequence[str], gcs_port: int) -> dict[str, str]:
    """127.0.0.10 and on (127.0.0.1 would be rewritten by Ray); another block where another grid may be up."""
    block = 0 if gcs_port and port_is_free(gcs_port) else random.randrange(1, 250)
    return {node: f"127.0.{block}.{10 + index}" for index, node in enumerate(nodes)}


def choose_node_ports(nodes: Sequence[str], head: str, gcs_port: int, dashboard_port: int) -> dict[str, dict[str, int]]:
    """Each node's ports: the usual ones where they are free, since people look for the dashboard there."""
    client_port = DEFAULT_PORTS["client"] if gcs_port else 0
    shared = choose_ports({"gcs": gcs_port, "dashboard": dashboard_port, "client": client_port})
    chosen: dict[str, dict[str, int]] = {}
    taken = set(shared.values())
    for node in nodes:
        own = choose_ports({"dashboard_agent": 0}, taken)
        taken |= set(own.values())
        chosen[node] = {**(shared if node == head else {"gcs": shared["gcs"]}), **own}
    return chosen
