"""Objects: blocks with a name, there whole or not at all.

What had the name stays until the new one is whole. Until then the new block belongs to this process and ends with it,
so that not even a kill leaves anything. `meta` has `size_bytes`, for a block can be longer than what was put into it.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from distributed_grid.agent.memory.errors import BlockLost, BlockNotFound, StaleBlock
from distributed_grid.orchestration.distributed_memory_pool import forks
from distributed_grid.orchestration.distributed_memory_pool.blocks import Block, bytes_of

if TYPE_CHECKING:
    from distributed_grid.orchestration.distributed_memory_pool.sync import SyncMemoryPool

CHUNK_BYTES = 8 * 1024 * 1024
#: Of a length that is not known: so much is held here, then it goes into blocks of this size first.
HELD_BYTES = 16 * 1024 * 1024
PART_BYTES = 256 * 1024 * 1024
#: One that is replaced while it is read is read again, so often.
ATTEMPTS = 20


def size_of(known: dict[str, Any]) -> int:
    """Of an object, from what the directory knows of its block."""
    return int(known["meta"].get("size_bytes", known["size_bytes"]))


def put(pool: SyncMemoryPool, name: str, data: Any, meta: dict[str, Any] | None = None, **options: Any) -> None:
    """Store anything with the buffer protocol."""
    view = bytes_of(data)
    with _new_block(pool, len(view), **options) as block:
        if view:
            pool.write(block, view)
    # Out of the block's care: if no answer comes it may have its name already, and else it goes with this process.
    pool.rename(block, name, {**(meta or {}), "size_bytes": len(view)}, keep=True)


@contextlib.contextmanager
def _new_block(pool: SyncMemoryPool, size: int, **options: Any) -> Iterator[Block]:
    """This process's own, and freed if anything goes wrong."""
    block = pool.allocate(max(1, size), owned=True, **options)
    try:
        yield block
    except BaseException:
        _free(pool, block)
        raise


def _free(pool: SyncMemoryPool, block: str) -> None:
    with contextlib.suppress(BlockNotFound):
        pool.deallocate(block)


def get(pool: SyncMemoryPool, name: str, start: int | None = None, end: int | None = None) -> bytes:
    """The bytes, or those of a slice of it; KeyError where there is nothing of that name."""
    for attempt in range(ATTEMPTS):
        known = describe(pool, name)
        wanted = range(size_of(known))[start:end]
        try:
            return pool.read(known["id"], len(wanted), offset=wanted.start if wanted else 0)
        except (BlockNotFound, StaleBlock):
            if attempt == ATTEMPTS - 1:
                raise
    raise AssertionError


def describe(pool: SyncMemoryPool, name: str) -> dict[str, Any]:
    """What the directory knows of it; KeyError where there is nothing of that name."""
    try:
        return pool.named(name)
    except BlockNotFound:
        raise KeyError(name) from None


def every(pool: SyncMemoryPool, prefix: str = "") -> dict[str, dict[str, Any]]:
    """What the directory knows of all of this user's objects, by name; lost ones too."""
    mine = [known for known in pool.list_blocks() if known["name"] and known["uid"] == pool.uid]
    return {known["name"]: known for known in mine if known["name"].startswith(prefix)}


def exists(pool: SyncMemoryPool, name: str) -> bool:
    try:
        pool.named(name)
    except BlockNotFound:
        return False
    except BlockLost:
        pass  # the name is still taken, and can be removed
    return True


def remove(pool: SyncMemoryPool, name: str) -> None:
    """KeyError where there is nothing of that name."""
    try:
        block = str(describe(pool, name)["id"])
    except BlockLost:
        block = str(every(pool, name)[name]["id"])
    _free(pool, block)


def copy(pool: SyncMemoryPool, name: str, other: str, **options: Any) -> None:
    known = describe(pool, name)
    with _new_block(pool, size_of(known), **options) as block:
        _copy_bytes(pool, known["id"], block, 0, size_of(known))
    pool.rename(block, other, known["meta"], keep=True)


def _copy_bytes(pool: SyncMemoryPool, source: str, target: str, offset: int, size: int) -> None:
    for data in pool.stream(source, size=size, chunk_bytes=CHUNK_BYTES):
        offset += pool.write(target, data, offset=offset)


class ObjectWriter(io.RawIOBase):
    """Takes bytes until `commit` makes them an object; `discard` (or the end of this process) leaves nothing.

    With `size_bytes`, at most so many come, and they go straight into their block. Without, a long one goes into parts
    first, and needs twice the room while these are joined.
    """

    def __init__(self, pool: SyncMemoryPool, name: str, size_bytes: int | None = None, **options: Any) -> None:
        super().__init__()
        self._pool, self.object_name, self._options = pool, name, options
        self._held = bytearray()
        self._parts: list[tuple[Block, int]] = []  # (block, bytes in it)
        self._part_bytes = PART_BYTES if size_bytes is None else max(1, size_bytes)
        self._most = size_bytes
        self._length = 0
        self._done = False
        forks.watch(self)
        if size_bytes is not None:
            self._new_part()

    def after_fork(self) -> None:
        """It is the parent's to finish, or to leave."""
        self._done, self._held, self._parts = True, bytearray(), []

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._length

    def write(self, data: Any) -> int:
        if self._done:
            raise ValueError("the object is already stored")
        view = bytes_of(data)
        if self._most is not None and self._length + len(view) > self._most:
            raise ValueError(f"more bytes came than the {self._most} that were announced")
        self._length += len(view)
        if not self._parts and self._length <= HELD_BYTES:
            self._held += view
            return len(view)
        if not self._parts:
            self._new_part()
            held, self._held = self._held, bytearray()
            self._append(memoryview(held))
        self._append(view)
        return len(view)

    def _append(self, view: memoryview) -> None:
        while view:
            block, used = self._parts[-1]
            fits = min(len(view), self._part_bytes - used)
            if not fits:
                self._new_part()
                continue
            self._pool.write(block, view[:fits], offset=used)
            self._parts[-1] = (block, used + fits)
            view = view[fits:]

    def _new_part(self) -> None:
        self._parts.append((self._pool.allocate(self._part_bytes, owned=True, **self._options), 0))

    def commit(self) -> None:
        """From now on it is there, whole."""
        if self._done:
            return
        try:
            if not self._parts:
                put(self._pool, self.object_name, self._held, **self._options)
                return
            whole = len(self._parts) == 1 and (self._length == self._part_bytes or self._most is not None)
            block = self._parts.pop()[0] if whole else self._join()
            self._pool.rename(block, self.object_name, {"size_bytes": self._length}, keep=True)
        finally:
            self.discard()

    def _join(self) -> Block:
        with _new_block(self._pool, self._length, **self._options) as block:
            offset = 0
            while self._parts:
                part, used = self._parts[0]
                _copy_bytes(self._pool, part, block, offset, used)
                offset += used
                _free(self._pool, self._parts.pop(0)[0])
        return block

    def discard(self) -> None:
        """Nothing is left of it, unless it was committed."""
        self._done = True
        self._held = bytearray()
        parts, self._parts = self._parts, []
        for block, _ in parts:
            _free(self._pool, block)
