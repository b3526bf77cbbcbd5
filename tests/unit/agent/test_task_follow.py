"""Following a task's output: every byte once, in order, and the exit last."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from distributed_grid.agent.follow import CHUNK_BYTES
from distributed_grid.agent.tasks import TaskKeeper, TaskSpec
from distributed_grid.core.errors import NotFound


@pytest.fixture
async def keeper(grid_home: Path) -> AsyncIterator[TaskKeeper]:
    keeper = TaskKeeper(grid_home / "spool", "gpu1")
    yield keeper
    for status in keeper.list():
        await keeper.cancel(status.task_id, grace_s=0)
        keeper.remove(status.task_id)


async def collect(chunks: AsyncIterator[dict[str, Any]]) -> tuple[dict[str, bytes], dict[str, Any]]:
    got = {"stdout": b"", "stderr": b""}
    ends = []
    async with asyncio.timeout(90):
        async for chunk in chunks:
            assert not ends, "something came after the exit"
            if "exit" in chunk:
                ends.append(chunk["exit"])
            else:
                assert len(chunk["data"]) <= CHUNK_BYTES
                got[chunk["stream"]] += chunk["data"]
    return got, ends[0]


async def test_all_of_both_streams_then_the_exit(keeper: TaskKeeper) -> None:
    script = "for i in 1 2 3; do head -c 400000 /dev/zero; echo $i >&2; sleep 0.05; done; printf last; exit 3"
    keeper.start("t", TaskSpec(["sh", "-c", script]))
    got, end = await collect(keeper.follow("t"))
    assert got == {"stdout": b"\0" * 1_200_000 + b"last", "stderr": b"1\n2\n3\n"}
    assert (end["state"], end["exit_code"]) == ("exited", 3)


async def test_goes_on_at_an_offset(keeper: TaskKeeper) -> None:
    keeper.start("t", TaskSpec(["sh", "-c", "echo 0123456789; echo abc >&2"]))
    await keeper.wait("t", 60)
    got, _ = await collect(keeper.follow("t", stdout_from=5, stderr_from=4))
    assert got == {"stdout": b"56789\n", "stderr": b""}


async def test_output_comes_while_it_runs(keeper: TaskKeeper) -> None:
    keeper.start("t", TaskSpec(["sh", "-c", "echo first; exec sleep 600"]))
    chunks = keeper.follow("t")
    async with asyncio.timeout(60):
        assert await anext(chunks) == {"stream": "stdout", "offset": 0, "data": b"first\n"}
    assert [chunk["data"] async for chunk in keeper.read("t", stdout_from=2)] == [b"rst\n"]
    await keeper.cancel("t", grace_s=0)
    _, end = await collect(chunks)
    assert end["signal"] in (9, 15)


async def test_a_lost_task_ends_the_following(keeper: TaskKeeper) -> None:
    status = keeper.start("t", TaskSpec(["sleep", "600"]))
    os.kill(status.shim_pid, signal.SIGKILL)
    _, end = await collect(keeper.follow("t"))
    assert end["state"] == "lost"


async def test_no_such_task(keeper: TaskKeeper) -> None:
    with pytest.raises(NotFound):
        await anext(keeper.follow("t"))
