"""Bytes that are kept packed, in chunks, so that each can still be read and written by itself: a node holds more so.

What counts as taken is what the packed chunks take. It grows with what is written, so each growth is asked for first.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator

from distributed_grid.agent.memory import packing

CHUNK_BYTES = 64 * 1024
_ZEROS = bytes(CHUNK_BYTES)
#: A chunk as it is kept: its codec and bytes; none while it is all zero.
Chunk = tuple[int, bytes]
#: What the table of chunks needs for one.
ENTRY_BYTES = 104


class PackedMemory:
    """`claim(bytes)`: counts that much more (or less) as taken, and raises where the node has no room for it."""

    def __init__(self, size_bytes: int, codec: int, claim: Callable[[int], None]) -> None:
        self.size_bytes = size_bytes
        self.codec = codec
        self._claim = claim
        self._lock = threading.Lock()  # of those who write
        self._chunks: dict[int, Chunk] = {}

    def read(self, offset: int, length: int) -> Iterator[memoryview]:
        """The bytes in order, at most a chunk at a time."""
        end = offset + length
        while offset < end:
            number, start = divmod(offset, CHUNK_BYTES)
            stop = min(CHUNK_BYTES, start + end - offset)
            yield memoryview(self._whole(number))[start:stop]
            offset += stop - start

    def _whole(self, number: int) -> bytes:
        codec, data = self._chunks.get(number, (packing.RAW, _ZEROS))
        if codec == packing.RAW:
            return data
        return packing.unpack(data, codec, min(CHUNK_BYTES, self.size_bytes - number * CHUNK_BYTES))

    def write(self, offset: int, data: memoryview) -> None:
        """Chunk by chunk; one that there is no room for stays as it was."""
        done = 0
        while done < len(data):
            number, start = divmod(offset + done, CHUNK_BYTES)
            part = data[done : done + CHUNK_BYTES - start]
            length = min(CHUNK_BYTES, self.size_bytes - number * CHUNK_BYTES)
            with self._lock:
                if len(part) == length:
                    self._keep(number, part)
                else:
                    whole = bytearray(self._whole(number)[:length])
                    whole[start : start + len(part)] = part
                    self._keep(number, memoryview(whole))
            done += len(part)

    def _keep(self, number: int, whole: memoryview) -> None:
        codec, data = packing.pack(whole, self.codec)
        fresh = None if codec == packing.ZERO else (codec, bytes(data))
        self._claim(_size(fresh) - _size(self._chunks.get(number)))
        if fresh is None:
            self._chunks.pop(number, None)
        else:
            self._chunks[number] = fresh

    def clear(self) -> None:
        with self._lock:
            self._chunks.clear()


def _size(chunk: Chunk | None) -> int:
    """With what Python itself needs for it."""
    return ENTRY_BYTES + sys.getsizeof(chunk) + sys.getsizeof(chunk[1]) if chunk is not None else 0


def give_back_to_the_system() -> None:
    """Small pieces stay with the allocator until it is told."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
