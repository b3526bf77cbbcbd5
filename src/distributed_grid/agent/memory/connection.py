"""One connection to a memory server, blocking, a request at a time; broken in the middle it is not used again."""

from __future__ import annotations

import contextlib
import itertools
import socket
import struct
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from xxhash import xxh3_64_intdigest

from distributed_grid.agent.memory import packing
from distributed_grid.agent.memory.errors import ServerLost
from distributed_grid.agent.memory.protocol import (
    ADMIN,
    END,
    FAILED,
    HANDSHAKE_LIMIT_S,
    LARGE_BYTES,
    LITTLE_BYTES,
    MAGIC,
    MARKED,
    MAX_JSON_BYTES,
    PACKED,
    PING,
    POLLED,
    READ,
    READV,
    REPLY,
    REQUEST,
    SETTLE,
    SHARE,
    SOCKET_BUFFER_BYTES,
    STALL_LIMIT_S,
    SUM,
    WRITE,
    WRITEV,
    compare_sum,
    error_from,
    pack_json,
    prove,
    read_greeting,
    receive,
    receive_data,
    receive_exactly,
    receive_some,
    send_all,
    send_data,
    send_large,
    set_limits,
    spin,
    tune,
    unpack_json,
)  # fmt: skip
from distributed_grid.core.errors import GridError

Pieces = Sequence[tuple[int, int]]  # (offset, length)


def open_socket(host: str, port: int, limit_s: float) -> socket.socket:
    try:
        sock = socket.create_connection((host, port), limit_s)
    except OSError as error:
        raise ServerLost(
            f"can't reach the memory server at {host}:{port}", cause=error.strerror or str(error), code="unreachable"
        ) from None
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)
    return sock


def open_local(name: str, limit_s: float) -> socket.socket:
    """The server's socket for its own host, by its abstract name."""
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(limit_s)
    try:
        sock.connect("\0" + name)
    except OSError as error:
        sock.close()
        raise ServerLost(
            "the memory server is not on this host", cause=error.strerror or str(error), code="not-local"
        ) from None
    return sock


def incarnation_at(host: str, port: int, limit_s: float = 2.0) -> int:
    """Which server answers there; ServerLost if none does."""
    with open_socket(host, port, limit_s) as sock:
        sock.setblocking(True)
        set_limits(sock, limit_s)
        return read_greeting(sock)[0]


class MemoryConnection:
    """`busy_poll_s`: how long an answer is spun for before the thread sleeps; a core for a lower latency."""

    def __init__(self, sock: socket.socket, uid: int, key: bytes, busy_poll_s: float = 0.0) -> None:
        self._sock = sock
        self._busy_poll_s = busy_poll_s
        self._flags = POLLED if busy_poll_s else 0
        self._step = _Step(self)
        self.usable = False
        #: A write was begun and not answered: the server may still be putting it into the block (see `end`).
        self.writing = False
        #: Writes are to one of several copies, and `settle` tells when they are in all of them.
        self.marked = False
        self.used_at = time.monotonic()
        try:
            tune(sock)
            set_limits(sock, HANDSHAKE_LIMIT_S)
            self.incarnation, self.number, self._sock = prove(sock, uid, key)
            set_limits(self._sock, STALL_LIMIT_S)
        except BaseException:
            sock.close()
            raise
        self.usable = True

    @classmethod
    def open(
        cls, host: str, port: int, uid: int, key: bytes, *, limit_s: float = 5.0, busy_poll_s: float = 0.0
    ) -> MemoryConnection:
        return cls(open_socket(host, port, limit_s), uid, key, busy_poll_s)

    @classmethod
    def open_local(cls, name: str, uid: int, key: bytes, *, limit_s: float = 5.0) -> MemoryConnection:
        return cls(open_local(name, limit_s), uid, key)

    @property
    def is_plain(self) -> bool:
        """Not encrypted, nor one that is spun for: its answers can be waited for on an event loop."""
        return not self._busy_poll_s and not hasattr(self._sock, "pending")

    @property
    def sock(self) -> socket.socket:
        """To be shut down by whoever ends what it is used for."""
        return self._sock

    def close(self) -> None:
        self.usable = False
        self._sock.close()

    def is_alive(self) -> bool:
        """Whether the other end is still there; nothing is expected from it while no request is under way."""
        if not self.usable:
            return False
        try:
            self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    def abort(self) -> None:
        """From another thread: whoever waits on this connection gets ServerLost at once."""
        self.usable = False
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    # -- requests -------------------------------------------------------------------------------------------------

    def read_into(self, block: int, generation: int, offset: int, view: memoryview, *, packed: int = 0) -> bool:
        """`packed`: the codec that the server may use, 0 for none; whether it did."""
        if len(view) <= LITTLE_BYTES and not packed:
            view[:] = self.read(block, generation, offset, len(view))
            return False
        with self._step:
            flags = self._flags | (PACKED if packed else 0)
            send_all(self._sock, REQUEST.pack(MAGIC, READ, flags, packed, block, generation, offset, len(view)))
            return self._take_data(view)

    def read(self, block: int, generation: int, offset: int, size: int) -> bytes:
        """A little, up to LITTLE_BYTES: one call to the kernel each way if all comes at once, and few steps beside."""
        with self._step:
            send_all(self._sock, REQUEST.pack(MAGIC, READ, self._flags, 0, block, generation, offset, size))
            return self._take_little(size)

    def readv_into(self, block: int, generation: int, pieces: Pieces, view: memoryview) -> None:
        """The pieces one after another."""
        table = _table(pieces)
        with self._step:
            send_all(self._sock, REQUEST.pack(MAGIC, READV, 0, len(pieces), block, generation, 0, len(view)) + table)
            self._take_data(view)

    def write(self, block: int, generation: int, offset: int, view: memoryview, *, codec: int = 0) -> None:
        with self._step:
            flags = (PACKED if codec else 0) | (MARKED if self.marked else 0)
            head = REQUEST.pack(MAGIC, WRITE, flags, codec, block, generation, offset, len(view))
            self.writing = True
            if len(view) <= LITTLE_BYTES and not codec:
                send_all(self._sock, b"".join((head, view, SUM.pack(xxh3_64_intdigest(view)))))
            elif codec:
                packing.send_packed(self._sock, head, view, codec)
            elif len(view) >= LARGE_BYTES:
                send_large(self._sock, head, view)
            else:
                send_data(self._sock, head, [view])
            self._take_reply()
            self.writing = False

    def begin_read(self, block: int, generation: int, offset: int, size: int) -> Answer:
        """As `read`, for who waits by himself: on an event loop."""
        request = REQUEST.pack(MAGIC, READ, self._flags, 0, block, generation, offset, size)
        return self._begin(request, REPLY.size + size + SUM.size)

    def begin_write(self, block: int, generation: int, offset: int, view: memoryview) -> Answer:
        head = REQUEST.pack(MAGIC, WRITE, 0, 0, block, generation, offset, len(view))
        self.writing = True
        return self._begin(b"".join((head, view, SUM.pack(xxh3_64_intdigest(view)))), REPLY.size)

    def _begin(self, request: bytes, wanted: int) -> Answer:
        self.usable = False  # until all of the answer is there
        try:
            sent = self._sock.send(request, socket.MSG_DONTWAIT)
        except OSError as error:
            raise ServerLost("lost the connection", cause=error.strerror or str(error)) from None
        if sent < len(request):
            raise ServerLost("the other end takes nothing", code="stalled")
        return Answer(self, self._sock, wanted)

    def writev(self, block: int, generation: int, pieces: Pieces, views: Sequence[memoryview]) -> None:
        total = sum(map(len, views))
        with self._step:
            flags = MARKED if self.marked else 0
            head = REQUEST.pack(MAGIC, WRITEV, flags, len(pieces), block, generation, 0, total)
            self.writing = True
            send_data(self._sock, head + _table(pieces), views)
            self._take_reply()
            self.writing = False

    def settle(self) -> None:
        """What was written is in all copies. There is no answer."""
        with self._step:
            send_all(self._sock, REQUEST.pack(MAGIC, SETTLE, 0, 0, 0, 0, 0, 0))
        self.marked = False

    def end(self, number: int) -> None:
        """Break off another connection of this user; when this returns it puts nothing into any block any more."""
        with self._step:
            send_all(self._sock, REQUEST.pack(MAGIC, END, 0, 0, number, 0, 0, 0))
            self._take_reply()

    def ping(self) -> None:
        with self._step:
            send_all(self._sock, REQUEST.pack(MAGIC, PING, 0, 0, 0, 0, 0, 0))
            self._take_reply()

    def admin(self, method: str, **arguments: Any) -> dict[str, Any]:
        body = pack_json({"method": method, **arguments})
        with self._step:
            send_all(self._sock, REQUEST.pack(MAGIC, ADMIN, 0, 0, 0, 0, 0, len(body)) + body)
            _, length = self._take_reply()
            if length > MAX_JSON_BYTES:
                raise ServerLost("an answer that is too long")
            return unpack_json(receive(self._sock, length))

    def share(self, block: int, generation: int) -> int:
        """A descriptor of the memory of a block on this host; the block's bytes begin after its control page."""
        with self._step:
            send_all(self._sock, REQUEST.pack(MAGIC, SHARE, 0, 0, block, generation, 0, 0))
            self._take_reply()
            try:
                _, fds, _, _ = socket.recv_fds(self._sock, 1, 1)
            except OSError as error:
                raise ServerLost("lost the connection", cause=str(error)) from None
            if not fds:
                raise ServerLost("the memory server sent no memory")
            return fds[0]

    # -- how they go ----------------------------------------------------------------------------------------------

    def _take_reply(self) -> tuple[int, int]:
        """(flags, length) of what follows."""
        head = memoryview(bytearray(REPLY.size))
        got = spin(self._sock, head, self._busy_poll_s) if self._busy_poll_s else 0
        if got < REPLY.size:
            receive_exactly(self._sock, head[got:])
        return self._read_reply(head)

    def _read_reply(self, head: memoryview, begun: bytes = b"") -> tuple[int, int]:
        """`begun`: what came with it of an error's text."""
        magic, status, flags, _, length = REPLY.unpack(head)
        if magic != MAGIC:
            raise ServerLost("an answer that can't be read")
        if status == FAILED:
            if length > MAX_JSON_BYTES or len(begun) > length:
                raise ServerLost("an answer that is too long")
            raise _Told(error_from(begun + receive(self._sock, length - len(begun))))
        return flags, length

    def _take_data(self, view: memoryview) -> bool:
        """Whether it came packed."""
        flags, length = self._take_reply()
        if length != len(view):
            raise ServerLost("an answer of another length than asked for")
        if flags & PACKED:
            packing.receive_packed(self._sock, view)
            return True
        receive_data(self._sock, [view])
        return False

    def _take_little(self, size: int) -> bytes:
        wanted = REPLY.size + size + SUM.size
        whole = memoryview(bytearray(wanted))
        got = spin(self._sock, whole, self._busy_poll_s) if self._busy_poll_s else 0
        if got < REPLY.size:
            got += receive_some(self._sock, whole[got:], REPLY.size - got)
        magic, status, flags, _, length = REPLY.unpack_from(whole)
        if magic != MAGIC or status or flags or length != size:
            self._read_reply(whole[: REPLY.size], bytes(whole[REPLY.size : got]))
            raise ServerLost("an answer of another length than asked for")
        if got < wanted:
            receive_exactly(self._sock, whole[got:])
        data = bytes(whole[REPLY.size : -SUM.size])
        compare_sum(SUM.unpack_from(whole, wanted - SUM.size)[0], xxh3_64_intdigest(data))
        return data


class Answer:
    """What is to come for a small request, taken without waiting."""

    __slots__ = ("_connection", "_got", "_sock", "_whole")

    def __init__(self, connection: MemoryConnection, sock: socket.socket, wanted: int) -> None:
        self._connection, self._sock, self._got = connection, sock, 0
        self._whole = memoryview(bytearray(wanted))

    def fileno(self) -> int:
        return self._sock.fileno()

    def take(self) -> bytes | None:
        """The data, which is nothing for a write, once all is there. ServerLost: in any other way than asked for."""
        whole, wanted = self._whole, len(self._whole)
        try:
            count = self._sock.recv_into(whole[self._got :], 0, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except OSError as error:
            raise ServerLost("lost the connection", cause=error.strerror or str(error)) from None
        if not count:
            raise ServerLost("lost the connection", cause="the other end closed it", code="closed")
        self._got += count
        if self._got < REPLY.size:
            return None
        magic, status, flags, _, length = REPLY.unpack_from(whole)
        if magic != MAGIC or status or flags or length != max(0, wanted - REPLY.size - SUM.size):
            raise ServerLost("another answer than asked for", code="refused")
        if self._got < wanted:
            return None
        data = bytes(whole[REPLY.size : -SUM.size]) if wanted > REPLY.size else b""
        if data:
            compare_sum(SUM.unpack_from(whole, wanted - SUM.size)[0], xxh3_64_intdigest(data))
        self._connection.usable, self._connection.writing = True, False
        return data


def _table(pieces: Pieces) -> bytes:
    return struct.pack(f"!{2 * len(pieces)}Q", *itertools.chain.from_iterable(pieces))


class _Step:
    """One request. An error that the server told leaves the connection usable; anything else in the middle does not."""

    __slots__ = ("_connection",)

    def __init__(self, connection: MemoryConnection) -> None:
        self._connection = connection

    def __enter__(self) -> None:
        if not self._connection.usable:
            raise ServerLost("the connection is closed", code="closed")
        self._connection.usable = False

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._connection.usable = True
        elif isinstance(error, _Told):
            self._connection.usable = True
            self._connection.writing = False
            raise error.error from None
        else:
            self._connection.close()


class _Told(Exception):
    def __init__(self, error: GridError) -> None:
        self.error = error
