"""Reads and writes files so that no link and no race on the way can lead out of the agreed directories.

Every directory is entered by its descriptor. A symbolic link is followed only if root made it: a user could set up
his own to have root write elsewhere.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from distributed_grid.agent.staging.names import TEMPORARY, Place
from distributed_grid.core.errors import Refused

CHUNK_BYTES = 1 << 20
_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_LINKS_LIMIT = 20


@dataclass(frozen=True, slots=True)
class Entry:
    """A file as one side has it."""

    path: str
    size: int
    mtime_ns: int
    mode: int
    uid: int
    gid: int
    digest: str = ""
    link: str = ""  # a symbolic link, and what it says

    @property
    def mark(self) -> list[int]:
        """What tells whether it was changed."""
        return [self.size, self.mtime_ns]

    def to_wire(self) -> dict[str, Any]:
        return asdict(self)


def entry_of(path: str, about: os.stat_result, digest: str = "", link: str = "") -> Entry:
    mode = stat.S_IMODE(about.st_mode)
    return Entry(path, about.st_size, about.st_mtime_ns, mode, about.st_uid, about.st_gid, digest, link)


@contextlib.contextmanager
def directory(tree: str, inside: Iterable[str] = (), made_by: tuple[int, int] | None = None) -> Iterator[int]:
    """A descriptor of the directory `inside` the tree; with `made_by`, what is missing is made for that user and group.

    On the way to the tree a link of root's own is followed; inside of it, none is.
    """
    fd = os.open("/", _DIRECTORY)
    links = 0
    try:
        todo = [part for part in tree.split("/") if part]
        while todo:
            name = todo.pop(0)
            try:
                fd = _enter(fd, name, made_by)
            except NotADirectoryError:
                about = os.stat(name, dir_fd=fd, follow_symlinks=False)
                links += 1
                if not stat.S_ISLNK(about.st_mode) or about.st_uid != 0 or links > _LINKS_LIMIT:
                    raise Refused(f"{tree}: {name} is not a directory, or a link", code="file-link") from None
                target = os.readlink(name, dir_fd=fd)
                todo = [*(part for part in target.split("/") if part), *todo]
                if target.startswith("/"):
                    fd = _enter(fd, "/", None)
        for name in inside:
            try:
                fd = _enter(fd, name, made_by)
            except NotADirectoryError:
                raise Refused(f"{tree}: {name} is not a directory, or a link", code="file-link") from None
        yield fd
    finally:
        os.close(fd)


def _enter(fd: int, name: str, made_by: tuple[int, int] | None) -> int:
    """The directory below, `fd` closed; where it fails `fd` stays."""
    try:
        below = os.open(name, _DIRECTORY, dir_fd=fd)
    except FileNotFoundError:
        if made_by is None:
            raise
        below = _make(fd, name, made_by)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise NotADirectoryError(errno.ENOTDIR, "a link", name) from None
        raise
    os.close(fd)
    return below


def _at(place: Place, made_by: tuple[int, int] | None = None) -> contextlib.AbstractContextManager[int]:
    return directory(place.tree, place.inside, made_by)


def _make(parent: int, name: str, owner: tuple[int, int], mode: int = 0o755) -> int:
    """A new directory. Its owner gets it by descriptor: its name may mean another thing by then."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=parent)
    opened = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        _own(opened, *owner)
        os.fchmod(opened, mode)
    finally:
        os.close(opened)
    return os.open(name, _DIRECTORY, dir_fd=parent)


def make_directory(path: str, mode: int, uid: int, gid: int) -> bool:
    """Make it where its parent is there and it is not; whether it was made."""
    parent, _, name = path.rpartition("/")
    with directory(parent or "/", made_by=(uid, gid)) as fd:
        try:
            about = os.stat(name, dir_fd=fd)
        except FileNotFoundError:
            os.close(_make(fd, name, (uid, gid), mode & 0o1777))
            return True
    if not stat.S_ISDIR(about.st_mode):
        raise Refused(f"{path} is not a directory", code="not-a-directory")
    return False


def _own(fd: int, uid: int, gid: int) -> None:
    about = os.fstat(fd)
    if (about.st_uid, about.st_gid) != (uid, gid):
        os.fchown(fd, uid, gid)


@contextlib.contextmanager
def opened(place: Place) -> Iterator[int]:
    """A regular file, for reading."""
    with _at(place) as fd:
        file = os.open(place.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=fd)
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise Refused(f"{place.path} is not a file", code="not-a-file")
            yield file
        finally:
            os.close(file)


def digest_of(fd: int, size: int) -> str:
    """Of so many bytes and no more: a file that is being appended to has a whole beginning at any time."""
    found = hashlib.blake2b(digest_size=20)
    at = 0
    while at < size and (data := os.pread(fd, min(CHUNK_BYTES, size - at), at)):
        found.update(data)
        at += len(data)
    return found.hexdigest()


def look(place: Place) -> Entry | None:
    """How the file stands now; None where there is none. `link` is set for all that is no file."""
    try:
        with _at(place) as fd:
            about = os.stat(place.name, dir_fd=fd, follow_symlinks=False)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return entry_of(place.path, about, link="" if stat.S_ISREG(about.st_mode) else "?")


def write(place: Place, wanted: Entry, source: int, *, expect: list[int] | None, aside: str = "") -> Entry:
    """Put what `source` holds at that name, whole or not at all, and say how it stands then.

    `expect`: the mark of the file that may be replaced. Any other is kept under its name and `aside`, or, where that is
    empty, nothing is done.
    """
    name = place.name
    with _at(place, (wanted.uid, wanted.gid)) as fd:
        temporary = f"{TEMPORARY}{secrets.token_hex(8)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        file = os.open(temporary, flags, 0o600, dir_fd=fd)
        try:
            try:
                _copy(source, file)
                _own(file, wanted.uid, wanted.gid)
                os.fchmod(file, wanted.mode & 0o777)
                os.utime(file, ns=(wanted.mtime_ns, wanted.mtime_ns))
            finally:
                os.close(file)
            _give_way(fd, name, expect, aside, wanted.path)
            os.rename(temporary, name, src_dir_fd=fd, dst_dir_fd=fd)
            about = os.stat(name, dir_fd=fd, follow_symlinks=False)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=fd)
            raise
    return entry_of(wanted.path, about, wanted.digest)


def _copy(source: int, file: int) -> None:
    at = 0
    while data := os.pread(source, CHUNK_BYTES, at):
        view = memoryview(data)
        while view:
            view = view[os.write(file, view) :]
        at += len(data)


def _give_way(fd: int, name: str, expect: list[int] | None, aside: str, path: str) -> None:
    try:
        about = os.stat(name, dir_fd=fd, follow_symlinks=False)
    except FileNotFoundError:
        return
    if stat.S_ISREG(about.st_mode) and [about.st_size, about.st_mtime_ns] == expect:
        return
    if not aside or stat.S_ISDIR(about.st_mode):
        raise Refused(f"{path} was changed meanwhile", code="file-changed")
    os.rename(name, name + aside, src_dir_fd=fd, dst_dir_fd=fd)


def write_link(place: Place, wanted: Entry) -> None:
    """A symbolic link; takes the place of another link, never of a file."""
    name = place.name
    with _at(place, (wanted.uid, wanted.gid)) as fd:
        try:
            if os.readlink(name, dir_fd=fd) == wanted.link:
                return
        except FileNotFoundError:
            pass
        except OSError:
            return
        temporary = f"{TEMPORARY}{secrets.token_hex(8)}"
        os.symlink(wanted.link, temporary, dir_fd=fd)
        if os.geteuid() == 0:
            os.chown(temporary, wanted.uid, wanted.gid, dir_fd=fd, follow_symlinks=False)
        os.rename(temporary, name, src_dir_fd=fd, dst_dir_fd=fd)


def remove(place: Place, expect: list[int]) -> bool:
    """Remove a file that is still as expected."""
    try:
        with _at(place) as fd:
            about = os.stat(place.name, dir_fd=fd, follow_symlinks=False)
            if not stat.S_ISREG(about.st_mode) or [about.st_size, about.st_mtime_ns] != expect:
                return False
            os.unlink(place.name, dir_fd=fd)
            return True
    except FileNotFoundError:
        return False
