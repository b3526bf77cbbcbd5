"""The word to go, and what its answer says: only from that can be told whether the program ever ran."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distributed_grid.agent.services import TaskCalls
from distributed_grid.agent.spool import SPEC, TaskSpec
from distributed_grid.agent.tasks import TaskKeeper
from distributed_grid.core.errors import NotFound
from distributed_grid.daemon.mover import why_never_ran
from distributed_grid.wire.rpc import CallContext
from tests.lab.waiting import wait_until

LIMIT_S = 60.0


class Held:
    """A node's tasks, and one that is held just before its exec."""

    def __init__(self, spool: Path) -> None:
        self.keeper = TaskKeeper(spool, "gpu1")
        self._calls = TaskCalls(SimpleNamespace(tasks=self.keeper))  # type: ignore[arg-type]

    def start(self, *argv: str) -> None:
        assert self.keeper.start("t", TaskSpec(list(argv), hold=True)).state == "staged"

    async def go(self) -> dict[str, Any]:
        return await self._calls.task_go(CallContext(), task_id="t")

    def kill_shim(self) -> None:
        os.kill(self.keeper.status("t").shim_pid, signal.SIGKILL)
        wait_until(lambda: self.keeper.status("t").state == "lost", LIMIT_S, "the shim to be gone")


@pytest.fixture
async def held(grid_home: Path) -> AsyncIterator[Held]:
    made = Held(grid_home / "spool")
    yield made
    for status in made.keeper.list():
        await made.keeper.cancel(status.task_id, grace_s=0)
        made.keeper.remove(status.task_id)


def facts(status: dict[str, Any]) -> tuple[str, bool, bool, bool]:
    return status["state"], status["started"], status["going"], status["rebooted"]


async def test_the_answer_is_that_it_runs_not_that_it_is_about_to(held: Held) -> None:
    held.start("sleep", "1000")
    first, again = await asyncio.gather(held.go(), held.go())
    assert facts(first) == facts(again) == ("running", True, True, False)
    assert first["pid"] and not why_never_ran(first)


async def test_a_program_that_is_gone_by_then_has_not_started(held: Held, tmp_path: Path) -> None:
    script = tmp_path / "program"
    script.write_text("#!/bin/sh\nexit 3\n")
    script.chmod(0o755)
    held.start(str(script))
    script.unlink()
    status = await held.go()
    assert facts(status) == ("failed", False, True, False)
    assert str(script) in why_never_ran(status)


async def test_a_copy_that_was_lost_before_the_word_has_not_started(held: Held) -> None:
    held.start("sleep", "1000")
    held.kill_shim()
    status = await held.go()
    assert facts(status) == ("lost", False, False, False)
    assert why_never_ran(status)


async def test_a_copy_that_was_lost_after_the_word_may_have_run(held: Held) -> None:
    held.start("sleep", "1000")
    await held.go()
    held.kill_shim()
    status = await held.go()
    assert facts(status) == ("lost", True, True, False)
    assert not why_never_ran(status)


async def test_a_node_that_was_started_anew_says_so(held: Held) -> None:
    held.start("sleep", "1000")
    await held.go()
    held.kill_shim()
    path = held.keeper.spool / "t" / SPEC
    path.write_text(json.dumps({**json.loads(path.read_text()), "boot_id": "another"}))
    status = await held.go()
    assert facts(status) == ("lost", True, True, True)
    assert why_never_ran(status)


async def test_there_must_be_a_task(held: Held) -> None:
    with pytest.raises(NotFound) as error:
        await held.go()
    assert error.value.code == "task-not-found"
