"""Free ports on this machine, and who holds those that are not."""

from __future__ import annotations

import random
import socket
from collections.abc import Collection, Mapping

_RANGE = range(20000, 32000)  # below the kernel's ephemeral ports, which come and go


def port_is_free(port: int) -> bool:
    """Ray listens on every interface, so one listener on any address is in its way."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))
        except OSError:
            return False
    return True


def choose_ports(preferred: Mapping[str, int], taken: Collection[int] = ()) -> dict[str, int]:
    """The preferred port where it is free, else a free one at random (so that two starts rarely collide)."""
    chosen: dict[str, int] = {}
    for name, port in preferred.items():
        avoid = {*taken, *chosen.values()}
        while not port or port in avoid or not port_is_free(port):
            port = random.choice(_RANGE)
        chosen[name] = port
    return chosen


def port_holder(port: int) -> str:
    """The program that listens there, as far as we may see."""
    import psutil

    try:
        for one in psutil.net_connections(kind="tcp"):
            if one.status == psutil.CONN_LISTEN and one.laddr and one.laddr.port == port and one.pid:
                return f"{psutil.Process(one.pid).name()} (pid {one.pid})"
    except psutil.Error:
        pass
    return "a program of another user"
