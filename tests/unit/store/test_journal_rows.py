"""The small typed interfaces of the journal's nouns."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from distributed_grid.core.clock import ManualClock
from distributed_grid.core.errors import InternalError, NotFound, Refused, UsageError
from distributed_grid.store.blocks import BlockRow
from distributed_grid.store.journal import Journal
from distributed_grid.store.leases import LeaseRow
from distributed_grid.store.moves import MoveRow
from distributed_grid.store.tasks import TaskRow


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def journal(tmp_path: Path, clock: ManualClock) -> Iterator[Journal]:
    with Journal.open(tmp_path / "journal.sqlite3", clock=clock, events_kept=100) as journal:
        yield journal


def _task(task_id: str, created: float = 1.0, **changes: object) -> TaskRow:
    return dataclasses.replace(TaskRow(task_id, "gpu1", 1000, ["true"], "running", created), **changes)


def test_tasks(journal: Journal) -> None:
    odd = _task("a1", argv=["tail", "caf\udce9", "\n"], detail={"lease": None})
    journal.tasks.put(odd)
    journal.tasks.put(_task("b2", 2.0, node="gpu2"))
    assert journal.tasks.get("a1") == odd
    assert [row.id for row in journal.tasks.list()] == ["b2", "a1"]
    assert [row.id for row in journal.tasks.list(node=["gpu2", "gpu3"], ended=None)] == ["b2"]
    assert journal.tasks.list(node=[]) == []
    ended = journal.tasks.update("a1", state="ended", ended=5, exit_code=137)
    assert (ended.state, ended.ended, ended.exit_code, ended.argv) == ("ended", 5.0, 137, odd.argv)
    assert journal.tasks.get("a1") == ended
    with pytest.raises(NotFound):
        journal.tasks.update("zz", state="ended")
    with pytest.raises(InternalError):
        journal.tasks.update("a1", colour="red")
    journal.tasks.prune(keep=0)
    assert [row.id for row in journal.tasks.list()] == ["b2"]
    journal.tasks.delete("b2")
    assert journal.tasks.find("b2") is None


def test_prefixes(journal: Journal) -> None:
    for task_id in ("abc1", "abc2", "abc", "b%_1", "bXX1"):
        journal.tasks.put(_task(task_id))
    journal.tasks.update("bXX1", uid=7)
    assert journal.tasks.get_by_prefix("abc1").id == "abc1"
    assert journal.tasks.get_by_prefix("abc").id == "abc"  # a whole id wins
    assert journal.tasks.get_by_prefix("b%").id == "b%_1"
    assert journal.tasks.get_by_prefix("b", uid=7).id == "bXX1"
    with pytest.raises(Refused) as caught:
        journal.tasks.get_by_prefix("ab")
    assert caught.value.code == "ambiguous-id"
    assert caught.value.details == {"candidates": ["abc", "abc1", "abc2"]}
    for nothing in ("x", "ABC", "abc11"):
        with pytest.raises(NotFound):
            journal.tasks.get_by_prefix(nothing)
    with pytest.raises(UsageError):
        journal.tasks.get_by_prefix("")


def test_events_are_numbered_and_pruned(journal: Journal, clock: ManualClock) -> None:
    first = journal.events.add("node-up", "gpu1 is up", node="gpu1", data={"a": 1})
    assert journal.events.list() == [first]
    for number in range(300):
        clock.advance(1)
        journal.events.add("tick", str(number))
    kept = journal.events.list(limit=10_000)
    assert 100 <= len(kept) < 200
    assert [event.seq for event in kept] == list(range(301 - len(kept) + 1, 302))
    assert [event.text for event in journal.events.latest(2)] == ["298", "299"]
    assert journal.events.list(after_seq=300)[0].text == "299"
    assert journal.events.list(kind="node-up") == []
    assert journal.events.last_seq() == 301


def test_a_move_and_its_story(journal: Journal, clock: ManualClock) -> None:
    row = MoveRow("offload_1_42", "PLANNED", "gpu-master", 42, 9000, "gpu1", 1000, clock.time(), clock.time())
    journal.moves.start(row, "planned")
    clock.advance(2)
    moved = journal.moves.step(row.id, "FROZEN", "held by the freezer", data={"bytes": 5})
    assert (moved.state, moved.updated, moved.data) == ("FROZEN", clock.time(), {"bytes": 5})
    assert [(step.seq, step.state) for step in journal.moves.steps(row.id)] == [(1, "PLANNED"), (2, "FROZEN")]
    with pytest.raises(NotFound):
        journal.moves.step("offload_9_9", "FROZEN", "no such move")
    journal.moves.delete(row.id)
    assert journal.moves.steps(row.id) == []


def test_leases_blocks_and_links(journal: Journal, clock: ManualClock) -> None:
    fences = [journal.leases.next_fence() for _ in range(3)]
    assert fences == sorted(set(fences))
    lease = LeaseRow("l1", "cpu", "active", "gpu1", "task a", 0, fences[-1], 1.0, None, {"cores": [0, 1]})
    assert journal.leases.put(lease) == journal.leases.get("l1")
    block = BlockRow("b1", "gpu1", 0, "live", 2**40, 1.0)
    assert journal.blocks.put(block) == journal.blocks.get_by_prefix("b")
    journal.links.put("gpu-master", "gpu1", 1e9)
    clock.advance(5)
    link = journal.links.put("gpu-master", "gpu1", 2e9)
    assert journal.links.get("gpu-master", "gpu1") == link
    assert journal.links.list() == [link]
    assert journal.links.get("gpu1", "gpu-master") is None
