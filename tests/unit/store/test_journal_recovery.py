"""A damaged or deleted journal: opened all the same, with what can be read, and told truthfully."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from distributed_grid.core.clock import ManualClock
from distributed_grid.store import journal as journal_module
from distributed_grid.store.journal import Journal
from distributed_grid.store.moves import MoveRow
from distributed_grid.store.tasks import TaskRow

TASKS = 300
PAGE = 4096


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A journal of many pages, closed cleanly."""
    path = tmp_path / "journal.sqlite3"
    with Journal.open(path, clock=ManualClock()) as journal, journal.transaction():
        for number in range(TASKS):
            journal.tasks.put(_task(number))
        journal.moves.start(MoveRow("offload_1_2", "PLANNED", "gpu-master", 2, 3, "gpu1", 0, 1.0, 1.0), "planned")
        journal.kv.put("fact", 42)
        journal.leases.next_fence()
    return path


def _task(number: int) -> TaskRow:
    return TaskRow(f"t{number:04}", "gpu1", 1000, ["python", "x" * 200], "running", float(number))


def _damage(path: Path, offset: int, size: int, seed: int = 7) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(random.Random(seed).randbytes(size))


@pytest.mark.parametrize(("offset", "size"), [(0, 16), (0, 100), (0, PAGE), (16, 84), (60, 4), (68, 4), (100, 8)])
def test_damaged_header_loses_no_row(path: Path, offset: int, size: int) -> None:
    _damage(path, offset, size)
    with Journal.open(path, clock=ManualClock()) as journal:
        recovered = journal.recovered
        assert recovered is not None
        assert recovered.kind == "damaged"
        assert recovered.lost == {}
        assert recovered.salvaged["tasks"] == TASKS
        assert journal.tasks.list(oldest_first=True) == [_task(number) for number in range(TASKS)]
        assert journal.moves.steps("offload_1_2")[0].story == "planned"
        assert journal.kv.get("fact") == 42
        assert Path(recovered.moved_to).name.startswith("journal.damaged-")
        assert Path(recovered.moved_to).exists()
    with Journal.open(path) as journal:
        assert journal.recovered is None
        assert len(journal.tasks.list()) == TASKS


def test_damaged_pages_cost_only_the_rows_on_them(path: Path) -> None:
    content = path.read_bytes()
    leaves = [
        start for start in range(PAGE, len(content), PAGE)
        if content[start] == 0x0D and content[start : start + PAGE].count(b'["python"') > 5
    ]  # fmt: skip
    assert len(leaves) > 6
    for leaf in (leaves[2], leaves[5]):  # two holes, so that neither end alone reaches what is between
        _damage(path, leaf, PAGE)
    with Journal.open(path, clock=ManualClock()) as journal:
        assert journal.recovered is not None
        lost = journal.recovered.lost
        assert set(lost) == {"tasks"}
        rows = journal.tasks.list()
        assert lost["tasks"] == TASKS - len(rows) == TASKS - journal.recovered.salvaged["tasks"]
        assert 0 < TASKS - len(rows) < 40
        assert all(row == _task(int(row.id[1:])) for row in rows)
        assert "tasks" in journal.recovered.describe()


def test_a_changed_list_of_tables_loses_no_row(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content.replace(b"start_ticks", b"start_tickz", 1))
    with Journal.open(path, clock=ManualClock()) as journal:
        assert journal.recovered is not None
        assert journal.recovered.lost == {}
        assert journal.moves.get("offload_1_2").start_ticks == 3


def test_text_that_cannot_be_read_costs_its_row(path: Path) -> None:
    content = path.read_bytes()
    where = content.index(b'["python"') + 20
    path.write_bytes(content[:where] + b"\xff\xfe" + content[where + 2 :])
    with Journal.open(path, clock=ManualClock()) as journal:
        assert journal.recovered is not None
        assert journal.recovered.lost == {"tasks": 1}
        assert len(journal.tasks.list()) == TASKS - 1


@pytest.mark.parametrize("seed", range(12))
def test_random_damage_never_keeps_it_from_opening(path: Path, seed: int) -> None:
    chance = random.Random(seed)
    size = path.stat().st_size
    for _ in range(chance.randrange(1, 6)):
        _damage(path, chance.randrange(size - 600), chance.randrange(1, 600), seed)
    with Journal.open(path, clock=ManualClock()) as journal:
        journal.kv.put("works", True)
        journal.tasks.put(_task(TASKS + 1))
        journal.events.add("test", "after")
    with Journal.open(path, clock=ManualClock()) as journal:
        assert journal.recovered is None
        assert journal.kv.get("works") is True


def test_truncated_file(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2 + 100)
    with Journal.open(path, clock=ManualClock()) as journal:
        assert journal.recovered is not None
        assert 0 < journal.recovered.salvaged["tasks"] < TASKS
        assert journal.recovered.lost["tasks"] is None
        assert all(row == _task(int(row.id[1:])) for row in journal.tasks.list())


@pytest.mark.parametrize("content", [b"", b"not a database, " * 1000, b"x"])
def test_not_a_database(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with Journal.open(path, clock=ManualClock()) as journal:
        assert journal.recovered is not None
        assert journal.recovered.kind == "damaged"
        assert Path(journal.recovered.moved_to).read_bytes() == content
        assert set(journal.recovered.lost) >= {"tasks", "moves", "leases"}
        assert journal.tasks.list() == []
        journal.tasks.put(_task(1))


@pytest.mark.parametrize("fault", ["header", "pages", "emptied", "deleted"])
def test_what_is_only_in_the_wal_is_salvaged(path: Path, tmp_path: Path, fault: str) -> None:
    crashed = tmp_path / "crashed" / path.name
    crashed.parent.mkdir()
    with Journal.open(path, clock=ManualClock()) as journal:
        if journal.journal_mode != "wal":
            pytest.skip("the file system of the tests allows no WAL")
        journal.kv.put("late", "in the wal")
        for file in tmp_path.glob("journal.*"):  # as kill -9 leaves it
            shutil.copyfile(file, crashed.with_name(file.name))
    if fault == "header":
        _damage(crashed, 0, 100)
    elif fault == "pages":
        _damage(crashed, crashed.stat().st_size - 4 * PAGE, 4 * PAGE)
    elif fault == "emptied":
        crashed.write_bytes(b"")
    else:
        crashed.unlink()
    with Journal.open(crashed, clock=ManualClock()) as journal:
        assert journal.recovered is not None
        assert journal.recovered.kind == ("missing" if fault == "deleted" else "damaged")
        assert journal.kv.get("late") == "in the wal"
        assert (len(journal.tasks.list()) == TASKS) == (fault == "header")
        assert ("tasks" in journal.recovered.lost) == (fault != "header")
        assert list(crashed.parent.glob("journal.damaged-*"))
    with Journal.open(crashed, clock=ManualClock()) as journal:
        assert journal.recovered is None


def test_a_repair_cut_short_is_finished(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _damage(path, 0, 100)

    def cut(_: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(journal_module, "_swap", cut)
        Journal.open(path, clock=ManualClock())
    path.unlink()  # the swap had set the damaged file aside when it was cut short
    with Journal.open(path, clock=ManualClock()) as journal:
        assert journal.recovered is not None
        assert journal.recovered.kind == "damaged"
        assert len(journal.tasks.list()) == TASKS
    left = {file.name for file in path.parent.iterdir()}
    assert left == {"journal.sqlite3", "journal.id"}


def test_a_repair_that_is_itself_damaged_is_done_again(path: Path) -> None:
    path.with_name("journal.rebuilt").write_bytes(b"half a file")
    with Journal.open(path, clock=ManualClock()) as journal:
        assert journal.recovered is None
        assert len(journal.tasks.list()) == TASKS
    assert not path.with_name("journal.rebuilt").exists()


def test_deleted_journal_is_told_and_fences_still_grow(path: Path) -> None:
    clock = ManualClock()
    with Journal.open(path, clock=clock) as journal:
        fence = journal.leases.next_fence()
    path.unlink()
    clock.advance(1)
    with Journal.open(path, clock=clock) as journal:
        assert journal.recovered is not None
        assert journal.recovered.kind == "missing"
        assert journal.tasks.list() == []
        assert journal.leases.next_fence() > fence
    with Journal.open(path, clock=clock) as journal:
        assert journal.recovered is None
