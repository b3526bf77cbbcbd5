"""Commits brought to disk beside other work: one fsync for all of them, and a log that has its size already."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from distributed_grid.core.clock import ManualClock
from distributed_grid.core.errors import GridError
from distributed_grid.store import database as database_module
from distributed_grid.store.database import WAL_BYTES, Database, open_database
from distributed_grid.store.journal import Journal
from distributed_grid.store.leases import LeaseRow


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    found = open_database(tmp_path / "j.sqlite3")
    found.write("CREATE TABLE t (x)")
    yield found
    found.close()


def add(database: Database) -> None:
    with database.transaction(durable=False):
        database.write("INSERT INTO t VALUES (1)")


async def test_one_fsync_serves_all_that_were_committed_before_it(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, synced = threading.Event(), []

    def slow(descriptor: int) -> None:
        synced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        assert held.wait(10)

    monkeypatch.setattr(database_module.os, "fdatasync", slow)
    add(database)
    first = database.synced()
    while not synced:
        await asyncio.sleep(0.001)
    add(database)  # after the first began: that one is not for it
    later = [database.synced(), database.synced()]
    assert later[0] is later[1] is not first
    held.set()
    await asyncio.gather(first, *later)
    assert synced == [f"{database.path}-wal"] * 2
    await database.synced()
    assert len(synced) == 3


async def test_a_disk_that_fails_is_told(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(database_module.os, "fdatasync", broken)
    add(database)
    with pytest.raises(GridError) as caught:
        await database.synced()
    assert caught.value.code == "journal-io"
    monkeypatch.undo()
    await database.synced()


async def test_while_the_disk_is_quick_the_loop_does_it_itself(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []
    took_s = [0.0]

    def fsync(_descriptor: int) -> None:
        threads.append(threading.get_ident())
        database_module.time.sleep(took_s[0])

    monkeypatch.setattr(database_module.os, "fdatasync", fsync)
    monkeypatch.setattr(database_module, "QUICK_SYNC_S", 0.5)
    here = threading.get_ident()
    await database.synced()  # nothing is known of the disk yet
    add(database)
    first = database.synced()
    add(database)
    assert database.synced() is first and len(threads) == 1  # not begun yet: it serves what is committed until then
    took_s[0] = 0.6
    await first
    await database.synced()  # it was slow: not here again
    took_s[0] = 0.0
    await database.synced()
    await database.synced()
    assert [one == here for one in threads] == [False, True, False, False, True]


async def test_what_is_still_to_be_synced_is_when_the_file_is_closed(tmp_path: Path) -> None:
    database = open_database(tmp_path / "j.sqlite3")
    database.write("CREATE TABLE t (x)")
    await database.synced()
    database._sync_s = 0.0
    add(database)
    last = database.synced()
    database.close()
    assert last.done()
    await asyncio.sleep(0)  # the turn in which it would have been done
    assert database._wal == -1


async def test_without_a_wal_every_commit_has_waited(tmp_path: Path) -> None:
    database = open_database(tmp_path / "j.sqlite3", wal=False)
    try:
        database.write("CREATE TABLE t (x)")
        with database.transaction(durable=False):
            database.write("INSERT INTO t VALUES (1)")
            assert database.query("PRAGMA synchronous") == [(2,)]
        await database.synced()
    finally:
        database.close()


def test_a_log_of_full_size_holds_what_is_written_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "j.sqlite3"
    database = open_database(path)
    database.write("CREATE TABLE t (x)")
    add(database)
    database.grow_wal()
    wal = Path(f"{path}-wal")
    assert wal.stat().st_size == WAL_BYTES
    add(database)
    copy = tmp_path / "copy.sqlite3"  # as after kill -9, with the log as it is
    for end in ("", "-wal"):
        Path(f"{copy}{end}").write_bytes(Path(f"{path}{end}").read_bytes())
    database.grow_wal()
    for _ in range(1500):  # round and round
        add(database)
    assert wal.stat().st_size <= WAL_BYTES * 1.2
    other = sqlite3.connect(path)
    assert other.execute("SELECT count(*) FROM t").fetchone() == (1502,)
    other.close()
    database.close()
    other = sqlite3.connect(copy)
    assert other.execute("SELECT count(*) FROM t").fetchone() == (2,)
    assert other.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    other.close()


def test_a_log_is_not_grown_where_there_is_little_room(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    little = SimpleNamespace(free=10 * WAL_BYTES)
    monkeypatch.setattr(database_module.shutil, "disk_usage", lambda _path: little)
    database.grow_wal()
    assert Path(f"{database.path}-wal").stat().st_size < WAL_BYTES


def test_a_fence_that_was_used_is_never_used_again(tmp_path: Path) -> None:
    """Also after a restart with a clock that was put back, and when its lease was taken out of the journal."""
    path, used = tmp_path / "journal.sqlite3", 0
    for clock in (ManualClock(2_000.0), ManualClock(1_000.0), ManualClock(1_000.0)):
        with Journal.open(path, clock=clock) as journal:
            fences = [journal.leases.next_fence() for _ in range(3)]
            assert fences == sorted(set(fences)) and fences[0] > used
            used = fences[-1]
            journal.leases.put(LeaseRow(f"l{used}", "boost", "claiming", "gpu1", "gpu-master", 0, used, 1.0))
            if clock.time() < 2_000.0:
                journal.leases.delete(f"l{used}")
    with Journal.open(path, clock=ManualClock(1_000.0)) as journal:
        assert journal.leases.next_fence() > used
