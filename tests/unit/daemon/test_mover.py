"""A move whatever fails under it: one of the two runs, never both, and nothing is left held that could be let go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from distributed_grid.core.errors import GridError, InternalError, NotFound, Refused, TimedOut, Unavailable
from distributed_grid.daemon import mover, offload_back
from distributed_grid.daemon.mover import why_never_ran
from distributed_grid.store.journal import Journal
from tests.unit.daemon.move_bench import ID, Bench

LOST_LINK = Unavailable("the connection was closed", code="connection-lost")


@pytest.fixture
async def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    monkeypatch.setattr(mover, "RETRY_S", 0.001)
    monkeypatch.setattr(offload_back, "SWEEP_AGAIN_S", 0.001)
    with Journal.open(tmp_path / "journal.sqlite3") as journal:
        made = Bench(journal)
        yield made
        await made.service.close()


async def in_doubt(bench: Bench, strategy: str = "live") -> asyncio.Task[Any]:
    """A move whose target went silent at the word to go; `bench.target` is offline."""
    name = "in_go" if strategy == "live" else "task_go"

    def cut() -> None:
        bench.target.state.online = False
        del bench.target.before[name], bench.target.errors[name]
        raise LOST_LINK

    bench.target.before[name] = cut
    bench.target.errors[name] = []
    task = asyncio.create_task(bench.move(strategy))
    await bench.until(lambda: bench.moves.find(ID) and bench.row.state == "IN_DOUBT")
    return task


async def resolve(bench: Bench, *, here: bool) -> dict[str, Any]:
    from distributed_grid.wire.rpc import CallContext

    return await bench.service.offload_resolve(CallContext(uid=0), move_id=ID, here=here)


@pytest.mark.parametrize("strategy", ["live", "relaunch"])
async def test_a_move_without_trouble_is_never_in_doubt(bench: Bench, strategy: str) -> None:
    row = await bench.move(strategy)
    assert row.state == "CLEANED" and row.data["running"] == {"pid": 5, "start_ticks": 6}
    assert bench.states() == ["PLANNED", "FROZEN", "COPIED", "STAGED", "COMMITTED", "RUNNING", "CLEANED"]
    assert bench.world.copy and not bench.world.home and not bench.world.both


# A cluster that is stopped in mid-move


async def test_a_source_is_not_taken_for_released_while_its_node_is_not_there(bench: Bench) -> None:
    bench.target.before["in_wait"] = bench.close_links
    bench.target.errors["in_wait"] = [LOST_LINK]
    with pytest.raises(Unavailable):
        await bench.move()
    assert bench.row.state == "ABORTED"
    assert not bench.row.data.get("released") and not bench.world.home
    bench.open_links()  # the cluster is started again
    await bench.until(lambda: bench.world.home)
    await bench.until(lambda: bench.row.data.get("released") and bench.row.data.get("dropped"))


async def test_a_daemon_that_starts_before_the_cluster_lets_the_source_go_later(bench: Bench) -> None:
    bench.target.errors["in_wait"] = [LOST_LINK]
    bench.home.errors["out_abort"] = [LOST_LINK]
    with pytest.raises(Unavailable):
        await bench.move()
    await bench.mover.close()  # the daemon is killed; the next one finds an aborted move that is not swept
    bench.close_links()
    bench.home.errors.clear()
    bench.service.recover()
    await asyncio.sleep(0)
    assert not bench.row.data.get("released")
    bench.open_links()
    await bench.until(lambda: bench.world.home)


async def test_moves_under_way_are_called_off_before_a_cluster_goes(bench: Bench) -> None:
    waiting = asyncio.Event()

    async def forever(*_: Any) -> None:
        waiting.set()
        await asyncio.Event().wait()

    bench.service.files.after_freeze = forever  # type: ignore[method-assign]
    task = bench.service._start(bench.request(), asyncio.Queue())
    await waiting.wait()
    await bench.service.call_off()
    assert task.cancelled() and bench.row.state == "ABORTED" and bench.world.home


# What is committed is never given up


@pytest.mark.parametrize(
    "error",
    [LOST_LINK, TimedOut("no answer"), InternalError("a fault"), GridError("no room", code="go"),
     NotFound("no such node", code="unknown-node"), Refused("not now", code="busy"), KeyError("a fault of ours")],
)  # fmt: skip
async def test_whatever_the_target_answers_it_is_asked_again(bench: Bench, error: Any) -> None:
    bench.target.errors["in_go"] = [error, error, None]
    row = await bench.move()
    assert row.state == "CLEANED" and bench.states()[-4:] == ["COMMITTED", "IN_DOUBT", "RUNNING", "CLEANED"]
    assert bench.events().count("offload.in_doubt") == 1 and not bench.world.both


async def test_a_cluster_that_is_stopped_and_started_finishes_a_move_in_doubt(bench: Bench) -> None:
    task = await in_doubt(bench)
    bench.close_links()
    for _ in range(20):
        await asyncio.sleep(0.001)
    assert not task.done() and bench.row.state == "IN_DOUBT" and not bench.world.home
    bench.target.state.online = True
    bench.open_links()
    assert (await task).state == "CLEANED" and bench.world.copy and not bench.world.both


async def test_a_copy_that_cannot_be_asked_whether_it_ran_stays_in_doubt(bench: Bench) -> None:
    bench.target.before["in_go"] = lambda: setattr(bench.target, "task_state", "lost")
    bench.target.errors["in_status"] = [None, TimedOut("no answer"), InternalError("a fault"), None]
    with pytest.raises(GridError, match="stays on gpu-master") as error:
        await bench.move()
    assert error.value.code == "not-moved" and "is gone" in error.value.cause
    assert bench.states()[-2:] == ["IN_DOUBT", "ABORTED"] and bench.world.home and not bench.world.copy


async def test_a_node_that_is_back_has_its_moves_finished_although_nobody_does(bench: Bench) -> None:
    task = await in_doubt(bench)
    task.cancel()
    await bench.mover.close()  # whoever carried it is gone
    bench.target.state.online = True
    bench.service.followers.follow = lambda _id: None  # type: ignore[method-assign]
    bench.service.node_is_up("gpu1")
    await bench.until(lambda: bench.row.state == "CLEANED")


async def test_a_full_disk_after_the_commit_keeps_the_move_going(bench: Bench) -> None:
    bench.target.errors["in_go"] = [LOST_LINK, None]
    bench.unwritable = {"IN_DOUBT": 1, "RUNNING": 3}
    assert (await bench.move()).state == "CLEANED"
    assert bench.world.copy and not bench.world.both and "IN_DOUBT" in bench.states()


# A full disk before it


async def test_a_commit_that_cannot_be_written_is_called_off(bench: Bench) -> None:
    bench.unwritable = {"COMMITTED": 1}
    with pytest.raises(GridError, match="disk is full"):
        await bench.move()
    assert bench.row.state == "ABORTED" and bench.world.home and "in_go" not in bench.target.called


async def test_after_a_commit_that_failed_the_source_waits_for_the_record_and_then_runs(bench: Bench) -> None:
    bench.unwritable = {"COMMITTED": 1, "ABORTED": 50}
    with pytest.raises(GridError, match="disk is full"):
        await bench.move()
    assert bench.row.state == "STAGED" and not bench.world.home
    await bench.until(lambda: bench.world.home)
    assert bench.row.state == "ABORTED" and bench.unwritable["ABORTED"] == 0


@pytest.mark.parametrize("state", ["FROZEN", "COPIED", "STAGED"])
@pytest.mark.parametrize("strategy", ["live", "relaunch"])
async def test_before_the_commit_a_full_disk_leaves_the_source_running(bench: Bench, strategy: str, state: str) -> None:
    bench.unwritable = {state: 1, "ABORTED": 50}
    with pytest.raises(GridError, match="disk is full"):
        await bench.move(strategy)
    assert bench.world.home and bench.row.state != "ABORTED"
    await bench.until(lambda: bench.row.state == "ABORTED" and bench.row.data.get("dropped"))
    assert "in_go" not in bench.target.called and "task_go" not in bench.target.called


async def test_events_that_cannot_be_written_stop_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise GridError("the disk is full", code="disk-full")

    monkeypatch.setattr(bench.service._events, "publish", full)
    assert (await bench.move()).state == "CLEANED"


# A relaunch


async def test_a_program_that_could_not_be_started_there_runs_on_here(bench: Bench) -> None:
    def fail() -> None:
        bench.target.going, bench.target.task_state = True, "failed"
        bench.target.task_error = NotFound("cannot start 'python' on gpu1", cause="not in PATH").to_wire()

    bench.target.before["task_go"] = fail
    with pytest.raises(GridError, match="stays on gpu-master") as error:
        await bench.move("relaunch")
    assert error.value.cause == "cannot start 'python' on gpu1: not in PATH"
    assert bench.row.state == "ABORTED" and bench.world.home and not bench.world.copy


@pytest.mark.parametrize("changes", [{"task_state": "lost"}, {"task_state": "lost", "going": True, "rebooted": True}])
async def test_a_relaunch_whose_copy_is_lost_runs_on_here(bench: Bench, changes: dict[str, Any]) -> None:
    bench.target.before["task_go"] = lambda: bench.target.__dict__.update(changes)
    with pytest.raises(GridError):
        await bench.move("relaunch")
    assert bench.row.state == "ABORTED" and bench.world.home


async def test_a_relaunch_that_was_let_go_and_then_lost_is_for_a_person(bench: Bench) -> None:
    bench.target.before["task_go"] = lambda: bench.target.__dict__.update(task_state="lost", going=True)
    task = asyncio.create_task(bench.move("relaunch"))
    await bench.until(lambda: bench.target.called.count("task_go") > 3)
    assert bench.row.state == "IN_DOUBT" and not bench.world.home
    assert (await resolve(bench, here=True))["state"] == "ABORTED"
    assert bench.world.home
    with pytest.raises(GridError):
        await task


STATUS = {"state": "running", "started": True, "going": True, "rebooted": False, "error": None}


@pytest.mark.parametrize(
    ("changes", "never"),
    [
        ({}, False), ({"state": "staged", "started": False}, False), ({"state": "exited"}, False),
        ({"state": "failed"}, False), ({"state": "failed", "started": False}, True),
        ({"state": "exited", "started": False}, False), ({"state": "exited", "started": False, "going": False}, True),
        ({"state": "lost"}, False), ({"state": "lost", "started": False}, False),
        ({"state": "lost", "started": False, "going": False}, True), ({"state": "lost", "rebooted": True}, True),
    ],
)  # fmt: skip
def test_what_proves_that_a_program_never_ran(changes: dict[str, Any], never: bool) -> None:
    assert bool(why_never_ran({**STATUS, **changes})) is never


def nth(count: int, then: Callable[[], None]) -> Callable[[], None]:
    calls = iter(range(1, 100))
    return lambda: then() if next(calls) == count else None


@pytest.mark.parametrize("change", [{"woken": True}, {"held": False}, {"held": False, "alive": False}])
@pytest.mark.parametrize(("strategy", "look"), [("relaunch", 1), ("relaunch", 2), ("live", 1)])
async def test_a_source_that_was_woken_is_not_committed(
    bench: Bench, strategy: str, look: int, change: dict[str, Any]
) -> None:
    bench.home.before["out_status"] = nth(look, lambda: bench.home.held.update(change))
    with pytest.raises(Refused) as error:
        await bench.move(strategy)
    assert error.value.code == "woken" and bench.row.state == "ABORTED"
    assert ("STAGED" in bench.states()) is (strategy == "live" or look == 2)
    assert "task_go" not in bench.target.called and "in_go" not in bench.target.called


# A person decides


@pytest.mark.parametrize("strategy", ["live", "relaunch"])
async def test_here_a_copy_that_had_got_the_word_is_ended_when_its_node_is_back(bench: Bench, strategy: str) -> None:
    task = await in_doubt(bench, strategy)
    bench.target.let_go()  # only its answer was lost
    assert (await resolve(bench, here=True))["state"] == "ABORTED"
    assert bench.world.home  # the person's word, with the target out of reach
    bench.target.state.online = True
    bench.service.node_is_up("gpu1")
    await bench.until(lambda: bench.row.data.get("dropped"))
    assert bench.world.home and not bench.world.copy
    assert bench.events().count("offload.copy_ended") == 1
    with pytest.raises(GridError, match="stays on gpu-master"):
        await task


async def test_here_a_copy_that_can_be_asked_is_ended_before_the_source_runs(bench: Bench) -> None:
    await in_doubt(bench)
    bench.target.errors["in_go"] = [LOST_LINK]  # it answers all but this
    bench.target.let_go()
    bench.target.errors["task_cancel"] = [TimedOut("the copy does not end"), None]
    bench.target.state.online = True
    await resolve(bench, here=True)
    assert not bench.world.home  # rather neither than both
    await bench.until(lambda: bench.world.home)
    assert not bench.world.copy and not bench.world.both


async def test_here_a_copy_that_never_got_the_word_just_goes(bench: Bench) -> None:
    await in_doubt(bench)
    await resolve(bench, here=True)
    bench.target.state.online = True
    await bench.until(lambda: bench.row.data.get("dropped"))
    assert bench.world.home and not bench.world.both and "offload.copy_ended" not in bench.events()


async def test_an_answer_that_comes_after_the_persons_word_changes_nothing(bench: Bench) -> None:
    await in_doubt(bench)
    asked = asyncio.Event()
    answer = bench.target.in_go

    def late(**arguments: Any) -> dict[str, Any]:
        bench.mover.step(ID, "ABORTED", "decided by hand")
        asked.set()
        return answer(**arguments)

    bench.target.in_go = late  # type: ignore[method-assign]
    bench.target.state.online = True
    await asked.wait()
    await bench.until(lambda: not bench.mover._finishing)
    assert bench.row.state == "ABORTED" and bench.states()[-1] == "ABORTED"


@pytest.mark.parametrize("strategy", ["live", "relaunch"])
async def test_there_the_word_is_said_as_soon_as_the_target_answers(bench: Bench, strategy: str) -> None:
    task = await in_doubt(bench, strategy)
    bench.service.followers._follow = lambda _id: asyncio.sleep(0)  # type: ignore[method-assign, assignment]
    await resolve(bench, here=False)
    await bench.until(lambda: bench.row.state == "CLEANED")  # the source is given up at once
    assert (await task).state == "CLEANED" and not bench.world.copy
    bench.target.state.online = True
    await bench.until(lambda: bench.world.copy)
    await bench.until(lambda: bench.row.data["running"] == {"pid": 5, "start_ticks": 6})
    assert not bench.world.both and bench.home.called.count("out_finish") == 1


async def test_there_a_copy_that_is_gone_is_told_as_lost(bench: Bench) -> None:
    await in_doubt(bench)
    bench.target.staged = False
    bench.home.held["stub"] = False
    await resolve(bench, here=False)
    bench.target.state.online = True
    await bench.until(lambda: bench.row.state == "LOST")


async def test_a_source_is_replaced_once_however_many_of_us_do_it(bench: Bench) -> None:
    await in_doubt(bench)
    bench.mover.decide_there(ID)
    await asyncio.gather(bench.mover.replace_source(ID), bench.mover.replace_source(ID))
    assert bench.row.state == "CLEANED" and bench.home.called.count("out_finish") == 1


async def test_only_a_move_in_doubt_can_be_decided(bench: Bench) -> None:
    await bench.move()
    for here in (True, False):
        with pytest.raises(Refused) as error:
            await resolve(bench, here=here)
        assert error.value.code == "not-in-doubt"


# Once


@pytest.mark.parametrize(
    ("path", "data", "code"),
    [
        (["RUNNING", "CLEANED"], {}, "already-moved"),
        (["RUNNING", "CLEANED", "MOVED"], {}, "already-moved"),
        (["RUNNING"], {}, "already-moved"),
        (["IN_DOUBT"], {}, "already-moving"),
        (["IN_DOUBT", "ABORTED"], {}, "already-moving"),  # and not let go yet
        (["IN_DOUBT", "ABORTED"], {"released": True}, ""),
    ],
)
async def test_a_process_that_was_moved_while_a_plan_was_made_is_not_moved_again(
    bench: Bench, path: list[str], data: dict[str, Any], code: str
) -> None:
    """The stub has the pid and the start time of what was planned for."""
    await in_doubt(bench)
    await bench.mover.close()
    bench.moves.step(ID, path[0], "")
    for state in path[1:]:
        bench.moves.step(ID, state, "", data=data)
    request = bench.request("relaunch")
    request.move_id = "offload_2_100"
    bench.target.state.online = True
    if not code:
        bench.target.__init__("gpu1", bench.world)  # type: ignore[misc]
        bench.service._start(request, asyncio.Queue()).cancel()
        return
    with pytest.raises(Refused) as error:
        bench.service._start(request, asyncio.Queue())
    assert error.value.code == code and bench.moves.find("offload_2_100") is None
