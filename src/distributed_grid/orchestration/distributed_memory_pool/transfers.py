"""Connections to memory servers that are kept for the next request, and the way to break off one that is under way."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Iterator
from contextvars import ContextVar
from types import TracebackType
from typing import Protocol

from distributed_grid.agent.memory.connection import MemoryConnection
from distributed_grid.agent.memory.errors import PoolClosed, ServerLost
from distributed_grid.core.errors import GridError
from distributed_grid.orchestration.distributed_memory_pool import forks
from distributed_grid.orchestration.distributed_memory_pool.blocks import Copy

KEPT_PER_SERVER = 8
#: One that nobody used for this long is closed when another is given back.
KEPT_S = 60.0
#: One that was used this short ago is not looked at before it is used again; if it is dead, that shows.
TRUSTED_S = 1.0


class Abortable(Protocol):
    def abort(self) -> None: ...


class Cancellation:
    """Breaks off what one call does on the wire; its connection is then thrown away."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connection: Abortable | None = None
        self.cancelled = False

    def cancel(self) -> None:
        with self._lock:
            self.cancelled = True
            if self._connection:
                self._connection.abort()

    def attach(self, connection: Abortable | None) -> None:
        with self._lock:
            self._connection = connection
            if connection and self.cancelled:
                connection.abort()


#: Set by the async pool around each call that it runs in a thread.
current: ContextVar[Cancellation | None] = ContextVar("grid_memory_cancellation", default=None)


@contextlib.contextmanager
def not_cancelled() -> Iterator[None]:
    """For what has to be done even though the call is cancelled."""
    before = current.set(None)
    try:
        yield
    finally:
        current.reset(before)


class Connections:
    """Idle ones by server; safe from any thread."""

    def __init__(self, busy_poll_s: float) -> None:
        self._busy_poll_s = busy_poll_s
        self._lock = threading.Lock()
        self._idle: dict[tuple[str, int], list[MemoryConnection]] = {}
        self._all: weakref.WeakSet[MemoryConnection] = weakref.WeakSet()
        #: By server: numbers of connections whose writes were broken off, and may still be under way there.
        self._broken: dict[tuple[str, int], set[tuple[int, int]]] = {}
        self._closed = False
        forks.watch(self)

    def after_fork(self) -> None:
        self._lock = threading.Lock()
        for connection in list(self._all):
            connection.close()
        self._idle.clear()
        self._broken.clear()  # the parent sees to those

    def use(self, copy: Copy, uid: int, key: bytes) -> _Use:
        """A connection to that server for one request, in a `with`."""
        return _Use(self, copy, uid, key)

    def take(self, copy: Copy, uid: int, key: bytes) -> MemoryConnection:
        if self._broken:
            self.end_broken(copy, uid, key)
        with self._lock:
            if self._closed:
                raise PoolClosed("the pool is shut down")
            kept = self._idle.get((copy.host, copy.port))
            connection = kept.pop() if kept else None
        if connection is not None and time.monotonic() - connection.used_at > TRUSTED_S and not connection.is_alive():
            connection.close()
            connection = None
        if connection is None:
            connection = MemoryConnection.open(copy.host, copy.port, uid, key, busy_poll_s=self._busy_poll_s)
            self._all.add(connection)
        if connection.incarnation != copy.incarnation:
            self.give(copy, connection)
            raise ServerLost(f"{copy.node} has a new memory server", code="other-incarnation")
        return connection

    def take_idle(self, copy: Copy) -> MemoryConnection | None:
        """One that can be used now, if there is one for which nothing has to be waited for."""
        server = (copy.host, copy.port)
        with self._lock:
            kept = self._idle.get(server)
            if self._closed or not kept or server in self._broken:
                return None
            connection = kept[-1]
            if connection.incarnation != copy.incarnation or not connection.is_plain:
                return None
            if time.monotonic() - connection.used_at > TRUSTED_S and not connection.is_alive():
                return None
            return kept.pop()

    def give(self, copy: Copy, connection: MemoryConnection) -> None:
        now = connection.used_at = time.monotonic()
        old, keep = None, False
        with self._lock:
            kept = self._idle.setdefault((copy.host, copy.port), [])
            if kept and now - kept[0].used_at > KEPT_S:
                old = kept.pop(0)
            if connection.usable and not self._closed and len(kept) < KEPT_PER_SERVER:
                kept.append(connection)
                keep = True
        if not keep:
            connection.close()
        if old is not None:
            old.close()

    def broke(self, copy: Copy, connection: MemoryConnection) -> None:
        """Its write was broken off: what is on its way must not reach the block after what is written next."""
        with self._lock:
            self._broken.setdefault((copy.host, copy.port), set()).add((connection.incarnation, connection.number))

    def end_broken(self, copy: Copy, uid: int, key: bytes) -> None:
        """Have the server end them; ServerLost where it does not say that it has."""
        server = (copy.host, copy.port)
        with self._lock:
            broken = list(self._broken.get(server, ()))
        if not broken:
            return
        connection = MemoryConnection.open(copy.host, copy.port, uid, key)
        try:
            for incarnation, number in broken:
                if incarnation == connection.incarnation:  # another server has none of it
                    connection.end(number)
        finally:
            connection.close()
        with self._lock:
            left = self._broken.get(server, set())
            left.difference_update(broken)
            if not left:
                self._broken.pop(server, None)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle = [connection for kept in self._idle.values() for connection in kept]
            self._idle.clear()
        for connection in idle:
            connection.close()


class _Use:
    """Not a generator: it is in the way of every small request."""

    __slots__ = ("_cancellation", "_connection", "_connections", "_copy", "_key", "_uid")

    def __init__(self, connections: Connections, copy: Copy, uid: int, key: bytes) -> None:
        self._connections, self._copy, self._uid, self._key = connections, copy, uid, key

    def __enter__(self) -> MemoryConnection:
        self._connection = self._connections.take(self._copy, self._uid, self._key)
        self._cancellation = current.get()
        if self._cancellation:
            self._cancellation.attach(self._connection)
        return self._connection

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        connection, connections = self._connection, self._connections
        if connection.writing:
            connections.broke(self._copy, connection)
        if self._cancellation:
            self._cancellation.attach(None)
        if connection.marked:
            connection.close()  # before it was settled
        connections.give(self._copy, connection)
        if connection.writing:
            with contextlib.suppress(GridError):  # then it is ended before anything else is asked there
                connections.end_broken(self._copy, self._uid, self._key)
