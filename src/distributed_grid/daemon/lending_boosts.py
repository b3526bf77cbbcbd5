"""Boosts as people see them, and `resource_boosts.json`: a snapshot that is written anew whenever it is not right."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
from pathlib import Path
from typing import Any

from distributed_grid.core.errors import GridError
from distributed_grid.core.resources import ResourceType
from distributed_grid.daemon.lending_book import LendingBook
from distributed_grid.daemon.tasks import user_name
from distributed_grid.orchestration.resource_sharing.model import Lease, LeaseState
from distributed_grid.store.snapshot import write_json_atomically

log = logging.getLogger(__name__)

CHECK_S = 2.0
#: Changes are written together, so long after the first: whoever asks for a boost does not wait for the file.
DELAY_S = 0.1


@functools.lru_cache(maxsize=1024)
def _shown_name(uid: int) -> str:
    """For people to read: the file of users is not read for each answer."""
    return user_name(uid)


def lease_view(lease: Lease) -> dict[str, Any]:
    amounts = lease.grant.amounts
    kinds = amounts.kinds
    return {
        **lease.to_wire(), "user": _shown_name(lease.uid), "amounts": amounts.to_wire(),
        "allocation_id": lease.id, "source_node": lease.node, "target_node": lease.target,
        "resource_type": kinds[0].value if len(kinds) == 1 else "+".join(kind.value for kind in kinds),
        "amount": amounts.of(kinds[0]) if kinds else 0.0,
    }  # fmt: skip


def boost_view(lease: Lease) -> dict[str, Any]:
    """What the documents say is kept of a boost."""
    kind = next(iter(lease.grant.amounts.kinds), ResourceType.CPU)
    return {
        "boost_id": lease.id, "allocation_id": lease.id, "source_node": lease.node, "target_node": lease.target,
        "resource_type": kind.value, "amount": lease.grant.amounts.of(kind), "priority": str(lease.priority),
        "allocated_at": lease.created, "expires_at": lease.expires, "state": lease.state.value,
        "is_active": lease.state in (LeaseState.ACTIVE, LeaseState.SUSPENDED) and not lease.overdue,
        "user": _shown_name(lease.uid), "cores": list(lease.grant.cores), "gpus": list(lease.grant.gpus),
        "tasks": list(lease.tasks),
    }  # fmt: skip


class BoostFile:
    def __init__(self, path: Path, book: LendingBook) -> None:
        self._path = path
        self._book = book
        self._changed = asyncio.Event()
        self._idle = asyncio.Event()
        self._due: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._content = b""

    def active(self) -> list[dict[str, Any]]:
        leases = [lease for lease in self._book.ledger.leases.values() if lease.kind == "boost"]
        views = [boost_view(lease) for lease in sorted(leases, key=lambda one: (one.created, one.id))]
        return [view for view in views if view["is_active"]]

    def start(self) -> None:
        self._book.on_change.append(self._on_change)
        self._changed.set()
        self._task = asyncio.create_task(self._run(), name="boost-file")

    async def close(self) -> None:
        if self._due:
            self._due.cancel()
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _on_change(self, lease: Lease) -> None:
        if lease.kind == "boost" and lease.state is not LeaseState.CLAIMING:
            self._idle.clear()
            if self._due is None:
                self._due = asyncio.get_running_loop().call_later(DELAY_S, self._changed.set)

    async def written(self) -> None:
        """Wait until the file shows the last change; what can't be written is not waited for."""
        if not self._idle.is_set():
            self._changed.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(5):
                await self._idle.wait()

    async def _run(self) -> None:
        while True:
            self._changed.clear()
            if self._due:
                self._due.cancel()
                self._due = None
            try:
                await asyncio.to_thread(self._write, self.active())
            except GridError as error:
                log.warning("%s: %s", error.message, error.cause)
            except Exception:  # the daemon's loop: the next round writes it
                log.exception("%s could not be written", self._path)
            if self._due is None and not self._changed.is_set():
                self._idle.set()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CHECK_S):
                    await self._changed.wait()

    def _write(self, boosts: list[dict[str, Any]]) -> None:
        """Only if it is not what it should be: also when somebody deleted or damaged it."""
        data = {"version": 1, "boosts": {one["boost_id"]: one for one in boosts}}
        content = (json.dumps(data, indent=2, allow_nan=False) + "\n").encode()
        try:
            there = self._path.read_bytes()
        except OSError:
            there = b""
        if there == content:
            return
        if there and there != self._content:
            try:
                json.loads(there)
            except (ValueError, RecursionError):
                log.warning("Persistence file corrupted: %s is written anew from the journal", self._path)
        write_json_atomically(self._path, data, durable=False)  # the journal is the truth
        self._content = content
