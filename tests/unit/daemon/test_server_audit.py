"""What each request leaves in the audit log, and what happens when nothing can be left there."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from distributed_grid.core.errors import GridError, NotFound, Refused
from distributed_grid.daemon.server import DaemonServer
from distributed_grid.store.audit import AuditLog
from distributed_grid.wire.channel import connect_unix
from distributed_grid.wire.rpc import CallContext, RpcClient, method, pack


class Calls:
    @method
    async def status(self, context: CallContext) -> str:
        return "fine"

    @method
    async def task_start(self, context: CallContext, *, argv: list[str], env: dict[str, str]) -> str:
        return "started"

    @method
    async def task_cancel(self, context: CallContext, *, task_id: str) -> None:
        if task_id == "none":
            raise NotFound("there is no such task")
        raise Refused("it belongs to root", code="not-yours")

    @method
    async def events_follow(self, context: CallContext) -> AsyncIterator[int]:
        yield 1
        raise Refused("no more of that", code="not-owner")


@pytest_asyncio.fixture
async def client(tmp_path: Path) -> AsyncIterator[RpcClient]:
    audit, socket = AuditLog(tmp_path / "logs" / "audit.log"), tmp_path / "grid.sock"
    (tmp_path / "logs").mkdir()
    server = DaemonServer(socket, socket, [Calls()], audit, lambda: [], dict)
    await server.start()
    found = await RpcClient.start(await connect_unix(socket))
    yield found
    await found.close()
    await server.close()
    audit.close()


def outcomes(tmp_path: Path) -> list[tuple[str, str]]:
    lines = (tmp_path / "logs" / "audit.log").read_text().splitlines()
    return [(entry["method"], entry["outcome"]) for entry in map(json.loads, lines)]


def logged(tmp_path: Path) -> list[tuple[str, Any]]:
    lines = (tmp_path / "logs" / "audit.log").read_text().splitlines()
    return [(entry["method"], entry["target"]) for entry in map(json.loads, lines)]


async def test_every_request_is_there_and_no_value_of_an_environment(client: RpcClient, tmp_path: Path) -> None:
    await client.call("status")
    await client.call("task_start", argv=["true"], env={"TOKEN": "hidden"})
    assert logged(tmp_path) == [("status", {}), ("task_start", {"argv": ["true"], "env": ["TOKEN"]})]


async def test_without_the_log_looking_is_answered_and_all_else_refused(client: RpcClient, tmp_path: Path) -> None:
    (tmp_path / "logs").rename(tmp_path / "away")
    assert await client.call("status") == "fine"
    with pytest.raises(GridError) as caught:
        await client.call("task_start", argv=["true"], env={})
    assert caught.value.code == "audit"


@pytest.mark.parametrize(
    ("name", "arguments", "outcome"),
    [
        ("task_cancel", {"task_id": "a"}, "refused: not-yours"),
        ("task_cancel", {"task_id": "none"}, "failed: not-found"),
        ("task_cancel", {"task": "a"}, "refused: bad-argument"),
        ("task_start", {"argv": "true", "env": {1: "x", "TOKEN": "hidden"}}, "refused: bad-argument"),
        ("sing", {"song": ["a", {}]}, "refused: unknown-call"),
    ],
)
async def test_what_was_not_carried_out_says_so(
    client: RpcClient, tmp_path: Path, name: str, arguments: dict[str, Any], outcome: str
) -> None:
    with pytest.raises(GridError):
        await client.call(name, **arguments)
    assert outcomes(tmp_path) == [(name, "accepted"), (name, outcome)]
    assert "hidden" not in (tmp_path / "logs" / "audit.log").read_text()


async def test_a_stream_that_is_refused_says_so(client: RpcClient, tmp_path: Path) -> None:
    with pytest.raises(Refused):
        async for _ in client.stream("events_follow"):
            pass
    assert outcomes(tmp_path) == [("events_follow", "accepted"), ("events_follow", "refused: not-owner")]


async def test_a_request_that_is_no_map_is_there_too(client: RpcClient, tmp_path: Path) -> None:
    await client._channel.send(pack({"i": 1000, "m": "status", "a": [1]}))
    assert await client.call("ping") == "pong"
    assert outcomes(tmp_path) == [("status", "accepted"), ("status", "refused: bad-argument")]
