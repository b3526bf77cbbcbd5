"""Frames that are almost right: valid ones, changed at random, sent to a server and told to a client."""

from __future__ import annotations

import contextlib
import logging
import random
import socket
import struct
import threading
from collections.abc import Callable

from xxhash import xxh3_64_intdigest

from distributed_grid.agent.memory import packing
from distributed_grid.agent.memory.connection import MemoryConnection, open_socket
from distributed_grid.agent.memory.protocol import (
    ADMIN,
    FAILED,
    MAGIC,
    OK,
    PACKED,
    PIECE,
    PING,
    READ,
    READV,
    REPLY,
    REQUEST,
    SHARE,
    SUM,
    WRITE,
    WRITEV,
    greet,
    pack_json,
    prove,
    set_limits,
    user_key,
)  # fmt: skip
from distributed_grid.agent.memory.server import MemoryServer
from distributed_grid.core.errors import GridError

KEY = b"k" * 32
UID, GENERATION, SIZE = 7, 5, 200_000
PLAIN, KEPT_PACKED, WITNESS = 1, 2, 3
NUMBERS = (0, 1, 2, 7, 255, 65535, 65536, SIZE - 1, SIZE, SIZE + 1, 2**31, 2**32 - 1, 2**44, 2**63, 2**64 - 1)


def _data(rng: random.Random) -> bytes:
    size = rng.choice((0, 1, 64, 4096, 70_000))
    return rng.choice((bytes(size), rng.randbytes(size), (b"text " * (size // 5 + 1))[:size]))


def _chunks(rng: random.Random, data: bytes) -> bytes:
    codec = rng.choice((packing.RAW, packing.LZ4, packing.ZSTD))
    used, packed = packing.pack(memoryview(data), codec) if data else (packing.RAW, b"")
    head = packing.CHUNK.pack(len(data), len(packed), used) if data else b""
    return head + bytes(packed) + SUM.pack(xxh3_64_intdigest(data))


def request(rng: random.Random) -> bytes:
    block = rng.choice((PLAIN, KEPT_PACKED))
    data = _data(rng)
    summed = data + SUM.pack(xxh3_64_intdigest(data))
    offset = rng.choice((0, 1, 65_535, SIZE - len(data)))
    pieces = [(rng.randrange(SIZE - 100), rng.randrange(100)) for _ in range(rng.choice((1, 3, 70)))]
    table, total = b"".join(PIECE.pack(*piece) for piece in pieces), sum(size for _, size in pieces)
    many = rng.randbytes(total)
    kind = rng.choice((READ, WRITE, READV, WRITEV, PING, SHARE, ADMIN, -WRITE))

    def head(operation: int, flags: int, count: int, at: int, length: int) -> bytes:
        return REQUEST.pack(MAGIC, operation, flags, count, block, GENERATION, at, length)

    if kind == READ:
        return head(READ, rng.choice((0, PACKED)), rng.choice((0, 1, 2, 3)), offset, len(data))
    if kind == WRITE:
        return head(WRITE, 0, 0, offset, len(data)) + summed
    if kind == -WRITE:
        return head(WRITE, PACKED, packing.ZSTD, offset, len(data)) + _chunks(rng, data)
    if kind == READV:
        return head(READV, 0, len(pieces), 0, total) + table
    if kind == WRITEV:
        return head(WRITEV, 0, len(pieces), 0, total) + table + many + SUM.pack(xxh3_64_intdigest(many))
    if kind == ADMIN:
        body = pack_json({"method": rng.choice(("free", "list", "stats", "copy", "allocate")), "block": WITNESS})
        return head(ADMIN, 0, 0, 0, len(body)) + body
    return head(kind, 0, 0, 0, 0)


def reply(rng: random.Random, data: bytes) -> bytes:
    kind = rng.randrange(3)
    if kind == 0:
        return REPLY.pack(MAGIC, OK, 0, 0, len(data)) + data + SUM.pack(xxh3_64_intdigest(data))
    if kind == 1:
        return REPLY.pack(MAGIC, OK, PACKED, 0, len(data)) + _chunks(rng, data)
    body = pack_json({"code": "out-of-range", "message": "no", "cause": "", "hint": ""})
    return REPLY.pack(MAGIC, FAILED, 0, 0, len(body)) + body


def changed(rng: random.Random, frame: bytes) -> bytes:
    data = bytearray(frame)
    for _ in range(rng.randrange(4)):
        at = rng.randrange(len(data) + 1)
        kind = rng.randrange(6)
        if kind == 0 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del data[at:]
        elif kind == 2:
            data[at:at] = rng.randbytes(rng.randrange(20))
        elif kind == 3:
            del data[at : at + rng.randrange(20)]
        elif kind == 4:
            width = rng.choice(("B", "I", "Q"))
            number = rng.choice(NUMBERS) % (1 << 8 * struct.calcsize("!" + width))
            data[at : at + struct.calcsize("!" + width)] = struct.pack("!" + width, number)
        else:
            data[at : at + 30] = data[:30]
    return bytes(data)


class Complaints(logging.Handler):
    """What a server logs as its own fault."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(self.format(record))


@contextlib.contextmanager
def watched_server():  # type: ignore[no-untyped-def]
    server, complaints = MemoryServer("127.0.0.1", KEY), Complaints()
    log = logging.getLogger("distributed_grid.agent.memory.server")
    log.addHandler(complaints)
    server.start()
    server.table.allocate(PLAIN, UID, GENERATION, SIZE, shared=False, most_bytes=4 * SIZE)
    server.table.allocate(KEPT_PACKED, UID, GENERATION, SIZE, shared=False, most_bytes=4 * SIZE, codec=packing.LZ4)
    server.table.set_growth(2 * SIZE)
    server.table.allocate(WITNESS, UID + 1, 1, SIZE, shared=False, most_bytes=4 * SIZE)
    server.table._find(WITNESS, UID + 1, 1).view[:] = b"w" * SIZE
    try:
        yield server, complaints
    finally:
        log.removeHandler(complaints)
        server.close()


def attack_server(rng: random.Random, server: MemoryServer) -> None:
    """One connection: some frames, then nothing more; it is answered or dropped, never kept waiting."""
    with open_socket("127.0.0.1", server.port, 10) as sock:
        sock.setblocking(True)
        set_limits(sock, 20)
        with contextlib.suppress(OSError, GridError):
            if rng.randrange(10):
                prove(sock, UID, user_key(KEY, UID))
            else:
                sock.sendall(changed(rng, rng.randbytes(72)))
            for _ in range(rng.randrange(1, 5)):
                sock.sendall(changed(rng, request(rng)))
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(1 << 20):
                pass


def check_server(server: MemoryServer, complaints: Complaints) -> None:
    assert not complaints.found, complaints.found[0]
    found = memoryview(bytearray(SIZE))
    good = MemoryConnection.open("127.0.0.1", server.port, UID + 1, user_key(KEY, UID + 1))
    try:
        good.read_into(WITNESS, 1, 0, found)
    finally:
        good.close()
    assert found == b"w" * SIZE
    stats = server.table.stats()
    assert stats["blocks"] == 3 and 2 * SIZE <= stats["promised_bytes"] <= 4 * SIZE


def attack_client(rng: random.Random) -> None:
    """A server that answers nonsense: the data it meant to send, or one typed error."""
    ours, theirs = socket.socketpair()
    serving = threading.Thread(target=greet, args=[theirs, 1, KEY])
    serving.start()
    connection = MemoryConnection(ours, UID, user_key(KEY, UID))
    serving.join()
    data = _data(rng)
    frame = reply(rng, data)
    sent = changed(rng, frame)
    view = memoryview(bytearray(len(data)))
    works: list[Callable[[], object]] = [
        lambda: connection.read_into(PLAIN, GENERATION, 0, view, packed=rng.choice((0, packing.ZSTD))),
        lambda: connection.readv_into(PLAIN, GENERATION, [(0, len(data))], view),
        lambda: connection.write(PLAIN, GENERATION, 0, memoryview(b"x")),
        lambda: connection.admin("stats"),
        connection.ping,
    ]
    work = rng.randrange(len(works))
    try:
        theirs.sendall(sent)
        theirs.shutdown(socket.SHUT_WR)
        works[work]()
        if work < 2 and sent != frame and data:
            assert view == data, "changed data was believed"
    except GridError:
        pass
    finally:
        connection.close()
        theirs.close()
