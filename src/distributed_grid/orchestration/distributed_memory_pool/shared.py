"""Blocks on this host: their memory is mapped, with no wire between."""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from distributed_grid.agent.memory.blocks import CONTROL_BYTES
from distributed_grid.agent.memory.connection import MemoryConnection
from distributed_grid.agent.memory.errors import ServerLost, StaleBlock
from distributed_grid.core.errors import GridError
from distributed_grid.orchestration.distributed_memory_pool import forks
from distributed_grid.orchestration.distributed_memory_pool.buffers import address_of, copy

#: Blocks kept mapped; those used longest ago are unmapped first.
MOST_OPEN = 128


@dataclass(slots=True, eq=False)
class SharedBlock:
    """Mapped. The server never shortens the memory, so that a freed block can't fault; it clears the first word."""

    memory: mmap.mmap
    generation: int
    server: _LocalServer
    address: int = 0
    users: int = 0
    closed: bool = False

    def __post_init__(self) -> None:
        self.address = address_of(self.memory) + CONTROL_BYTES

    def _check(self) -> None:
        if self.memory[:8] != self.generation.to_bytes(8, "little"):
            raise StaleBlock("the block was freed")
        self.server.check()

    def read_into(self, offset: int, view: memoryview) -> None:
        self._check()
        copy(address_of(view), self.address + offset, len(view))
        self._check()  # else these may be the zeros that freeing leaves

    def readv_into(self, places: Sequence[tuple[int, int]], view: memoryview) -> None:
        """Many `(offset, size)`, one after the other."""
        self._check()
        at = address_of(view)
        for offset, size in places:
            copy(at, self.address + offset, size)
            at += size
        self._check()

    def write(self, offset: int, view: memoryview) -> None:
        self.writev([(offset, view)])

    def writev(self, pieces: Sequence[tuple[int, memoryview]]) -> None:
        self._check()
        for offset, view in pieces:
            copy(self.address + offset, address_of(view), len(view))
        self._check()


class _LocalServer:
    """A server on this host; its death is seen on the connection, for its memory would outlive it in our hands."""

    def __init__(self, name: str, uid: int, key: bytes) -> None:
        self._connection = MemoryConnection.open_local(name, uid, key)
        self._lock = threading.Lock()

    def check(self) -> None:
        if not self._connection.is_alive():
            raise ServerLost("the memory server is gone", code="closed")

    def share(self, number: int, generation: int) -> int:
        with self._lock:
            return self._connection.share(number, generation)

    def close(self) -> None:
        self._connection.close()


class SharedBlocks:
    """The open ones of a pool; safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._servers: dict[str, _LocalServer] = {}
        self._blocks: OrderedDict[int, SharedBlock] = OrderedDict()
        self._elsewhere: set[str] = set()
        forks.watch(self)

    def after_fork(self) -> None:
        """The mappings would do; what tells whether their server lives is the parent's connection."""
        self._lock = threading.Lock()
        for server in self._servers.values():
            server.close()
        self._blocks, self._servers = OrderedDict(), {}

    @contextlib.contextmanager
    def use(
        self, local_name: str, number: int, generation: int, uid: int, key: bytes
    ) -> Iterator[SharedBlock | None]:
        """None: that server is not on this host."""
        block = self._open(local_name, number, generation, uid, key)
        if block is None:
            yield None
            return
        try:
            yield block
        except GridError:
            self.forget(number)
            with self._lock:
                server = self._servers.get(local_name)
                if server is block.server and not server._connection.is_alive():
                    del self._servers[local_name]
                    server.close()
            raise
        finally:
            self._release(block)

    def _open(self, local_name: str, number: int, generation: int, uid: int, key: bytes) -> SharedBlock | None:
        with self._lock:
            if local_name in self._elsewhere:
                return None
            found = self._blocks.get(number)
            if found is not None and found.generation == generation:
                self._blocks.move_to_end(number)
                found.users += 1
                return found
            server = self._servers.get(local_name)
            if server is None or not server._connection.is_alive():
                try:
                    server = _LocalServer(local_name, uid, key)
                except ServerLost as error:
                    if error.code == "not-local":
                        self._elsewhere.add(local_name)
                        return None
                    raise
                self._servers[local_name] = server
            made = SharedBlock(_map(server.share(number, generation)), generation, server, users=1)
            self._drop(self._blocks.pop(number, None))
            self._blocks[number] = made
            while len(self._blocks) > MOST_OPEN:
                self._drop(self._blocks.popitem(last=False)[1])
            return made

    def _release(self, block: SharedBlock) -> None:
        with self._lock:
            block.users -= 1
            if block.closed and not block.users:
                block.memory.close()

    def _drop(self, block: SharedBlock | None) -> None:
        if block is not None and not block.closed:
            block.closed = True
            if not block.users:
                block.memory.close()

    def forget(self, number: int) -> None:
        with self._lock:
            self._drop(self._blocks.pop(number, None))

    def close(self) -> None:
        with self._lock:
            for block in self._blocks.values():
                self._drop(block)
            for server in self._servers.values():
                server.close()
            self._blocks.clear()
            self._servers.clear()


def _map(fd: int) -> mmap.mmap:
    try:
        return mmap.mmap(fd, os.fstat(fd).st_size, flags=mmap.MAP_SHARED)
    except (OSError, ValueError) as error:
        raise ServerLost("the block can't be mapped", cause=str(error)) from None
    finally:
        os.close(fd)
