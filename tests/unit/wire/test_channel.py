"""Frames between our processes: proven peers, sealed messages, limits."""

from __future__ import annotations

import asyncio
import contextlib
import os
import struct
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from distributed_grid.core.errors import Unavailable
from distributed_grid.wire.channel import (
    MAX_FRAME_BYTES,
    Channel,
    ChannelClosed,
    Listener,
    connect,
    connect_unix,
    read_secret,
    serve,
    serve_unix,
)  # fmt: skip

SECRET = b"s" * 32


async def echo(channel: Channel) -> None:
    while True:
        await channel.send(await channel.recv())


@contextlib.asynccontextmanager
async def listening(secret: bytes = SECRET) -> AsyncIterator[Listener]:
    listener = await serve("127.0.0.1", 0, secret, echo)
    try:
        yield listener
    finally:
        await listener.close()


async def test_a_message_comes_back_as_it_was() -> None:
    async with listening() as listener:
        channel = await connect("127.0.0.1", listener.port, SECRET)
        for size in (0, 1, 70_000, 3_000_000):
            data = os.urandom(size)
            await channel.send(data)
            assert await channel.recv() == data
        channel.close()
        await channel.wait_closed()


async def test_one_without_the_token_gets_nowhere() -> None:
    async with listening() as listener:
        with pytest.raises(ChannelClosed):
            channel = await connect("127.0.0.1", listener.port, b"x" * 32)
            await channel.send(b"hello")
            await channel.recv()


async def test_one_who_is_not_ours_is_told_apart() -> None:
    async def babble(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(struct.pack("!I", 5) + b"HTTP?")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(babble, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(ChannelClosed, match="not one of our agents"):
        await connect("127.0.0.1", port, SECRET)
    server.close()
    await server.wait_closed()


async def test_nobody_there_is_said_at_once() -> None:
    async with listening() as listener:
        port = listener.port
    with pytest.raises(Unavailable, match="can't reach"):
        await connect("127.0.0.1", port, SECRET)


async def test_a_length_over_the_limit_ends_the_line(tmp_path: Path) -> None:
    ended = asyncio.Event()

    async def watch(channel: Channel) -> None:
        with pytest.raises(ChannelClosed, match="announced"):
            await channel.recv()
        ended.set()

    listener = await serve_unix(tmp_path / "s", watch)
    _reader, writer = await asyncio.open_unix_connection(str(tmp_path / "s"))
    writer.write(struct.pack("!I", MAX_FRAME_BYTES + 1))
    await asyncio.wait_for(ended.wait(), 30)
    writer.close()
    await writer.wait_closed()
    await listener.close()


async def test_what_is_on_the_wire_is_sealed() -> None:
    seen = bytearray()

    async with listening() as listener:

        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there_reader, there = await asyncio.open_connection("127.0.0.1", listener.port)

            async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
                while data := await source.read(65536):
                    seen.extend(data)
                    sink.write(data)
                    await sink.drain()
                sink.close()

            await asyncio.gather(pump(reader, there), pump(there_reader, writer))

        middle = await asyncio.start_server(relay, "127.0.0.1", 0)
        channel = await connect("127.0.0.1", middle.sockets[0].getsockname()[1], SECRET)
        await channel.send(b"the secret of the lab")
        assert await channel.recv() == b"the secret of the lab"
        channel.close()
        await channel.wait_closed()
        middle.close()
        await middle.wait_closed()
    assert b"the secret of the lab" not in seen and SECRET not in seen


async def test_a_unix_socket_is_closed_to_others_and_names_its_peer(tmp_path: Path) -> None:
    peers: list[tuple[int, int]] = []

    async def note(channel: Channel) -> None:
        peers.append(channel.peer_credentials())
        await channel.send(b"ok")

    listener = await serve_unix(tmp_path / "s", note)
    assert (tmp_path / "s").stat().st_mode & 0o777 == 0o600
    channel = await connect_unix(tmp_path / "s")
    assert await channel.recv() == b"ok"
    assert peers == [(os.geteuid(), os.getpid())]
    channel.close()
    await channel.wait_closed()
    await listener.close()


def test_the_secret_is_derived_and_not_the_token(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("abc\n")
    assert read_secret(tmp_path / "token") != b"abc"
    assert len(read_secret(tmp_path / "token")) == 32


@contextlib.asynccontextmanager
async def raw_peer(tmp_path: Path) -> AsyncIterator[tuple[Channel, asyncio.StreamReader, asyncio.StreamWriter]]:
    """A channel of ours, and the bare bytes at the other end of it."""
    ours: asyncio.Future[Channel] = asyncio.get_running_loop().create_future()
    ended = asyncio.Event()

    async def keep(channel: Channel) -> None:
        ours.set_result(channel)
        await ended.wait()

    listener = await serve_unix(tmp_path / "s", keep)
    reader, writer = await asyncio.open_unix_connection(str(tmp_path / "s"))
    try:
        yield await ours, reader, writer
    finally:
        ended.set()
        writer.close()
        await listener.close()


def frame(data: bytes) -> bytes:
    return struct.pack("!I", len(data)) + data


async def test_frames_that_come_together_or_in_pieces_are_handed_on_one_by_one(tmp_path: Path) -> None:
    async with raw_peer(tmp_path) as (channel, _reader, writer):
        got: list[bytes] = []
        writer.write(frame(b"first") + frame(b"second") + frame(b"third"))
        assert await channel.recv() == b"first"
        hearing = asyncio.ensure_future(channel.hear(got.append))  # what had come before is handed on too
        for byte in frame(b"in pieces") + frame(b""):
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0)
        writer.write(frame(b"last") + b"\0\0")  # and a piece of one that never comes
        writer.close()
        with pytest.raises(ChannelClosed, match="lost the connection"):
            await hearing
        assert got == [b"second", b"third", b"in pieces", b"", b"last"]


async def test_what_nobody_waits_for_makes_the_other_end_wait(tmp_path: Path) -> None:
    async with raw_peer(tmp_path) as (channel, _reader, writer):
        for _ in range(64):
            writer.write(frame(b"x" * 65_536))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(writer.drain(), 0.2)
        assert len(channel._came) < 1024 * 1024
        for _ in range(64):
            assert len(await channel.recv()) == 65_536


async def test_one_who_takes_nothing_is_seen_and_waited_for(tmp_path: Path) -> None:
    async with raw_peer(tmp_path) as (channel, reader, _writer):
        async def send_all() -> None:
            for _ in range(64):
                await channel.send(b"x" * 65_536)

        sending = asyncio.ensure_future(send_all())
        while not channel.is_clogged:
            await asyncio.sleep(0)
        assert not sending.done()
        await reader.readexactly(64 * (65_536 + 4))
        await asyncio.wait_for(sending, 30)


async def test_a_fault_of_what_is_heard_ends_the_line(tmp_path: Path) -> None:
    async with raw_peer(tmp_path) as (channel, _reader, writer):
        def refuse(data: bytes) -> None:
            raise ChannelClosed("not ours")

        writer.write(frame(b"one") + frame(b"two"))
        with pytest.raises(ChannelClosed, match="not ours"):
            await channel.hear(refuse)


async def test_transports_of_other_loops() -> None:
    """uvloop's are none of asyncio's; Ray takes uvloop wherever it is installed."""

    class Foreign:
        sent = b""

        def get_extra_info(self, name: str) -> None:
            return None

        def is_closing(self) -> bool:
            return False

        def write(self, data: bytes) -> None:
            self.sent += data

    foreign, opened = Foreign(), []
    channel = Channel(on_open=opened.append)
    channel.connection_made(foreign)  # type: ignore[arg-type]
    channel.post(b"word")
    channel.data_received(foreign.sent)
    assert opened == [channel] and await channel.recv() == b"word"
