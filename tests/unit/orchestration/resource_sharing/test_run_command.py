"""`run_with_shared_resources` at a daemon that goes, a worker that is silent, and a caller who gives up."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from distributed_grid.core import GridOrchestrator
from distributed_grid.core.errors import GridError, NotFound, Unavailable, UsageError
from distributed_grid.orchestration.resource_sharing import jobs
from distributed_grid.wire.channel import ChannelClosed

ENDED = {"state": "exited", "exit_code": 0, "started_at": 1.0, "ended_at": 2.0}
STARTED = {"node": "gpu1", "lease": {"id": "lease", "grant": {"cores": [0], "gpus": []}}}


class Line:
    """What the daemon would say, by call; a list of answers is used up one by one."""

    def __init__(self, **said: list[Any]) -> None:
        self._said = said
        self.called: list[str] = []
        self.is_open = True

    async def call(self, name: str, *, timeout_s: float | None = 60.0, **arguments: Any) -> Any:
        self.called.append(name)
        answers = self._said.get(name, [])
        return answers.pop(0) if answers else None

    async def stream(self, name: str, **arguments: Any) -> AsyncIterator[Any]:
        self.called.append(name)
        for item in self._said[name].pop(0):
            if isinstance(item, Exception):
                raise item
            if item == "silence":
                await asyncio.sleep(600)
            yield item


async def run(line: Line, **arguments: Any) -> jobs.SharedResult:
    async def open_line() -> Line:
        return line

    return await jobs.run_command(open_line, ["true"], request={"amounts": {"cpu": 1}}, stage=None, **arguments)


async def test_a_worker_that_is_away_is_told_and_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    away = [{"away": "gpu1 is not online"}, {"stream": "stdout", "data": b"hi"}, {"exit": ENDED}]
    told: list[str] = []
    done = await run(Line(lease_run=[[{"started": STARTED}]], task_follow=[list(away)]), on_away=told.append)
    assert (done.exit_code, done.stdout, told) == (0, "hi", ["gpu1 is not online"])
    with caplog.at_level(logging.WARNING):
        await run(Line(lease_run=[[{"started": STARTED}]], task_follow=[list(away)]))
    assert "gpu1 is not online" in caplog.text


async def test_a_lost_worker_or_room_made_and_it_runs_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "LOST_S", 0.01)
    starts = [[{"started": STARTED}] for _ in range(4)]
    follows: list[Any] = [
        [{"away": "gpu1 is not online"}, "silence"],
        [{"exit": {**ENDED, "state": "lost", "exit_code": None}}],
        [{"exit": {**ENDED, "exit_code": 143}}],
        [{"exit": ENDED}],
    ]
    line = Line(lease_run=starts, task_follow=follows, job_made_room=["preempted for another", ""])
    done = await run(line, retry=True)
    assert done.exit_code == 0 and line.called.count("lease_run") == 4
    assert line.called.count("lease_release") == 1, "of the silent one, so that nothing runs twice"


async def test_without_retry_a_program_that_made_room_has_its_own_exit_code() -> None:
    line = Line(lease_run=[[{"started": STARTED}]], task_follow=[[{"exit": {**ENDED, "exit_code": 143}}]])
    assert (await run(line)).exit_code == 143


async def test_called_off_at_any_moment_it_is_ended() -> None:
    for said in ({"lease_run": [["silence"]]}, {"lease_run": [[{"started": STARTED}]], "task_follow": [["silence"]]}):
        line = Line(**said)
        running = asyncio.create_task(run(line))
        await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert line.called[-1] == "task_cancel"


async def test_a_daemon_that_comes_back_is_not_noticed() -> None:
    lost = ChannelClosed("gone")
    line = Line(
        lease_run=[[lost], [{"started": STARTED}]],
        task_follow=[[{"stream": "stdout", "data": b"a"}, lost], [{"stream": "stdout", "data": b"b"}, {"exit": ENDED}]],
    )
    assert (await run(line)).stdout == "ab"


async def test_a_daemon_that_is_never_there_leaves_the_callers_program_its_time() -> None:
    """Each try fails without waiting: the loop must wait, or nothing else would ever run."""
    line = Line(lease_run=[[ChannelClosed("gone")] for _ in range(100_000)])
    running = asyncio.create_task(run(line))
    await asyncio.sleep(0.2)
    assert 1 <= line.called.count("lease_run") < 50
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_the_orchestrators_own_control_plane_was_stopped(grid_home: Path) -> None:
    grid = GridOrchestrator()
    line: Any = Line()
    line.is_open = False
    grid._client = line
    async with asyncio.timeout(5):
        for work in (grid.run_with_shared_resources("true"), grid._follow("t", "gpu1")):
            with pytest.raises(Unavailable) as caught:
                await work
            assert caught.value.code == "no-daemon"


async def test_a_waiting_time_that_is_no_number() -> None:
    async def open_line() -> Line:
        raise NotFound("not asked for")

    with pytest.raises(UsageError):
        await jobs.run_command(open_line, ["true"], request={"wait_s": float("nan")})


async def test_an_error_of_the_command_is_raised() -> None:
    wrong = {**ENDED, "state": "failed", "error": NotFound("there is no command", code="command-not-found").to_wire()}
    with pytest.raises(GridError, match="there is no command"):
        await run(Line(lease_run=[[{"started": STARTED}]], task_follow=[[{"exit": wrong}]]))
