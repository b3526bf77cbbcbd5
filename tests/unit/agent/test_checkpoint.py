"""A task goes to disk and comes back: its memory is free meanwhile, and it goes on where it was."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from distributed_grid.agent import lease_checkpoints as checkpoints
from distributed_grid.agent import terminal
from distributed_grid.agent.spool import TaskSpec
from distributed_grid.agent.tasks import TaskKeeper
from distributed_grid.core.errors import Refused
from tests.lab.waiting import wait_until

pytestmark = [pytest.mark.root, pytest.mark.criu]
LIMIT_S = 60.0
COUNTER = "(sleep 1000) & i=0; while true; do echo $i; i=$((i+1)); sleep 0.02; done"


@pytest.fixture
async def keeper(grid_home: Path) -> AsyncIterator[TaskKeeper]:
    keeper = TaskKeeper(grid_home / "spool", "gpu1")
    yield keeper
    for status in keeper.list():
        await keeper.cancel(status.task_id, grace_s=0)
        keeper.remove(status.task_id)


def count(keeper: TaskKeeper) -> int:
    lines = (keeper.spool / "t" / "stdout").read_text().splitlines(keepends=True)
    whole = [line.strip() for line in lines if line.endswith("\n")]
    assert whole == [str(number) for number in range(len(whole))], "no gap, and nothing twice"
    return len(whole)


def goes_on(keeper: TaskKeeper, before: int) -> None:
    wait_until(lambda: count(keeper) > before + 3, LIMIT_S, "the task to go on")


def start(keeper: TaskKeeper) -> Path:
    keeper.start("t", TaskSpec(["sh", "-c", COUNTER]))
    wait_until(lambda: count(keeper) > 3, LIMIT_S, "the task to count")
    return keeper.spool / "t"


async def test_twice_to_disk_and_back(keeper: TaskKeeper) -> None:
    place = start(keeper)
    pids = keeper.processes("t")
    for _ in range(2):
        await checkpoints.store_all({place: keeper.processes("t")}, [0], LIMIT_S)
        assert checkpoints.state_of(place) == "stored" and keeper.processes("t") == []
        assert keeper.status("t").state == "running", "nobody sees an end"
        before = count(keeper)
        # A keeper of a new agent knows as much.
        assert not TaskKeeper(keeper.spool, "gpu1").signal("t", signal.SIGUSR2)
        await checkpoints.bring_back(place, [0], LIMIT_S)
        goes_on(keeper, before)
    assert keeper.status("t").pid in keeper.processes("t") and keeper.status("t").pid != pids[0]
    assert len(keeper.processes("t")) >= len(pids) - 1
    ended = await keeper.cancel("t", grace_s=0)
    assert ended.signal == signal.SIGTERM
    assert not (place / "checkpoint").exists()


async def test_its_input_and_its_terminal_go_on(keeper: TaskKeeper, tmp_path: Path) -> None:
    """As `run-shared` gives them to a command: a FIFO that the agent holds open, and a terminal of its own."""
    fifo = tmp_path / "stdin"
    os.mkfifo(fifo)
    typing = os.open(fifo, os.O_RDWR | os.O_NONBLOCK)
    script = "while read line; do echo got $line; done; test -t 1 && echo end"
    argv = [sys.executable, "-I", "-S", terminal.__file__, "24x80", str(tmp_path / "size"), "stdin", "sh", "-c", script]
    keeper.start("t", TaskSpec(argv, stdin=str(fifo)))
    place = keeper.spool / "t"

    def wait_for(text: str) -> None:
        wait_until(lambda: text in (place / "stdout").read_text(), LIMIT_S, text)

    os.write(typing, b"one\n")
    wait_for("got one\n")
    await checkpoints.store_all({place: keeper.processes("t")}, [], LIMIT_S)
    await checkpoints.bring_back(place, [], LIMIT_S)
    os.write(typing, b"two\n")
    wait_for("got two\n")
    os.close(typing)
    assert (await keeper.wait("t", LIMIT_S)).exit_code == 0
    assert (place / "stdout").read_text() == "got one\ngot two\nend\n"


async def test_what_is_on_disk_can_be_ended(keeper: TaskKeeper) -> None:
    place = start(keeper)
    await checkpoints.store_all({place: keeper.processes("t")}, [], LIMIT_S)
    ended = await keeper.cancel("t", grace_s=0)
    assert (ended.state, ended.signal) == ("exited", signal.SIGTERM)
    assert not (place / "checkpoint").exists()


async def test_what_cannot_be_stored_runs_on(keeper: TaskKeeper) -> None:
    keeper.start("u", TaskSpec(["sh", "-c", "(setsid sleep 1000 &); echo up; exec sleep 1000"]))
    wait_until(lambda: "up" in (keeper.spool / "u" / "stdout").read_text(), LIMIT_S, "it to be up")
    before = keeper.processes("u")
    with pytest.raises(Refused, match="can't be stored on disk"):
        await checkpoints.store_all({keeper.spool / "u": before}, [], LIMIT_S)
    wait_until(lambda: checkpoints.state_of(keeper.spool / "u") == "running", LIMIT_S, "the shim's answer")
    assert keeper.processes("u") == before


async def test_an_image_that_is_damaged_ends_the_task(keeper: TaskKeeper) -> None:
    place = start(keeper)
    await checkpoints.store_all({place: keeper.processes("t")}, [], LIMIT_S)
    (place / "checkpoint" / "pstree.img").write_bytes(b"nonsense")
    for _ in range(3):
        checkpoints.order(place, "run")
        wait_until(lambda: checkpoints.state_of(place) != "changing", LIMIT_S, "the shim's answer")
    ended = await keeper.wait("t", LIMIT_S)
    failure = ended.failure()
    assert ended.state == "failed" and failure is not None and "cannot bring back" in failure.message
