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
