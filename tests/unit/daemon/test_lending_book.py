"""The book with agents of the test's own: who waits for whom, what a fault leaves behind, what a new daemon finds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from distributed_grid.core.errors import GridError, InternalError, Refused, UsageError
from distributed_grid.core.resources import GB
from distributed_grid.daemon import lending_book
from distributed_grid.orchestration.resource_sharing.model import Amounts, LeaseState
from distributed_grid.orchestration.resource_sharing.queue import PATIENCE_S
from distributed_grid.store.snapshot import disk_full
from distributed_grid.wire.channel import Channel, ChannelClosed, connect_unix, serve_unix
from distributed_grid.wire.rpc import CallContext, RpcClient, RpcServer
from tests.unit.daemon.lending_fakes import CRITICAL, HIGH, LOW, Bench

ROOT = CallContext(uid=0)
LONG_S = PATIENCE_S + 1
FULL = disk_full(Path("journal"))


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    found = Bench(tmp_path)
    yield found
    await found.close()


def failing(error: Exception) -> Callable[..., Any]:
    def fail(*_arguments: Any, **_more: Any) -> Any:
        raise error

    return fail


# Who waits for whom


async def test_one_that_waits_for_a_node_holds_up_no_other_node(bench: Bench) -> None:
    await bench.lent(8, node="gpu1")
    waiting = bench.ask(8, HIGH, "gpu1", waited_s=LONG_S)
    other = bench.ask(1, LOW, "gpu2")
    assert (await asyncio.wait_for(other.granted, 10)).node == "gpu2"
    assert not waiting.granted.done()


async def test_small_ones_do_not_starve_a_large_one_on_the_nodes_it_could_have(bench: Bench) -> None:
    for node in ("gpu1", "gpu2"):
        await bench.lent(4, node=node)
    large = bench.ask(8, waited_s=LONG_S)
    small, memory = bench.ask(1), bench.ask(0, memory=GB)
    await bench.quiet()
    assert not small.granted.done(), "it may not overtake"
    assert memory.granted.done(), "a type that the large one does not ask for"
    assert not large.granted.done()


async def test_a_node_that_could_never_serve_it_is_not_kept_free_for_it(bench: Bench) -> None:
    await bench.lent(8, node="gpu2")
    bench.book.ledger.offer("gpu1", Amounts(4, 0, 0))  # its owner uses the rest
    large = bench.ask(8, waited_s=LONG_S)
    assert (await asyncio.wait_for(bench.ask(2).granted, 10)).node == "gpu1"
    assert not large.granted.done()


@pytest.mark.parametrize("why", ["offline", "cooling", "owner"])
async def test_one_that_cannot_go_on_holds_nothing_up(bench: Bench, why: str) -> None:
    low = await bench.lent(8, LOW, "gpu1", kind="run")
    critical = await bench.lent(8, CRITICAL, "gpu1")
    assert bench.lease(low.id).state is LeaseState.SUSPENDED
    waiter = bench.book.waiters[f"resume:{low.id}"]
    object.__setattr__(waiter.request, "asked_at", waiter.request.asked_at - 700)
    await bench.book.release(critical.id)  # would resume it, but for:
    bench.book.set(low.id, state=LeaseState.SUSPENDED, held=type(low.held)())
    bench.book.wait_to_resume(bench.lease(low.id))
    waiter = bench.book.waiters[f"resume:{low.id}"]
    object.__setattr__(waiter.request, "asked_at", waiter.request.asked_at - 700)
    if why == "offline":
        bench.agents["gpu1"].state.online = False
    elif why == "cooling":
        bench.book.cooling.add("gpu1")
    else:
        bench.shots["gpu1"] = type(bench.shots["gpu1"])(**{**_fields(bench.shots["gpu1"]), "cpu_cores_used": 8.0})
        bench.service.loop._smooth.clear()
    bench.service.loop.refresh()
    bench.book.pump()
    assert f"resume:{low.id}" in bench.book.waiters
    assert (await asyncio.wait_for(bench.ask(8, LOW).granted, 10)).node == "gpu2"


def _fields(shot: Any) -> dict[str, Any]:
    return {name: getattr(shot, name) for name in type(shot).__dataclass_fields__}


# Making room


async def test_the_place_of_one_that_was_ended_goes_to_who_it_was_ended_for(bench: Bench) -> None:
    agent = bench.agents["gpu1"]
    agent.errors["lease_checkpoint"] = Refused("it can't be stored", code="checkpoint")
    victim = await bench.lent(4, LOW, "gpu1", kind="run", memory=30 * GB)
    queued = bench.ask(1, HIGH, "gpu1", memory=8 * GB)
    urgent = bench.ask(1, CRITICAL, "gpu1", memory=30 * GB)
    assert (await asyncio.wait_for(urgent.granted, 10)).held.memory_bytes == 30 * GB
    assert not queued.granted.done(), "it waited longer, but nobody was ended for it"
    assert bench.state(victim.id) is LeaseState.RELEASED
    row = bench.journal.leases.get(victim.id)
    assert row.data["reason"].startswith("preempted"), "and its owner is told why"


async def test_why_is_known_before_what_makes_room_ends(bench: Bench) -> None:
    agent = bench.agents["gpu1"]
    agent.errors["lease_checkpoint"] = Refused("it can't be stored", code="checkpoint")
    victim = await bench.lent(1, LOW, "gpu1", kind="run", memory=30 * GB)
    agent.gates["lease_release"] = asyncio.Event()
    bench.ask(0, CRITICAL, "gpu1", memory=30 * GB)
    await bench.quiet()
    assert bench.lease(victim.id).reason.startswith("preempted")
    assert bench.lease(victim.id).state is LeaseState.RELEASING
    assert "lease_end_tasks" not in agent.calls
    agent.gates["lease_release"].set()
    await bench.quiet()


async def test_a_stored_victim_does_not_come_back_before_the_room_is_made(bench: Bench) -> None:
    agent = bench.agents["gpu1"]
    first = await bench.lent(1, LOW, "gpu1", kind="run", memory=15 * GB)
    second = await bench.lent(1, LOW, "gpu1", kind="run", memory=15 * GB)
    urgent = bench.ask(0, CRITICAL, "gpu1", memory=30 * GB)
    for _ in range(200):
        states = [bench.lease(one.id).state for one in (first, second)]
        if LeaseState.SUSPENDED in states:
            break
        await asyncio.sleep(0)
    assert sorted(states) == [LeaseState.ACTIVE, LeaseState.SUSPENDED], "one is on disk, the other not yet"
    bench.service.loop.tick()  # the round that comes every second
    assert (await asyncio.wait_for(urgent.granted, 10)).held.memory_bytes == 30 * GB
    assert "lease_resume" not in agent.calls


async def test_nobody_stops_for_one_that_has_gone(bench: Bench) -> None:
    agent = bench.agents["gpu1"]
    agent.gates["lease_checkpoint"] = asyncio.Event()
    victims = [await bench.lent(1, LOW, "gpu1", kind="run", memory=15 * GB) for _ in range(2)]
    urgent = bench.ask(0, CRITICAL, "gpu1", memory=30 * GB)
    await bench.quiet()
    await bench.book.forget(urgent)
    agent.gates["lease_checkpoint"].set()
    await bench.quiet()
    assert agent.calls.count("lease_checkpoint") == 1
    assert [bench.lease(one.id).state for one in victims] == [LeaseState.ACTIVE] * 2, "the first went on again"


# In the journal before its agent is asked


async def test_a_boost_is_in_the_journal_before_its_agent_is_asked(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent, synced = bench.agents["gpu1"], bench.journal.leases.synced
    found: list[LeaseState] = []
    asked, sent = agent.ask, []

    def ask(name: str, **arguments: Any) -> asyncio.Future[Any]:
        found.append(bench.state(arguments["lease"]["id"]))
        return asked(name, **arguments)

    def counted() -> asyncio.Future[None]:
        sent.append(1)
        return synced()

    monkeypatch.setattr(agent, "ask", ask)
    monkeypatch.setattr(bench.journal.leases, "synced", counted)
    lease = await asyncio.wait_for(bench.ask(node="gpu1").granted, 10)
    assert found == [LeaseState.CLAIMING] and lease.state is LeaseState.ACTIVE
    await bench.quiet()
    assert sent == [1], "and brought to disk right after the answer"
    assert bench.state(lease.id) is LeaseState.ACTIVE
    assert "boost.granted" in bench.kinds()


async def test_a_boost_that_a_power_cut_took_from_the_journal_is_found_at_its_agent(bench: Bench) -> None:
    lease = await bench.lent(2)
    bench.journal.leases.delete(lease.id)  # never came to the disk
    await bench.restart()
    await bench.compare()
    found = bench.lease(lease.id)
    assert (found.state, found.kind, found.held, found.expires) == (
        LeaseState.ACTIVE, lease.kind, lease.held, lease.expires
    )  # fmt: skip
    assert "lease.adopted" in bench.kinds()


async def test_who_hangs_up_at_once_leaves_nothing(bench: Bench, tmp_path: Path) -> None:
    """His request is begun in the turn in which it came, so the hang-up comes in the middle of it."""
    server = RpcServer(bench.service, hello=dict)

    async def on_channel(channel: Channel) -> None:
        await server.serve(channel, ROOT)

    listener = await serve_unix(tmp_path / "s", on_channel)
    for gate in (False, True):
        if gate:
            bench.agents["gpu1"].gates["lease_claim"] = asyncio.Event()
        client = await RpcClient.start(await connect_unix(tmp_path / "s"))
        asked = client.ask("lease_request", amounts={"cpu": 1}, kind="boost", nodes=["gpu1"], wait_s=60.0)
        await client.close()
        for one in bench.agents["gpu1"].gates.values():
            await bench.quiet()
            one.set()
        await bench.quiet()
        assert not bench.book.waiters and not bench.book.ledger.leases
        assert not bench.agents["gpu1"].claims.held
        with pytest.raises(ChannelClosed):
            await asked
    await listener.close()


async def test_a_fault_while_one_is_claimed_leaves_nobody_waiting(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        bench.book.ledger, "change", _fails_once(bench.book.ledger.change, ValueError("a fault of ours"))
    )
    waiter = bench.ask()
    with pytest.raises(InternalError):
        await asyncio.wait_for(bench.service.wait(waiter, 0.0), 10)
    await bench.quiet()
    assert not bench.agents["gpu1"].claims.held and not bench.book.ledger.leases


def _fails_once(real: Callable[..., Any], error: Exception) -> Callable[..., Any]:
    left = [error]

    def call(*arguments: Any, **more: Any) -> Any:
        if left:
            raise left.pop()
        return real(*arguments, **more)

    return call


async def test_a_journal_that_cannot_be_written_fails_only_who_needs_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bench.lent(8, node="gpu1")
    waiting = bench.ask(1, node="gpu1")
    monkeypatch.setattr(bench.journal.leases, "put", failing(FULL))
    with pytest.raises(GridError, match="disk is full"):
        await bench.service.wait(bench.ask(1, node="gpu2"), 0.0)
    assert list(bench.book.waiters) == [waiting.request.id], "the one that failed is not granted later to nobody"
    assert not waiting.granted.done()
    assert len(bench.book.ledger.leases) == 1


async def test_the_ledger_is_as_the_journal_where_that_cannot_be_written(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = await bench.lent(2)
    monkeypatch.setattr(bench.journal.leases, "put", failing(FULL))
    with pytest.raises(GridError):
        bench.book.set(lease.id, state=LeaseState.SUSPENDED, held=type(lease.held)())
    assert bench.lease(lease.id) == lease
    bench.book.ledger.check()


# Giving back


@pytest.mark.parametrize("error", [InternalError("lease_release failed"), Refused("no", code="signal-refused")])
async def test_what_an_agent_would_not_take_back_is_tried_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, error: GridError
) -> None:
    lease = await bench.lent(2)
    agent = bench.agents[lease.node]
    agent.errors["lease_release"] = error
    with pytest.raises(type(error)):
        await bench.book.release(lease.id)
    assert bench.lease(lease.id).state is LeaseState.RELEASING
    assert not await bench.book.settled(float("inf")), "nobody waits for what is not under way"
    agent.errors.clear()
    bench.service.loop.tick()
    await bench.quiet()
    assert lease.id in bench.book.ledger.leases, "not again at once"
    monkeypatch.setattr(lending_book, "RELEASE_AGAIN_S", 0.0)
    bench.service.loop.tick()
    await bench.quiet()
    assert lease.id not in bench.book.ledger.leases and not agent.claims.held


async def test_it_is_still_expired_when_it_is_given_back_at_last(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    lease = await bench.lent(2)
    bench.agents[lease.node].errors["lease_release"] = InternalError("not now")
    with pytest.raises(InternalError):
        await bench.book.release(lease.id, state=LeaseState.EXPIRED)
    bench.agents[lease.node].errors.clear()
    monkeypatch.setattr(lending_book, "RELEASE_AGAIN_S", 0.0)
    bench.service.loop.tick()
    await bench.quiet()
    assert bench.state(lease.id) is LeaseState.EXPIRED


async def test_a_claim_that_failed_in_doubt_is_taken_back(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent may hold it: its place is lent to nobody before it says that it does not."""
    bench.agents["gpu1"].errors["lease_claim"] = InternalError("lease_claim failed")
    waiter = bench.ask(2)
    first = waiter.request.id
    lease = await asyncio.wait_for(waiter.granted, 10)
    assert lease.node == "gpu2" and lease.id != first
    assert bench.lease(first).state is LeaseState.RELEASING
    bench.service.loop.tick()
    await bench.quiet()
    assert first not in bench.book.ledger.leases


# A new daemon


async def test_one_that_was_being_claimed_when_the_daemon_died_is_active(bench: Bench) -> None:
    waiter = bench.ask(2)
    for _ in range(100):
        if waiter.request.id in bench.agents["gpu1"].claims.held:
            break
        await asyncio.sleep(0)
    await bench.restart()
    assert bench.lease(waiter.request.id).state is LeaseState.CLAIMING
    await bench.compare()
    assert bench.lease(waiter.request.id).state is LeaseState.ACTIVE


@pytest.mark.parametrize("kind", ["boost", "allocation", "run"])
async def test_one_the_agent_does_not_know_is_claimed_again(bench: Bench, kind: str) -> None:
    """A power cut: the journal is on disk, the agent's file is not. A command, though, has not begun."""
    lease = await bench.lent(2)
    bench.journal.leases.update(
        lease.id, state="claiming", kind=kind, data={**lease.to_wire(), "state": "claiming", "kind": kind}
    )
    bench.agents[lease.node].claims.held.clear()
    await bench.restart()
    await bench.compare()
    if kind == "run":
        assert lease.id not in bench.book.ledger.leases
    else:
        assert bench.lease(lease.id).state is LeaseState.ACTIVE
        assert lease.id in bench.agents[lease.node].claims.held


async def test_asking_again_waits_for_the_first_answer(bench: Bench) -> None:
    lease = await bench.lent(2)
    bench.journal.leases.update(lease.id, state="claiming", data={**lease.to_wire(), "state": "claiming"})
    await bench.restart()
    asked = asyncio.create_task(
        bench.service.lease_request(ROOT, amounts={"cpu": 2}, kind="boost", duration_s=60.0, lease_id=lease.id)
    )
    await bench.quiet()
    assert not asked.done(), "nobody knows yet whether it is granted"
    await bench.compare()
    view = await asyncio.wait_for(asked, 10)
    assert (view["id"], view["state"]) == (lease.id, "active")


async def test_asking_again_for_one_that_goes_back_gets_another(bench: Bench) -> None:
    lease = await bench.lent(2, node="gpu1")
    bench.agents["gpu1"].errors["lease_release"] = InternalError("not now")
    with pytest.raises(InternalError):
        await bench.book.release(lease.id)
    view = await bench.service.lease_request(ROOT, amounts={"cpu": 2}, kind="boost", duration_s=60.0, lease_id=lease.id)
    assert view["state"] == "active" and view["id"] != lease.id


# Starting


async def test_nothing_starts_in_one_that_is_not_active(bench: Bench) -> None:
    lease = await bench.lent(8, LOW, "gpu1")
    assert bench.book.check_startable(lease.id) == lease
    urgent = await bench.lent(8, CRITICAL, "gpu1")
    with pytest.raises(Refused, match="suspended") as caught:
        bench.book.check_startable(lease.id)
    assert caught.value.code == "lease-not-active"
    await bench.book.release(urgent.id)
    await bench.book.release(lease.id)
    with pytest.raises(Refused, match="over") as caught:
        bench.book.check_startable(lease.id)
    assert caught.value.code == "lease-not-active"


async def test_a_wait_that_is_no_number(bench: Bench) -> None:
    await bench.lent(8, node="gpu1")
    with pytest.raises(UsageError):
        await asyncio.wait_for(bench.service.wait(bench.ask(1, node="gpu1"), float("nan")), 10)
    assert not bench.book.waiters


async def test_a_worker_that_has_just_come_lends_at_once(bench: Bench) -> None:
    for agent in bench.agents.values():
        agent.state.online = False
    bench.service.loop.refresh()
    bench.agents["gpu2"].state.online = True
    view = await bench.service.lease_request(ROOT, amounts={"cpu": 2}, kind="boost", duration_s=60.0)
    assert view["node"] == "gpu2"
