"""The memory pool for asyncio: a transfer runs in a thread of its own, so that the loop is never late.

Only a little data, of a block that is known, over a connection that is idle, goes without one: handing it to a thread
and back takes longer than the request.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from distributed_grid.agent.memory.connection import Answer, MemoryConnection
from distributed_grid.agent.memory.errors import ChecksumMismatch, PoolClosed, ServerLost
from distributed_grid.agent.memory.protocol import STALL_LIMIT_S, Stalled
from distributed_grid.config.models import ClusterConfig
from distributed_grid.core.errors import GridError
from distributed_grid.orchestration.distributed_memory_pool import forks
from distributed_grid.orchestration.distributed_memory_pool.blocks import Block, Location, bytes_of
from distributed_grid.orchestration.distributed_memory_pool.courtesy import let_others_go_first
from distributed_grid.orchestration.distributed_memory_pool.object_calls import ARRAY_CACHE_BYTES
from distributed_grid.orchestration.distributed_memory_pool.sync import STREAM_CHUNK_BYTES, SyncMemoryPool, chunks_of
from distributed_grid.orchestration.distributed_memory_pool.transfers import Cancellation, current

if TYPE_CHECKING:
    from distributed_grid.orchestration.distributed_memory_pool.array import RemoteArray
    from distributed_grid.orchestration.distributed_memory_pool.mapping import ObjectMapping

THREADS = 16
#: What surely fits into the buffers of an idle connection, so that sending it never waits.
ON_LOOP_BYTES = 4096
P = ParamSpec("P")
T = TypeVar("T")


class DistributedMemoryPool:
    """As `SyncMemoryPool`, with coroutines. A cancelled one breaks off its transfer; the pool goes on."""

    def __init__(
        self, config: ClusterConfig | None = None, *, compression: str | None = None, busy_poll_s: float = 0.0
    ) -> None:
        self._pool = SyncMemoryPool(config, compression=compression, busy_poll_s=busy_poll_s)
        self._threads: ThreadPoolExecutor | None = None
        forks.watch(self)

    def after_fork(self) -> None:
        if self._threads is not None:  # its threads are the parent's
            self._threads = _threads()

    async def initialize(self) -> None:
        if self._threads is None:
            self._threads = _threads()
            try:
                await self._run(self._pool.initialize)
            except BaseException:
                await self.shutdown()
                raise

    async def shutdown(self) -> None:
        """Close what this pool opened. Blocks stay: they are freed by `deallocate` only."""
        threads, self._threads = self._threads, None
        if threads is not None:
            try:
                await asyncio.to_thread(self._pool.shutdown)
            finally:
                await asyncio.to_thread(threads.shutdown)

    async def __aenter__(self) -> DistributedMemoryPool:
        await self.initialize()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.shutdown()

    async def _run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._run_or_undo(None, functools.partial(function, *args, **kwargs))

    async def _run_or_undo(self, undo: Callable[[T], object] | None, function: Callable[[], T]) -> T:
        """In a thread. Cancelled, it breaks off, and `undo`es what was done before that could be heard."""
        if self._threads is None:
            raise PoolClosed("the memory pool is not open", hint="call initialize() first")
        cancellation = Cancellation()
        context = contextvars.copy_context()
        context.run(current.set, cancellation)
        running = self._threads.submit(context.run, function)
        try:
            return await asyncio.shield(asyncio.wrap_future(running))
        except asyncio.CancelledError:
            cancellation.cancel()
            if not running.cancel():
                await _until_done(running)
                if undo is not None and running.exception() is None:
                    await _until_done(self._threads.submit(undo, running.result()))
            raise

    async def _on_loop(
        self, block_id: str, offset: int, size: int, begin: Callable[[MemoryConnection, Location], Answer], *,
        writes: bool = False,
    ) -> bytes | None:  # fmt: skip
        """A little request without a thread. None: it is not done, and has to be done in one."""
        pool = self._pool
        if self._threads is None or type(offset) is not int:
            return None
        location = pool.on_one_wire(block_id, offset, size)
        if writes and location and (len(location.copies) > 1 or location.at_rest):
            return None
        connection = pool.take_idle(location) if location else None
        if location is None or connection is None:
            return None
        try:
            try:
                return await _answer(begin(connection, location))
            finally:
                if not connection.usable:
                    connection.close()
                broken = pool.give_back(location, connection)
        except asyncio.CancelledError:
            if broken:
                await _until_done(self._threads.submit(pool.end_broken, location))
            raise
        except (ChecksumMismatch, ServerLost) as error:
            stalled = error.code == "stalled"
        if stalled:
            await self._run(pool.look_again, location)
        return None

    async def allocate(
        self, size: int, preferred_node: str | None = None, *, strict: bool = False, replicas: int = 1,
        owned: bool = False, name: str = "", meta: dict[str, Any] | None = None, at_rest: str = "",
    ) -> Block:  # fmt: skip
        """A new block of `size` bytes, all zero, on `preferred_node` or where there is most room.

        `strict`: on that node or not at all. `replicas=2`: a copy on a second node, kept up. `owned`: freed when this
        process ends. `name`: found again by `find`; a block that had the name is freed. `meta`: anything JSON.
        `at_rest`: "lz4" or "zstd" keeps it packed, so that the node holds more; it takes what it packs to, and a write
        that finds no room for that is refused (PoolFull).
        """
        allocate = functools.partial(
            self._pool.allocate, size, preferred_node, strict=strict, replicas=replicas, owned=owned, name=name,
            meta=meta, at_rest=at_rest,
        )  # fmt: skip
        return await self._run_or_undo(self._pool.deallocate, allocate)

    async def write(self, block_id: str, data: Any, *, offset: int = 0) -> int:
        """Write anything with the buffer protocol, without a copy; the number of bytes."""
        view = bytes_of(data)
        if len(view) <= ON_LOOP_BYTES:
            done = await self._on_loop(
                block_id, offset, len(view),
                lambda connection, at: connection.begin_write(at.number, at.generation, offset, view),
                writes=True,
            )  # fmt: skip
            if done is not None:
                self._pool.count(written=len(view))
                return len(view)
        return await self._run(self._pool.write, block_id, data, offset=offset)

    async def read(self, block_id: str, size: int | None = None, *, offset: int = 0) -> bytes:
        """`size` bytes from `offset` on; without a size, all to the end."""
        if type(size) is int and size <= ON_LOOP_BYTES:
            data = await self._read_on_loop(block_id, offset, size)
            if data is not None:
                return data
        return await self._run(self._pool.read, block_id, size, offset=offset)

    async def read_into(self, block_id: str, buffer: Any, *, offset: int = 0) -> int:
        """Fill a writable buffer; the number of bytes."""
        view = bytes_of(buffer)
        if len(view) <= ON_LOOP_BYTES and not view.readonly:
            data = await self._read_on_loop(block_id, offset, len(view))
            if data is not None:
                view[:] = data
                return len(view)
        return await self._run(self._pool.read_into, block_id, buffer, offset=offset)

    async def _read_on_loop(self, block_id: str, offset: int, size: int) -> bytes | None:
        data = await self._on_loop(
            block_id, offset, size, lambda connection, at: connection.begin_read(at.number, at.generation, offset, size)
        )
        if data is not None:
            self._pool.count(read=size)
        return data

    async def readv(self, block_id: str, pieces: Sequence[tuple[int, int]]) -> list[bytes]:
        """Many `(offset, size)` in one request."""
        return await self._run(self._pool.readv, block_id, pieces)

    async def writev(self, block_id: str, pieces: Iterable[tuple[int, Any]]) -> int:
        """Many `(offset, data)` in one request."""
        return await self._run(self._pool.writev, block_id, pieces)

    async def stream(
        self, block_id: str, *, offset: int = 0, size: int | None = None, chunk_bytes: int = STREAM_CHUNK_BYTES
    ) -> AsyncIterator[bytes]:
        """The bytes in order, a chunk at a time; the next one is fetched while this one is used."""
        whole = int((await self.info(block_id))["size_bytes"])
        ahead: asyncio.Task[bytes] | None = None
        try:
            for start, length in chunks_of(whole, offset, size, chunk_bytes):
                fetched, ahead = ahead, asyncio.ensure_future(self.read(block_id, length, offset=start))
                if fetched is not None:
                    yield await fetched
            if ahead is not None:
                yield await ahead
        finally:
            if ahead is not None and not ahead.done():
                ahead.cancel()
                await asyncio.wait([ahead])

    async def deallocate(self, block_id: str) -> None:
        """Free it: its memory goes back to the node's system at once."""
        await self._run(self._pool.deallocate, block_id)

    async def info(self, block_id: str) -> dict[str, Any]:
        """What the directory knows of it: size, nodes, name, meta…"""
        return await self._run(self._pool.info, block_id)

    async def list_blocks(self) -> list[dict[str, Any]]:
        """All blocks of this user, newest first."""
        return await self._run(self._pool.list_blocks)

    async def rename(
        self, block_id: str, name: str, meta: dict[str, Any] | None = None, *, keep: bool = False
    ) -> None:
        """Give it a name (and `meta`) in one step; a block that had that name is freed. `keep`: no longer `owned`."""
        await self._run(self._pool.rename, block_id, name, meta, keep=keep)

    async def find(self, name: str) -> Block:
        """The block of that name, else BlockNotFound."""
        return await self._run(self._pool.find, name)

    @property
    def objects(self) -> ObjectMapping:
        """Named objects, as a dictionary of bytes; it blocks."""
        return self._pool.objects

    async def array(
        self, shape: int | tuple[int, ...], dtype: Any = "float64", preferred_node: str | None = None, *,
        cache_bytes: int = ARRAY_CACHE_BYTES, **options: Any,
    ) -> RemoteArray:  # fmt: skip
        """A new array of zeros in a block of its own; `options` as of `allocate`. The array's own calls block."""
        return await self._run_or_undo(
            _free, lambda: self._pool.array(shape, dtype, preferred_node, cache_bytes=cache_bytes, **options)
        )

    async def put_array(
        self, array: Any, preferred_node: str | None = None, *, cache_bytes: int = ARRAY_CACHE_BYTES, **options: Any
    ) -> RemoteArray:
        """A copy of a local array; with a `name`, it has it when it is whole."""
        return await self._run_or_undo(
            _free, lambda: self._pool.put_array(array, preferred_node, cache_bytes=cache_bytes, **options)
        )

    async def get_array(self, name: str, *, cache_bytes: int = ARRAY_CACHE_BYTES) -> RemoteArray:
        """The array of that name, or in that block, from any process of the user."""
        return await self._run(self._pool.get_array, name, cache_bytes=cache_bytes)

    async def stats(self) -> dict[str, Any]:
        """The pool's figures by node, this user's share, and what this object has transferred."""
        return await self._run(self._pool.stats)


def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS, thread_name_prefix="grid-memory", initializer=let_others_go_first)


async def _answer(answer: Answer) -> bytes:
    loop = asyncio.get_running_loop()
    waiting: asyncio.Future[bytes] = loop.create_future()

    def take() -> None:
        try:
            data = answer.take()
        except GridError as error:
            if not waiting.done():
                waiting.set_exception(error)
        else:
            if data is not None and not waiting.done():
                waiting.set_result(data)

    def give_up() -> None:
        if not waiting.done():
            waiting.set_exception(Stalled(0))

    fd = answer.fileno()
    limit = loop.call_later(STALL_LIMIT_S, give_up)
    loop.add_reader(fd, take)
    try:
        return await waiting
    finally:
        loop.remove_reader(fd)
        limit.cancel()


async def _until_done(running: Future[Any]) -> None:
    """To its end, however often this is cancelled: a thread must be out of the caller's buffer before he goes on."""
    waiting = asyncio.wrap_future(running)
    while not waiting.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([waiting])
    waiting.exception()  # looked at, so that asyncio does not complain


def _free(array: RemoteArray) -> None:
    array.free()
