"""Lists the files beneath directories, up to a limit, without leaving their file system or following links."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field

from distributed_grid.agent.staging.beneath import Entry, directory, entry_of, look
from distributed_grid.agent.staging.names import Agreed, is_home, is_skipped
from distributed_grid.core.errors import Refused


@dataclass(slots=True)
class Scan:
    entries: list[Entry] = field(default_factory=list)
    directories: list[Entry] = field(default_factory=list)
    #: Trees that hold more files than the limit, and of which nothing is listed.
    large: list[str] = field(default_factory=list)


def scan(agreed: Agreed, max_files: int) -> Scan:
    """What is there now; trees and files that are not there are simply not listed."""
    found = Scan()
    for tree in agreed.trees:
        part = Scan()
        try:
            with directory(tree) as fd:
                about = os.fstat(fd)
                whole = _walk(fd, tree, about.st_dev, is_home(tree), part, max_files)
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            continue
        if not whole:
            found.large.append(tree)
            continue
        found.directories += [entry_of(tree, about), *part.directories]
        found.entries += part.entries
    seen = {one.path for one in found.entries}
    for path in agreed.files:
        try:
            entry = look(agreed.place(path))
        except (PermissionError, Refused):
            continue
        if entry and not entry.link and path not in seen:
            found.entries.append(entry)
    return found


def _walk(parent: int, path: str, device: int, hidden: bool, found: Scan, max_files: int) -> bool:
    fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=parent)
    try:
        below = []
        with os.scandir(fd) as entries:
            for one in entries:
                if is_skipped(one.name, hidden=hidden):
                    continue
                try:
                    about = one.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                name = f"{path.rstrip('/')}/{one.name}"
                if stat.S_ISREG(about.st_mode):
                    found.entries.append(entry_of(name, about))
                elif stat.S_ISLNK(about.st_mode):
                    found.entries.append(entry_of(name, about, link=os.readlink(one.name, dir_fd=fd)))
                elif stat.S_ISDIR(about.st_mode) and about.st_dev == device:
                    below.append((one.name, name, about))
                if len(found.entries) > max_files:
                    return False
        for name, whole, about in below:
            found.directories.append(entry_of(whole, about))
            try:
                inner = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
            except OSError:
                continue  # gone, or a link by now
            try:
                if len(found.directories) > max_files or not _walk(inner, whole, device, False, found, max_files):
                    return False
            except PermissionError:
                continue
            finally:
                os.close(inner)
        return True
    finally:
        os.close(fd)


def above(paths: list[str]) -> list[Entry]:
    """The directories and all above them, as they are here, those nearest the root first."""
    names: set[str] = set()
    for path in paths:
        while path not in ("", "/"):
            names.add(path)
            path = path.rpartition("/")[0]
    found = []
    for name in sorted(names):
        try:
            found.append(entry_of(name, os.stat(name)))  # noqa: PTH116
        except OSError:
            continue
    return found
