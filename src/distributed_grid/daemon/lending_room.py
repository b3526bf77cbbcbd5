"""Making room for a critical request: victims go to disk, freeze or end, wait in the queue, and go on by themselves."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from typing import TYPE_CHECKING

from distributed_grid.core.errors import GridError, TimedOut, Unavailable
from distributed_grid.orchestration.resource_sharing.model import NOTHING, Amounts, Grant, Lease, LeaseState
from distributed_grid.orchestration.resource_sharing.preempt import How, Preemption, Victim

if TYPE_CHECKING:
    from distributed_grid.daemon.lending_book import LendingBook, Waiter

log = logging.getLogger(__name__)

#: A node whose agent refused or did not answer is not asked again for the same request this long.
AVOID_S = 3.0
#: Storing a task on disk or fetching it back; the agent gives up before.
STORE_LIMIT_S = 150.0


class RoomMaker:
    def __init__(self, book: LendingBook) -> None:
        self._book = book

    async def make(self, waiter: Waiter, room: Preemption) -> None:
        """Nobody else is served on the node meanwhile (`room_on`), and the waiter gets it before anybody can ask."""
        made = True
        try:
            for victim in room.victims:
                if self._book.waiters.get(waiter.request.id) is not waiter:
                    break  # nobody waits any more: the others need not stop
                try:
                    await self.preempt(victim, f"for a {waiter.request.priority} request of {waiter.request.amounts}")
                except GridError as error:
                    log.warning("%s could not make room: %s", victim.lease.id, error.message)
                    waiter.avoid[room.node] = time.time() + AVOID_S
                    made = False
        finally:
            waiter.busy, waiter.room_on = False, ""
        self._serve_first(waiter, room.node if made else "")

    def _serve_first(self, waiter: Waiter, node: str) -> None:
        if node and self._book.waiters.get(waiter.request.id) is waiter:
            try:
                if self._book.ledger.find(waiter.request.amounts, (node,)) is not None:
                    self._book.grant(waiter, node)
            except GridError as error:
                self._book.fail(waiter, error)
        self._book.pump()

    async def preempt(self, victim: Victim, why: str) -> None:
        lease = self._book.ledger.leases.get(victim.lease.id)
        if lease is None or lease.state not in (LeaseState.ACTIVE, LeaseState.SUSPENDED):
            return
        on_disk = victim.how is How.STORE and await self._stored(lease)
        if victim.how is How.STORE and not on_disk:
            if await self._ended(lease, why):
                return
        elif not on_disk:  # the agent first: only what has stopped can be lent to another
            await self._book.at_agent(lease, "lease_suspend", 30, held=victim.left.to_wire())
        lease = self._book.ledger.leases.get(lease.id) or lease
        if lease.state not in (LeaseState.ACTIVE, LeaseState.SUSPENDED):
            return
        lease = self._book.set(lease.id, state=LeaseState.SUSPENDED, held=victim.left, reason=f"preempted {why}")
        if f"resume:{lease.id}" not in self._book.waiters:
            self._book.wait_to_resume(lease)
        how = "stored on disk" if on_disk else "suspended"
        self._book.tell(lease, "lease.suspended", f"{_name(lease)} on {lease.node} is {how}: room is needed {why}")

    async def _stored(self, lease: Lease) -> bool:
        """Everything under it is on disk; else (False) that does not work."""
        try:
            await self._book.at_agent(lease, "lease_checkpoint", STORE_LIMIT_S)
            return True
        except (Unavailable, TimedOut):
            raise
        except GridError as error:
            log.info("%s can't be stored: %s (%s)", lease.id, error.message, error.cause)
            return False

    async def _ended(self, lease: Lease, why: str) -> bool:
        """What runs under it is asked to end, and has ended; True if the lease is over with it.

        Why is written before anything ends: whoever waits for the command must not see its end first.
        """
        grace_s = self._book.plane.config.offload.grace_seconds
        text = f"{_name(lease)} on {lease.node} is asked to end: room is needed {why}"
        self._book.tell(lease, "lease.preempted", text)
        if lease.kind == "run" or lease.overdue:
            if not await self._book.release(lease.id, reason=f"preempted {why}", grace_s=grace_s):
                raise Unavailable(f"{lease.node} does not answer", code="node-offline")
            return True
        await self._book.at_agent(lease, "lease_end_tasks", grace_s + 40, grace_s=grace_s)
        await self._book.at_agent(lease, "lease_suspend", 30, held=NOTHING.to_wire())
        return False

    def resume(self, waiter: Waiter, closed: Collection[str]) -> bool:
        """`closed`: nodes on which room is kept, or being made, for others."""
        lease = self._book.ledger.leases.get(waiter.resume)
        if lease is None or lease.state is not LeaseState.SUSPENDED:
            self._book.waiters.pop(waiter.request.id, None)
            return True
        want, has = lease.grant.amounts, lease.held.amounts
        missing = Amounts(want.cpu - has.cpu, want.gpu - has.gpu, want.memory_bytes - has.memory_bytes)
        if lease.node in closed or lease.node in self._book.cooling or waiter.avoid.get(lease.node, 0) > time.time():
            return False
        if lease.node not in self._book.plane.links.names() or not self._book.plane.links.get(lease.node).state.online:
            return False
        if self._book.ledger.find(missing, (lease.node,)) is None:
            return False
        more = self._book.ledger.nodes[lease.node].choose(missing)
        grant = Grant(
            tuple(sorted({*lease.held.cores, *more.cores})), tuple(sorted({*lease.held.gpus, *more.gpus})),
            lease.held.memory_bytes + more.memory_bytes,
        )  # fmt: skip
        lease = self._book.set(lease.id, state=LeaseState.ACTIVE, grant=grant, held=grant, reason="")
        self._book.waiters.pop(waiter.request.id, None)
        self._book.spawn(self.resume_at_agent(lease))
        return True

    async def resume_at_agent(self, lease: Lease) -> None:
        try:
            await self._book.at_agent(lease, "lease_resume", STORE_LIMIT_S, grant=lease.grant.to_wire())
        except GridError as error:  # told again when the node's list of claims is compared
            log.warning("%s could not be resumed on %s: %s", lease.id, lease.node, error.message)
            return
        self._book.tell(lease, "lease.resumed", f"{_name(lease)} runs again on {lease.node}")


def _name(lease: Lease) -> str:
    return ", ".join(lease.tasks) or f"{lease.kind} {lease.id[:8]}"
