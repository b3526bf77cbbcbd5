"""A transaction that is not durable at once: whole, seen by others, and on disk with the next that is."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from distributed_grid.core.errors import Unavailable
from distributed_grid.store import database as database_module
from distributed_grid.store.database import Database, open_database


def level(database: Database) -> int:
    return int(database.query("PRAGMA synchronous")[0][0])


def next_level(database: Database) -> int:
    """How the next durable transaction is written; 2 (FULL): its commit waits for the disk."""
    with database.transaction():
        return level(database)


def test_it_is_whole_and_the_next_is_durable_again(tmp_path: Path) -> None:
    database = open_database(tmp_path / "j.sqlite3")
    try:
        database.write("CREATE TABLE t (x)")
        with database.transaction(durable=False):
            database.write("INSERT INTO t VALUES (1)")
            with database.transaction():  # within another it is what the outer one is
                database.write("INSERT INTO t VALUES (2)")
            assert level(database) == 1
        assert next_level(database) == 2
        with pytest.raises(ZeroDivisionError), database.transaction(durable=False):
            database.write("INSERT INTO t VALUES (3)")
            raise ZeroDivisionError
        assert next_level(database) == 2
        with database.transaction(), database.transaction(durable=False):
            assert level(database) == 2, "a durable one stays so"
        other = sqlite3.connect(tmp_path / "j.sqlite3")
        assert other.execute("SELECT x FROM t ORDER BY x").fetchall() == [(1,), (2,)]
        other.close()
    finally:
        database.close()


def test_one_that_could_not_begin_leaves_the_next_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database_module, "BUSY_S", 0.01)
    database = open_database(tmp_path / "j.sqlite3")
    other = sqlite3.connect(tmp_path / "j.sqlite3", isolation_level=None)
    try:
        database.write("CREATE TABLE t (x)")
        other.execute("BEGIN IMMEDIATE")  # as somebody's sqlite3 shell
        with pytest.raises(Unavailable) as caught, database.transaction(durable=False):
            pass
        assert caught.value.code == "journal-busy"
        other.execute("ROLLBACK")
        assert next_level(database) == 2
    finally:
        other.close()
        database.close()
