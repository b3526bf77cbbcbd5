"""The ledger and the agents' claims brought together: whenever a line is new, and as what runs under them ends."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any

from distributed_grid.core.errors import GridError, InternalError, NotFound, Refused, TimedOut, Unavailable
from distributed_grid.daemon.lending_book import LendingBook
from distributed_grid.orchestration.resource_sharing.model import Grant, Lease, LeaseState
from distributed_grid.orchestration.resource_sharing.offers import LentUse

if TYPE_CHECKING:
    from distributed_grid.daemon.control import ControlPlane
    from distributed_grid.daemon.lending_loop import LendingLoop

log = logging.getLogger(__name__)

BOOTS_KEY = "lending.boots"
#: A command that has not started after this long has been given up by whoever asked for it.
UNSTARTED_S = 120.0
#: How often such are looked for.
LOOK_S = 10.0


class ClaimsWatch:
    def __init__(self, plane: ControlPlane, book: LendingBook, loop: LendingLoop) -> None:
        self._plane = plane
        self._book = book
        self._loop = loop
        #: Node -> the boot id under which its claims were last compared.
        self._boots: dict[str, str] = dict(plane.journal.kv.get(BOOTS_KEY, {}))
        self._look_due = 0.0

    async def watch(self, node: str) -> None:
        """Compare the claims whenever the line is new, then hear what ends there."""
        while node in self._plane.links.names():
            link = self._plane.links.get(node)
            try:
                await link.client(5.0)
                await self._reconcile(node)
                async for item in link.stream("leases_watch"):
                    await self._on_item(node, item)
            except Unavailable:
                pass
            except GridError as error:
                log.warning("the leases of %s could not be watched: %s", node, error.message)
            except Exception:  # the daemon's loop: a fault with one item must not end the watch
                log.exception("the leases of %s could not be watched", node)
            await asyncio.sleep(0.3)

    async def _reconcile(self, node: str) -> None:
        book = self._book
        before = set(book.ledger.leases)
        told: list[dict[str, Any]] = await self._plane.links.get(node).call("lease_list")
        claims = {str(one["id"]): one for one in told}
        self._compare_boot(node)
        for lease_id, claim in claims.items():
            known = book.ledger.leases.get(lease_id)
            if known is None:
                self._unknown(node, lease_id, claim)
            elif known.state is LeaseState.CLAIMING and lease_id not in book.claiming:
                book.set(lease_id, durable=False, state=LeaseState.ACTIVE)  # the last daemon died over it
            elif known.state is LeaseState.ACTIVE and claim.get("state") == "suspended":
                book.spawn(book.room.resume_at_agent(known))
            elif known.state is LeaseState.SUSPENDED and claim.get("state") != "suspended":
                book.spawn(self._suspend_again(known))
        for lease in list(book.ledger.on_node(node)):
            if lease.id in claims or lease.id not in before or lease.id in book.claiming:
                continue
            if lease.state is LeaseState.RELEASING:
                book.finish(lease.id)
            elif lease.state is LeaseState.CLAIMING and lease.kind == "run":
                self._loop.end(lease, "whoever asked for it has gone")  # who asks again gets another
            else:
                await self._claim_again(lease)

    def _unknown(self, node: str, lease_id: str, claim: dict[str, Any]) -> None:
        """Held by the agent, not by us: the agent is right, unless the journal says that it is over."""
        if self._plane.journal.leases.find(lease_id) is None:
            try:
                self._book.adopt(Lease.from_wire({**claim, "state": _state_of(claim)}))
                return
            except (InternalError, KeyError, ValueError) as error:
                log.warning("the claim %s on %s is given back: %s", lease_id, node, error)
        self._book.spawn(self._give_back(node, lease_id, int(claim["fence"])))

    async def _give_back(self, node: str, lease_id: str, fence: int) -> None:
        try:
            await self._plane.links.get(node).call("lease_release", timeout_s=60, lease_id=lease_id, fence=fence)
        except GridError as error:  # it is found again when the line is new
            log.warning("the claim %s on %s could not be given back: %s", lease_id, node, error.message)

    async def _suspend_again(self, lease: Lease) -> None:
        try:
            await self._book.at_agent(lease, "lease_suspend", 30, held=lease.held.to_wire())
        except GridError as error:
            log.warning("%s could not be suspended again: %s", lease.id, error.message)

    async def _claim_again(self, lease: Lease) -> None:
        """The node lost its list, or was never asked: what the journal says was lent is lent."""
        try:
            await self._plane.links.get(lease.node).call("lease_claim", lease=lease.to_wire())
        except (Unavailable, TimedOut):
            raise
        except Refused as error:
            self._book.tell(lease, "lease.lost", f"{lease.id[:8]}: {lease.node} refuses it: {error.message}")
            self._book.finish(lease.id, LeaseState.LOST)
        except GridError as error:  # its disk is full, perhaps: that takes nothing away from its holder
            log.warning("%s could not be claimed again on %s: %s", lease.id, lease.node, error.message)
        else:
            if self._book.ledger.leases[lease.id].state is LeaseState.CLAIMING:
                self._book.set(lease.id, durable=False, state=LeaseState.ACTIVE)

    # -- a node that was started anew -----------------------------------------------------------------------------

    def was_started_anew(self, node: str) -> bool:
        """Since its claims were last compared: nothing that ran there then runs now."""
        known = self._boots.get(node)
        return known is not None and node in self._plane.links.names() and known != self._boot_of(node)

    def _boot_of(self, node: str) -> str:
        return str(self._plane.links.get(node).state.agent.get("boot_id", ""))

    def _compare_boot(self, node: str) -> None:
        if self.was_started_anew(node):
            for lease in list(self._book.ledger.on_node(node)):
                if lease.kind == "run" and lease.tasks and lease.state is not LeaseState.RELEASING:
                    self.lose(lease)
        if self._boots.get(node) != self._boot_of(node):
            self._boots[node] = self._boot_of(node)
            self._plane.journal.kv.put(BOOTS_KEY, self._boots)

    def lose(self, lease: Lease) -> None:
        """A command's lease ends with the command. Boosts and allocations are not processes: they stay."""
        text = f"{', '.join(lease.tasks) or lease.id[:8]}: {lease.node} was started anew"
        self._book.tell(lease, "lease.lost", text)
        self._loop.end(lease, "its node was started anew", LeaseState.LOST)

    # -- what runs under them -------------------------------------------------------------------------------------

    async def _on_item(self, node: str, item: dict[str, Any]) -> None:
        if "cpu_cores" in item:
            self._loop.use[node] = LentUse(float(item["cpu_cores"]), int(item["memory_bytes"]))
        for over in item.get("over", []):
            lease = self._book.ledger.leases.get(over["lease"])
            if lease is not None:
                text = f"{lease.id[:8]} used {over['used_bytes']} bytes, more than its {over['limit_bytes']}"
                self._book.tell(lease, "lease.over_memory", text)
        for task_id in item.get("ended", []):
            if task_id in self._book.task_lease:
                await self._note_end(node, task_id)

    async def _note_end(self, node: str, task_id: str) -> None:
        try:
            status = await self._plane.links.get(node).call("task_status", task_id=task_id)
            with self._plane.journal.transaction(durable=False):  # the agent keeps the exit code
                self._plane.tasks.note(node, status)
        except NotFound:
            pass
        self._loop.forget_task(task_id)

    def look_for_unstarted(self) -> None:
        """A start that never reached its agent (the line was cut) must not keep the lease in use for ever."""
        if time.monotonic() < self._look_due:
            return
        self._look_due = time.monotonic() + LOOK_S
        found: dict[str, list[str]] = {}
        for task_id, lease_id in self._book.task_lease.items():
            row, lease = self._plane.journal.tasks.find(task_id), self._book.ledger.leases.get(lease_id)
            late = row is None or (row.state == "prepared" and time.time() - row.created > UNSTARTED_S)
            if late and lease is not None and self._loop.is_online(lease.node):
                found.setdefault(lease.node, []).append(task_id)
        for node, tasks in found.items():
            self._book.spawn(self._drop_unstarted(node, tasks))

    async def _drop_unstarted(self, node: str, tasks: list[str]) -> None:
        try:
            link = self._plane.links.get(node)
            started = [one for one in await link.call("task_list", task_ids=tasks) if one["state"] != "prepared"]
            for status in started:  # only the answer was lost
                self._plane.tasks.note(node, status)
            for task_id in set(tasks) - {status["task_id"] for status in started}:
                try:
                    await link.call("task_remove", task_id=task_id)  # perhaps prepared there
                except NotFound:
                    pass
                except Refused:
                    continue  # it is being started just now
                if self._plane.journal.tasks.find(task_id) is not None:
                    error = Unavailable(f"it never reached {node}", code="node-offline").to_wire()
                    detail = {"error": error}
                    self._plane.journal.tasks.update(task_id, state="failed", ended=time.time(), detail=detail)
                self._loop.forget_task(task_id)
        except GridError as error:
            log.info("what was started on %s could not be seen: %s", node, error.message)


def _state_of(claim: dict[str, Any]) -> str:
    """What an agent holds is in use, unless it was told to suspend it."""
    held = Grant.from_wire(claim["held"])
    suspended = claim.get("state") == "suspended" and held != Grant.from_wire(claim["grant"])
    return LeaseState.SUSPENDED.value if suspended else LeaseState.ACTIVE.value
