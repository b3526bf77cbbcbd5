"""The memory pool for plain programs: blocking, no event loop, no Ray. The async pool runs this one in threads."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from distributed_grid.agent.memory.connection import MemoryConnection
from distributed_grid.agent.memory.errors import (
    BlockNotFound,
    ChecksumMismatch,
    OutOfRange,
    PoolClosed,
    PoolFull,
    ServerLost,
    StaleBlock,
)  # fmt: skip
from distributed_grid.agent.memory.protocol import LITTLE_BYTES, MAX_PIECES
from distributed_grid.config.models import ClusterConfig
from distributed_grid.config.paths import GridPaths
from distributed_grid.core.errors import GridError, Refused, TimedOut, UsageError
from distributed_grid.orchestration.distributed_memory_pool import forks
from distributed_grid.orchestration.distributed_memory_pool.blocks import (
    PAGE_BLOCKS,
    Block,
    Copy,
    Location,
    bytes_of,
    check_meta,
    check_size,
    new_block_id,
)  # fmt: skip
from distributed_grid.orchestration.distributed_memory_pool.buffers import fresh_bytes
from distributed_grid.orchestration.distributed_memory_pool.compression import Link, mode_of
from distributed_grid.orchestration.distributed_memory_pool.directory import Directory
from distributed_grid.orchestration.distributed_memory_pool.object_calls import ObjectCalls
from distributed_grid.orchestration.distributed_memory_pool.shared import SharedBlock, SharedBlocks
from distributed_grid.orchestration.distributed_memory_pool.transfers import Connections, current, not_cancelled
from distributed_grid.orchestration.distributed_memory_pool.unflushed import Unflushed

ATTEMPTS = 6
#: Longer than the daemon waits for a node that starts its memory server on a busy machine.
ALLOCATE_LIMIT_S = 200.0
MOST_KNOWN = 4096
STREAM_CHUNK_BYTES = 8 * 1024 * 1024
#: Writes to a block that is kept packed go in parts, each of which may have to be done again to find room.
AT_REST_PART_BYTES = 64 * 1024 * 1024
#: What one copy of a block may fail with, so that it is tried again, there or at another.
LOST = (ServerLost, BlockNotFound, StaleBlock, ChecksumMismatch)

#: What is done at one copy of a block: over the wire, or in memory that is shared.
OnWire = Callable[[MemoryConnection, Location, Link], None]
OnShared = Callable[[SharedBlock], None]


class SyncMemoryPool(ObjectCalls):
    """Blocks of memory on other nodes. They live until `deallocate`; `shutdown` frees none.

    `compression`: "off", "auto", "lz4" or "zstd" on the wire (default: the configuration's). `busy_poll_s`: spin this
    long for an answer before sleeping, for the lowest latency. Safe from several threads.
    """

    def __init__(
        self, config: ClusterConfig | None = None, *, compression: str | None = None, busy_poll_s: float = 0.0
    ) -> None:
        self._config = config
        self._mode = mode_of(compression, config.memory_pool.compression if config else "auto")
        self._busy_poll_s = busy_poll_s
        self._directory: Directory | None = None
        self._uid, self._key = -2, b""
        self._lock = threading.Lock()
        self._known: dict[str, Location] = {}
        self._links: dict[str, Link] = {}
        self.unflushed = Unflushed()
        self._counts = {"reads": 0, "writes": 0, "bytes_read": 0, "bytes_written": 0, "retries": 0}
        forks.watch(self)

    def after_fork(self) -> None:
        self._lock = threading.Lock()

    # -- the pool -------------------------------------------------------------------------------------------------

    def initialize(self) -> None:
        """Find the daemon (a dead one is started again) and get this user's key. Safe to repeat."""
        if self._directory is not None:
            return
        config = self._config
        path = (config.daemon.socket if config else None) or GridPaths.default().socket
        directory = Directory(Path(path), str(config.path) if config and config.path else None)
        try:
            opened = directory.call("memory_open")
        except BaseException:
            directory.close()
            raise
        self._uid, self._key = int(opened["uid"]), bytes(opened["key"])
        self._connections = Connections(self._busy_poll_s)
        self._shared = SharedBlocks()
        self._directory = directory

    def shutdown(self) -> None:
        """Close what this pool opened. Blocks stay: they are freed by `deallocate` only."""
        try:
            if self._directory is not None:
                self.unflushed.flush()
        finally:
            self._close()

    def _close(self) -> None:
        directory, self._directory = self._directory, None
        if directory is not None:
            self._connections.close()
            self._shared.close()
            directory.close()
            self._known.clear()

    @property
    def is_open(self) -> bool:
        return self._directory is not None

    @property
    def uid(self) -> int:
        """Whose blocks these are."""
        return self._uid

    def __enter__(self) -> SyncMemoryPool:
        self.initialize()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def _ask(self, name: str, **arguments: Any) -> Any:
        if self._directory is None:
            raise PoolClosed("the memory pool is not open", hint="call initialize() first")
        return self._directory.call(name, **arguments)

    # -- blocks ---------------------------------------------------------------------------------------------------

    def allocate(
        self, size: int, preferred_node: str | None = None, *, strict: bool = False, replicas: int = 1,
        owned: bool = False, name: str = "", meta: dict[str, Any] | None = None, at_rest: str = "",
    ) -> Block:  # fmt: skip
        """A new block of `size` bytes, all zero, on `preferred_node` or where there is most room.

        `strict`: on that node or not at all. `replicas=2`: a copy on a second node, kept up. `owned`: freed when this
        process ends. `name`: found again by `find`; a block that had the name is freed. `meta`: anything JSON.
        `at_rest`: "lz4" or "zstd" keeps it packed, so that the node holds more; it takes what it packs to, and a write
        that finds no room for that is refused (PoolFull).
        """
        wanted = {
            "size_bytes": check_size(size), "preferred_node": preferred_node or "", "strict": strict,
            "replicas": replicas, "owner_pid": os.getpid() if owned else 0, "key": name, "meta": check_meta(meta),
            "at_rest": at_rest,
        }  # fmt: skip
        try:
            return self._learn(self._allocate(new_block_id(), wanted)).handle()
        except Refused as error:
            if error.code != "block-exists":
                raise
            # The daemon was killed over it, and what there is of it is being freed.
            return self._learn(self._allocate(new_block_id(), wanted)).handle()

    def _allocate(self, block_id: str, wanted: dict[str, Any]) -> dict[str, Any]:
        """Broken off, it leaves nothing: not even what was just made when nobody waited for the answer any more."""
        try:
            found: dict[str, Any] = self._ask(
                "memory_allocate", timeout_s=ALLOCATE_LIMIT_S, block_id=block_id, **wanted
            )
            return found
        except BaseException as error:
            cancellation = current.get()
            cancelled = cancellation is not None and cancellation.cancelled
            if self._directory is not None and (
                cancelled or isinstance(error, TimedOut) or not isinstance(error, GridError)
            ):  # fmt: skip
                with not_cancelled(), contextlib.suppress(GridError):
                    self._ask("memory_deallocate", timeout_s=2.0, block_id=block_id)
            raise

    def deallocate(self, block: str) -> None:
        """Free it: its memory goes back to the node's system at once."""
        known = self._known.pop(str(block), None)
        if known and self._directory is not None:
            self._shared.forget(known.number)
        with not_cancelled():  # it is what a call that is cancelled cleans up with
            self._ask("memory_deallocate", done_if=BlockNotFound, block_id=str(block))

    def info(self, block: str) -> dict[str, Any]:
        """What the directory knows of it: size, nodes, name, meta…"""
        found: dict[str, Any] = self._ask("memory_locate", block_id=str(block))
        return found

    def list_blocks(self) -> list[dict[str, Any]]:
        """All blocks of this user, newest first."""
        found: list[dict[str, Any]] = []
        while True:
            page = self._ask("memory_list", before=[found[-1]["created"], found[-1]["id"]] if found else None)
            found += page
            if len(page) < PAGE_BLOCKS:
                return found

    def rename(self, block: str, name: str, meta: dict[str, Any] | None = None, *, keep: bool = False) -> None:
        """Give it a name (and `meta`) in one step; a block that had that name is freed. "" takes the name away.

        `keep`: an `owned` block outlives its owner from then on, so that one killed while it writes leaves nothing.
        """
        check_meta(meta)
        self._ask("memory_rename", block_id=str(block), key=name, meta=meta, keep=keep)
        self._known.pop(str(block), None)

    def find(self, name: str) -> Block:
        """The block of that name, else BlockNotFound."""
        return self._learn(self._ask("memory_find", key=name)).handle()

    def named(self, name: str) -> dict[str, Any]:
        """As `info`, of the block of that name."""
        found: dict[str, Any] = self._ask("memory_find", key=name)
        self._learn(found)
        return found

    def stats(self) -> dict[str, Any]:
        """The pool's figures by node, this user's share, and what this object has transferred."""
        found: dict[str, Any] = self._ask("memory_stats")
        links = {node: link.rate_bytes_s for node, link in self._links.items()}
        return {**found, "client": {**self._counts, "compression": self._mode, "link_bytes_per_s": links}}

    # -- bytes ----------------------------------------------------------------------------------------------------

    def write(self, block: str, data: Any, *, offset: int = 0) -> int:
        """Write anything with the buffer protocol, without a copy; the number of bytes."""
        view = bytes_of(data)
        failure = None
        if len(view) <= LITTLE_BYTES:
            try:
                if self._write_little(block, offset, view):
                    return len(view)
            except _CopyFailed as error:
                failure = error
        if len(view) > AT_REST_PART_BYTES and self._locate(block).at_rest:
            self._check_range(self._locate(block), [(offset, len(view))])
            for start in range(0, len(view), AT_REST_PART_BYTES):
                self.write(block, view[start : start + AT_REST_PART_BYTES], offset=offset + start)
            return len(view)

        def on_wire(connection: MemoryConnection, location: Location, link: Link) -> None:
            codec = link.codec_for_write(self._mode, view)
            began = time.perf_counter()
            connection.write(location.number, location.generation, offset, view, codec=codec)
            if not codec:
                link.sent(len(view), time.perf_counter() - began)

        self._write(block, [(offset, len(view))], on_wire, lambda shared: shared.write(offset, view), failure)
        return len(view)

    def _write_little(self, block: str, offset: int, view: memoryview) -> bool:
        """As `_read_little`; False: it has to go the long way."""
        location = self.on_one_wire(block, offset, len(view))
        if location is None or len(location.copies) > 1 or location.at_rest:
            return False
        copy = location.copies[0]
        try:
            with self._connections.use(copy, self._uid, self._key) as connection:
                connection.write(location.number, location.generation, offset, view)
        except LOST as error:
            raise _CopyFailed(copy, error) from None
        self.count(written=len(view))
        return True

    def writev(self, block: str, pieces: Iterable[tuple[int, Any]]) -> int:
        """Many `(offset, data)` in one request; the number of bytes."""
        views = [(offset, bytes_of(data)) for offset, data in pieces]
        places = [(offset, len(view)) for offset, view in views]
        if not views:
            return 0

        def on_wire(connection: MemoryConnection, location: Location, link: Link) -> None:
            connection.writev(location.number, location.generation, places, [view for _, view in views])

        self._write(block, places, on_wire, lambda shared: shared.writev(views))
        return sum(length for _, length in places)

    def read(self, block: str, size: int | None = None, *, offset: int = 0) -> bytes:
        """`size` bytes from `offset` on; without a size, all to the end."""
        if size is None:
            size = max(0, self._locate(block).size_bytes - offset)
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            raise UsageError(f"a size is a whole number of bytes, not {size!r}", code="bad-size")
        if size <= LITTLE_BYTES:
            return self._read_little(block, offset, size)
        self._check_range(self._locate(block), [(offset, size)])  # before memory is made for it
        data, view = fresh_bytes(size)
        self.read_into(block, view, offset=offset)
        return data

    def read_into(self, block: str, buffer: Any, *, offset: int = 0) -> int:
        """Fill a writable buffer (bytearray, array, memoryview); the number of bytes."""
        view = bytes_of(buffer)
        if view.readonly and len(view):
            raise UsageError("the buffer can't be written to", hint="give a bytearray or an array", code="read-only")
        if len(view) <= LITTLE_BYTES:
            view[:] = self._read_little(block, offset, len(view))
        else:
            self._read_into(block, offset, view, None)
        return len(view)

    def _read_little(self, block: str, offset: int, size: int) -> bytes:
        """The short way to a little data; to whatever is out of the ordinary the long way sees."""
        failure = None
        location = self.on_one_wire(block, offset, size)
        if location is not None:
            copy = location.copies[0]
            try:
                with self._connections.use(copy, self._uid, self._key) as connection:
                    data = connection.read(location.number, location.generation, offset, size)
                self.count(read=size)
                return data
            except LOST as error:
                failure = _CopyFailed(copy, error)
        place = bytearray(size)
        self._read_into(block, offset, memoryview(place), failure)
        return bytes(place)

    def on_one_wire(self, block: str, offset: int, size: int) -> Location | None:
        """Where it is known to lie, if that much can be asked for there over the wire."""
        location = self._known.get(block)
        if location is None or not 0 <= offset <= location.size_bytes - size or not size or location.copies[0].shared:
            return None
        return location

    def _read_into(self, block: str, offset: int, view: memoryview, failure: _CopyFailed | None) -> None:
        def on_wire(connection: MemoryConnection, location: Location, link: Link) -> None:
            codec = link.codec_for_read(self._mode, len(view))
            began = time.perf_counter()
            if not connection.read_into(location.number, location.generation, offset, view, packed=codec):
                link.sent(len(view), time.perf_counter() - began)

        self._read(block, [(offset, len(view))], on_wire, lambda shared: shared.read_into(offset, view), failure)

    def readv(self, block: str, pieces: Sequence[tuple[int, int]]) -> list[bytes]:
        """Many `(offset, size)` in one request."""
        places = [(int(offset), int(size)) for offset, size in pieces]
        self._check_range(self._locate(block), places)
        if not places:
            return []
        starts = list(itertools.accumulate([size for _, size in places], initial=0))
        whole, view = fresh_bytes(max(2, starts[-1]))
        view = view[: starts[-1]]

        def on_wire(connection: MemoryConnection, location: Location, link: Link) -> None:
            connection.readv_into(location.number, location.generation, places, view)

        self._read(block, places, on_wire, lambda shared: shared.readv_into(places, view))
        return [whole[at:end] for at, end in itertools.pairwise(starts)]

    def stream(
        self, block: str, *, offset: int = 0, size: int | None = None, chunk_bytes: int = STREAM_CHUNK_BYTES
    ) -> Iterator[bytes]:
        """The bytes in order, a chunk at a time."""
        for start, length in chunks_of(self._locate(block).size_bytes, offset, size, chunk_bytes):
            yield self.read(block, length, offset=start)

    def count(self, *, read: int = -1, written: int = -1) -> None:
        """One read or write of so many bytes."""
        if read >= 0:
            self._counts["reads"] += 1
            self._counts["bytes_read"] += read
        else:
            self._counts["writes"] += 1
            self._counts["bytes_written"] += written

    # -- for an event loop, which must not wait ---------------------------------------------------------------------

    def take_idle(self, location: Location) -> MemoryConnection | None:
        """A connection that can be used now, to be given back; None: it has to be waited for."""
        return self._connections.take_idle(location.copies[0])

    def give_back(self, location: Location, connection: MemoryConnection) -> bool:
        """Whether it was broken off in a write, so that `end_broken` is to be called."""
        broken = connection.writing
        if broken:
            self._connections.broke(location.copies[0], connection)
        self._connections.give(location.copies[0], connection)
        return broken

    def end_broken(self, location: Location) -> None:
        with contextlib.suppress(GridError):  # then it is ended before anything else is asked there
            self._connections.end_broken(location.copies[0], self._uid, self._key)

    def look_again(self, location: Location) -> None:
        """It did not answer: the daemon looks into that, and says where the block lies now."""
        self._locate(location.id, failed=location.copies[0])

    # -- where it lies, and what to do when it does not -----------------------------------------------------------

    def _learn(self, found: dict[str, Any]) -> Location:
        location = Location.from_wire(found)
        if len(self._known) >= MOST_KNOWN:
            self._known.clear()
        self._known[location.id] = location
        return location

    def _locate(self, block: str, *, failed: Copy | None = None) -> Location:
        """From memory, or from the directory; `failed`: that copy did not answer, which the daemon looks into."""
        known = self._known.get(str(block))
        if known is not None and failed is None:
            return known
        self._known.pop(str(block), None)
        node = failed.node if failed else ""
        return self._learn(self._ask("memory_locate", block_id=str(block), failed_node=node))

    def _check_range(self, location: Location, places: Sequence[tuple[int, int]]) -> None:
        if len(places) > MAX_PIECES:
            raise UsageError(f"at most {MAX_PIECES} pieces in one request", code="too-many-pieces")
        for offset, length in places:
            if offset < 0 or length < 0 or offset + length > location.size_bytes:
                raise OutOfRange(
                    f"{length} bytes from {offset} on do not fit into {location.id}",
                    cause=f"it has {location.size_bytes} bytes",
                )

    def _read(
        self, block: str, places: Sequence[tuple[int, int]], on_wire: OnWire, on_shared: OnShared,
        failure: _CopyFailed | None = None,
    ) -> None:  # fmt: skip
        def work(location: Location) -> None:
            self._at(location.copies[0], location, on_wire, on_shared)

        self._repeat(block, places, work, failure)
        self._counts["reads"] += 1
        self._counts["bytes_read"] += sum([length for _, length in places])

    def _write(
        self, block: str, places: Sequence[tuple[int, int]], on_wire: OnWire, on_shared: OnShared,
        failure: _CopyFailed | None = None,
    ) -> None:  # fmt: skip
        def everywhere(location: Location) -> None:
            if len(location.copies) == 1:
                self._at(location.copies[0], location, on_wire, on_shared)
            else:
                self._at_all(location, on_wire)

        while True:
            try:
                self._repeat(block, places, everywhere, failure)
                break
            except PoolFull:  # kept packed, and to take more than it was allowed
                self._ask("memory_grow", block_id=str(block))
                failure = None
        self._counts["writes"] += 1
        self._counts["bytes_written"] += sum(length for _, length in places)

    def _repeat(
        self, block: str, places: Sequence[tuple[int, int]], work: Callable[[Location], None],
        first: _CopyFailed | None = None,
    ) -> None:  # fmt: skip
        """Both reading and writing can be done again: do so where the block lies now, until it is done or lost.

        `first`: how the first attempt failed, where it was made already.
        """
        cancellation = current.get()
        location = self._locate(block)
        self._check_range(location, places)
        if not any(length for _, length in places):
            return
        for attempt in range(ATTEMPTS):
            try:
                if first is not None:
                    raise first
                return work(location)
            except _CopyFailed as failure:
                first = None
                if attempt == ATTEMPTS - 1 or (cancellation and cancellation.cancelled):
                    raise failure.error from None
                with self._lock:
                    self._counts["retries"] += 1
                if attempt:
                    time.sleep(0.05 * 2**attempt)
                # A wrong sum is of somebody who wrote in between: nothing is wrong with the node.
                lost = None if isinstance(failure.error, ChecksumMismatch) else failure.copy
                before, location = location, self._locate(block, failed=lost)
                gone = isinstance(failure.error, BlockNotFound | StaleBlock)
                if gone and attempt and location == before:
                    raise failure.error from None

    def _at(self, copy: Copy, location: Location, on_wire: OnWire, on_shared: OnShared) -> None:
        try:
            if copy.shared:
                with self._shared.use(
                    copy.local_name, location.number, location.generation, self._uid, self._key
                ) as shared:
                    if shared is not None:
                        return on_shared(shared)
            with self._connections.use(copy, self._uid, self._key) as connection:
                on_wire(connection, location, self._links.setdefault(copy.node, Link()))
        except LOST as error:
            raise _CopyFailed(copy, error) from None

    def _at_all(self, location: Location, on_wire: OnWire) -> None:
        """Each copy is marked as being written until all are; if we go before, the daemon makes them equal again."""
        with contextlib.ExitStack() as stack:
            held: list[MemoryConnection] = []
            for copy in location.copies:
                try:
                    connection = stack.enter_context(self._connections.use(copy, self._uid, self._key))
                    connection.marked = True
                    held.append(connection)
                    on_wire(connection, location, self._links.setdefault(copy.node, Link()))
                except LOST as error:
                    raise _CopyFailed(copy, error) from None
            for connection in reversed(held):  # the first copy last: who waits there may go on
                with contextlib.suppress(ServerLost):
                    connection.settle()


class _CopyFailed(Exception):
    def __init__(self, copy: Copy, error: ServerLost | BlockNotFound | StaleBlock | ChecksumMismatch) -> None:
        self.copy = copy
        self.error = error


def chunks_of(whole: int, offset: int, size: int | None, chunk_bytes: int) -> Iterator[tuple[int, int]]:
    """(offset, length) of each chunk of a part of a block."""
    end = whole if size is None else offset + size
    if offset < 0 or end > whole or chunk_bytes < 1 or end < offset:
        raise OutOfRange(f"{end - offset} bytes from {offset} on do not fit", cause=f"the block has {whole} bytes")
    for start in range(offset, end, chunk_bytes):
        yield start, min(chunk_bytes, end - start)
