"""The journal: the one truth of the daemon, on disk before anything is done or acknowledged."""

from __future__ import annotations

import contextlib
import sqlite3
import time
import uuid
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from distributed_grid.core.clock import Clock, SystemClock
from distributed_grid.core.errors import GridError, InternalError, Refused
from distributed_grid.store.blocks import Blocks
from distributed_grid.store.database import PAGE_BYTES, Database, explain, is_damage, open_database
from distributed_grid.store.events import EVENTS_KEPT, Events
from distributed_grid.store.kv import KeyValues
from distributed_grid.store.leases import Leases
from distributed_grid.store.links import Links
from distributed_grid.store.moves import Moves
from distributed_grid.store.salvage import companions, has_sound_header, remove_database, salvage
from distributed_grid.store.schema import APPLICATION_ID, MIGRATIONS, RECOVERY_KEY, SCHEMA_KEY, TABLES
from distributed_grid.store.snapshot import disk_full, fsync_directory, is_disk_full, write_json_atomically
from distributed_grid.store.tasks import Tasks


@dataclass(frozen=True, slots=True)
class Recovery:
    """What was wrong with the file when it was opened, and what was done about it."""

    #: "damaged": moved aside and read as far as possible; "missing": it was there once and is gone.
    kind: str
    reason: str
    at: float
    moved_to: str = ""
    salvaged: dict[str, int] = field(default_factory=dict)
    #: Rows that could not be read, by table; None where nobody can say how many.
    lost: dict[str, int | None] = field(default_factory=dict)

    def describe(self) -> str:
        if not self.moved_to:
            return f"the journal was {self.kind} ({self.reason}); a new one was begun"
        kept = sum(self.salvaged.values())
        gone = ", ".join(f"{table} ({'?' if count is None else count})" for table, count in self.lost.items())
        return (
            f"the journal was {self.kind} ({self.reason}); {kept} rows were kept, "
            f"lost: {gone or 'none'}; what was there is at {self.moved_to}"
        )


class Journal:
    """Open with `Journal.open`. Single-threaded; every write is on disk when its call, or its transaction, returns."""

    def __init__(self, database: Database, clock: Clock, recovered: Recovery | None, events_kept: int) -> None:
        self._database = database
        self.recovered = recovered
        self.kv = KeyValues(database)
        self.tasks = Tasks(database)
        self.events = Events(database, clock, events_kept)
        self.moves = Moves(database, clock)
        self.leases = Leases(database, clock)
        self.links = Links(database, clock)
        self.blocks = Blocks(database)

    @classmethod
    def open(
        cls, path: Path, *, clock: Clock | None = None, wal: bool = True, events_kept: int = EVENTS_KEPT
    ) -> Journal:
        """Open, create or repair the journal; `recovered` says what had to be done."""
        clock = clock or SystemClock()
        try:
            database, recovered = _open(path, clock, wal)
        except sqlite3.Error as error:
            raise explain(error, path) from error
        except OSError as error:
            if is_disk_full(error):
                raise disk_full(path) from error
            raise GridError(f"the journal {path} cannot be used", cause=str(error), code="journal-io") from error
        return cls(database, clock, recovered, events_kept)

    @property
    def path(self) -> Path:
        return self._database.path

    @property
    def journal_mode(self) -> str:
        return self._database.journal_mode

    def transaction(self, durable: bool = True) -> AbstractContextManager[None]:
        """Group writes: all or none, on disk at the end (else with the next that is). Never await inside."""
        return self._database.transaction(durable)

    def close(self) -> None:
        self._database.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _open(path: Path, clock: Clock, wal: bool) -> tuple[Database, Recovery | None]:
    marker = path.with_name(f"{path.stem}.id")
    used_before = marker.exists()
    repaired = _rebuilt(path).exists()  # a repair that was cut short just before its end
    if repaired and _trouble(_rebuilt(path), True, wal=False)[0]:
        remove_database(_rebuilt(path))
        repaired = False
    recovered: Recovery | None = None
    if not repaired:
        kind, reason = _trouble(path, used_before, wal)
        if kind and any(file.is_file() for file in (path, *companions(path))):
            _rebuild(path, clock, kind, reason)
            repaired = True
        elif kind:
            recovered = Recovery(kind, reason, clock.time())
    if repaired:
        _swap(path)
    database = open_database(path, wal=wal)
    try:
        _migrate(database)
        if repaired:
            recovered = Recovery(**KeyValues(database).get(RECOVERY_KEY))
        if not used_before:
            write_json_atomically(marker, {"id": uuid.uuid4().hex, "created": clock.time()})
    except BaseException:
        database.close()
        raise
    return database, recovered


def _trouble(path: Path, used_before: bool, wal: bool) -> tuple[str, str]:
    """The kind of recovery that is needed and why, "" for none."""
    if not path.exists():
        return ("missing", "the file was removed") if used_before else ("", "")
    path.chmod(0o600)
    # SQLite takes a file without a whole page for a new one, and throws its WAL away.
    if used_before and path.stat().st_size < PAGE_BYTES:
        return "damaged", "the file is cut off"
    if path.stat().st_size and not has_sound_header(path):
        return "damaged", "its header is not that of a journal of the grid"
    reason = _damage(path, used_before, wal)
    return ("damaged", reason) if reason else ("", "")


def _damage(path: Path, used_before: bool, wal: bool) -> str:
    """What is wrong with the file, "" if nothing; errors that are not damage (locked, no rights) are raised."""
    try:
        database = open_database(path, wal=wal)
    except UnicodeDecodeError:  # in SQLite's own message
        return "its list of tables is unreadable"
    except sqlite3.DatabaseError as error:
        if is_damage(error):
            return str(error)
        raise
    try:
        # Not quick_check: it does not see that an index and its table disagree. Both take milliseconds here.
        result = str(database.query("PRAGMA integrity_check(1)")[0][0])
        if result != "ok":
            return result.replace("\n", " ")
        tables = dict(database.query("SELECT name, sql FROM sqlite_schema"))
        version = _header_version(database)
        if not tables and not version and not used_before:
            return ""  # created, but cut off before its first migration
        known: Any = KeyValues(database).get(SCHEMA_KEY) if "kv" in tables else None
        application = database.query("PRAGMA application_id")[0][0]
        # Nothing checks these header fields for us: a flipped bit there must not pass for a newer version.
        if application != APPLICATION_ID or known != {"version": version}:
            return "its header is not that of a journal of the grid"
        if version <= MIGRATIONS[-1][0] and tables != _tables_at(version):
            return "its tables are not those of a journal of the grid"
        for table in tables.keys() & set(TABLES):
            database.query(f"SELECT * FROM {table}")  # SQLite's own check does not look at the encoding
        return ""
    except UnicodeDecodeError:
        return "it holds unreadable text"
    except InternalError as error:
        return error.cause
    except GridError as error:
        if error.code == "journal-damaged":
            return error.cause
        raise
    finally:
        database.close()


def _tables_at(version: int) -> dict[str, str | None]:
    """What sqlite_schema holds after the migrations up to `version`."""
    with contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        for number, statements in MIGRATIONS:
            for statement in statements if number <= version else ():
                connection.execute(statement)
        return dict(connection.execute("SELECT name, sql FROM sqlite_schema").fetchall())


def _migrate(database: Database) -> None:
    newest = MIGRATIONS[-1][0]
    version = _header_version(database)
    if version > newest:
        raise Refused(
            f"the journal {database.path} was written by a newer grid (version {version}, this one knows {newest})",
            hint="run the newer grid, or set GRID_HOME to another directory",
            code="journal-newer",
        )
    for number, statements in MIGRATIONS:
        if number <= version:
            continue
        with database.transaction():
            for statement in statements:
                database.write(statement)
            database.write(f"PRAGMA application_id={APPLICATION_ID}")
            database.write(f"PRAGMA user_version={number}")
            KeyValues(database).put(SCHEMA_KEY, {"version": number})


def _header_version(database: Database) -> int:
    return int(database.query("PRAGMA user_version")[0][0])


def _rebuild(path: Path, clock: Clock, kind: str, reason: str) -> None:
    """Make a sound file out of what can be read, beside the damaged one, which is not touched."""
    building = path.with_name(f"{path.stem}.rebuilding")
    remove_database(building)
    # No WAL here, so that it is one file with everything in it.
    database = open_database(building, wal=False)
    try:
        _migrate(database)
        salvaged, lost = salvage(path, database, path.with_name(f"{path.stem}.scratch"))
        moved_to = str(_free_name(path, clock))
        recovery = Recovery(kind, reason, clock.time(), moved_to, salvaged, lost)
        KeyValues(database).put(RECOVERY_KEY, asdict(recovery))
    except BaseException:
        database.close()
        remove_database(building)
        raise
    database.close()
    for file in companions(building):
        file.unlink(missing_ok=True)
    building.rename(_rebuilt(path))
    fsync_directory(path.parent)


def _swap(path: Path) -> None:
    """Put the finished repair in the damaged file's place; can be cut short anywhere and done again."""
    with_record = open_database(_rebuilt(path), wal=False)
    try:
        moved_to = Path(KeyValues(with_record).get(RECOVERY_KEY)["moved_to"])
    finally:
        with_record.close()
    for file in companions(_rebuilt(path)):
        file.unlink(missing_ok=True)
    _set_aside(path, moved_to)
    _rebuilt(path).rename(path)
    fsync_directory(path.parent)


def _set_aside(path: Path, to: Path) -> None:
    """Move the file and its companions; an old WAL must never meet a new file."""
    for source, target in zip((path, *companions(path)), (to, *companions(to)), strict=True):
        if source.exists():
            source.rename(target)
    fsync_directory(path.parent)


def _free_name(path: Path, clock: Clock) -> Path:
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(clock.time()))
    number = 0
    while True:
        name = path.with_name(f"{path.stem}.damaged-{stamp}" + (f"-{number}" if number else ""))
        if not any(file.exists() for file in (name, *companions(name))):
            return name
        number += 1


def _rebuilt(path: Path) -> Path:
    return path.with_name(f"{path.stem}.rebuilt")
