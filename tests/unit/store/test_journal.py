"""Opening, migrating and grouping writes."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import stat
from pathlib import Path

import pytest

from distributed_grid.core.clock import ManualClock
from distributed_grid.core.errors import GridError, InternalError, Refused, Unavailable
from distributed_grid.store import journal as journal_module
from distributed_grid.store.database import file_system_of
from distributed_grid.store.journal import Journal
from distributed_grid.store.schema import MIGRATIONS, TABLES


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.sqlite3"


def test_new_journal_is_private_durable_and_whole(path: Path) -> None:
    before = os.umask(0)
    try:
        with Journal.open(path) as journal:
            assert journal.recovered is None
            assert journal.journal_mode in ("wal", "truncate")
            journal.kv.put("a", {"b": [1, None]})
            for file in path.parent.iterdir():
                assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
    finally:
        os.umask(before)
    with Journal.open(path) as journal:
        assert journal.recovered is None
        assert journal.kv.list() == {"a": {"b": [1, None]}, "journal.schema": {"version": MIGRATIONS[-1][0]}}
    connection = sqlite3.connect(path)
    names = {row[0] for row in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")}
    connection.close()
    assert names - {"sqlite_sequence"} == set(TABLES)


def test_migrations_run_once_each_and_all_or_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Journal.open(path) as journal:
        journal.kv.put("kept", 1)
    newest = MIGRATIONS[-1][0]
    added = (newest + 1, ("CREATE TABLE more (id TEXT PRIMARY KEY) STRICT",))
    wrong = (newest + 2, ("CREATE TABLE half (id TEXT) STRICT", "CREATE TABLE more (id TEXT) STRICT"))
    monkeypatch.setattr(journal_module, "MIGRATIONS", (*MIGRATIONS, added, wrong))
    with pytest.raises(InternalError):
        Journal.open(path)
    monkeypatch.setattr(journal_module, "MIGRATIONS", (*MIGRATIONS, added))
    for _ in range(2):
        with Journal.open(path) as journal:
            assert journal.recovered is None
            assert journal.kv.get("kept") == 1
            assert journal.kv.get("journal.schema") == {"version": newest + 1}
    connection = sqlite3.connect(path)
    names = {row[0] for row in connection.execute("SELECT name FROM sqlite_schema")}
    connection.close()
    assert "more" in names
    assert "half" not in names

    monkeypatch.undo()
    with pytest.raises(Refused) as caught:
        Journal.open(path)
    assert caught.value.code == "journal-newer"
    assert caught.value.hint
    assert path.exists()


def test_falls_back_where_shared_memory_does_not_work(path: Path) -> None:
    with Journal.open(path) as journal:
        journal.kv.put("a", 1)
    path.with_name(path.name + "-shm").mkdir()
    with Journal.open(path) as journal:
        assert journal.journal_mode == "truncate"
        assert journal.recovered is None
        journal.kv.put("b", 2)
        assert journal.kv.get("a") == 1


def test_file_system_is_that_of_the_innermost_mount(tmp_path: Path) -> None:
    home = tmp_path.resolve()
    mounts = (
        "22 1 259:1 / / rw,relatime shared:1 - ext4 /dev/a rw\n"
        f"40 22 0:40 / {home} rw shared:2 - nfs4 server:/home rw\n"
        f"41 22 0:41 / {home}/loc rw - tmpfs tmpfs rw\n"
    )
    assert file_system_of(home / "local" / "journal", mounts) == "nfs4"
    assert file_system_of(home / "loc" / "journal", mounts) == "tmpfs"
    assert file_system_of(Path("/nowhere"), mounts) == "ext4"


def test_transactions_nest_and_roll_back(path: Path) -> None:
    with Journal.open(path) as journal:
        with pytest.raises(ValueError, match="outer"), journal.transaction():
            journal.kv.put("gone", 1)
            raise ValueError("outer")
        with journal.transaction():
            journal.kv.put("kept", 1)
            with pytest.raises(ValueError, match="inner"), journal.transaction():
                journal.kv.put("inner", 1)
                raise ValueError("inner")
        assert set(journal.kv.list()) == {"journal.schema", "kept"}


async def test_a_write_cannot_slip_into_another_tasks_transaction(path: Path) -> None:
    with Journal.open(path) as journal:
        async def intruder() -> None:
            journal.kv.put("slipped", 1)

        with journal.transaction():
            other = asyncio.create_task(intruder())
            await asyncio.wait([other])  # what nobody should do
        with pytest.raises(InternalError):
            other.result()
        assert journal.kv.get("slipped") is None


def test_full_database_is_told_as_a_full_disk(path: Path) -> None:
    with Journal.open(path) as journal:
        journal.kv.put("a", 1)
        pages = journal._database.query("PRAGMA page_count")[0][0]
        journal._database.query(f"PRAGMA max_page_count={pages}")
        with pytest.raises(GridError) as caught, journal.transaction():
            journal.kv.put("a", 2)
            journal.kv.put("big", "x" * 100_000)
        assert caught.value.code == "disk-full"
        assert journal.kv.get("a") == 1


def test_a_file_held_by_another_program_is_busy_not_damaged(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distributed_grid.store.database.BUSY_S", 0.05)
    Journal.open(path).close()
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    try:
        with pytest.raises(Unavailable) as caught:
            Journal.open(path)
    finally:
        other.close()
    assert caught.value.code == "journal-busy"
    with Journal.open(path, clock=ManualClock()) as journal:
        assert journal.recovered is None


def test_no_directory(tmp_path: Path) -> None:
    with pytest.raises(Unavailable) as caught:
        Journal.open(tmp_path / "none" / "journal.sqlite3")
    assert caught.value.code == "journal-io"
