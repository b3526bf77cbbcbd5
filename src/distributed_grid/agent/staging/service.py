"""The calls by which the daemon carries a moved process's files to this node, and those it changed home again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pwd
import signal
import stat
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from distributed_grid.agent.node import AgentNode
from distributed_grid.agent.staging import beneath
from distributed_grid.agent.staging.beneath import CHUNK_BYTES, Entry, digest_of, entry_of
from distributed_grid.agent.staging.cache import Cache
from distributed_grid.agent.staging.names import Agreed, Place
from distributed_grid.agent.staging.placed import Placed
from distributed_grid.agent.staging.scan import above, scan
from distributed_grid.core.errors import GridError, NotFound, Refused, UsageError
from distributed_grid.core.process import ProcessId
from distributed_grid.wire.rpc import CallContext, method

MAX_FILES = 50_000
SAVE_LIMIT_S = 3600.0

Answer = TypeVar("Answer")
Wire = dict[str, Any]


class StagingService:
    def __init__(self, node: AgentNode) -> None:
        self._name = node.name
        self._cache = Cache(node.node_dir / "cache")
        self._placed = Placed(node.node_dir / "staging" / "placed.json")
        self._writing = threading.Lock()

    # -- looking ----------------------------------------------------------------------------------------------------

    @method
    async def stage_scan(self, context: CallContext, *, agreed: Wire, max_files: int) -> Wire:
        """What lies beneath the agreed directories, and the agreed files; trees with more than that are `large`."""
        found = await _run(lambda: scan(Agreed.from_wire(agreed), min(max_files, MAX_FILES)))
        return {
            "entries": [one.to_wire() for one in found.entries],
            "directories": [one.to_wire() for one in found.directories],
            "large": found.large,
        }

    @method
    async def stage_above(self, context: CallContext, *, paths: list[str]) -> list[Wire]:
        """These directories and all above them, with their owners."""
        return [one.to_wire() for one in await _run(lambda: above(paths))]

    @method
    async def stage_look(self, context: CallContext, *, agreed: Wire, paths: list[str], digests: bool) -> list[Wire]:
        """How these files stand, with digests if asked for; those that are not there are left out."""
        return await _run(lambda: self._look(Agreed.from_wire(agreed), paths, digests))

    def _look(self, agreed: Agreed, paths: list[str], digests: bool) -> list[Wire]:
        found = []
        for path in paths:
            place = agreed.place(path)
            with contextlib.suppress(FileNotFoundError, NotADirectoryError, Refused):
                if not digests:
                    entry = beneath.look(place)
                    if entry:
                        found.append(entry.to_wire())
                    continue
                with beneath.opened(place) as fd:
                    before = os.fstat(fd)
                    found.append(entry_of(path, before, digest_of(fd, before.st_size)).to_wire())
        return found

    @method
    async def stage_read(self, context: CallContext, *, agreed: Wire, wanted: list[Wire]) -> list[bytes]:
        """Pieces of files: `path`, `offset`, `size` each, together no more than a piece may be."""
        return await _run(lambda: self._read(Agreed.from_wire(agreed), wanted))

    def _read(self, agreed: Agreed, wanted: list[Wire]) -> list[bytes]:
        if sum(int(one["size"]) for one in wanted) > CHUNK_BYTES:
            raise UsageError("more than one piece at a time", code="piece-size")
        pieces = []
        for one in wanted:
            try:
                with beneath.opened(agreed.place(one["path"])) as fd:
                    pieces.append(os.pread(fd, int(one["size"]), int(one["offset"])))
            except FileNotFoundError:
                pieces.append(b"")  # gone meanwhile: its digest will not fit
        return pieces

    # -- writing ----------------------------------------------------------------------------------------------------

    @method
    async def stage_make(self, context: CallContext, *, directories: list[Wire]) -> list[str]:
        """Make the directories that are not here yet, each as its owner's; which were made."""
        found = [Entry(**one) for one in directories]
        return await _run(
            lambda: [one.path for one in found if beneath.make_directory(one.path, one.mode, one.uid, one.gid)]
        )

    @method
    async def stage_have(self, context: CallContext, *, agreed: Wire, entries: list[Wire]) -> list[str]:
        """Have as many of these files here as can be without sending; which are still missing."""
        return await _run(lambda: self._have(Agreed.from_wire(agreed), [Entry(**one) for one in entries]))

    def _have(self, agreed: Agreed, entries: list[Entry]) -> list[str]:
        missing, marks = [], {}
        with self._writing:
            for one in entries:
                place = agreed.place(one.path)
                if one.link:
                    beneath.write_link(place, one)
                elif self._is_here(place, one):
                    marks[one.path] = one.mark
                elif self._cache.has(one.digest):
                    marks[one.path] = self._place(place, one).mark
                else:
                    missing.append(one.path)
            self._placed.set(marks)
        return missing

    def _is_here(self, place: Place, wanted: Entry) -> bool:
        """Whether that content is at its place already; then only its times and owner are set."""
        try:
            with beneath.opened(place) as fd:
                about = os.fstat(fd)
                if about.st_size != wanted.size or digest_of(fd, wanted.size) != wanted.digest:
                    return False
                with contextlib.suppress(PermissionError, OSError):  # a read-only file system has it as it is
                    if (about.st_uid, about.st_gid) != (wanted.uid, wanted.gid):
                        os.fchown(fd, wanted.uid, wanted.gid)
                    if stat.S_IMODE(about.st_mode) != wanted.mode & 0o777:
                        os.fchmod(fd, wanted.mode & 0o777)
                    if about.st_mtime_ns != wanted.mtime_ns:
                        os.utime(fd, ns=(wanted.mtime_ns, wanted.mtime_ns))
                return True
        except (FileNotFoundError, Refused):
            return False

    def _place(self, place: Place, wanted: Entry) -> Entry:
        with self._cache.open(wanted.digest) as fd:
            return beneath.write(place, wanted, fd, expect=self._placed.mark(wanted.path), aside=f".of-{self._name}")

    @method
    async def stage_piece(self, context: CallContext, *, move_id: str, digest: str, offset: int, data: bytes) -> None:
        """A piece of a large content."""
        if len(data) > CHUNK_BYTES:
            raise UsageError("more than one piece at a time", code="piece-size")
        await _run(lambda: self._cache.add(move_id, digest, offset, data))

    @method
    async def stage_place(
        self, context: CallContext, *, move_id: str, agreed: Wire, files: list[Wire]
    ) -> list[Wire]:
        """Put files where they belong: each `entry`, and `data` unless its pieces were sent before.

        The answer has each as it stands then, or `refused` and why.
        """
        return await _run(lambda: self._place_all(move_id, Agreed.from_wire(agreed), files))

    def _place_all(self, move_id: str, agreed: Agreed, files: list[Wire]) -> list[Wire]:
        done: list[Wire] = []
        marks: dict[str, list[int]] = {}
        with self._writing:
            for one in files:
                wanted = Entry(**one["entry"])
                place = agreed.place(wanted.path)
                try:
                    self._complete(move_id, wanted, one.get("data"))
                    placed = self._place(place, wanted)
                except Refused as error:
                    done.append({"path": wanted.path, "refused": error.code, "text": error.message})
                    continue
                marks[placed.path] = placed.mark
                done.append(placed.to_wire())
            self._placed.set(marks)
            self._cache.sweep()
        return done

    def _complete(self, move_id: str, wanted: Entry, data: bytes | None) -> None:
        if data is not None:
            self._cache.add(move_id, wanted.digest, 0, data)
        if data is not None or not self._cache.has(wanted.digest):
            self._cache.seal(move_id, wanted.digest, wanted.size)

    @method
    async def stage_home(
        self, context: CallContext, *, move_id: str, agreed: Wire, uid: int, gid: int, files: list[Wire]
    ) -> list[Wire]:
        """Files that come home, as that user: each `entry`, `expect` (the mark of what may be replaced), `data`.

        The answer has each as it stands then, or `refused` and why: nothing was written there.
        """
        return await _run(lambda: self._home_all(move_id, Agreed.from_wire(agreed), uid, gid, files))

    def _home_all(self, move_id: str, agreed: Agreed, uid: int, gid: int, files: list[Wire]) -> list[Wire]:
        done: list[Wire] = []
        for one in files:
            wanted = Entry(**one["entry"])
            place = agreed.place(wanted.path)
            try:
                self._complete(move_id, wanted, one.get("data"))
                owned = self._as_owner(place, wanted, uid, gid)
                with self._cache.open(wanted.digest) as fd:
                    done.append(beneath.write(place, owned, fd, expect=one.get("expect")).to_wire())
            except Refused as error:
                done.append({"path": wanted.path, "refused": error.code, "text": error.message})
        self._cache.sweep()
        return done

    def _as_owner(self, place: Place, wanted: Entry, uid: int, gid: int) -> Entry:
        """What the other side says of owners counts for nothing: the user's own file keeps its owner and mode."""
        here = beneath.look(place)
        mode = wanted.mode & 0o777
        if here is not None:
            if here.link or (uid != 0 and here.uid != uid):
                raise Refused(f"{wanted.path} is not the user's own file", code="not-owner")
            uid, gid, mode = here.uid, here.gid, here.mode
        elif uid != 0:
            _check_writable(place, uid, gid)
        return Entry(wanted.path, wanted.size, wanted.mtime_ns, mode, uid, gid, wanted.digest)

    @method
    async def stage_settle(self, context: CallContext, *, marks: dict[str, list[int]]) -> None:
        """These files, as they are, are home now: a later move may replace them."""
        with self._writing:
            self._placed.set(marks)

    @method
    async def stage_remove(self, context: CallContext, *, agreed: Wire, marks: dict[str, list[int]]) -> list[str]:
        """Remove files that were sent and have since gone where they came from; only those still as they were sent."""
        known = Agreed.from_wire(agreed)
        return await _run(lambda: [path for path, mark in marks.items() if beneath.remove(known.place(path), mark)])

    # -- a relaunch -------------------------------------------------------------------------------------------------

    @method
    async def stage_save(
        self, context: CallContext, *, pid: int, start_ticks: int, number: int, grace_s: float
    ) -> bool:
        """Ask a program to save itself, and give it that long; False if it ended meanwhile."""
        if number not in signal.valid_signals():
            raise UsageError(f"there is no signal {number}", code="bad-signal")
        process = ProcessId(pid, start_ticks)
        if not process.signal(number):
            raise NotFound(f"process {pid} is gone", code="process-not-found")
        deadline = time.monotonic() + min(grace_s, SAVE_LIMIT_S)
        while process.is_alive() and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        return process.is_alive()


async def _run(work: Callable[[], Answer]) -> Answer:
    """In a thread; what the system says becomes an error that crosses the wire."""
    try:
        return await asyncio.to_thread(work)
    except OSError as error:
        what = error.filename if isinstance(error.filename, str) else "a file"
        raise GridError(f"{what} could not be carried", cause=error.strerror or str(error), code="file-error") from None


def _check_writable(place: Place, uid: int, gid: int) -> None:
    """The nearest directory that is there must be one in which that user may make files."""
    inside = place.inside
    while True:
        try:
            with beneath.directory(place.tree, inside) as fd:
                about = os.fstat(fd)
                break
        except FileNotFoundError:
            if not inside:
                raise Refused(f"{place.tree} is gone", code="not-writable") from None
            inside.pop()
    bits = 0o200 if about.st_uid == uid else 0o020 if about.st_gid in _groups(uid, gid) else 0o002
    if not about.st_mode & bits:
        raise Refused(f"{place.path}: the user may not write there", code="not-writable")


def _groups(uid: int, gid: int) -> list[int]:
    try:
        return os.getgrouplist(pwd.getpwuid(uid).pw_name, gid)
    except KeyError:
        return [gid]
