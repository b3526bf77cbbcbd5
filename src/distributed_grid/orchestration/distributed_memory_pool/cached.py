"""The bytes of one block with a bounded cache before them: small pieces are kept here, large ones go straight.

What is written to it reaches the node at `flush`, and only the very bytes that were written: others may write beside.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from distributed_grid.agent.memory.errors import PoolClosed
from distributed_grid.core.errors import GridError
from distributed_grid.orchestration.distributed_memory_pool import forks

if TYPE_CHECKING:
    from distributed_grid.orchestration.distributed_memory_pool.sync import SyncMemoryPool

Bytes = NDArray[np.uint8]

PAGE_BYTES = 64 * 1024
#: Pages fetched at once where one is read after the other.
PAGES_AHEAD = 16
#: Many pieces travel in requests of at most so many bytes, and so many pieces.
BATCH_BYTES = 8 * 1024 * 1024
BATCH_PIECES = 8192
#: Reading a gap of this size costs less than one more piece.
SMALL_GAP_BYTES = 1024


@dataclass(slots=True, eq=False)
class _Page:
    data: Bytes
    loaded: bool = False
    dirty: NDArray[np.bool_] | None = None  # which bytes were written here and not there yet


class _Ahead:
    """What will probably be asked for next, being fetched."""

    def __init__(self, pool: SyncMemoryPool, block: str, start: int, size: int) -> None:
        self.start, self.end = start, start + size
        self._data: Bytes = np.empty(size, np.uint8)
        self._failed = True
        self._thread = threading.Thread(target=self._fetch, args=(pool, block), name="grid-memory-ahead", daemon=True)
        self._thread.start()

    def _fetch(self, pool: SyncMemoryPool, block: str) -> None:
        try:
            pool.read_into(block, self._data, offset=self.start)
            self._failed = False
        except GridError:
            pass  # whoever asks for it reads it himself, and is told

    def result(self) -> Bytes | None:
        self._thread.join()  # the pool's own limits end it
        return None if self._failed else self._data


class CachedBlock:
    """Safe from several threads. `cache_bytes=0`: nothing is kept, every call goes to the node."""

    def __init__(self, pool: SyncMemoryPool, block: str, size_bytes: int, cache_bytes: int) -> None:
        self._pool, self._block, self._size = pool, str(block), size_bytes
        self._cache_bytes = cache_bytes
        self._most_pages = cache_bytes // PAGE_BYTES
        self._lock = threading.RLock()
        self._pages: OrderedDict[int, _Page] = OrderedDict()
        self._last_page = -2
        self._last_end = -1
        self._ahead: _Ahead | None = None
        forks.watch(self)

    def after_fork(self) -> None:
        """What is not written yet is the parent's to write."""
        self._lock = threading.RLock()
        self._pages = OrderedDict()
        self._ahead = None

    # -- one piece ------------------------------------------------------------------------------------------------

    def read(self, offset: int, size: int) -> Bytes:
        if size < PAGE_BYTES and self._most_pages > 1:
            return self._read_small(offset, size)
        with self._lock:
            self._write_out(offset, offset + size)
            in_order = offset == self._last_end
            self._last_end = offset + size
            ahead, self._ahead = self._ahead, None
        data = ahead.result() if ahead and (ahead.start, ahead.end) == (offset, offset + size) else None
        if data is None:
            data = np.empty(size, np.uint8)
            self._pool.read_into(self._block, data, offset=offset)
        if in_order:
            self._fetch_ahead(offset + size, size)
        return data

    def _fetch_ahead(self, start: int, size: int) -> None:
        size = min(size, self._size - start)
        if 0 < size <= self._cache_bytes:
            with self._lock:
                self._write_out(start, start + size)
                self._ahead = _Ahead(self._pool, self._block, start, size)

    def _read_small(self, offset: int, size: int) -> Bytes:
        out = np.empty(size, np.uint8)
        with self._lock:
            for number, inner, outer in _by_page(offset, size):
                out[outer] = self._loaded(number).data[inner]
        return out

    def write(self, offset: int, data: Bytes) -> None:
        if not self._pool.is_open:  # now, for the cache would take it
            raise PoolClosed("the memory pool is not open", hint="call initialize() first")
        size = len(data)
        if size >= PAGE_BYTES or self._most_pages < 2:
            with self._lock:
                self._drop(offset, offset + size)
                self._pool.write(self._block, data, offset=offset)
            return
        with self._lock:
            self._drop_ahead(offset, offset + size)
            self._pool.unflushed.add(self)
            for number, inner, outer in _by_page(offset, size):
                page = self._page(number)
                if page.dirty is None:
                    page.dirty = np.zeros(PAGE_BYTES, np.bool_)
                page.data[inner] = data[outer]
                page.dirty[inner] = True

    # -- many pieces of one length --------------------------------------------------------------------------------

    def gather(self, offsets: NDArray[np.int64], length: int, out: Bytes) -> None:
        """Pieces at rising offsets, one after the other into `out`; small gaps are read too, and left out."""
        with self._lock:
            self._write_out(int(offsets[0]), int(offsets[-1]) + length)
        first = np.flatnonzero(np.diff(offsets, prepend=-(2**62)) - length > SMALL_GAP_BYTES)
        last = np.append(first[1:], len(offsets)) - 1
        starts, sizes = offsets[first], offsets[last] + length - offsets[first]
        read = self._pool.readv(self._block, list(zip(starts.tolist(), sizes.tolist(), strict=True)))
        data = np.frombuffer(b"".join(read) if len(read) > 1 else read[0], np.uint8)
        if len(data) == len(out):
            out[:] = data
            return
        at = np.repeat(np.cumsum(sizes) - sizes - starts, last - first + 1) + offsets
        windows = np.lib.stride_tricks.sliding_window_view(data, length)
        out.reshape(-1, length)[:] = windows[at]

    def scatter(self, offsets: NDArray[np.int64], length: int, data: Bytes) -> None:
        with self._lock:
            self._drop(int(offsets[0]), int(offsets[-1]) + length)
            view = memoryview(data)  # type: ignore[arg-type]
            places = zip(offsets.tolist(), range(0, len(data), length), strict=True)
            self._pool.writev(self._block, [(offset, view[at : at + length]) for offset, at in places])

    # -- the cache ------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Have the node hold all that was written."""
        with self._lock:
            self._write_out(0, self._size)
            self._pool.unflushed.discard(self)

    def forget(self, *, unwritten_too: bool = False) -> None:
        """Read anew from now on, for others may have written."""
        with self._lock:
            if not unwritten_too:
                self.flush()
            self._pages.clear()
            self._ahead = None
            self._pool.unflushed.discard(self)

    def _page(self, number: int) -> _Page:
        page = self._pages.get(number)
        if page is None:
            while len(self._pages) >= self._most_pages:
                oldest = next(iter(self._pages))
                self._write_out(oldest * PAGE_BYTES, (oldest + 1) * PAGE_BYTES)
                del self._pages[oldest]
            page = self._pages[number] = _Page(np.zeros(PAGE_BYTES, np.uint8))
        self._pages.move_to_end(number)
        return page

    def _loaded(self, number: int) -> _Page:
        page = self._pages.get(number)
        if page is None or not page.loaded:
            most = PAGES_AHEAD if number == self._last_page + 1 else 1
            for each, data in self._fetch(number, min(most, self._most_pages // 2)):
                page = self._page(each)
                if page.dirty is not None:
                    np.copyto(data, page.data[: len(data)], where=page.dirty[: len(data)])
                page.data[: len(data)] = data
                page.loaded = True
        self._last_page = number
        return self._page(number)

    def _fetch(self, number: int, most: int) -> Iterator[tuple[int, Bytes]]:
        """That page and those after it that are not here, in one request."""
        count = 1
        while count < most and number + count not in self._pages:
            count += 1
        start = number * PAGE_BYTES
        whole = np.empty(min(count * PAGE_BYTES, self._size - start), np.uint8)
        self._pool.read_into(self._block, whole, offset=start)
        for at in range(0, len(whole), PAGE_BYTES):
            yield number + at // PAGE_BYTES, whole[at : at + PAGE_BYTES]

    def _pages_in(self, start: int, end: int) -> list[tuple[int, _Page]]:
        if not self._pages or start >= end:
            return []
        first, last = start // PAGE_BYTES, (end - 1) // PAGE_BYTES
        if last - first < len(self._pages):
            return [(n, self._pages[n]) for n in range(first, last + 1) if n in self._pages]
        return [(n, page) for n, page in self._pages.items() if first <= n <= last]

    def _write_out(self, start: int, end: int) -> None:
        """The written bytes of the pages that touch that range."""
        pieces: list[tuple[int, Bytes]] = []
        done: list[_Page] = []
        for number, page in self._pages_in(start, end):
            if page.dirty is None:
                continue
            edges = np.flatnonzero(np.diff(page.dirty, prepend=False, append=False)).tolist()
            pieces += [(number * PAGE_BYTES + a, page.data[a:b]) for a, b in zip(edges[::2], edges[1::2], strict=True)]
            done.append(page)
            if len(pieces) >= BATCH_PIECES:
                self._send(pieces, done)
        self._send(pieces, done)

    def _send(self, pieces: list[tuple[int, Bytes]], pages: list[_Page]) -> None:
        if pieces:
            self._pool.writev(self._block, pieces)
        for page in pages:  # only now: what could not be written is still to be written
            page.dirty = None
        pieces.clear()
        pages.clear()

    def _drop(self, start: int, end: int) -> None:
        """Keep nothing of that range, for it is about to be written past the cache."""
        self._drop_ahead(start, end)
        self._write_out(start, end)
        for number, _ in self._pages_in(start, end):
            del self._pages[number]

    def _drop_ahead(self, start: int, end: int) -> None:
        if self._ahead and self._ahead.start < end and start < self._ahead.end:
            self._ahead = None


def _by_page(offset: int, size: int) -> Iterator[tuple[int, slice, slice]]:
    """(number of the page, where in the page, where in the piece)."""
    at = 0
    while at < size:
        number, inner = divmod(offset + at, PAGE_BYTES)
        length = min(PAGE_BYTES - inner, size - at)
        yield number, slice(inner, inner + length), slice(at, at + length)
        at += length
