"""Calls and streams: typed arguments, errors across the wire, streams that wait and that can be left."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from distributed_grid.core.errors import GridError, InternalError, NotFound, TimedOut, UsageError
from distributed_grid.wire.channel import Channel, ChannelClosed, connect_unix, serve_unix
from distributed_grid.wire.rpc import STREAM_WINDOW, CallContext, RpcClient, RpcServer, method, unpack


class Service:
    def __init__(self) -> None:
        self.produced = 0
        self.left = asyncio.Event()

    @method
    async def add(self, context: CallContext, *, one: int, two: int = 1) -> int:
        return one + two

    @method
    async def fail(self, context: CallContext, *, how: str) -> None:
        if how == "not-found":
            raise NotFound("no such thing", cause="it never was", hint="look elsewhere", code="thing")
        raise ValueError("a fault")

    @method
    async def sleep(self, context: CallContext) -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            self.left.set()

    @method
    async def count(self, context: CallContext, *, up_to: int) -> AsyncIterator[int]:
        try:
            for number in range(up_to):
                self.produced += 1
                yield number
        finally:
            self.left.set()

    @method
    async def big(self, context: CallContext) -> str:
        return "x" * (17 * 1024 * 1024)

    @method
    def double(self, context: CallContext, *, number: int) -> int:
        if number < 0:
            raise NotFound("no such number", code="thing")
        return 2 * number

    @method
    def later(self, context: CallContext, *, number: int) -> Coroutine[Any, Any, int]:
        """Begins at once, and is not done with that."""
        self.produced += 1
        return self._later(number)

    async def _later(self, number: int) -> int:
        try:
            await asyncio.sleep(0 if number else 3600)
            if number < 0:
                raise NotFound("no such number", code="thing")
            return number
        finally:
            self.left.set()

    async def hidden(self, context: CallContext) -> str:
        return "never"


@contextlib.asynccontextmanager
async def talking(tmp_path: Path) -> AsyncIterator[tuple[Service, RpcClient]]:
    service = Service()
    server = RpcServer(service, hello=lambda: {"who": "test"})

    async def on_channel(channel: Channel) -> None:
        await server.serve(channel, CallContext())

    listener = await serve_unix(tmp_path / "s", on_channel)
    client = await RpcClient.start(await connect_unix(tmp_path / "s"))
    try:
        yield service, client
    finally:
        await client.close()
        await listener.close()


async def test_a_call_answers(tmp_path: Path) -> None:
    async with talking(tmp_path) as (_service, client):
        assert client.hello["who"] == "test"
        assert await client.call("add", one=2) == 3
        many = await asyncio.gather(*(client.call("add", one=n, two=n) for n in range(100)))
        assert many == [2 * n for n in range(100)]


@pytest.mark.parametrize(
    ("name", "arguments", "kind", "text"),
    [
        ("add", {"one": "many"}, UsageError, "one"),
        ("add", {}, UsageError, "one"),
        ("add", {"one": 1, "three": 3}, UsageError, "three"),
        ("hidden", {}, UsageError, "no call named"),
        ("fail", {"how": "fault"}, InternalError, "fail failed"),
    ],
)
async def test_wrong_calls_get_one_error_each(
    tmp_path: Path, name: str, arguments: dict[str, Any], kind: type[GridError], text: str
) -> None:
    async with talking(tmp_path) as (_service, client):
        with pytest.raises(kind, match=text):
            await client.call(name, **arguments)
        assert await client.call("add", one=1) == 2


async def test_an_error_crosses_with_all_it_says(tmp_path: Path) -> None:
    async with talking(tmp_path) as (_service, client):
        with pytest.raises(NotFound) as caught:
            await client.call("fail", how="not-found")
        error = caught.value
        assert (error.code, error.cause, error.hint) == ("thing", "it never was", "look elsewhere")


async def test_a_stream_waits_for_its_reader_and_ends_when_left(tmp_path: Path) -> None:
    async with talking(tmp_path) as (service, client):
        stream = client.stream("count", up_to=100_000)
        assert await anext(stream) == 0
        assert await client.call("add", one=1) == 2  # other calls go on meanwhile
        assert service.produced <= STREAM_WINDOW + 2
        await stream.aclose()
        await asyncio.wait_for(service.left.wait(), 30)
        assert [n async for n in client.stream("count", up_to=50)] == list(range(50))


async def test_a_call_has_a_limit_and_is_cancelled_there(tmp_path: Path) -> None:
    async with talking(tmp_path) as (service, client):
        with pytest.raises(TimedOut):
            await client.call("sleep", timeout_s=0.05)
        await asyncio.wait_for(service.left.wait(), 30)


async def test_what_hangs_on_a_lost_line_is_told(tmp_path: Path) -> None:
    async with talking(tmp_path) as (service, client):
        call = asyncio.ensure_future(client.call("sleep", timeout_s=None))
        await asyncio.sleep(0)
        assert await client.call("add", one=1) == 2
        client._channel.close()
        with pytest.raises(ChannelClosed):
            await call
        assert not client.is_open
        await asyncio.wait_for(service.left.wait(), 30)


@given(st.binary(max_size=200))
@example(b"\x81\x90\x00")  # a map whose key is a list
def test_no_bytes_do_more_than_end_the_line(data: bytes) -> None:
    try:
        assert isinstance(unpack(data), dict)
    except ChannelClosed:
        pass


async def test_what_cannot_be_sent_is_told_and_the_line_goes_on(tmp_path: Path) -> None:
    async with talking(tmp_path) as (_service, client):
        with pytest.raises(UsageError) as told:
            await client.call("fail", how="x" * (17 * 1024 * 1024))
        assert told.value.code == "message-too-long"
        with pytest.raises(UsageError) as told:
            await client.call("fail", how=object())
        assert told.value.code == "bad-message"
        with pytest.raises(InternalError) as fault:
            await client.call("big", timeout_s=60)
        assert fault.value.code == "message-too-long"
        assert await client.call("add", one=2) == 3


async def test_a_plain_function_answers_like_any_other(tmp_path: Path) -> None:
    async with talking(tmp_path) as (_service, client):
        assert await client.call("double", number=4) == 8
        with pytest.raises(UsageError, match="number"):
            await client.call("double", number="many")
        with pytest.raises(NotFound):
            await client.call("double", number=-1)
        many = await asyncio.gather(*(client.call("double", number=n) for n in range(600)))
        assert many == [2 * n for n in range(600)]
        assert await client.call("add", one=1) == 2


async def test_a_plain_method_may_answer_later(tmp_path: Path) -> None:
    async with talking(tmp_path) as (service, client):
        assert await client.call("later", number=7) == 7
        with pytest.raises(NotFound):
            await client.call("later", number=-1)
        service.left.clear()
        waiting = client.ask("later", number=0)
        assert await client.call("double", number=1) == 2, "others are answered meanwhile"
        waiting.cancel()
        await asyncio.wait_for(service.left.wait(), 10)


async def test_what_is_begun_for_a_caller_who_hangs_up_is_ended_too(tmp_path: Path) -> None:
    async with talking(tmp_path) as (service, client):
        waiting = client.ask("later", number=0)
        await client.close()
        await asyncio.wait_for(service.left.wait(), 10)
        assert service.produced == 1
        with pytest.raises(ChannelClosed):
            await waiting
