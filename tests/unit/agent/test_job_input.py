"""A job's standard input is exact: each byte once, in order, its end only when it is said, whoever dies meanwhile."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from distributed_grid.agent import job_input
from distributed_grid.agent import lease_checkpoints as checkpoints
from distributed_grid.agent.spool import EXIT, PIPE, TaskSpec
from distributed_grid.agent.tasks import TaskKeeper
from distributed_grid.core.errors import Refused, TimedOut, UsageError
from tests.lab.waiting import wait_until

LIMIT_S = 60.0


@pytest.fixture
async def keeper(grid_home: Path) -> AsyncIterator[TaskKeeper]:
    keeper = TaskKeeper(grid_home / "spool", "gpu1")
    yield keeper
    for status in keeper.list():
        await keeper.cancel(status.task_id, grace_s=0)
        keeper.remove(status.task_id)


async def give(keeper: TaskKeeper, data: bytes, offset: int, last: bool = False) -> bool:
    """As an agent does; each call may as well be another agent's, for nothing is kept in between."""
    place = keeper.spool / "t"
    return await job_input.accept(
        place, data, offset, last, lambda: (place / EXIT).exists(), lambda: keeper.wake_shim("t")
    )


def said(keeper: TaskKeeper) -> str:
    return (keeper.spool / "t" / "stdout").read_text()


async def test_a_repeat_is_dropped_and_the_end_is_said_once(keeper: TaskKeeper) -> None:
    keeper.start("t", TaskSpec(["cat"], stdin=PIPE))
    await give(keeper, b"one ", 0)
    await give(keeper, b"one ", 0)
    wait_until(lambda: said(keeper) == "one ", LIMIT_S, "the first part")
    await give(keeper, b"one ", 0)
    await give(keeper, b"two", 4)
    with pytest.raises(UsageError):
        await give(keeper, b"four", 9)
    wait_until(lambda: said(keeper) == "one two", LIMIT_S, "the second part")
    assert keeper.status("t").state == "running", "no agent is there now, and that is no end of file"
    await give(keeper, b"", 7, last=True)
    await give(keeper, b"", 7, last=True)
    assert (await keeper.wait("t", LIMIT_S)).exit_code == 0
    await give(keeper, b"late", 7)
    assert said(keeper) == "one two"


async def test_much_of_it_to_a_slow_reader(keeper: TaskKeeper, tmp_path: Path) -> None:
    """More than the FIFO and the parts ahead hold; each part is sent twice."""
    data = os.urandom(3 * 1024 * 1024 + 17)
    keeper.start("t", TaskSpec(["sh", "-c", "sleep 0.3; sha256sum"], stdin=PIPE))
    async with asyncio.timeout(LIMIT_S):
        for at in range(0, len(data), 65536):
            for _ in range(2):
                await give(keeper, data[at : at + 65536], at)
            assert len(list((keeper.spool / "t" / "input").iterdir())) <= job_input.PARTS_AHEAD
        await give(keeper, b"", len(data), last=True)
    assert (await keeper.wait("t", LIMIT_S)).exit_code == 0
    assert said(keeper).split()[0] == hashlib.sha256(data).hexdigest()


async def test_who_does_not_read_is_waited_for_and_nothing_is_dropped(
    keeper: TaskKeeper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = tmp_path / "go"
    script = f"while ! test -e {go}; do sleep 0.02; done; wc -c; exit 3"
    keeper.start("t", TaskSpec(["sh", "-c", script], stdin=PIPE))
    monkeypatch.setattr(job_input, "WAIT_LIMIT_S", 0.05)
    at = 0
    with pytest.raises(TimedOut):
        while at < 10_000_000:
            await give(keeper, b"x" * 65536, at)
            at += 65536
    go.write_text("")
    monkeypatch.setattr(job_input, "WAIT_LIMIT_S", LIMIT_S)
    await give(keeper, b"x" * 65536, at, last=True)
    assert (await keeper.wait("t", LIMIT_S)).exit_code == 3, "its exit is seen while the shim hands on"
    assert said(keeper).strip() == str(at + 65536)


async def test_a_job_that_leaves_its_input_alone(keeper: TaskKeeper) -> None:
    keeper.start("t", TaskSpec(["sh", "-c", "exec <&-; sleep 0.2; exit 4"], stdin=PIPE))
    async with asyncio.timeout(LIMIT_S):
        for at in range(0, 4_000_000, 65536):
            await give(keeper, b"x" * 65536, at)
    assert (await keeper.wait("t", LIMIT_S)).exit_code == 4


@pytest.mark.root
@pytest.mark.criu
async def test_input_goes_on_after_a_time_on_disk(keeper: TaskKeeper) -> None:
    keeper.start("t", TaskSpec(["sh", "-c", "while read line; do echo got $line; done"], stdin=PIPE))
    place = keeper.spool / "t"
    await give(keeper, b"one\n", 0)
    wait_until(lambda: said(keeper) == "got one\n", LIMIT_S, "the first line")
    await checkpoints.store_all({place: keeper.processes("t")}, [], LIMIT_S)
    await give(keeper, b"two\n", 4)
    assert said(keeper) == "got one\n", "it is on disk"
    await checkpoints.bring_back(place, [], LIMIT_S)
    wait_until(lambda: said(keeper) == "got one\ngot two\n", LIMIT_S, "the second line")
    await give(keeper, b"", 8, last=True)
    assert (await keeper.wait("t", LIMIT_S)).exit_code == 0


@pytest.mark.root
@pytest.mark.criu
async def test_unread_input_is_not_stored(keeper: TaskKeeper) -> None:
    keeper.start("t", TaskSpec(["sleep", "600"], stdin=PIPE))
    await give(keeper, b"typed", 0, last=True)
    with pytest.raises(Refused) as caught:
        for _ in range(100):
            await checkpoints.store_all({keeper.spool / "t": keeper.processes("t")}, [], LIMIT_S)
            await checkpoints.bring_back(keeper.spool / "t", [], LIMIT_S)
    assert "it has not read its input" in caught.value.cause
