"""Length-limited frames; over TCP both ends prove that they know the cluster's secret, and every frame is sealed."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import secrets
import socket
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import cast

from distributed_grid.core.errors import Refused, Unavailable, UsageError

MAX_FRAME_BYTES = 16 * 1024 * 1024
#: What a stranger may make us hold before it has proved that it knows the secret.
HANDSHAKE_FRAME_BYTES = 1024
HANDSHAKE_LIMIT_S = 10.0
CLOSE_LIMIT_S = 5.0
#: What may lie here without anybody waiting for it before the other end has to wait.
AHEAD_BYTES = 128 * 1024
_MAGIC = b"GRIDWIRE1"
_LENGTH = struct.Struct("!I")
_NONCE_BYTES = 32
_SEAL_BYTES = 16


class ChannelClosed(Unavailable):
    """The other end is gone, or said something that is not ours."""

    code = "connection-lost"


class Channel(asyncio.Protocol):
    """Frames over a connection; `_sealer` is set once the handshake is done.

    A protocol and not a stream: a frame is handed on by the very turn of the loop that reads its last byte.
    """

    def __init__(self, peer: str = "", on_open: Callable[[Channel], None] | None = None) -> None:
        self.limit_bytes = MAX_FRAME_BYTES
        self.peer = peer
        self._on_open = on_open
        self._transport: asyncio.Transport | None = None
        self._sealer: _Sealer | None = None
        #: What has come and is not taken yet. Cut into frames when they are asked for: the handshake changes how.
        self._came = bytearray()
        self._take: Callable[[bytes], None] | None = None
        self._wake: asyncio.Future[None] | None = None
        self._reading = True
        self._writable = asyncio.Event()
        self._gone = asyncio.Event()
        #: Why nothing more comes.
        self._lost: ChannelClosed | None = None

    # -- sending --------------------------------------------------------------------------------------------------

    def post(self, data: bytes) -> None:
        """Send without waiting for the other end; whoever sends much waits until it is `taken`."""
        if len(data) > MAX_FRAME_BYTES - _SEAL_BYTES:  # before it is sealed: the line stays in step and can go on
            raise UsageError(
                f"a message of {len(data)} bytes is over the limit of {MAX_FRAME_BYTES}", code="message-too-long"
            )
        if self._transport is None or self._transport.is_closing():
            raise self._lost or self._closed("it was closed")
        if self._sealer:
            data = self._sealer.seal(data)
        self._transport.write(_LENGTH.pack(len(data)) + data)

    async def send(self, data: bytes) -> None:
        self.post(data)
        await self.taken()

    async def taken(self) -> None:
        """Wait while the other end is behind with what it was sent."""
        if not self._writable.is_set():
            await self._writable.wait()
            if self._gone.is_set():
                raise self._lost or self._closed("it was closed")

    @property
    def is_clogged(self) -> bool:
        """The other end does not take what it is sent."""
        return not self._writable.is_set()

    # -- receiving ------------------------------------------------------------------------------------------------

    async def recv(self) -> bytes:
        while (data := self._next()) is None:
            if self._lost:
                raise self._lost
            self._read_on(True)
            self._wake = asyncio.get_running_loop().create_future()
            try:
                await self._wake
            finally:
                self._wake = None
        return data

    async def hear(self, take: Callable[[bytes], None]) -> None:
        """Hand every message to `take` as it comes, until the line ends: that raises ChannelClosed, as `take` may."""
        self._take = take
        try:
            self._hand_on()
            self._read_on(True)
            while self._lost is None:
                self._wake = asyncio.get_running_loop().create_future()
                await self._wake
            raise self._lost
        finally:
            self._take = self._wake = None

    def _next(self) -> bytes | None:
        """The next frame, if all of it is there."""
        if len(self._came) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._came)
        if length > self.limit_bytes:
            raise ChannelClosed(f"{self.peer} announced a message of {length} bytes", code="message-too-long")
        end = _LENGTH.size + length
        if len(self._came) < end:
            return None
        with memoryview(self._came) as view:
            data = bytes(view[_LENGTH.size : end])
        del self._came[:end]
        return self._sealer.unseal(data, self.peer) if self._sealer else data

    def _hand_on(self) -> None:
        try:
            while self._take is not None and (data := self._next()) is not None:
                self._take(data)
        except ChannelClosed as error:
            self._take = None
            self._end(error)

    def _read_on(self, on: bool) -> None:
        if on == self._reading or self._transport is None or self._transport.is_closing():
            return
        self._reading = on
        if on:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()

    def _end(self, why: ChannelClosed) -> None:
        self._lost = self._lost or why
        self._wake_up()

    def _wake_up(self) -> None:
        if self._wake and not self._wake.done():
            self._wake.set_result(None)

    def _closed(self, cause: str) -> ChannelClosed:
        return ChannelClosed(f"lost the connection to {self.peer}", cause=cause)

    # -- what the loop tells --------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's, which Ray takes where it finds it, is none
        self._writable.set()
        if self._on_open:
            name = transport.get_extra_info("peername")
            self.peer = f"{name[0]}:{name[1]}" if isinstance(name, tuple) else "the local socket"
            self._on_open(self)

    def data_received(self, data: bytes) -> None:
        self._came += data
        if self._take is not None:
            self._hand_on()
        elif self._wake is not None:
            self._wake_up()
        elif len(self._came) > AHEAD_BYTES:  # nobody waits for it
            self._read_on(False)

    def eof_received(self) -> None:
        self._end(self._closed("the other end hung up"))

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def connection_lost(self, error: Exception | None) -> None:
        self._end(self._closed(str(error or "it was closed")))
        self._gone.set()
        self._writable.set()

    # -- the end --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    async def wait_closed(self) -> None:
        if self._transport is None:
            return
        try:
            async with asyncio.timeout(CLOSE_LIMIT_S):
                await self._gone.wait()
        except TimeoutError:  # what was still to be sent can't be: whoever waits for that is let go
            self._transport.abort()

    def peer_credentials(self) -> tuple[int, int]:
        """(uid, pid) of the process at the other end of a unix socket, from the kernel."""
        assert self._transport is not None
        sock: socket.socket = self._transport.get_extra_info("socket")
        raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid, uid, _gid = struct.unpack("3i", raw)
        return uid, pid


class _Sealer:
    """AES-GCM with one key per direction; the nonce is a counter, so a frame can't be replayed or reordered."""

    def __init__(self, send_key: bytes, recv_key: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._send, self._recv = AESGCM(send_key), AESGCM(recv_key)
        self._sent = self._received = 0

    def seal(self, data: bytes) -> bytes:
        self._sent += 1
        return self._send.encrypt(self._sent.to_bytes(12, "big"), data, None)

    def unseal(self, data: bytes, peer: str) -> bytes:
        from cryptography.exceptions import InvalidTag

        self._received += 1
        try:
            return self._recv.decrypt(self._received.to_bytes(12, "big"), data, None)
        except InvalidTag:
            raise ChannelClosed(f"a message from {peer} was changed on the way") from None


def read_secret(token_path: Path) -> bytes:
    """The agents' secret, derived from Ray's token so that one file of mode 0600 is all a node needs."""
    return hmac.digest(token_path.read_bytes().strip(), b"distributed-grid agent channel", "sha256")


def _mac(secret: bytes, who: bytes, nonces: bytes) -> bytes:
    return hmac.new(secret, _MAGIC + who + nonces, hashlib.sha256).digest()


async def connect(host: str, port: int, secret: bytes, timeout_s: float = HANDSHAKE_LIMIT_S) -> Channel:
    peer = f"{host}:{port}"
    try:
        async with asyncio.timeout(timeout_s):
            _transport, channel = await asyncio.get_running_loop().create_connection(lambda: Channel(peer), host, port)
            try:
                await _handshake_as_client(channel, secret)
            except BaseException:
                channel.close()
                await channel.wait_closed()
                raise
            return channel
    except TimeoutError:
        raise Unavailable(f"{peer} did not answer within {timeout_s:g} s", code="unreachable") from None
    except OSError as error:
        raise Unavailable(f"can't reach {peer}", cause=error.strerror or str(error), code="unreachable") from None


async def _handshake_as_client(channel: Channel, secret: bytes) -> None:
    channel.limit_bytes = HANDSHAKE_FRAME_BYTES
    greeting = await channel.recv()
    if not greeting.startswith(_MAGIC) or len(greeting) != len(_MAGIC) + _NONCE_BYTES:
        raise ChannelClosed(f"{channel.peer} is not one of our agents")
    mine = secrets.token_bytes(_NONCE_BYTES)
    nonces = greeting[len(_MAGIC) :] + mine
    await channel.send(mine + _mac(secret, b"client", nonces))
    if not hmac.compare_digest(await channel.recv(), _mac(secret, b"server", nonces)):
        raise ChannelClosed(f"{channel.peer} does not know this cluster's token", code="wrong-token")
    channel._sealer = _Sealer(_mac(secret, b"c2s", nonces), _mac(secret, b"s2c", nonces))
    channel.limit_bytes = MAX_FRAME_BYTES


async def _handshake_as_server(channel: Channel, secret: bytes) -> None:
    channel.limit_bytes = HANDSHAKE_FRAME_BYTES
    mine = secrets.token_bytes(_NONCE_BYTES)
    await channel.send(_MAGIC + mine)
    answer = await channel.recv()
    nonces = mine + answer[:_NONCE_BYTES]
    if not hmac.compare_digest(answer[_NONCE_BYTES:], _mac(secret, b"client", nonces)):
        raise ChannelClosed("the other end does not know this cluster's token", code="wrong-token")
    await channel.send(_mac(secret, b"server", nonces))
    channel._sealer = _Sealer(_mac(secret, b"s2c", nonces), _mac(secret, b"c2s", nonces))
    channel.limit_bytes = MAX_FRAME_BYTES


OnChannel = Callable[[Channel], Awaitable[None]]


class Listener:
    """A listening socket; each accepted channel is handled in a task of its own, all ended by `close`."""

    def __init__(self, on_channel: OnChannel, handshake: OnChannel | None) -> None:
        self._on_channel = on_channel
        self._handshake = handshake
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def port(self) -> int:
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    def accept(self) -> Channel:
        return Channel(on_open=self._opened)

    def _opened(self, channel: Channel) -> None:
        task = asyncio.get_running_loop().create_task(self._handle(channel))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _handle(self, channel: Channel) -> None:
        try:
            if self._handshake:
                async with asyncio.timeout(HANDSHAKE_LIMIT_S):
                    await self._handshake(channel)
            await self._on_channel(channel)
        except (ChannelClosed, TimeoutError):
            pass  # a stranger, or one who hung up: nothing to tell anybody
        finally:
            channel.close()
            await channel.wait_closed()

    async def close(self) -> None:
        if self._server:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def serve(host: str, port: int, secret: bytes, on_channel: OnChannel) -> Listener:
    async def handshake(channel: Channel) -> None:
        await _handshake_as_server(channel, secret)

    listener = Listener(on_channel, handshake)
    listener._server = await asyncio.get_running_loop().create_server(listener.accept, host, port)
    return listener


async def serve_unix(path: Path, on_channel: OnChannel) -> Listener:
    """A socket of mode 0600, made under a private umask so that there is no moment when it is open to others."""
    listener = Listener(on_channel, None)
    before = os.umask(0o177)
    try:
        path.unlink(missing_ok=True)
        listener._server = await asyncio.get_running_loop().create_unix_server(listener.accept, str(path))
    except OSError as error:
        too_long = len(os.fsencode(path)) >= 108
        hint = "a socket's path has at most 107 bytes: set GRID_HOME to a shorter one" if too_long else ""
        raise Refused(f"can't listen at {path}", cause=error.strerror or str(error), hint=hint, code="socket") from None
    finally:
        os.umask(before)
    return listener


async def connect_unix(path: Path, timeout_s: float = 5.0) -> Channel:
    try:
        async with asyncio.timeout(timeout_s):
            _transport, channel = await asyncio.get_running_loop().create_unix_connection(
                lambda: Channel("the daemon"), str(path)
            )
    except TimeoutError:
        raise Unavailable(f"the daemon at {path} did not answer within {timeout_s:g} s", code="daemon-silent") from None
    except OSError as error:
        cause = f"{path}: {error.strerror or error}"
        raise Unavailable("the daemon is not running", cause=cause, code="no-daemon") from None
    return channel
