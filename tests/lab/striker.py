"""Strikes in the middle of a move, at the moment its journal says a state; standard library only.

`strike_in` waits for the state and strikes. `striker.py ORDERS` does so for a host of a lab, from outside of it, with
JSON in and out. The blow is prepared first (then it says `ready`) and is one call to the kernel, so that it lands in
the state it is meant for, however short that is.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sqlite3
import struct
import sys
import time
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

LIMIT_S = 120.0
POLL_S = 0.0002
STATES = ("PLANNED", "FROZEN", "COPIED", "STAGED", "COMMITTED", "RUNNING", "CLEANED")
RTM_NEWLINK, F_REQUEST, F_ACK, IFF_UP = 16, 1, 4, 1


def pull(interface: str) -> Callable[[], bool]:
    """Ready to take it down: what `ip link set INTERFACE down` asks of the kernel."""
    link = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
    link.bind((0, 0))
    body = struct.pack("=BxHiII", 0, 0, socket.if_nametoindex(interface), 0, IFF_UP)
    message = struct.pack("=IHHII", 16 + len(body), RTM_NEWLINK, F_REQUEST | F_ACK, 1, 0) + body

    def down() -> bool:
        link.send(message)
        (code,) = struct.unpack_from("=i", link.recv(4096), 16)
        return bool(code == 0)

    return down


def kill(pids: Collection[int]) -> bool:
    """Whether one of them was still there."""
    there = False
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            there = True
    return there


def strike_in(
    journal: str, pid: int, since: float, state: str, after_s: float, strike: Callable[[], bool],
    prepare: Callable[[], bool] = lambda: True, over: Callable[[], bool] = lambda: False,
    ready: Callable[[], object] = lambda: None,
) -> dict[str, Any]:  # fmt: skip
    """Strike so long after the newest move of that pid enters the state, or at once when it is past it.

    `prepare` is asked again and again once there is a move, until it says that there is something to strike. Told:
    whether it hit, when, and the states right before and after the blow. An empty state: in whatever it is prepared.
    """
    with contextlib.closing(sqlite3.connect(f"file:{journal}?mode=ro", uri=True, timeout=5)) as database:

        def now() -> str:
            query = "SELECT state FROM moves WHERE pid = ? AND created >= ? ORDER BY created DESC"
            try:
                return str((database.execute(query, (pid, since)).fetchone() or [""])[0])
            except sqlite3.OperationalError:  # it is being made anew
                return ""

        ready()
        limit, prepared, seen, began = time.monotonic() + LIMIT_S, False, "", 0.0
        while time.monotonic() < limit and not over():
            seen = now()
            began = began or (time.monotonic() if seen == state else 0.0)
            if seen and not prepared:
                prepared = prepare()
                seen = now()
            if prepared and (not state or seen == state or is_past(seen, state)):
                break
            time.sleep(POLL_S)
        if seen == state or not state:
            time.sleep(max(0.0, (began or time.monotonic()) + after_s - time.monotonic()))
        before, at = now(), time.time()
        hit = strike()
        return {"hit": hit, "before": before, "after": now(), "at": at}


def is_past(now: str, state: str) -> bool:
    return now not in STATES or STATES.index(now) > STATES.index(state)


def main(orders: dict[str, Any]) -> dict[str, Any]:
    """`down`: an interface, or `kill`: pids; `root`: where the host has its root."""
    strike = pull(orders.pop("down")) if "down" in orders else partial(kill, orders.pop("kill"))
    os.chroot(orders.pop("root"))
    return strike_in(**orders, strike=strike, ready=lambda: print("ready", flush=True))


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))), flush=True)
