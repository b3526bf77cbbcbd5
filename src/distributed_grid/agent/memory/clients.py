"""Who is connected to a memory server, and who has to go when there are too many: no one user keeps the others out."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from distributed_grid.agent.memory.blocks import BlockTable
from distributed_grid.agent.memory.errors import ServerLost
from distributed_grid.agent.memory.protocol import ADMIN_UID

MOST = 1024
MOST_PER_USER = 512
#: Connected, and not proved yet who they are; also what the agent may have beyond the others.
MOST_UNPROVED = 64
#: A connection that was broken off ends as soon as what is in its buffers is taken, or thrown away.
END_LIMIT_S = 20.0
PROVED_EVERY_S = 0.002


@dataclass(slots=True, eq=False)
class Client:
    sock: socket.socket
    number: int
    uid: int | None = None  # None: not proved yet
    busy: bool = False  # in the middle of a request
    used_at: float = 0.0
    dropped: bool = False  # told to go; its thread may still be at work
    gone: threading.Event = field(default_factory=threading.Event)

    def hang_up(self) -> None:
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)


class Clients:
    """Safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all: dict[int, Client] = {}
        self._next = 0
        self._closed = False

    def __len__(self) -> int:
        return len(self._all)

    def _staying(self) -> list[Client]:
        return [client for client in self._all.values() if not client.dropped]

    def came(self, sock: socket.socket) -> Client | None:
        """A new one, in the place of the stranger who was here longest if need be. None: nobody comes in any more."""
        with self._lock:
            if self._closed:
                return None
            strangers = [client for client in self._staying() if client.uid is None]
            if len(strangers) >= MOST_UNPROVED:
                self._drop(strangers[0])
            self._next += 1
            client = self._all[self._next] = Client(sock, self._next, used_at=time.monotonic())
            return client

    def proved(self, client: Client, uid: int, sock: socket.socket) -> bool:
        """Whether it may stay; another that is idle makes room for it."""
        with self._lock:
            client.sock = sock
            mine = [one for one in self._staying() if one.uid == uid]
            users = [one for one in self._staying() if one.uid not in (None, ADMIN_UID)]
            if uid == ADMIN_UID:
                fits = len(mine) < MOST_UNPROVED or self._drop_idle(mine)
            elif len(mine) >= MOST_PER_USER:
                fits = self._drop_idle(mine)
            else:
                fits = len(users) < MOST or self._drop_idle(users)
            if fits and not self._closed and not client.dropped:
                client.uid = uid
                client.used_at = time.monotonic()
                return True
            return False

    def _drop_idle(self, some: Iterable[Client]) -> bool:
        idle = min((one for one in some if not one.busy), key=lambda one: one.used_at, default=None)
        if idle is None:
            return False
        self._drop(idle)
        return True

    def _drop(self, client: Client) -> None:
        client.dropped = True
        client.hang_up()

    def went(self, client: Client) -> None:
        with self._lock:
            self._all.pop(client.number, None)
        client.gone.set()

    def end(self, number: int, uid: int, table: BlockTable) -> None:
        """Break off a user's connection; returns when its thread is out of every block."""
        with self._lock:
            client = self._all.get(number)
        if client is None:
            return
        deadline = time.monotonic() + END_LIMIT_S
        # Its own end may know that it is proved, and have sent a request, a moment before we do.
        while client.uid is None and time.monotonic() < deadline and not client.gone.wait(PROVED_EVERY_S):
            pass
        if uid not in (client.uid, ADMIN_UID):
            return
        client.hang_up()
        table.give_up(client.sock)
        if not client.gone.wait(END_LIMIT_S):
            raise ServerLost("a connection does not end", code="busy")

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for client in self._all.values():
                client.hang_up()
