"""What is lent at a node, by id, checked before it is taken in, in a file that a new agent reads."""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from distributed_grid.core.errors import GridError, NotFound, Refused

ENDED_KEPT = 500
#: A file of changes that has grown beyond this is written anew.
COMPACT_BYTES = 256 * 1024

Claim = dict[str, Any]
V = TypeVar("V")


class Claims:
    """Pure but for its file: one line for each change, for a lease must not wait for all the others to be written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.held: dict[str, Claim] = {}
        #: Fences of those that are over: an old claim that arrives late is known for what it is.
        self.ended: dict[str, int] = {}
        self.lock = threading.Lock()
        self._read()

    def _read(self) -> None:
        try:
            data = self._path.read_bytes()
        except OSError:
            return
        sound = 0
        for line in data.splitlines(keepends=True):
            try:
                told = json.loads(line)
                changed, ended = dict(told["held"]), dict(told["ended"])
            except (ValueError, KeyError, TypeError):
                break
            if not line.endswith(b"\n"):
                break
            sound += len(line)
            self.held.update(changed)
            self.ended.update(ended)
        self.held = {name: claim for name, claim in self.held.items() if claim is not None}
        if sound < len(data):
            os.truncate(self._path, sound)  # the half line that a killed agent may have left hides all that follow

    @contextmanager
    def changing(self, lease_id: str) -> Iterator[None]:
        """What is changed of one lease in here is in the file at the end, or (with an error) as it was before.

        Claims in `held` are replaced, never changed in place.
        """
        with self.lock:
            held, ended = self.held.get(lease_id), self.ended.get(lease_id)
            try:
                yield
                self.save(lease_id)
            except BaseException:
                _put_back(self.held, lease_id, held)
                _put_back(self.ended, lease_id, ended)
                raise

    def save(self, lease_id: str) -> None:
        """Not flushed to the disk: after a power cut the daemon's journal says what was lent."""
        ended = {lease_id: self.ended[lease_id]} if lease_id in self.ended else {}
        line = json.dumps({"held": {lease_id: self.held.get(lease_id)}, "ended": ended}).encode() + b"\n"
        try:
            if not self._append(line):
                self._write_all()
        except OSError as error:
            raise GridError(
                f"{self._path} could not be written", cause=error.strerror or str(error),
                hint="look at the free space and the rights there",
                code="disk-full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "spool",
            ) from error  # fmt: skip

    def _append(self, line: bytes) -> bool:
        """False where the file has to be written anew."""
        try:
            fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            size = os.fstat(fd).st_size
            if size >= COMPACT_BYTES:
                return False
            if os.write(fd, line) == len(line):
                return True
            os.ftruncate(fd, size)  # a part of a line would hide all that follow
            return False
        finally:
            os.close(fd)

    def _write_all(self) -> None:
        self.ended = dict(list(self.ended.items())[-ENDED_KEPT:])
        fresh = self._path.with_suffix(".new")
        fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(fd, "wb") as file:
            file.write(json.dumps({"held": self.held, "ended": self.ended}).encode() + b"\n")
        fresh.replace(self._path)

    def take(self, claim: Claim, cores: int, gpus: set[int], memory_bytes: int, node: str) -> None:
        lease_id, fence = claim["id"], int(claim["fence"])
        if self.ended.get(lease_id, -1) >= fence:
            raise Refused(f"{lease_id} is over on {node}", code="lease-over")
        known = self.held.get(lease_id)
        if known is not None and int(known["fence"]) > fence:
            raise Refused(f"{lease_id} was claimed again since on {node}", code="lease-fenced")
        others = [one["held"] for other, one in self.held.items() if other != lease_id]
        wanted = claim["held"]
        taken_cores = {core for one in others for core in one["cores"]}
        taken_gpus = {gpu for one in others for gpu in one["gpus"]}
        lent_bytes = sum(int(one["memory_bytes"]) for one in others)
        clash = set(wanted["cores"]) & taken_cores or set(wanted["gpus"]) & taken_gpus
        beyond = any(core >= cores for core in wanted["cores"]) or not set(wanted["gpus"]) <= gpus
        if clash or beyond or lent_bytes + int(wanted["memory_bytes"]) > memory_bytes:
            raise Refused(
                f"{node} does not have what {lease_id} asks for", cause=f"asked: {wanted}", code="claim-refused"
            )
        tasks = list(dict.fromkeys([*(known or {}).get("tasks", []), *claim.get("tasks", [])]))
        self.held[lease_id] = {**claim, "tasks": tasks}

    def get(self, lease_id: str, fence: int, node: str) -> Claim:
        claim = self.held.get(lease_id)
        if claim is None:
            raise NotFound(f"there is no lease {lease_id} on {node}", code="lease-not-found")
        if int(claim["fence"]) != fence:
            raise Refused(f"{lease_id} was claimed again since on {node}", code="lease-fenced")
        return claim


def _put_back(values: dict[str, V], key: str, value: V | None) -> None:
    if value is None:
        values.pop(key, None)
    else:
        values[key] = value
