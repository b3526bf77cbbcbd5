"""Frames of the memory pool: fixed headers, every length checked before anything is made for it, a sum at the end.

A request is REQUEST, for the `V` operations a table of PIECE, for a write the data and its sum. A reply is REPLY and,
where its length is not 0, that much data and its sum. All data goes straight from and to where it lies.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from xxhash import xxh3_64, xxh3_64_intdigest

from distributed_grid.agent.memory.errors import ChecksumMismatch, ServerLost, WrongKey
from distributed_grid.core.errors import GridError

if TYPE_CHECKING:
    from distributed_grid.agent.memory.tls import ServerTls

MAGIC = b"GM"
GREETING_MAGIC = b"GRIDMEM2"
#: magic, operation, flags, pieces, block, generation, offset, length
REQUEST = struct.Struct("!2sBBIQQQQ")
#: magic, status, flags, reserved, length
REPLY = struct.Struct("!2sBBIQ")
PIECE = struct.Struct("!QQ")
SUM = struct.Struct("!Q")
#: magic, incarnation of the server, flags, nonce
GREETING = struct.Struct("!8sQB32s")
#: uid, nonce, proof
ANSWER = struct.Struct("!q32s32s")
#: number of the connection, proof
WELCOME = struct.Struct("!Q32s")
#: In a greeting's flags: from here on encrypted.
TLS = 1

READ, WRITE, READV, WRITEV, PING, SHARE, ADMIN, END, SETTLE = 1, 2, 3, 4, 5, 6, 7, 8, 9
OK, FAILED = 0, 1
#: In `flags`: the data comes in chunks, each packed or not (see packing.py).
PACKED = 1
#: The next request follows at once: the server waits a moment without sleeping, as the client does for the answer.
POLLED = 2
#: A write to one of several copies: whoever breaks off before SETTLE (which has no answer) may leave them different.
MARKED = 4
SERVER_POLL_S = 50e-6

ADMIN_UID = -1
SLICE_BYTES = 256 * 1024
SMALL_BYTES = 16 * 1024
#: What is no more than a slice is taken in halves, so that one is summed while the other comes.
HALF_BYTES = SLICE_BYTES // 2
#: Up to here a request is done in one piece and few steps, with a copy more.
LITTLE_BYTES = 64 * 1024
#: From here on a sum is made beside the sending.
LARGE_BYTES = 8 * 1024 * 1024
SOCKET_BUFFER_BYTES = 2 * 1024 * 1024
MAX_PIECES = 65536
#: What the kernel takes in one call is 1024.
MAX_PARTS = 512
MAX_LENGTH = 1 << 44
MAX_JSON_BYTES = 4 * 1024 * 1024
#: No byte for this long in the middle of a frame ends the connection.
STALL_LIMIT_S = 30.0
HANDSHAKE_LIMIT_S = 10.0


def pool_key(secret: bytes) -> bytes:
    """What memory servers know, from the cluster's secret."""
    return hmac.digest(secret, b"distributed-grid memory pool", "sha256")


def user_key(key: bytes, uid: int) -> bytes:
    """What one user knows; from it nobody finds another user's key, nor the pool's."""
    return hmac.digest(key, b"user %d" % uid, "sha256")


def tune(sock: socket.socket) -> None:
    """Blocking, without delay, and with the kernel's own time limits: `settimeout` costs a poll with each call."""
    sock.setblocking(True)
    set_limits(sock, STALL_LIMIT_S)
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


def set_limits(sock: socket.socket, limit_s: float) -> None:
    if hasattr(sock, "pending"):  # one of ssl's would just wait again
        sock.settimeout(limit_s)
        return
    limit = struct.pack("@ll", int(limit_s), int(limit_s % 1 * 1_000_000))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


class Stalled(ServerLost):
    """Nothing came for the whole time limit; `got` bytes had."""

    def __init__(self, got: int) -> None:
        super().__init__("the other end stopped in the middle of a message", code="stalled")
        self.got = got


def receive_exactly(sock: socket.socket, view: memoryview) -> None:
    got, wanted = 0, len(view)
    while got < wanted:
        try:
            count = sock.recv_into(view[got:] if got else view, 0, socket.MSG_WAITALL)
        except BlockingIOError:
            raise Stalled(got) from None
        except OSError as error:
            raise ServerLost("lost the connection", cause=error.strerror or str(error)) from None
        if not count:
            raise ServerLost("lost the connection", cause="the other end closed it", code="closed")
        got += count


def spin(sock: socket.socket, view: memoryview, limit_s: float) -> int:
    """What came while it was waited for without sleeping; 0 too where the line is broken, which the next call tells."""
    deadline = time.perf_counter() + limit_s
    while time.perf_counter() < deadline:
        try:
            return sock.recv_into(view, 0, socket.MSG_DONTWAIT)
        except BlockingIOError:
            pass
        except OSError:
            break
    return 0


def receive_some(sock: socket.socket, view: memoryview, least: int) -> int:
    """At least so many bytes, and more where they are there already."""
    got = 0
    while got < least:
        try:
            count = sock.recv_into(view[got:] if got else view)
        except BlockingIOError:
            raise Stalled(got) from None
        except OSError as error:
            raise ServerLost("lost the connection", cause=error.strerror or str(error)) from None
        if not count:
            raise ServerLost("lost the connection", cause="the other end closed it", code="closed")
        got += count
    return got


def receive(sock: socket.socket, size: int) -> bytes:
    """A small message; `size` is ours, or was checked."""
    data = bytearray(size)
    receive_exactly(sock, memoryview(data))
    return bytes(data)


def send_all(sock: socket.socket, *parts: bytes | memoryview) -> None:
    """Small parts in one packet."""
    try:
        if len(parts) == 1:  # most requests and answers, in the fewest steps
            sock.sendall(parts[0])
            return
        left = sum(map(len, parts))
        sent = sock.sendmsg(parts)
        if sent < left:
            sock.sendall(b"".join(parts)[sent:])
    except BlockingIOError:
        raise Stalled(0) from None
    except OSError as error:
        raise ServerLost("lost the connection", cause=error.strerror or str(error)) from None


class Scratch:
    """For data that others may change between its sum and its way: what is summed is then a copy, a slice at a time.

    Only while others are there, for it costs a quarter of the speed. Who comes in the middle of a slice can still make
    its sum wrong, which is told, and done again.
    """

    def __init__(self, is_crowded: Callable[[], bool]) -> None:
        self.is_crowded = is_crowded
        self._memory: memoryview | None = None

    def at(self, start: int, size: int) -> memoryview:
        if self._memory is None:
            self._memory = memoryview(bytearray(SLICE_BYTES + SMALL_BYTES))  # a slice, and what was too little to go
        return self._memory[start : start + size]


def send_data(
    sock: socket.socket, head: bytes, views: Iterable[memoryview], scratch: Scratch | None = None
) -> None:
    """Head, data, sum. Each slice is summed just before it goes, while it is in the cache."""
    total = xxh3_64()
    waiting: list[bytes | memoryview] = [head]
    held = len(head)
    try:
        for view in views:
            for start in range(0, len(view), SLICE_BYTES):
                part = view[start : start + SLICE_BYTES]
                if scratch is not None and scratch.is_crowded():
                    copied = scratch.at(held, len(part))
                    copied[:] = part
                    part = copied
                total.update(part)
                waiting.append(part)
                held += len(part)
                if held >= SMALL_BYTES or len(waiting) >= MAX_PARTS:
                    _flush(sock, waiting, held)
                    waiting, held = [], 0
        waiting.append(SUM.pack(total.intdigest()))
        _flush(sock, waiting, held + SUM.size)
    except BlockingIOError:
        raise Stalled(0) from None
    except OSError as error:
        raise ServerLost("lost the connection", cause=error.strerror or str(error)) from None


def send_large(sock: socket.socket, head: bytes, view: memoryview) -> None:
    """The same for one large view, summed by a thread beside its way: sending keeps a core busy as it is."""
    total = xxh3_64()
    adding = threading.Thread(target=total.update, args=(view,), name="sum")  # in one go: the interpreter is not shared
    adding.start()
    try:
        sock.sendall(head)
        for start in range(0, len(view), SLICE_BYTES):
            sock.sendall(view[start : start + SLICE_BYTES])
        adding.join()
        sock.sendall(SUM.pack(total.intdigest()))
    except BlockingIOError:
        raise Stalled(0) from None
    except OSError as error:
        raise ServerLost("lost the connection", cause=error.strerror or str(error)) from None
    finally:
        adding.join()  # it reads the caller's memory


def _flush(sock: socket.socket, parts: list[bytes | memoryview], size: int) -> None:
    sent = sock.sendmsg(parts)
    while sent < size:  # go on where it stopped, without a copy
        size -= sent
        while sent and sent >= len(parts[0]):
            sent -= len(parts[0])
            parts.pop(0)
        if sent:
            parts[0] = memoryview(parts[0])[sent:]
        sent = sock.sendmsg(parts)


def receive_data(sock: socket.socket, views: Iterable[memoryview], scratch: Scratch | None = None) -> None:
    """Straight into the places given, then the sum is compared."""
    listed = list(views)
    size = sum(map(len, listed))
    if size <= HALF_BYTES and len(listed) < MAX_PARTS and not (scratch and scratch.is_crowded()):
        _receive_small(sock, listed, size)
        return
    total, most = xxh3_64(), SLICE_BYTES if size > SLICE_BYTES else HALF_BYTES
    for view in listed:
        for start in range(0, len(view), most):
            part = view[start : start + most]
            place = scratch.at(0, len(part)) if scratch and scratch.is_crowded() else part
            receive_exactly(sock, place)
            total.update(place)
            if place is not part:
                part[:] = place
    check_sum(sock, total.intdigest())


def _receive_small(sock: socket.socket, views: list[memoryview], size: int) -> None:
    """Data and sum by one call to the kernel, each to its place."""
    told = bytearray(SUM.size)
    try:
        got = sock.recvmsg_into([*views, told], 0, socket.MSG_WAITALL)[0]
    except BlockingIOError:
        raise Stalled(0) from None
    except OSError as error:
        raise ServerLost("lost the connection", cause=error.strerror or str(error)) from None
    if not got:
        raise ServerLost("lost the connection", cause="the other end closed it", code="closed")
    if got < size + SUM.size:  # a signal came between
        for view in (*views, memoryview(told)):
            if got < len(view):
                receive_exactly(sock, view[got:])
            got = max(0, got - len(view))
    if len(views) == 1:
        found = xxh3_64_intdigest(views[0])
    else:
        total = xxh3_64()
        for view in views:
            total.update(view)
        found = total.intdigest()
    compare_sum(SUM.unpack(told)[0], found)


def compare_sum(told: int, found: int) -> None:
    if told != found:
        raise ChecksumMismatch("what arrived is not what was sent", cause="the checksum differs")


def receive_parts(
    sock: socket.socket, pieces: Iterable[tuple[int, int]], unit: int
) -> Iterator[tuple[int, memoryview]]:
    """(offset, bytes) of data that has no place of its own, cut at multiples of `unit`; the sum is compared last."""
    total, scratch = xxh3_64(), memoryview(bytearray(unit))
    for offset, length in pieces:
        end = offset + length
        while offset < end:
            part = scratch[: min(end - offset, unit - offset % unit)]
            receive_exactly(sock, part)
            total.update(part)
            yield offset, part
            offset += len(part)
    check_sum(sock, total.intdigest())


def check_sum(sock: socket.socket, found: int) -> None:
    compare_sum(SUM.unpack(receive(sock, SUM.size))[0], found)


def drain(sock: socket.socket, size: int) -> None:
    """Take what is refused off the line, so that the connection stays in step."""
    scratch = memoryview(bytearray(min(size, SLICE_BYTES)))
    while size > 0:
        part = scratch[: min(size, SLICE_BYTES)]
        receive_exactly(sock, part)
        size -= len(part)


def pack_json(data: Any) -> bytes:
    return json.dumps(data, separators=(",", ":")).encode()


def unpack_json(data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except ValueError:
        raise ServerLost("a message that can't be read") from None
    if not isinstance(found, dict):
        raise ServerLost("a message that is not an object")
    return found


def error_from(data: bytes) -> GridError:
    return GridError.from_wire(unpack_json(data))


# -- who is who ---------------------------------------------------------------------------------------------------


def _proof(key: bytes, who: bytes, said: bytes) -> bytes:
    return hmac.digest(key, GREETING_MAGIC + who + said, "sha256")


def greeting(incarnation: int, flags: int = 0) -> bytes:
    """What a server says first: who it is, and a nonce."""
    return GREETING.pack(GREETING_MAGIC, incarnation, flags, secrets.token_bytes(32))


def greet(
    sock: socket.socket, incarnation: int, key: bytes, number: int = 0, tls: ServerTls | None = None
) -> tuple[int, socket.socket]:
    """The server's side: the uid whose key the other end has proved to know, and the socket to go on with.

    What is proved is bound to the certificate, and to there being one: nobody in the middle can show another, or none.
    """
    bound = greeting(incarnation, TLS if tls else 0)
    send_all(sock, bound)
    if tls:
        sock = tls.wrap(sock, HANDSHAKE_LIMIT_S)
        bound += tls.fingerprint
    with _closed_if_refused(sock):
        uid, theirs, proof = ANSWER.unpack(receive(sock, ANSWER.size))
        expected, bound = user_key(key, uid), bound + theirs
        if not hmac.compare_digest(proof, _proof(expected, b"client", bound)):
            with contextlib.suppress(ServerLost):
                send_all(sock, bytes(WELCOME.size))
            raise WrongKey("the other end does not know its key")
        bound += number.to_bytes(8, "big")
        send_all(sock, WELCOME.pack(number, _proof(expected, b"server", bound)))
    return int(uid), sock


@contextlib.contextmanager
def _closed_if_refused(sock: socket.socket) -> Iterator[None]:
    """Once it is encrypted, only we have the socket."""
    try:
        yield
    except BaseException:
        sock.close()
        raise


def read_greeting(sock: socket.socket) -> tuple[int, int, bytes]:
    """(incarnation, flags, all of it) of whatever listens there."""
    said = receive(sock, GREETING.size)
    magic, incarnation, flags, _ = GREETING.unpack(said)
    if magic != GREETING_MAGIC:
        raise ServerLost("what listens there is not a memory server", code="not-ours")
    return int(incarnation), int(flags), said


def prove(sock: socket.socket, uid: int, key: bytes) -> tuple[int, int, socket.socket]:
    """The client's side: the server's incarnation, the connection's number there, and the socket to go on with."""
    incarnation, flags, bound = read_greeting(sock)
    if flags & TLS:
        from distributed_grid.agent.memory.tls import join

        sock, fingerprint = join(sock, HANDSHAKE_LIMIT_S)
        bound += fingerprint
    mine = secrets.token_bytes(32)
    bound += mine
    with _closed_if_refused(sock):
        send_all(sock, ANSWER.pack(uid, mine, _proof(key, b"client", bound)))
        number, proof = WELCOME.unpack(receive(sock, WELCOME.size))
        if not hmac.compare_digest(proof, _proof(key, b"server", bound + number.to_bytes(8, "big"))):
            raise WrongKey("the memory server and this user do not share a key", hint="was the cluster started anew?")
    return incarnation, int(number), sock
