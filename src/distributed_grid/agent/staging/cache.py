"""Contents that came over the wire, kept by their digest, so that the same file need not come twice."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

from distributed_grid.agent.staging.beneath import digest_of
from distributed_grid.core.errors import Refused, UsageError

LIMIT_BYTES = 4 << 30
PART_KEPT_S = 24 * 3600.0
_DIGEST = re.compile(r"[0-9a-f]{40}")
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,119}")


class Cache:
    def __init__(self, path: Path, limit_bytes: int = LIMIT_BYTES) -> None:
        self._path = path
        self._limit_bytes = limit_bytes

    def _whole(self, digest: str) -> Path:
        if not _DIGEST.fullmatch(digest):
            raise UsageError("not a digest", code="bad-digest")
        return self._path / digest

    def _part(self, move_id: str, digest: str) -> Path:
        if not _ID.fullmatch(move_id):
            raise UsageError(f"{move_id!r} is not the id of a move", code="bad-move-id")
        return self._path / f"{self._whole(digest).name}.{move_id}.part"

    def has(self, digest: str) -> bool:
        return self._whole(digest).exists()

    @contextlib.contextmanager
    def open(self, digest: str) -> Iterator[int]:
        fd = os.open(self._whole(digest), os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.utime(fd)  # the least used go first
            yield fd
        finally:
            os.close(fd)

    def add(self, move_id: str, digest: str, offset: int, data: bytes) -> None:
        """A piece of what is to become that content; pieces may be repeated."""
        self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(self._part(move_id, digest), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            view, at = memoryview(data), offset
            while view:
                done = os.pwrite(fd, view, at)
                view, at = view[done:], at + done
        finally:
            os.close(fd)

    def seal(self, move_id: str, digest: str, size: int) -> None:
        """All pieces are there: it counts if it is what it says it is."""
        part = self._part(move_id, digest)
        try:
            fd = os.open(part, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            if self.has(digest):
                return  # sealed before, the answer was lost
            raise
        try:
            os.ftruncate(fd, size)
            found = digest_of(fd, size)
        finally:
            os.close(fd)
        if found != digest:
            part.unlink()
            raise Refused("a file was changed on its way", code="file-digest")
        part.rename(self._whole(digest))

    def sweep(self) -> None:
        """Keep within the limit, and no pieces of moves long over."""
        files = []
        with contextlib.suppress(FileNotFoundError):
            for one in self._path.iterdir():
                with contextlib.suppress(FileNotFoundError):
                    about = one.stat()
                    if one.suffix != ".part":
                        files.append((about.st_mtime, about.st_size, one))
                    elif about.st_mtime < time.time() - PART_KEPT_S:
                        one.unlink()
        total = sum(size for _, size, _ in files)
        for _, size, one in sorted(files):
            if total <= self._limit_bytes:
                return
            one.unlink(missing_ok=True)
            total -= size
