"""`grid run-shared`: its standard input on the way to the command, and times that are none."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Any

import click
import pytest

from distributed_grid.commands import run_shared
from distributed_grid.commands._common import Seconds
from distributed_grid.commands.run_shared import _Input, _Stdin
from distributed_grid.core.errors import NotFound, TimedOut, Unavailable
from distributed_grid.daemon.client import LastingClient
from distributed_grid.wire.channel import ChannelClosed

LIMIT_S = 10.0


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Our standard input is a pipe; its writing end."""
    reading, writing = os.pipe()
    read = os.read
    monkeypatch.setattr(os, "read", lambda fd, count: read(reading if fd == 0 else fd, count))
    yield writing
    for fd in (reading, writing):
        with contextlib.suppress(OSError):  # a test closed it: the end of file
            os.close(fd)


class Client:
    def __init__(self, *answers: Exception | None) -> None:
        self.answers = list(answers)
        self.sent: list[tuple[bytes, int, bool]] = []
        self.is_silent = False

    async def call(self, name: str, *, data: bytes, offset: int, last: bool, **_: Any) -> None:
        self.sent.append((data, offset, last))
        answer = self.answers.pop(0) if self.answers else None
        if self.is_silent:
            await asyncio.sleep(600)
        if isinstance(answer, Exception):
            raise answer


async def ended(thread: threading.Thread) -> None:
    await asyncio.to_thread(thread.join, LIMIT_S)
    assert not thread.is_alive()


async def test_what_may_be_lost_is_sent_again_at_its_offset(typed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_shared, "INPUT_AGAIN_S", 0.001)
    client = Client(Unavailable("gpu1 is not online"), None, ChannelClosed("the agent is gone"), TimedOut("it sleeps"))
    typing = _Input(client, "t", _Stdin(keep=False))
    os.write(typed, b"one")
    typing.start()
    async with asyncio.timeout(LIMIT_S):
        while len(client.sent) < 2:
            await asyncio.sleep(0.001)
    os.write(typed, b"three")
    async with asyncio.timeout(LIMIT_S):
        while len(client.sent) < 5:
            await asyncio.sleep(0.001)
    os.close(typed)
    await ended(typing)
    assert client.sent == [(b"one", 0, False)] * 2 + [(b"three", 3, False)] * 3 + [(b"", 8, True)]


async def test_input_that_cannot_be_given_is_told(typed: int, capsys: pytest.CaptureFixture[str]) -> None:
    typing = _Input(Client(NotFound("there is no task t")), "t", _Stdin(keep=False))
    os.write(typed, b"one")
    typing.start()
    await ended(typing)
    assert "gets no more input: there is no task t" in capsys.readouterr().err


async def test_a_second_run_gets_it_from_the_beginning(typed: int) -> None:
    """Also what the reader of the first run was waiting for when that one ended."""
    stdin = _Stdin(keep=True)
    first, second = Client(), Client()
    typing = _Input(first, "t", stdin)
    os.write(typed, b"one")
    typing.start()
    async with asyncio.timeout(LIMIT_S):
        while not first.sent:
            await asyncio.sleep(0.001)
    typing.stop()
    again = _Input(second, "u", stdin)
    again.start()
    os.write(typed, b"two")
    os.close(typed)
    await ended(typing)
    await ended(again)
    assert b"".join(data for data, _, _ in second.sent) == b"onetwo" and second.sent[-1][2]
    assert [offset for _, offset, _ in second.sent][-1] == 6
    os.close(stdin.kept)


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_command_ends_first_without_a_word(typed: int, capfd: pytest.CaptureFixture[str]) -> None:
    """`yes | grid run-shared … head -1`: what is on its way then is nobody's business any more."""
    started: list[_Input] = []

    async def go(stop: bool) -> None:
        client = Client()
        client.is_silent = True
        typing = _Input(client, "t", _Stdin(keep=False))
        started.append(typing)
        typing.start()
        async with asyncio.timeout(LIMIT_S):
            while not client.sent:
                await asyncio.sleep(0.001)
        if stop:
            typing.stop()

    for stop in (True, False):  # by us, or by the end of the loop
        os.write(typed, b"y\n")
        asyncio.run(go(stop))
        started[-1].join(LIMIT_S)
        assert not started[-1].is_alive()
    assert capfd.readouterr().err == ""


async def test_a_client_that_was_closed_brings_no_daemon_up(grid_home: Any) -> None:
    client = LastingClient()
    await client.close()
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(ChannelClosed):
            await client.call("ping")
    assert not grid_home.exists()


def test_a_time_that_is_none() -> None:
    @click.command()
    @click.option("--wait-time", type=Seconds(0, 100))
    def command(wait_time: float) -> None: ...

    for text in ("nan", "inf", "-1", "x"):
        with pytest.raises(click.BadParameter):
            command.main(["--wait-time", text], standalone_mode=False)
    command.main(["--wait-time", "3"], standalone_mode=False)
