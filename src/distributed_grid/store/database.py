"""One SQLite connection with durable commits and errors a user can act on."""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from distributed_grid.core.errors import GridError, InternalError, Unavailable
from distributed_grid.store.snapshot import disk_full, fsync_directory, is_disk_full

PAGE_BYTES = 4096
# The daemon's loop waits while another program (a person's sqlite3 shell) holds the file: not for long.
BUSY_S = 2.0
# The size at which SQLite begins the WAL anew (1,000 pages, each with a header of 24 bytes), and a little more.
WAL_BYTES = 1100 * (PAGE_BYTES + 24)
#: An fsync that takes less than this is done by the loop itself.
QUICK_SYNC_S = 0.001

# WAL needs memory shared by mmap and sound locks, which these do not promise.
NETWORK_FILE_SYSTEMS = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "lustre", "gpfs", "beegfs", "ceph", "afs", "glusterfs"}
    | {"fuse.glusterfs", "fuse.sshfs"}
)

# How SQLite says that the shared memory of WAL cannot be had (a directory of others' rights, no mmap, no locks).
_NO_SHARED_MEMORY = frozenset(
    {sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PROTOCOL, sqlite3.SQLITE_READONLY}
)


class Database:
    """Short synchronous statements on one connection; each runs in a transaction of its own or in the open one."""

    def __init__(self, path: Path, connection: sqlite3.Connection, journal_mode: str) -> None:
        self.path = path
        self.journal_mode = journal_mode
        self._connection = connection
        self._depth = 0
        self._owner: object = None
        #: Whether a commit waits for the disk now; None: unknown.
        self._durable: bool | None = None
        self._syncer: ThreadPoolExecutor | None = None
        self._wal = -1
        #: The fsync that the loop does in its next turn; how long the last one took.
        self._to_sync: asyncio.Future[None] | None = None
        self._sync_s = float("inf")
        #: The fsync under way, and the one that follows for what was committed since it began.
        self._syncing: asyncio.Future[None] | None = None
        self._next_sync: asyncio.Future[None] | None = None

    def query(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        try:
            return self._connection.execute(sql, values).fetchall()
        except sqlite3.Error as error:
            raise explain(error, self.path) from error

    def write(self, sql: str, values: Sequence[Any] = (), *, durable: bool = True) -> int:
        """Run one statement; on disk when this returns, unless a transaction is open. The last row's id.

        Not `durable`: as in `transaction`.
        """
        self._check_owner()
        if not self._depth:
            self._set_durable(durable)
        return self._execute(sql, values)  # one statement is all or nothing by itself, and committed by itself

    def _execute(self, sql: str, values: Sequence[Any]) -> int:
        try:
            return self._connection.execute(sql, values).lastrowid or 0
        except sqlite3.Error as error:
            raise explain(error, self.path) from error

    @contextmanager
    def transaction(self, durable: bool = True) -> Iterator[None]:
        """All of it or nothing, on disk at the end; may be nested. Never await inside.

        Not `durable`: it outlives the process but not a power cut, until the next durable one is on disk, or `synced`.
        """
        self._check_owner()
        nested = f"level_{self._depth}" if self._depth else ""
        if not nested:
            self._set_durable(durable)
        self._run(f"SAVEPOINT {nested}" if nested else "BEGIN IMMEDIATE")
        self._owner = _current_task()
        self._depth += 1
        try:
            yield
            self._run(f"RELEASE {nested}" if nested else "COMMIT")
        except BaseException:
            # SQLite itself rolls back all of it on some errors (disk full).
            if self._connection.in_transaction:
                if nested:
                    self._run(f"ROLLBACK TO {nested}")
                    self._run(f"RELEASE {nested}")
                else:
                    self._run("ROLLBACK")
            raise
        finally:
            self._depth -= 1

    def _check_owner(self) -> None:
        if self._depth and _current_task() is not self._owner:
            # It would be acknowledged before it is on disk.
            raise InternalError("a journal transaction was left open across an await")

    def _set_durable(self, durable: bool) -> None:
        """Said before each transaction, not put back after it: so it holds however the one before ended."""
        durable = durable or self.journal_mode != "wal"  # without a WAL, less than FULL may damage the file
        if durable is self._durable:
            return
        self._durable = None
        self._run(f"PRAGMA synchronous={'FULL' if durable else 'NORMAL'}")  # NORMAL: no fsync at the commit, with WAL
        self._durable = durable

    def synced(self) -> asyncio.Future[None]:
        """Done once all that is committed now is on disk.

        A commit to the WAL followed by an fsync of it is what SQLite itself does for `synchronous=FULL`. One fsync
        serves all that were committed before it began. Not to be cancelled: others may wait for the same.

        While the disk is quick the loop does it itself, in its next turn: what is sent in this one is on its way then.
        A thread for it costs more than that, and is there for a disk that is slow: then the loop goes on meanwhile.
        """
        if self._to_sync is not None:
            return self._to_sync
        if self._syncing is None or self._syncing.done():
            self._syncing = self._begin_sync()
            return self._syncing
        if self._next_sync is None:
            self._next_sync = asyncio.ensure_future(self._sync_after(self._syncing))
        return self._next_sync

    async def _sync_after(self, running: asyncio.Future[None]) -> None:
        await asyncio.wait({running})
        self._syncing, self._next_sync = self._next_sync, None
        await self._begin_sync()

    def _begin_sync(self) -> asyncio.Future[None]:
        loop = asyncio.get_running_loop()
        if self.journal_mode != "wal":  # every commit has waited for the disk
            done: asyncio.Future[None] = loop.create_future()
            done.set_result(None)
            return done
        if self._sync_s < QUICK_SYNC_S:
            self._to_sync = loop.create_future()
            loop.call_soon(self._sync_here, self._to_sync)
            return self._to_sync
        if self._syncer is None:  # of its own: the loop's other threads may all be busy
            self._syncer = ThreadPoolExecutor(1, "journal-sync")
        return loop.run_in_executor(self._syncer, self._sync)

    def _sync_here(self, done: asyncio.Future[None]) -> None:
        if self._to_sync is not done:  # it was done before the file was closed
            return
        self._to_sync = None
        try:
            self._sync()
        except GridError as error:
            done.set_exception(error)
        else:
            done.set_result(None)

    def _sync(self) -> None:
        begun = time.monotonic()
        try:
            os.fdatasync(self._wal_descriptor())
            self._sync_s = time.monotonic() - begun
        except OSError as error:
            if is_disk_full(error):
                raise disk_full(self.path) from error
            message, hint = f"the journal {self.path} can't be brought to disk", f"check the disk of {self.path.parent}"
            raise Unavailable(message, cause=str(error), hint=hint, code="journal-io") from error

    def _wal_descriptor(self) -> int:
        """Ours, beside SQLite's: nobody locks the WAL itself, so that closing it takes no lock away."""
        if self._wal >= 0 and os.fstat(self._wal).st_nlink == 0:
            os.close(self._wal)
            self._wal = -1
        if self._wal < 0:
            self._wal = os.open(f"{self.path}-wal", os.O_RDWR | os.O_CLOEXEC)
            fsync_directory(self.path.parent)  # SQLite does so at an fsync of its own only
        return self._wal

    def grow_wal(self) -> None:
        """Give the WAL its full size at once: an fsync of a file that grows takes about twice as long.

        Zeros are no frames to SQLite. Where there is no room to spare it just grows as it always does.
        """
        if self.journal_mode != "wal" or shutil.disk_usage(self.path.parent).free < 100 * WAL_BYTES:
            return
        self._run("BEGIN IMMEDIATE")  # nobody appends to it meanwhile
        try:
            descriptor = self._wal_descriptor()
            size = os.fstat(descriptor).st_size
            if size < WAL_BYTES:
                os.pwrite(descriptor, bytes(WAL_BYTES - size), size)
                os.fsync(descriptor)
        except OSError:
            pass  # it is only slower
        finally:
            self._run("ROLLBACK")

    def close(self) -> None:
        if self._to_sync is not None:
            self._sync_here(self._to_sync)
        if self._syncer is not None:
            self._syncer.shutdown()
        if self._wal >= 0:
            os.close(self._wal)
            self._wal = -1
        self._connection.close()

    def _run(self, sql: str) -> None:
        try:
            self._connection.execute(sql)
        except sqlite3.Error as error:
            raise explain(error, self.path) from error


def open_database(path: Path, *, wal: bool = True) -> Database:
    """Open or create (0600) the file. WAL where it takes, else TRUNCATE; both fsync before a commit returns.

    Raises sqlite3.DatabaseError as it is, so that the caller can tell damage from the rest.
    """
    _create(path)
    wanted = wal and file_system_of(path) not in NETWORK_FILE_SYSTEMS
    if wanted:
        connection = _connect(path)
        try:
            if _set_mode(connection, "wal"):
                connection.execute("BEGIN IMMEDIATE")  # shows whether the shared memory really works
                connection.execute("ROLLBACK")
                return Database(path, connection, "wal")
        except sqlite3.OperationalError as error:
            if _primary(error) not in _NO_SHARED_MEMORY:
                connection.close()
                raise
        except sqlite3.Error:
            connection.close()
            raise
        connection.close()
    # Exclusive locking reads a WAL file without shared memory, so the mode can be left even where it never worked.
    connection = _connect(path, "PRAGMA locking_mode=EXCLUSIVE")
    try:
        if not _set_mode(connection, "truncate"):
            raise Unavailable(f"{path} is in use by another program", code="journal-busy")
        connection.execute("PRAGMA locking_mode=NORMAL")
        connection.execute("SELECT count(*) FROM sqlite_schema").fetchall()  # lets the exclusive lock go
    except BaseException:
        connection.close()
        raise
    return Database(path, connection, "truncate")


def is_damage(error: sqlite3.Error) -> bool:
    return _primary(error) in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def explain(error: sqlite3.Error, path: Path) -> GridError:
    """What SQLite says, as one of our errors."""
    code = _primary(error)
    # A full disk also shows as a failed read or open where shared memory could not grow.
    if code == sqlite3.SQLITE_FULL or (
        code in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN) and _no_space(path.parent)
    ):
        return disk_full(path)
    cause = str(error)
    if is_damage(error):
        hint = "run: grid daemon stop, then: grid daemon start (what can be read is recovered)"
        return GridError(f"the journal {path} is damaged", cause=cause, hint=hint, code="journal-damaged")
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        hint = "close whatever else has the file open, then try again"
        return Unavailable(f"{path} is in use by another program", cause=cause, hint=hint, code="journal-busy")
    if code in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM):
        hint = f"check the disk and the rights of {path.parent}"
        return Unavailable(f"the journal {path} cannot be used", cause=cause, hint=hint, code="journal-io")
    return InternalError("the journal refused a statement", cause=cause)


def file_system_of(path: Path, mountinfo: str | None = None) -> str:
    """The type of the file system that holds `path`, "" where unknown (proc(5), mountinfo)."""
    if mountinfo is None:
        try:
            mountinfo = Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
        except OSError:
            return ""
    where = path.resolve()
    best, kind = -1, ""
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        fields = left.split()
        if len(fields) < 5 or not right:
            continue
        point = Path(fields[4].replace("\\040", " ").replace("\\134", "\\"))
        # A later mount on the same point hides the earlier one.
        if where.is_relative_to(point) and len(point.parts) >= best:
            best, kind = len(point.parts), right.split()[0]
    return kind


def _create(path: Path) -> None:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return
    except OSError as error:
        if is_disk_full(error):
            raise disk_full(path) from error
        hint = f"check the disk and the rights of {path.parent}"
        raise Unavailable(f"{path} cannot be created", cause=str(error), hint=hint, code="journal-io") from error
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    fsync_directory(path.parent)


def _connect(path: Path, first: str = "") -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None)
    try:
        connection.execute(first)
        connection.execute(f"PRAGMA page_size={PAGE_BYTES}")
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute("PRAGMA foreign_keys=ON")
        connection.execute("PRAGMA cell_size_check=ON")
    except BaseException:
        connection.close()
        raise
    return connection


def _set_mode(connection: sqlite3.Connection, mode: str) -> bool:
    row = connection.execute(f"PRAGMA journal_mode={mode}").fetchone()
    return row is not None and row[0] == mode


def _primary(error: sqlite3.Error) -> int:
    """The primary result code, without the extended part; 0 for errors that Python raises itself."""
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF


def _no_space(directory: Path) -> bool:
    try:
        return shutil.disk_usage(directory).free < 64 * 1024
    except OSError:
        return False


def _current_task() -> object:
    try:
        return asyncio.current_task()
    except RuntimeError:  # no loop runs here
        return None
