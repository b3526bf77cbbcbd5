"""What lending does by itself: gives way, sees that a node was started anew, forgets starts that failed."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from distributed_grid.core.errors import Refused
from distributed_grid.core.resources import GB
from distributed_grid.daemon import lending_boosts, lending_loop, lending_ray
from distributed_grid.daemon.lending_boosts import BoostFile
from distributed_grid.daemon.lending_claims import UNSTARTED_S
from distributed_grid.daemon.lending_ray import RayGroups
from distributed_grid.orchestration.resource_sharing.model import LeaseState
from distributed_grid.store.tasks import TaskRow
from distributed_grid.wire.rpc import CallContext
from tests.unit.daemon.lending_fakes import HIGH, LOW, MEMORY, NORMAL, Bench

ROOT = CallContext(uid=0)


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    found = Bench(tmp_path)
    yield found
    await found.close()


async def round_of(bench: Bench) -> None:
    """One of the loop's, without its watchers."""
    bench.service.loop.refresh()
    bench.service.loop._give_way()
    bench.book.pump()
    await bench.quiet()


# The owner


async def test_an_owner_who_needs_memory_gets_it_from_low(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lending_loop, "OWNER_BACK_S", 0.0)
    low = await bench.lent(1, LOW, "gpu1", kind="run", memory=10 * GB)
    normal = await bench.lent(1, NORMAL, "gpu1", kind="run", memory=5 * GB)
    idle = bench.shots["gpu1"]
    bench.shots["gpu1"] = replace(idle, memory_used_bytes=int(MEMORY * 0.95))
    await round_of(bench)
    await round_of(bench)
    assert bench.lease(low.id).state is LeaseState.SUSPENDED
    assert bench.lease(low.id).held.memory_bytes == 0, "it is on disk: a frozen one would keep its memory"
    assert bench.agents["gpu1"].calls.count("lease_checkpoint") == 1
    assert bench.lease(normal.id).state is LeaseState.ACTIVE
    bench.shots["gpu1"] = idle
    await round_of(bench)
    assert bench.lease(low.id).state is LeaseState.ACTIVE, "he is gone again"


async def test_an_owner_who_needs_cores_gets_them_from_low(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lending_loop, "OWNER_BACK_S", 0.0)
    monkeypatch.setattr(lending_loop, "SMOOTHING", 1.0)
    low = await bench.lent(2, LOW, "gpu1", kind="run", memory=10 * GB)
    bench.shots["gpu1"] = replace(bench.shots["gpu1"], at=1.0, cpu_cores_used=8.0)
    await round_of(bench)
    held = bench.lease(low.id).held
    assert (held.cores, held.memory_bytes) == ((), 10 * GB), "frozen where it is"


# Rest


async def test_a_node_that_rests_freezes_what_may_be_frozen(bench: Bench) -> None:
    normal = await bench.lent(1, NORMAL, "gpu1", kind="run")
    memory = await bench.lent(0, LOW, "gpu1", kind="run", memory=GB)
    high = await bench.lent(1, HIGH, "gpu1", kind="run")
    boost = await bench.lent(1, NORMAL, "gpu1")
    elsewhere = await bench.lent(1, LOW, "gpu2", kind="run")
    bench.book.cooling.add("gpu1")
    for _ in range(3):  # and stays so
        await round_of(bench)
    states = {one.id: bench.lease(one.id).state for one in (normal, memory, high, boost, elsewhere)}
    assert [states[one.id] for one in (normal, memory)] == [LeaseState.SUSPENDED] * 2
    assert [states[one.id] for one in (high, boost, elsewhere)] == [LeaseState.ACTIVE] * 3
    assert bench.lease(memory.id).held.memory_bytes == GB, "nothing is ended or lost for a rest"
    assert "lease_resume" not in bench.agents["gpu1"].calls
    bench.book.cooling.clear()
    await round_of(bench)
    assert [bench.lease(one.id).state for one in (normal, memory)] == [LeaseState.ACTIVE] * 2


# A node that was started anew


async def test_the_lease_of_a_command_is_lost_with_its_node_and_a_boost_is_not(bench: Bench) -> None:
    run, boost = await bench.lent(1, node="gpu1", kind="run"), await bench.lent(1, node="gpu1")
    await bench.compare()
    assert bench.lease(run.id).state is LeaseState.ACTIVE, "known for the first time"
    bench.agents["gpu1"].state.agent = {"boot_id": "second"}
    await bench.restart()
    await bench.compare()
    assert run.id not in bench.book.ledger.leases and bench.state(run.id) is LeaseState.LOST
    assert bench.lease(boost.id).state is LeaseState.ACTIVE
    assert "lease.lost" in bench.kinds()
    again = await bench.lent(1, node="gpu1", kind="run")
    await bench.compare()
    assert bench.lease(again.id).state is LeaseState.ACTIVE, "that was told once"


async def test_the_end_of_its_command_may_be_told_first(bench: Bench) -> None:
    run = await bench.lent(1, node="gpu1", kind="run")
    await bench.compare()
    bench.agents["gpu1"].state.agent = {"boot_id": "second"}
    bench.service.loop.forget_task(run.tasks[0])
    await bench.quiet()
    assert bench.state(run.id) is LeaseState.LOST


# Starts


@pytest.mark.parametrize("known", ["", "prepared", "running"])
async def test_a_start_that_never_reached_its_agent_is_forgotten(bench: Bench, known: str) -> None:
    boost = await bench.lent(1, node="gpu1")
    agent, asked_at = bench.agents["gpu1"], time.time() - UNSTARTED_S - 1
    bench.journal.tasks.put(TaskRow("task_1_x", "gpu1", 0, ["x"], "prepared", asked_at, detail={"lease": boost.id}))
    bench.journal.tasks.put(TaskRow("task_2_x", "gpu1", 0, ["x"], "prepared", time.time(), detail={"lease": boost.id}))
    bench.book.set(boost.id, tasks=("task_1_x", "task_2_x"))
    bench.book.task_lease.update({"task_1_x": boost.id, "task_2_x": boost.id})
    if known:
        agent.tasks["task_1_x"] = {"task_id": "task_1_x", "state": known}
    bench.service.loop.claims.look_for_unstarted()
    await bench.quiet()
    if known == "running":
        assert bench.lease(boost.id).tasks == ("task_1_x", "task_2_x"), "only the answer was lost"
        assert bench.journal.tasks.get("task_1_x").state == "running"
    else:
        assert bench.lease(boost.id).tasks == ("task_2_x",), "the other may be on its way"
        assert bench.journal.tasks.get("task_1_x").state == "failed"


async def test_one_being_started_just_now_is_left_alone(bench: Bench) -> None:
    run = await bench.lent(1, node="gpu1", kind="run")
    bench.journal.tasks.update(run.tasks[0], state="prepared", created=time.time() - UNSTARTED_S - 1)
    bench.agents["gpu1"].errors["task_remove"] = Refused("it is being started", code="task-running")
    bench.service.loop.claims.look_for_unstarted()
    await bench.quiet()
    assert bench.lease(run.id).tasks == run.tasks


# What follows in the background


async def test_the_boosts_file_follows_and_nobody_waits_for_it(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lending_boosts, "DELAY_S", 3600.0)
    file = BoostFile(bench.folder / "boosts.json", bench.book)
    file.start()
    try:
        await file.written()
        writes = []
        monkeypatch.setattr(file, "_write", lambda boosts: writes.append(len(boosts)))
        first = await bench.lent(1)
        await bench.lent(1)
        assert writes == [], "not in the way of the next request"
        await file.written()
        assert writes == [2], "at once for who wants to see it"
        monkeypatch.undo()
        await bench.book.release(first.id)
        await file.written()
        assert len(json.loads((bench.folder / "boosts.json").read_text())["boosts"]) == 1
    finally:
        await file.close()


async def test_ray_is_followed_whatever_happens(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lending_ray, "LOOK_S", 0.001)
    monkeypatch.setattr(lending_ray, "AGE_S", 0.0)
    calls = []

    async def bridge() -> object:
        calls.append(1)
        if len(calls) == 1:
            raise OSError(24, "Too many open files")

        async def call(verb: str, **_more: object) -> dict[str, object]:
            return {} if verb == "lease_groups" else {"id": "group", "ready": True}

        return SimpleNamespace(call=call)

    plane = SimpleNamespace(journal=bench.journal, keeper=SimpleNamespace(is_up=True, joined_bridge=bridge))
    groups = RayGroups(plane, bench.book)  # type: ignore[arg-type]
    lease = await bench.lent(1)
    groups.start()
    try:
        async with asyncio.timeout(10):
            assert await groups.ready(lease, 10) == "group"
    finally:
        await groups.close()
