"""Data in chunks that are packed where that makes them smaller: zeros as nothing, the rest with lz4 or zstd.

Each chunk is CHUNK (raw length, packed length, codec) and its bytes. Lengths are checked against what is left to come,
so a hostile stream can neither grow a buffer nor write past its end.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

from xxhash import xxh3_64

from distributed_grid.agent.memory.errors import ServerLost
from distributed_grid.agent.memory.protocol import SUM, check_sum, receive, receive_exactly, send_all
from distributed_grid.core.errors import UsageError

CHUNK = struct.Struct("!IIB")
CHUNK_BYTES = 1024 * 1024
RAW, LZ4, ZSTD, ZERO = 1, 2, 3, 4
CODECS = {"lz4": LZ4, "zstd": ZSTD}
_ZEROS = bytes(CHUNK_BYTES)
_own = threading.local()


def pack(part: memoryview, codec: int) -> tuple[int, bytes | memoryview]:
    """(codec used, bytes): zeros are always seen, and what would grow goes as it is."""
    if is_zero(part):
        return ZERO, b""
    if codec == LZ4:
        import lz4.block

        packed: bytes = lz4.block.compress(part, store_size=False)
    elif codec == ZSTD:
        packed = _zstd()[0].compress(part)
    else:
        return RAW, part
    return (codec, packed) if len(packed) < len(part) else (RAW, part)


def _zstd() -> tuple[Any, Any]:
    """A packer and an unpacker of this thread's own: making one costs more than packing a small chunk."""
    found: tuple[Any, Any] | None = getattr(_own, "zstd", None)
    if found is None:
        import zstandard

        packer = zstandard.ZstdCompressor(level=1, write_content_size=False, write_checksum=False)
        found = _own.zstd = (packer, zstandard.ZstdDecompressor())
    return found


def is_zero(part: memoryview) -> bool:
    if part[0] or part[-1] or part[len(part) // 2] or part[:64] != _ZEROS[: min(64, len(part))]:
        return False
    return bytes(part) == _ZEROS[: len(part)]


def unpack(packed: bytes, codec: int, raw_bytes: int) -> bytes:
    try:
        if codec == LZ4:
            import lz4.block

            data: bytes = lz4.block.decompress(packed, uncompressed_size=raw_bytes)
        else:
            import zstandard

            if zstandard.frame_content_size(packed) not in (-1, raw_bytes):  # it would be believed, and allocated
                raise ServerLost("packed data of another length than told")
            data = _zstd()[1].decompress(packed, max_output_size=raw_bytes)
    except codec_errors() as error:
        raise ServerLost("packed data that can't be unpacked", cause=str(error)) from None
    if len(data) != raw_bytes:
        raise ServerLost("packed data of another length than told")
    return data


def codec_errors() -> tuple[type[Exception], ...]:
    import lz4.block
    import zstandard

    return (ValueError, RuntimeError, MemoryError, lz4.block.LZ4BlockError, zstandard.ZstdError)


def _chunks(view: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(view), CHUNK_BYTES):
        yield view[start : start + CHUNK_BYTES]


def send_packed(
    sock: socket.socket, head: bytes, view: memoryview, codec: int, is_crowded: Callable[[], bool] = lambda: False
) -> None:
    """`is_crowded`: others may write to it meanwhile, so that each chunk is copied first."""
    total = xxh3_64()
    for part in _chunks(view):
        if is_crowded():
            part = memoryview(bytes(part))
        total.update(part)
        used, data = pack(part, codec)
        send_all(sock, head + CHUNK.pack(len(part), len(data), used), data)
        head = b""
    send_all(sock, head + SUM.pack(total.intdigest()))


def receive_packed(
    sock: socket.socket, view: memoryview, is_crowded: Callable[[], bool] = lambda: False
) -> None:
    """Into `view`; the sum is of the raw bytes, in a copy if others may write to the same place meanwhile."""

    def place(start: int, size: int) -> memoryview:
        return memoryview(bytearray(size)) if is_crowded() else view[start : start + size]

    for start, part in receive_parts(sock, len(view), place):
        if part.obj is not view.obj:
            view[start : start + len(part)] = part


def receive_parts(
    sock: socket.socket, length: int, place: Callable[[int, int], memoryview]
) -> Iterator[tuple[int, memoryview]]:
    """(start, bytes) of each chunk, once they are where `place(start, size)` says; the sum is compared at the end."""
    total = xxh3_64()
    got = 0
    while got < length:
        raw_bytes, packed_bytes, codec = CHUNK.unpack(receive(sock, CHUNK.size))
        if not 0 < raw_bytes <= min(CHUNK_BYTES, length - got) or packed_bytes > raw_bytes:
            raise ServerLost("a chunk that does not fit")
        part = place(got, raw_bytes)
        if codec == RAW and packed_bytes == raw_bytes:
            receive_exactly(sock, part)
        elif codec == ZERO and packed_bytes == 0:
            part[:] = _ZEROS[:raw_bytes]
        elif codec in (LZ4, ZSTD):
            part[:] = unpack(receive(sock, packed_bytes), codec, raw_bytes)
        else:
            raise ServerLost("a chunk of an unknown kind")
        total.update(part)
        yield got, part
        got += raw_bytes
    check_sum(sock, total.intdigest())


def drain_packed(sock: socket.socket, length: int) -> None:
    while length > 0:
        raw_bytes, packed_bytes, _ = CHUNK.unpack(receive(sock, CHUNK.size))
        if not 0 < raw_bytes <= CHUNK_BYTES or raw_bytes > length or packed_bytes > raw_bytes:
            raise ServerLost("a chunk that does not fit")
        receive(sock, packed_bytes)
        length -= raw_bytes
    receive(sock, SUM.size)


def codec_of(name: str) -> int:
    """By its name; 0 for none."""
    if name and name not in CODECS:
        raise UsageError(
            f"there is no compression {name!r}", cause=f"one of {', '.join(CODECS)}", code="bad-compression"
        )
    return CODECS.get(name, 0)


PROBE_BYTES = 64 * 1024
#: What must be saved for packing to be worth the other side's work at all.
WORTH_RATIO = 0.9


def probe_ratio(view: memoryview, codec: int) -> float:
    """Packed size against raw, from three samples of the data."""
    size = len(view)
    starts = sorted({0, max(0, size // 2 - PROBE_BYTES // 2), max(0, size - PROBE_BYTES)})
    raw = packed = 0
    for start in starts:
        part = view[start : start + min(PROBE_BYTES, CHUNK_BYTES)]
        raw += len(part)
        packed += len(pack(part, codec)[1])
    return packed / raw if raw else 1.0


def choose(view: memoryview, codec: int) -> int:
    """The codec asked for where it saves something, RAW where only zeros do, 0 for data as it is."""
    if codec != RAW and probe_ratio(view, codec) <= WORTH_RATIO:
        return codec
    return RAW if probe_ratio(view, RAW) <= WORTH_RATIO else 0
