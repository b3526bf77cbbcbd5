"""Reads what can still be read of a damaged journal, table by table and row by row."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from distributed_grid.core.errors import InternalError
from distributed_grid.store.database import PAGE_BYTES, Database
from distributed_grid.store.schema import RECOVERY_KEY, SCHEMA_KEY, TABLES

#: At most so many row ids are tried one by one where a scan cannot pass.
_PROBES = 50_000
#: Where the end of a table cannot be seen: give up after so many in a row.
_FRUITLESS_PROBES = 5_000

#: What Python raises for a bad page, for bad text in a row, and for bad text in SQLite's own message.
_UNREADABLE = (sqlite3.DatabaseError, UnicodeDecodeError)

Counts = dict[str, int]
#: None: rows are gone and nobody can say how many.
Losses = dict[str, int | None]


def companions(path: Path) -> list[Path]:
    """The files that SQLite keeps beside a database."""
    return [path.with_name(path.name + suffix) for suffix in ("-wal", "-shm", "-journal")]


def remove_database(path: Path) -> None:
    for file in (path, *companions(path)):
        with contextlib.suppress(IsADirectoryError):
            file.unlink(missing_ok=True)


def salvage(damaged: Path, into: Database, scratch: Path) -> tuple[Counts, Losses]:
    """Copy the readable rows of `damaged` (left as it is; if deleted, of its WAL) to the fresh journal `into`."""
    # Its own first page, which lists the tables; else that of a fresh file, whose tables begin at the same pages.
    ways = (None, into.path.read_bytes()[:PAGE_BYTES])
    kept: list[int] = []
    for first_page in ways:
        with contextlib.suppress(_TryOtherWay), into.transaction():
            salvaged, lost = _fill(damaged, into, scratch, first_page)
            if not lost:
                return salvaged, lost
            kept.append(sum(salvaged.values()))
            raise _TryOtherWay
    with into.transaction():
        return _fill(damaged, into, scratch, ways[kept.index(max(kept))])


class _TryOtherWay(Exception):
    """Undoes what one way has put in."""


def _fill(damaged: Path, into: Database, scratch: Path, first_page: bytes | None) -> tuple[Counts, Losses]:
    salvaged: Counts = {}
    lost: Losses = {}
    with _readable_copy(damaged, scratch, first_page) as source:
        for table in TABLES:
            there = _columns(source, table)
            columns = [name for name in (row[1] for row in into.query(f"PRAGMA table_info({table})")) if name in there]
            rows, gone = _read(source, table, columns) if columns else ([], None)
            salvaged[table] = 0
            for row in rows:
                if table == "kv" and row[0] in (SCHEMA_KEY, RECOVERY_KEY):
                    continue
                if _insert(into, table, columns, row):
                    salvaged[table] += 1
                elif gone is not None:
                    gone += 1
            if gone != 0:
                lost[table] = gone
    return salvaged, lost


@contextmanager
def _readable_copy(damaged: Path, scratch: Path, first_page: bytes | None) -> Iterator[sqlite3.Connection]:
    """A copy of the file that SQLite is able to open, thrown away at the end."""
    remove_database(scratch)
    try:
        _copy(damaged, scratch, first_page)
        with contextlib.closing(sqlite3.connect(scratch, isolation_level=None)) as connection:
            yield connection
    finally:
        remove_database(scratch)


def _copy(damaged: Path, scratch: Path, first_page: bytes | None) -> None:
    if damaged.exists():
        shutil.copyfile(damaged, scratch)
    else:
        scratch.touch()
    for source, target in zip(companions(damaged), companions(scratch), strict=True):
        if source.is_file() and not source.name.endswith("-shm"):
            shutil.copyfile(source, target)
    scratch.chmod(0o600)
    with scratch.open("r+b") as file:
        pages = -(-scratch.stat().st_size // PAGE_BYTES) or 1
        file.truncate(pages * PAGE_BYTES)
        if first_page is not None:
            file.write(first_page)
        file.seek(0)
        file.write(_header(pages))


def _header(pages: int) -> bytes:
    """A sound file header for our settings (https://sqlite.org/fileformat2.html, 1.3): WAL, no free pages, UTF-8."""
    head = b"SQLite format 3\0" + struct.pack(">HBBBBBB", PAGE_BYTES, 2, 2, 0, 64, 32, 32)
    #              change, pages, free, free, cookie, format, cache, vacuum, encoding, version, vacuum, application
    head += struct.pack(">12I", 1, pages, 0, 0, 1, 4, 0, 0, 1, 0, 0, 0)
    # Valid for another change than the last: SQLite then counts the pages itself, those in the WAL too.
    return head + bytes(20) + struct.pack(">II", 0, 0)


def has_sound_header(path: Path) -> bool:
    """Whether the fields of the header that never change are right; SQLite takes a wrong one for a wish (read-only)."""
    with path.open("rb") as file:
        head = file.read(100)
    wanted = _header(0)
    # Schema format and encoding are zero until the first table is made.
    late = head[44:48] + head[56:60]
    return (
        head[:18] + head[20:24] == wanted[:18] + wanted[20:24]
        and {*head[18:20]} <= {1, 2}  # WAL or not
        and late in (wanted[44:48] + wanted[56:60], bytes(8))
    )


def _columns(source: sqlite3.Connection, table: str) -> set[str]:
    try:
        return {str(row[1]) for row in source.execute(f"PRAGMA table_info({table})")}
    except _UNREADABLE:
        return set()


def _read(source: sqlite3.Connection, table: str, columns: list[str]) -> tuple[list[tuple[Any, ...]], int | None]:
    """The readable rows in order, and how many are gone."""
    select = f"SELECT rowid, {', '.join(columns)} FROM {table} NOT INDEXED"
    found: dict[int, tuple[Any, ...]] = {}

    def scan(way: str) -> tuple[bool, int | None]:
        """Whether it came to the end, and the last row id it saw."""
        last = None
        try:
            for row in source.execute(f"{select} ORDER BY rowid {way}"):
                if last is not None and (row[0] > last) != (way == "ASC"):
                    return False, last  # pages that lead in a circle
                last = row[0]
                found[last] = row[1:]
        except _UNREADABLE:
            return False, last
        return True, last

    gone: int | None = 0
    complete, low = scan("ASC")
    if not complete:
        first = 1 if low is None else low + 1
        high = scan("DESC")[1]
        gone = None if high is None or high - first > _PROBES else 0
        fruitless = 0
        for rowid in range(first, min(first + _PROBES, first + _PROBES if high is None else high)):
            try:
                row = source.execute(f"{select} WHERE rowid = ?", [rowid]).fetchone()
            except _UNREADABLE:
                row = None
                gone = None if gone is None else gone + 1
            if row is not None:
                found[rowid] = row[1:]
            fruitless = 0 if row is not None else fruitless + 1
            if high is None and fruitless > _FRUITLESS_PROBES:
                break
    return [found[rowid] for rowid in sorted(found)], gone


def _insert(into: Database, table: str, columns: list[str], row: tuple[Any, ...]) -> bool:
    marks = ", ".join("?" for _ in columns)
    try:
        into.write(f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({marks})", row)
    except InternalError:  # the tables' own rules refuse it: a row of nonsense
        return False
    return True
