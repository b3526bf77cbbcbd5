"""Commands under leases, with an agent that answers when the test lets it."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distributed_grid.core.errors import GridError, Refused, Unavailable
from distributed_grid.core.resources import GB, AllocationPriority
from distributed_grid.daemon import lending_jobs
from distributed_grid.daemon.lending_book import LendingBook
from distributed_grid.daemon.lending_jobs import LendingJobs
from distributed_grid.orchestration.resource_sharing.model import Amounts, Grant, Lease, LeaseState
from distributed_grid.store.journal import Journal
from distributed_grid.wire.rpc import CallContext

ME = CallContext(uid=os.geteuid())
LIMIT_S = 10.0


class Agent:
    """A node's agent and the line to it."""

    def __init__(self) -> None:
        self.state = SimpleNamespace(online=True, agent={"uid": 0})
        self.called: list[str] = []
        self.starts = asyncio.Event()
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.may_claim = asyncio.Event()
        self.may_claim.set()
        self.wrong: GridError | None = None

    async def client(self, wait_s: float = 0.0) -> None:
        return

    def ask(self, name: str, **arguments: Any) -> asyncio.Future[Any]:
        return asyncio.ensure_future(self.call(name, **arguments))

    async def call(self, name: str, **arguments: Any) -> Any:
        self.called.append(name)
        if name == "lease_claim":
            await self.may_claim.wait()
        if name == "lease_start":
            self.starts.set()
            await self.may_start.wait()
            if self.wrong:
                raise self.wrong
            return {"task_id": arguments["task_id"], "state": "running"}
        if name == "task_status":
            return {"task_id": arguments["task_id"], "state": "exited"}
        return None


class Grid:
    def __init__(self, journal: Journal) -> None:
        self.agent = Agent()
        self.cancelled: list[str] = []
        self.noted: list[Any] = []

        async def task_cancel(context: CallContext, *, task_id: str) -> None:
            self.cancelled.append(task_id)

        self.plane: Any = SimpleNamespace(
            journal=journal, links=SimpleNamespace(get=lambda _: self.agent, names=lambda: ["gpu1"]),
            stop_asked=asyncio.Event(),
            tasks=SimpleNamespace(note=lambda node, status: self.noted.append(status), task_cancel=task_cancel),
            events=SimpleNamespace(publish=lambda *_, **__: None),
        )  # fmt: skip
        self.book = LendingBook(self.plane)
        self.book.ledger.set_node("gpu1", 8, (), 32 * GB)
        self.book.ledger.offer("gpu1", Amounts(8, 0, 32 * GB))
        lending: Any = SimpleNamespace(
            book=self.book, own=lambda _, lease: lease, usable=lambda _, name: self.book.ledger.leases[name],
            loop=SimpleNamespace(forget_task=self.forget), wait=lambda waiter, _: asyncio.shield(waiter.granted),
        )  # fmt: skip
        self.jobs = LendingJobs(self.plane, lending)
        self.jobs.start()

    def forget(self, task_id: str) -> None:
        lease_id = self.book.task_lease.pop(task_id)
        tasks = tuple(one for one in self.book.ledger.leases[lease_id].tasks if one != task_id)
        self.book.set(lease_id, tasks=tasks)

    def lend(self, name: str, kind: str = "run") -> Lease:
        grant = Grant((0,), (), 0) if kind == "run" else Grant((1, 2), (), 0)
        lease = Lease(
            name, kind, "gpu1", "gpu-master", ME.uid, AllocationPriority.NORMAL, grant, 1, 1.0,
            state=LeaseState.ACTIVE, held=grant,
        )  # fmt: skip
        return self.book.write(self.book.ledger.add(lease))

    def run(self, task_id: str = "t", **arguments: Any) -> Any:
        return self.jobs.lease_run(ME, argv=["true"], task_id=task_id, **arguments)

    def state(self, name: str) -> str:
        lease = self.book.ledger.leases.get(name)
        return lease.state.value if lease else "over"


@pytest.fixture
async def grid(tmp_path: Path) -> AsyncIterator[Grid]:
    with Journal.open(tmp_path / "journal.sqlite3") as journal:
        grid = Grid(journal)
        yield grid
        await grid.book.close()


async def until(true: Any) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not true():
            await asyncio.sleep(0)


async def hang_up(asking: asyncio.Task[Any]) -> None:
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)


@pytest.mark.parametrize("ticks", range(12))
async def test_whoever_hangs_up_before_it_runs_leaves_nothing(grid: Grid, ticks: int) -> None:
    """At any moment of the start, whether the agent has begun it or not."""
    grid.lend("run")
    grid.agent.may_start.clear()
    stream = grid.run(lease_id="run")
    asking = asyncio.create_task(anext(stream))
    for _ in range(ticks):
        await asyncio.sleep(0)
    await hang_up(asking)
    await stream.aclose()
    grid.agent.may_start.set()
    if "lease_start" in grid.agent.called or ticks:
        await until(lambda: grid.state("run") == "over")
        assert grid.agent.called[-1] == "lease_release", "which ends what runs under it, after it was started"


async def test_hanging_up_ends_the_command_but_not_the_boost(grid: Grid) -> None:
    grid.lend("boost", "boost")
    grid.agent.may_start.clear()
    asking = asyncio.create_task(anext(grid.run(lease="boost")))
    await grid.agent.starts.wait()
    await hang_up(asking)
    assert not grid.cancelled, "the agent is at it: first it begins"
    grid.agent.may_start.set()
    await until(lambda: grid.cancelled == ["t"])
    assert grid.state("boost") == "active"


async def test_a_daemon_that_stops_is_not_a_caller_who_leaves(grid: Grid) -> None:
    grid.lend("run")
    grid.agent.may_start.clear()
    asking = asyncio.create_task(anext(grid.run(lease_id="run")))
    await grid.agent.starts.wait()
    grid.plane.stop_asked.set()
    await hang_up(asking)
    grid.agent.may_start.set()
    await asyncio.sleep(0.01)
    assert grid.state("run") == "active" and not grid.cancelled


async def test_what_runs_is_not_ended_because_its_node_is_away_when_it_is_asked_for_again(grid: Grid) -> None:
    grid.lend("run")
    stream = grid.run(lease_id="run")
    assert "started" in await anext(stream)
    await stream.aclose()
    grid.agent.wrong = Unavailable("gpu1 is not online")
    with pytest.raises(Unavailable):
        await anext(grid.run(lease_id="run"))
    await asyncio.sleep(0.01)
    assert grid.state("run") == "active"


async def test_nothing_starts_under_a_lease_that_is_not_active(grid: Grid) -> None:
    """Given away while the files were sent: a boost's command is refused, one with a lease of its own waits."""
    for name, kind in (("boost", "boost"), ("run", "run")):
        grid.lend(name, kind)
        arguments = {"lease": name} if kind == "boost" else {"lease_id": name}
        stream = grid.run(f"in-{name}", files=True, **arguments)
        assert await anext(stream) == {"send": "gpu1"}
        grid.book.set(name, state=LeaseState.SUSPENDED, reason="preempted")
        await grid.jobs.job_put(ME, task_id=f"in-{name}", data=b"", last=True)
        asking = asyncio.create_task(anext(stream))
        if kind == "boost":
            with pytest.raises(Refused) as caught:
                await asking
            assert caught.value.code == "lease-not-active"
        else:
            await asyncio.sleep(0.1)
            assert not asking.done()
            grid.book.set(name, state=LeaseState.ACTIVE, reason="")
            assert "started" in await asking
            await stream.aclose()
        assert ("lease_start" in grid.agent.called) is (kind == "run")


async def test_who_is_only_being_claimed_for_is_not_told_to_wait(grid: Grid, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lending_jobs, "FIRST_LOOK_S", 0.001)
    monkeypatch.setattr(lending_jobs, "LOOK_S", 0.001)
    grid.agent.may_claim.clear()
    waiter = grid.book.enqueue("w", Amounts(cpu=1), AllocationPriority.NORMAL, ME.uid, kind="run", target="gpu-master")
    told: list[Any] = []

    async def wait() -> None:
        async for item in grid.jobs._waiting(waiter, None):
            told.append(item)

    waiting = asyncio.create_task(wait())
    await asyncio.sleep(0.05)
    grid.agent.may_claim.set()
    await waiting
    assert grid.state("w") == "active" and not told


async def test_each_command_of_a_boost_is_told_and_nothing_is_kept_for_those_who_have_gone(grid: Grid) -> None:
    grid.lend("boost", "boost")
    streams = [grid.run(name, lease="boost") for name in ("a", "b")]
    for stream in streams:
        assert "started" in await anext(stream)
    grid.book.set("boost", state=LeaseState.SUSPENDED, reason="preempted for another")
    for stream in streams:
        assert await anext(stream) == {"notice": "suspended: preempted for another"}
    grid.book.set("boost", state=LeaseState.ACTIVE, reason="")
    for stream in streams:
        assert await anext(stream) == {"notice": "it goes on"}
        await stream.aclose()
    assert not grid.jobs._notices


async def test_the_end_of_what_was_ended_with_its_lease_is_known(grid: Grid) -> None:
    """The agent's watch tells of tasks in leases: this one is in none any more."""
    grid.lend("run")
    stream = grid.run(lease_id="run")
    await anext(stream)
    await grid.book.release("run", reason="released")
    await until(lambda: grid.noted[-1] == {"task_id": "t", "state": "exited"})
    await stream.aclose()


async def test_the_end_is_told_at_once_with_why_it_had_to_make_room(grid: Grid) -> None:
    grid.lend("run")
    stream = grid.run(lease_id="run")
    await anext(stream)
    grid.book.set("run", state=LeaseState.RELEASING, reason="preempted for another")
    assert await anext(stream) == {"notice": "releasing: preempted for another"}
    over = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    grid.forget("t")
    async with asyncio.timeout(0.3):  # not only at the next look
        assert await over == {"over": True}
    assert await grid.jobs.job_made_room(ME, task_id="t", lease_id="run") == "preempted for another"
    grid.book.finish("run", LeaseState.RELEASED)
    assert await grid.jobs.job_made_room(ME, task_id="t", lease_id="run") == "preempted for another"
    grid.lend("other")
    assert await grid.jobs.job_made_room(ME, task_id="u", lease_id="other") == ""
    with contextlib.suppress(StopAsyncIteration):
        await anext(stream)
