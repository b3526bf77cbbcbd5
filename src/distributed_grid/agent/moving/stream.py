"""The data plane of one move: one TCP connection, both sides prove the key, every frame is sealed.

With `encrypt` off frames travel in the clear but still carry an AES-GMAC tag, so that nothing can be slipped in.
Pages are packed (lz4) while the link turns out to be slower than packing them.
Blocking sockets, each with a stall limit: a silent peer ends the move, it does not hang it.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import struct
import time
from typing import Any

import lz4.block
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from distributed_grid.core.errors import Refused, TimedOut, Unavailable

HELLO, PAGES, FILE, END, ANSWER, PACKED = 1, 2, 3, 4, 5, 6
FRAME_BYTES = 1 << 20  # payload of a full frame
_MAX_BODY = FRAME_BYTES + (1 << 18)
_TAG_BYTES = 16
_MAGIC = b"grid-move-1 "
#: On a link slower than this, time is better spent on packing: lz4 does some 400 MB/s on one core.
_SLOW_S_PER_BYTE = 1 / 200e6
_WEIGHT = 0.1  # of the latest frame in the mean
_WORTH = 0.8  # packed to more than this share, a frame is sent as it is, and so are the next ones
_UNPACKED_FRAMES = 15


class Link:
    """One end of the connection; `send` and `receive` whole frames."""

    def __init__(self, sock: socket.socket, sending: bytes, receiving: bytes, encrypt: bool) -> None:
        self.sock = sock
        self.encrypt = encrypt
        self._seal, self._open = AESGCM(sending), AESGCM(receiving)
        self._sent = self._received = 0
        self._buffer = bytearray(_MAX_BODY + _TAG_BYTES)
        self._plain = bytearray(_MAX_BODY)
        self._sealed = bytearray(_MAX_BODY + _TAG_BYTES)
        self.bytes_sent = self.packed_frames = 0
        self._s_per_byte = 0.0  # a mean of what sending took of late; the first frames only fill buffers
        self._unpacked_left = 0

    def send(self, op: int, payload: bytes | bytearray | memoryview) -> None:
        if len(payload) > _MAX_BODY - 1:
            raise ValueError("frame too big")
        if op == PAGES and self._s_per_byte > _SLOW_S_PER_BYTE:
            op, payload = self._pack(payload)
        size = len(payload)
        nonce = bytes([op]) + self._sent.to_bytes(11, "little")
        self._sent += 1
        parts: list[bytes | memoryview | bytearray]
        if self.encrypt:
            out = memoryview(self._sealed)[: size + _TAG_BYTES]
            self._seal.encrypt_into(nonce, payload, None, out)
            parts = [struct.pack("<IB", size, op), out]
        else:
            tag = self._seal.encrypt(nonce, b"", payload)
            parts = [struct.pack("<IB", size, op), payload, tag]
        began = time.monotonic()
        self._send_all(parts)
        if size > FRAME_BYTES // 8:
            took = (time.monotonic() - began) / size
            self._s_per_byte += _WEIGHT * (took - self._s_per_byte)
        self.bytes_sent += size + _TAG_BYTES + 5

    def _pack(self, payload: bytes | bytearray | memoryview) -> tuple[int, bytes | bytearray | memoryview]:
        if self._unpacked_left:
            self._unpacked_left -= 1
            return PAGES, payload
        packed: bytes = lz4.block.compress(payload, store_size=False)
        if len(packed) > _WORTH * len(payload):
            self._unpacked_left = _UNPACKED_FRAMES
            return PAGES, payload
        self.packed_frames += 1
        return PACKED, packed

    def _send_all(self, parts: list[bytes | memoryview | bytearray]) -> None:
        views = [memoryview(part) for part in parts]
        try:
            while views:
                done = self.sock.sendmsg(views)
                while views and done >= len(views[0]):
                    done -= len(views.pop(0))
                if done:
                    views[0] = views[0][done:]
        except TimeoutError:
            raise TimedOut("the other node stopped taking data", code="move-stalled") from None
        except OSError as error:
            raise Unavailable("the connection to the other node broke", cause=str(error), code="move-link") from None

    def receive(self) -> tuple[int, memoryview]:
        """The next frame; the view is good until the next call."""
        head = self._read(memoryview(self._buffer)[:5])
        size, op = struct.unpack("<IB", head)
        if size > _MAX_BODY:
            raise Refused("the other node sent a frame that is too big", code="move-protocol")
        body = self._read(memoryview(self._buffer)[: size + _TAG_BYTES])
        nonce = bytes([op]) + self._received.to_bytes(11, "little")
        self._received += 1
        try:
            if self.encrypt:
                plain = memoryview(self._plain)[:size]
                self._open.decrypt_into(nonce, body, None, plain)
            else:
                self._open.decrypt(nonce, body[size:], body[:size])
                plain = body[:size]
        except InvalidTag:
            raise Refused("a frame was changed on its way", code="move-protocol") from None
        if op != PACKED:
            return op, plain
        try:
            return PAGES, memoryview(lz4.block.decompress(plain, uncompressed_size=_MAX_BODY))
        except lz4.block.LZ4BlockError as error:
            raise Refused("a packed frame cannot be read", cause=str(error), code="move-protocol") from None

    def _read(self, view: memoryview) -> memoryview:
        got = 0
        try:
            while got < len(view):
                count = self.sock.recv_into(view[got:])
                if count == 0:
                    raise Unavailable("the other node closed the connection", code="move-link")
                got += count
        except TimeoutError:
            raise TimedOut("the other node stopped sending", code="move-stalled") from None
        except OSError as error:
            raise Unavailable("the connection to the other node broke", cause=str(error), code="move-link") from None
        return view

    def close(self) -> None:
        self.sock.close()


def _derive(key: bytes, *parts: bytes) -> bytes:
    return hmac.new(key, b"|".join((_MAGIC, *parts)), hashlib.sha256).digest()


def _tune(sock: socket.socket, stall_s: float) -> None:
    sock.settimeout(stall_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, 2 << 20)  # autotuning sometimes falls into a slow mode


def _exactly(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = sock.recv(size - len(data))
        if not more:
            raise ConnectionResetError("closed during the handshake")
        data += more
    return data


def _mode(encrypt: bool) -> bytes:
    return b"sealed" if encrypt else b"signed"


def connect(host: str, port: int, key: bytes, *, encrypt: bool, stall_s: float = 30.0) -> Link:
    try:
        sock = socket.create_connection((host, port), timeout=min(stall_s, 10.0))
    except OSError as error:
        raise Unavailable(f"cannot reach the target at {host}:{port}", cause=str(error), code="move-link") from None
    try:
        _tune(sock, stall_s)
        theirs = _exactly(sock, len(_MAGIC) + 32)
        if not theirs.startswith(_MAGIC):
            raise Refused("what answers there is not a grid node", code="move-protocol")
        theirs, mine = theirs[len(_MAGIC) :], os.urandom(32)
        sock.sendall(mine + _derive(key, b"source", _mode(encrypt), theirs, mine))
        if not hmac.compare_digest(_exactly(sock, 32), _derive(key, b"target", _mode(encrypt), theirs, mine)):
            raise Refused("the target does not know the key of this move", code="move-key")
    except OSError as error:
        sock.close()
        raise Unavailable(f"the target {host}:{port} refused us", cause=str(error), code="move-link") from None
    except Refused:
        sock.close()
        raise
    return Link(sock, _derive(key, b"up", theirs, mine), _derive(key, b"down", theirs, mine), encrypt)


def listen(host: str) -> socket.socket:
    return socket.create_server((host, 0), backlog=4)


def accept(listener: socket.socket, key: bytes, *, encrypt: bool, stall_s: float, wait_s: float) -> Link:
    """The first peer that proves the key; others are turned away without ending the wait."""
    deadline = time.monotonic() + wait_s
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimedOut("the source did not connect", code="move-stalled")
        listener.settimeout(left)
        try:
            sock, _ = listener.accept()
        except TimeoutError:
            continue
        try:
            _tune(sock, 10.0)
            mine = os.urandom(32)
            sock.sendall(_MAGIC + mine)
            answer = _exactly(sock, 64)
            theirs, proof = answer[:32], answer[32:]
            if not hmac.compare_digest(proof, _derive(key, b"source", _mode(encrypt), mine, theirs)):
                sock.close()
                continue
            sock.sendall(_derive(key, b"target", _mode(encrypt), mine, theirs))
            sock.settimeout(stall_s)
        except OSError:
            sock.close()
            continue
        return Link(sock, _derive(key, b"down", mine, theirs), _derive(key, b"up", mine, theirs), encrypt)


def pack_json(data: dict[str, Any]) -> bytes:
    import json

    return json.dumps(data).encode()
