"""The blocks that a memory server holds: made, used by many connections at once, and given back to the system."""

from __future__ import annotations

import contextlib
import mmap
import operator
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distributed_grid.agent.memory.accounting import show_bytes
from distributed_grid.agent.memory.at_rest import PackedMemory, give_back_to_the_system
from distributed_grid.agent.memory.errors import BlockNotFound, OutOfRange, PoolFull, ServerLost, StaleBlock
from distributed_grid.agent.memory.packing import CODECS
from distributed_grid.core.errors import Refused

PAGE_BYTES = mmap.PAGESIZE
#: A shared block begins with a page whose first word is its generation, 0 once it is freed.
CONTROL_BYTES = PAGE_BYTES
#: A frozen block (being copied) lets its writers wait this long.
FROZEN_LIMIT_S = 120.0
#: What was written while a copy is made is known in so many parts at most, of at least this size.
MOST_PARTS = 16384
LEAST_PART_BYTES = 1024 * 1024
#: Two writers of the same bytes of a block with copies go one after the other; one that does not end has this long.
MARK_LIMIT_S = 10.0
#: Who wrote a little is taken to write more for this long.
LITTLE_AGAIN_S = 0.02
#: Descriptors that are kept for connections; blocks beyond go into memory that can't be mapped by clients.
KEPT_DESCRIPTORS = 2048
ADMIN = -1
Pieces = Sequence[tuple[int, int]]


@dataclass(slots=True, eq=False)
class Block:
    id: int
    uid: int
    generation: int
    size_bytes: int
    memory: mmap.mmap | None  # None: it is kept packed
    view: memoryview
    created: float
    packed: PackedMemory | None = None
    taken_bytes: int = 0  # what it counts for: its size, or what its packed chunks take
    fd: int = -1  # of a block that clients on this host may map
    users: int = 0
    writers: int = 0
    little_at: float = -LITTLE_AGAIN_S  # when a little was written last
    freed: bool = False
    frozen_until: float = 0.0
    sockets: set[socket.socket] = field(default_factory=set)
    #: By connection, the (start, end) that it writes to all copies, and has not settled yet.
    marks: dict[socket.socket, tuple[int, int]] = field(default_factory=dict)
    torn: bool = False  # a writer went before it had settled: the copies may differ
    tracked: set[int] | None = None  # the parts that were written since a copy was begun

    @property
    def shared(self) -> bool:
        return self.fd >= 0

    def has_writers(self) -> bool:
        return bool(self.writers) or self._is_disturbed()

    def has_other_writers(self) -> bool:
        """For one who is a writer."""
        return self.writers > 1 or self._is_disturbed()

    def _is_disturbed(self) -> bool:
        """By those who are not seen: who has it mapped, and who writes a little, again and again."""
        return self.fd >= 0 or time.monotonic() - self.little_at < LITTLE_AGAIN_S

    @property
    def part_bytes(self) -> int:
        return max(LEAST_PART_BYTES, -(-self.size_bytes // MOST_PARTS))

    def note_written(self, pieces: Pieces) -> None:
        if self.tracked is not None:
            for offset, length in pieces:
                end = min(offset + length, self.size_bytes)  # a request may have been refused for being too long
                self.tracked.update(range(offset // self.part_bytes, -(-end // self.part_bytes)))

    def resident_bytes(self) -> int:
        """Only of a shared one: the others are in the process's own count."""
        return os.fstat(self.fd).st_blocks * 512 if self.fd >= 0 else 0

    def describe(self) -> dict[str, Any]:
        return {
            "id": self.id, "uid": self.uid, "generation": self.generation, "size_bytes": self.size_bytes,
            "shared": self.shared, "created": self.created, "taken_bytes": self.taken_bytes,
            "at_rest": next((name for name, codec in CODECS.items() if self.packed and codec == self.packed.codec), ""),
        }  # fmt: skip


def _make(block_id: int, uid: int, generation: int, size_bytes: int, shared: bool) -> Block:
    whole = -(-size_bytes // PAGE_BYTES) * PAGE_BYTES
    fd, start = -1, 0
    try:
        if shared and (fd := _new_memory()) >= 0:
            start = CONTROL_BYTES
            os.ftruncate(fd, CONTROL_BYTES + whole)
            memory = mmap.mmap(fd, CONTROL_BYTES + whole, flags=mmap.MAP_SHARED)
            memory[:8] = generation.to_bytes(8, "little")
        else:
            memory = mmap.mmap(-1, whole, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with contextlib.suppress(OSError):  # a kernel without huge pages
                memory.madvise(mmap.MADV_HUGEPAGE)
    except (OSError, OverflowError, ValueError) as error:
        if fd >= 0:
            os.close(fd)
        raise PoolFull("Failed to allocate memory block", cause=f"{show_bytes(size_bytes)}: {error}") from None
    memory.madvise(mmap.MADV_DONTDUMP)
    view = memoryview(memory)[start : start + size_bytes]
    return Block(block_id, uid, generation, size_bytes, memory, view, time.time(), taken_bytes=size_bytes, fd=fd)


def _new_memory() -> int:
    """A descriptor of memory that can be mapped by others; -1 where descriptors get short."""
    try:
        fd = os.memfd_create("grid-block", os.MFD_CLOEXEC)
    except OSError:
        return -1
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if most < 0 or fd < most - min(KEPT_DESCRIPTORS, most // 2):  # the kernel gives the lowest that is free
        return fd
    os.close(fd)
    return -1


class BlockTable:
    """All blocks of a server; each call is safe from any thread."""

    def __init__(self) -> None:
        self._blocks: dict[int, Block] = {}
        self._lock = threading.RLock()  # taken by itself where nobody waits: a condition's own calls cost as much again
        self._changed = threading.Condition(self._lock)
        self._given_up: set[socket.socket] = set()
        self._promised = 0
        self._growth = 0  # what blocks that are kept packed may still grow by

    def allocate(
        self, block_id: int, uid: int, generation: int, size_bytes: int, *, shared: bool, most_bytes: int,
        codec: int = 0,
    ) -> bool:  # fmt: skip
        """Safe to repeat; whether clients on this host can map it, for which `shared` is a wish.

        `most_bytes`: what all blocks together may come to. `codec`: keep it packed, 0 for not.
        """
        with self._changed:
            found = self._blocks.get(block_id)
            if found is not None:
                if (found.uid, found.generation, found.size_bytes) != (uid, generation, size_bytes):
                    raise Refused("another block has that id", code="block-exists")
                return found.shared
            if size_bytes <= 0:
                raise OutOfRange("a block has at least one byte")
            if codec:
                self._blocks[block_id] = self._make_packed(block_id, uid, generation, size_bytes, codec)
                return False
            if self._promised + size_bytes > most_bytes:
                raise _full(size_bytes, most_bytes - self._promised)
            made = self._blocks[block_id] = _make(block_id, uid, generation, size_bytes, shared)
            self._promised += size_bytes
            return made.shared

    def _make_packed(self, block_id: int, uid: int, generation: int, size_bytes: int, codec: int) -> Block:
        def claim(growth: int) -> None:
            with self._changed:
                if block.freed:
                    raise BlockNotFound("there is no such block here")
                if growth > max(0, self._growth):
                    raise _full(growth, self._growth)
                self._growth -= growth
                block.taken_bytes += growth
                self._promised += growth

        packed = PackedMemory(size_bytes, codec, claim)
        block = Block(block_id, uid, generation, size_bytes, None, memoryview(b""), time.time(), packed)
        return block

    def set_growth(self, growth_bytes: int, promised_bytes: int | None = None) -> int:
        """How much blocks that are kept packed may still grow; what they take now.

        `promised_bytes`: what was promised when that was reckoned. What was taken since comes off.
        """
        with self._changed:
            self._growth = growth_bytes - (0 if promised_bytes is None else self._promised - promised_bytes)
            return sum(block.taken_bytes for block in self._blocks.values() if block.packed)

    def free(self, block_id: int) -> bool:
        """Gone at once for everybody; whoever is in the middle of it loses its connection. False: it was not there."""
        with self._changed:
            block = self._blocks.pop(block_id, None)
            if block is None:
                return False
            self._promised -= block.taken_bytes
            block.freed = True
            if block.shared and block.memory:
                block.memory[:8] = bytes(8)
                block.memory.madvise(mmap.MADV_REMOVE, CONTROL_BYTES)  # a client may hold its mapping for long
            for sock in block.sockets:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
            if not block.users:
                _close(block)
            self._changed.notify_all()
        return True

    @contextlib.contextmanager
    def use(
        self, block_id: int, uid: int, generation: int, sock: socket.socket, *, write: bool, pieces: Pieces = ()
    ) -> Iterator[Block]:
        """The block for the length of one request: it can't be unmapped meanwhile. `pieces`: what will be written."""
        with self._changed:
            block = self._find(block_id, uid, generation)
            if write and block.frozen_until:
                block = self._wait_for_thaw(block_id, uid, generation, sock)
            block.users += 1
            block.writers += write
            block.sockets.add(sock)
        try:
            yield block
        finally:
            with self._changed:
                block.users -= 1
                block.writers -= write
                block.sockets.discard(sock)
                if write:
                    block.note_written(pieces)
                if block.freed and not block.users:
                    _close(block)
                self._changed.notify_all()

    def copy_out(self, block_id: int, uid: int, generation: int, offset: int, length: int) -> bytes | None:
        """A little data at once: cheaper than keeping the block in use while it is sent. None: it is kept packed."""
        end = offset + length
        with self._lock:
            block = self._find(block_id, uid, generation)
            if end > block.size_bytes:
                check_range(block, [(offset, length)])
            return bytes(block.view[offset:end]) if block.packed is None else None

    def copy_out_pieces(self, block_id: int, uid: int, generation: int, pieces: Pieces) -> bytes | None:
        """The same for many."""
        with self._lock:
            block = self._find(block_id, uid, generation)
            ends = [offset + length for offset, length in pieces]
            if max(ends) > block.size_bytes:
                check_range(block, pieces)
            if block.packed:
                return None
            starts = map(operator.itemgetter(0), pieces)
            return b"".join(map(block.view.__getitem__, map(slice, starts, ends)))

    def copy_in(
        self, block_id: int, uid: int, generation: int, sock: socket.socket, offset: int, data: bytes | memoryview
    ) -> bool:
        """The same for a write, once all of it is here and was found right. False: the block is kept packed."""
        end = offset + len(data)
        with self._lock:
            block = self._find(block_id, uid, generation)
            if block.frozen_until:
                block = self._wait_for_thaw(block_id, uid, generation, sock)
            if end > block.size_bytes:
                check_range(block, [(offset, len(data))])
            if block.packed is not None:
                return False
            block.view[offset:end] = data
            block.little_at = time.monotonic()
            if block.tracked is not None:
                block.note_written([(offset, len(data))])
            return True

    def _find(self, block_id: int, uid: int, generation: int) -> Block:
        block = self._blocks.get(block_id)
        if block is None or uid not in (block.uid, ADMIN):  # another user's block is as if it were not there
            raise BlockNotFound("there is no such block here")
        if block.generation != generation:
            raise StaleBlock("the block moved on since this handle was made")
        return block

    def _wait_for_thaw(self, block_id: int, uid: int, generation: int, sock: socket.socket) -> Block:
        while True:
            self._check_wanted(sock)
            block = self._find(block_id, uid, generation)
            left = block.frozen_until - time.monotonic()
            if not block.frozen_until or left <= 0:
                block.frozen_until = 0.0
                return block
            self._changed.wait(left)

    # -- connections that are broken off --------------------------------------------------------------------------

    def give_up(self, sock: socket.socket) -> None:
        """Whoever waits here for that connection waits no longer."""
        with self._changed:
            self._given_up.add(sock)
            self._changed.notify_all()

    def went(self, sock: socket.socket) -> None:
        with self._changed:
            self._given_up.discard(sock)

    def _check_wanted(self, sock: socket.socket) -> None:
        if sock in self._given_up:
            raise ServerLost("broken off")

    # -- copies ---------------------------------------------------------------------------------------------------

    def mark(self, block: Block, sock: socket.socket, pieces: Pieces) -> None:
        """Its bytes are being written to all copies. Whoever else writes the same ones waits until that is settled.

        All write to the first copy first, so that the order of two writers is the same everywhere.
        """
        start, end = min(offset for offset, _ in pieces), max(offset + length for offset, length in pieces)
        deadline = time.monotonic() + MARK_LIMIT_S
        with self._changed:
            while any(a < end and start < b for a, b in block.marks.values()) and not block.freed:
                self._check_wanted(sock)
                if not self._changed.wait(deadline - time.monotonic()) and time.monotonic() > deadline:
                    block.torn = True
                    break
            block.marks[sock] = (start, end)

    def unmark(self, block: Block, sock: socket.socket, *, torn: bool) -> None:
        with self._changed:
            block.torn |= torn
            block.marks.pop(sock, None)
            self._changed.notify_all()

    def torn(self) -> list[int]:
        with self._changed:
            return [block.id for block in self._blocks.values() if block.torn][:10_000]

    def mend(self, block_id: int) -> None:
        """Its copies are about to be made anew, or it has none."""
        with self._changed:
            self._get(block_id).torn = False

    def track(self, block_id: int) -> None:
        """Note from now on what is written."""
        with self._changed:
            self._get(block_id).tracked = set()

    def changed(self, block_id: int) -> list[tuple[int, int]]:
        """The (offset, length)s that were written since this was asked last."""
        with self._changed:
            block = self._get(block_id)
            if block.tracked is None:
                raise Refused("nobody has begun a copy", code="not-tracked")
            parts, block.tracked = sorted(block.tracked), set()
        unit, found = block.part_bytes, list[tuple[int, int]]()
        for part in parts:
            offset = part * unit
            length = min(unit, block.size_bytes - offset)
            if found and sum(found[-1]) == offset:
                found[-1] = (found[-1][0], found[-1][1] + length)
            else:
                found.append((offset, length))
        return found

    def freeze(self, block_id: int, limit_s: float = FROZEN_LIMIT_S) -> None:
        """Writers wait from now on; returns when those under way are done."""
        deadline = time.monotonic() + 30
        with self._changed:
            block = self._get(block_id)
            block.frozen_until = time.monotonic() + limit_s
            while block.writers and not block.freed:
                if not self._changed.wait(deadline - time.monotonic()) and time.monotonic() > deadline:
                    block.frozen_until = 0.0
                    self._changed.notify_all()
                    raise ServerLost("a writer does not end", code="busy")
            self._get(block_id)

    def thaw(self, block_id: int, generation: int) -> None:
        """Let writers go on; with a new generation only if nobody can have written since the freeze."""
        with self._changed:
            block = self._get(block_id)
            if generation != block.generation and block.frozen_until < time.monotonic():
                raise Refused("the block was not held still until the copy was complete", code="thawed")
            block.frozen_until = 0.0
            block.tracked = None
            self._set(block, generation)

    def set_generation(self, block_id: int, generation: int) -> None:
        with self._changed:
            self._set(self._get(block_id), generation)

    def _set(self, block: Block, generation: int) -> None:
        block.generation = generation
        if block.shared and block.memory:
            block.memory[:8] = generation.to_bytes(8, "little")
        self._changed.notify_all()

    def _get(self, block_id: int) -> Block:
        block = self._blocks.get(block_id)
        if block is None:
            raise BlockNotFound("there is no such block here")
        return block

    # -- what there is --------------------------------------------------------------------------------------------

    def has(self, block_id: int) -> bool:
        with self._changed:
            return block_id in self._blocks

    def describe(self, after: int = -1, most: int | None = None) -> list[dict[str, Any]]:
        """By rising ids, those after one."""
        with self._changed:
            wanted = sorted(block_id for block_id in self._blocks if block_id > after)[:most]
            return [self._blocks[block_id].describe() for block_id in wanted]

    def stats(self) -> dict[str, int]:
        with self._changed:
            shared = sum(block.resident_bytes() for block in self._blocks.values())
            return {
                "blocks": len(self._blocks), "promised_bytes": self._promised,
                "packed_bytes": sum(block.taken_bytes for block in self._blocks.values() if block.packed),
                "resident_bytes": min(self._promised, shared + anonymous_bytes()),
            }  # fmt: skip

    def free_all(self) -> None:
        for block_id in list(self._blocks):
            self.free(block_id)


def _full(size_bytes: int, room_bytes: int) -> PoolFull:
    room = max(0, room_bytes)
    cause = f"{show_bytes(size_bytes)} asked for, room for {show_bytes(room)}"
    return PoolFull("Failed to allocate memory block", cause=cause, room_bytes=room)


def check_range(block: Block, pieces: Pieces) -> None:
    size = block.size_bytes
    for offset, length in pieces:
        if offset + length > size:
            raise OutOfRange(
                f"{length} bytes from {offset} on do not fit into a block of {block.size_bytes}",
                size_bytes=block.size_bytes,
            )


def _close(block: Block) -> None:
    block.view.release()
    if block.packed:
        block.packed.clear()
        give_back_to_the_system()
    if block.memory:
        block.memory.close()
    if block.fd >= 0:
        os.close(block.fd)
        block.fd = -1


def anonymous_bytes() -> int:
    """This process's anonymous memory; all but a few MiB of it are blocks."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0
