"""What lending does by itself: renews offers, expires, gives back again, gives way to owners."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from distributed_grid.core.errors import GridError
from distributed_grid.daemon.lending_book import LendingBook
from distributed_grid.daemon.lending_claims import ClaimsWatch
from distributed_grid.orchestration.resource_sharing.model import OVER, Amounts, Lease, LeaseState
from distributed_grid.orchestration.resource_sharing.offers import Lendable, LentUse, lendable, owned
from distributed_grid.orchestration.resource_sharing.preempt import Victim, gives_way

if TYPE_CHECKING:
    from distributed_grid.daemon.control import ControlPlane

log = logging.getLogger(__name__)

TICK_S = 1.0
#: Figures are smoothed over some seconds: one busy moment is not yet an owner who came back.
SMOOTHING = 0.25
#: An owner who is back for this long gets what was lent at low priority.
OWNER_BACK_S = 5.0
#: A run's lease with nothing started under it is kept this long for a caller who lost the daemon meanwhile.
ORPHAN_S = 45.0
WARNING_PART, WARNING_S, GRACE_PART, GRACE_S = 0.1, 300.0, 0.05, 30.0
COOLING_KEY = "lending.cooling"
PRUNE_S = 600.0
QUOTA_KINDS = ("boost", "allocation", "auto", "pool")
ENDED_KEPT = 500


class LendingLoop:
    def __init__(self, plane: ControlPlane, book: LendingBook) -> None:
        self._plane = plane
        self._book = book
        book.cooling.update(plane.journal.kv.get(COOLING_KEY, []))
        self.warned: set[str] = set()
        #: What the processes under leases use, by node.
        self.use: dict[str, LentUse] = {}
        self._lendable: dict[str, Lendable] = {}
        self._offered_at: dict[str, float] = {}
        self._busy_since: dict[tuple[str, str], float] = {}  # (node, type) -> since when its owner needs it
        self._yielding: set[str] = set()
        self._smooth: dict[str, tuple[float, float]] = {}  # node -> (moment of the figures, owner's cores)
        self.claims = ClaimsWatch(plane, book, self)
        self._watchers: dict[str, asyncio.Task[None]] = {}
        self._task: asyncio.Task[None] | None = None
        self._started = time.time()
        self._refreshed = 0.0
        self._prune_due = time.monotonic() + PRUNE_S

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="lending")

    async def close(self) -> None:
        tasks = [*self._watchers.values(), *([self._task] if self._task else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            try:
                self.tick()
            except Exception:  # the daemon's loop: a fault in one round must not end lending
                log.exception("a round of lending failed")
            await asyncio.sleep(TICK_S)

    def tick(self) -> None:
        for link in self._plane.links:
            task = self._watchers.get(link.node)
            if task is None or task.done():
                watching = self.claims.watch(link.node)
                self._watchers[link.node] = asyncio.create_task(watching, name=f"leases-{link.node}")
        self.refresh()
        self._prune()
        self._expire()
        self._release_again()
        self.claims.look_for_unstarted()
        self._give_way()
        self._book.pump()

    def _prune(self) -> None:
        """Leases that are over are kept for a while, so that they can be told from ones that never were."""
        if time.monotonic() < self._prune_due:
            return
        self._prune_due = time.monotonic() + PRUNE_S
        store = self._plane.journal.leases
        over = store.list(state=[state.value for state in OVER])
        for row in over[ENDED_KEPT:]:
            store.delete(row.id)

    # -- offers ---------------------------------------------------------------------------------------------------

    def is_online(self, node: str) -> bool:
        return node in self._plane.links.names() and self._plane.links.get(node).state.online

    def offered_at(self, node: str) -> float:
        return self._offered_at.get(node, time.time())

    def refresh_if_old(self) -> None:
        """Figures come once a second, and each round adds them up: a request does not wait for the same sum again."""
        if time.monotonic() - self._refreshed > 1.5 * TICK_S:
            self.refresh()

    def refresh(self) -> None:
        """What each worker lends just now, from its latest figures."""
        self._refreshed = time.monotonic()
        config, ledger = self._plane.config, self._book.ledger
        for node in config.workers:
            shot = self._plane.collector.get_latest_snapshot(node.name)
            if shot is None or not self.is_online(node.name) or not shot.cpu_cores_total:
                if node.name in ledger.nodes:
                    ledger.offer(node.name, Amounts())
                continue
            use = self.use.get(node.name, LentUse())
            own_cores = max(0.0, shot.cpu_cores_used - use.cpu_cores)
            at, before = self._smooth.get(node.name, (0.0, own_cores))
            if at != shot.at:
                before += SMOOTHING * (own_cores - before)
                self._smooth[node.name] = (shot.at, before)
            book = ledger.set_node(node.name, *owned(shot, node))
            pool = self._pool_bytes(node.name)
            # On real hosts the memory servers' pages are in the node's figures; they are borrowed, not its owner's.
            borrowed = use.memory_bytes + (0 if config.embedded else self._pool_resident_bytes(node.name))
            smooth = LentUse(max(0.0, shot.cpu_cores_used - before), borrowed)
            found = lendable(shot, node, config.resource_sharing, smooth, frozenset(book.lent_gpus))
            beyond = max(0, pool - self.quota_bytes(node.name))  # blocks draw on the quotas first
            left = max(0, found.amounts.memory_bytes - beyond)
            found = replace(found, amounts=replace(found.amounts, memory_bytes=left))
            self._lendable[node.name] = found
            if node.name in self._book.cooling or not config.resource_sharing.enabled:
                found = Lendable(Amounts())
            ledger.offer(node.name, found.amounts, found.gpus)
            now = time.time()
            if now - self._offered_at.get(node.name, 0.0) >= config.resource_sharing.check_interval:
                self._offered_at[node.name] = now

    def _pool_bytes(self, node: str) -> int:
        """What the memory pool's blocks were promised there."""
        pool = getattr(self._plane, "memory", None)
        return pool.promised_on(node) if pool is not None else 0

    def _pool_resident_bytes(self, node: str) -> int:
        pool = getattr(self._plane, "memory", None)
        return pool.resident_on(node) if pool is not None else 0

    def quota_bytes(self, node: str) -> int:
        """Memory of the leases that the pool's blocks may draw on."""
        return sum(one.held.memory_bytes for one in self._book.ledger.on_node(node) if one.kind in QUOTA_KINDS)

    def room_for_pool(self, node: str) -> int | None:
        """How much more the pool may put on a node: the rest of the quotas, and what is not promised to anybody.

        None: nothing is known of what it owns. How busy its owner is does not matter here: blocks leave him a reserve.
        """
        if node not in self._lendable:
            return None
        book, quota, pool = self._book.ledger.nodes[node], self.quota_bytes(node), self._pool_bytes(node)
        unlent = book.memory_bytes - book.lent_memory_bytes - max(0, pool - quota)
        return max(0, unlent) + max(0, quota - pool)

    def unused_bytes(self, node: str) -> int:
        """Promised by leases that the pool may not draw on, and not used yet: free only as far as one can see."""
        book = self._book.ledger.nodes.get(node)
        others = book.lent_memory_bytes - self.quota_bytes(node) if book else 0
        return max(0, others - self.use.get(node, LentUse()).memory_bytes)

    def node_view(self, name: str) -> dict[str, Any]:
        book = self._book.ledger.nodes[name]
        reasons = dict(self._lendable[name].reasons) if name in self._lendable else {}
        return {
            "node": name, "online": self.is_online(name), "cooling": name in self._book.cooling,
            "owned": book.owned.to_wire(), "lent": book.lent.to_wire(), "free": book.free.to_wire(), "reasons": reasons,
        }  # fmt: skip

    def cool(self, node: str, on: bool) -> None:
        if on:
            self._book.cooling.add(node)
        else:
            self._book.cooling.discard(node)
        self._plane.journal.kv.put(COOLING_KEY, sorted(self._book.cooling))
        self.tick()

    def _give_way(self) -> None:
        """The owner of a node is back, or it rests: what has to stops until he is gone again, or that is over."""
        for name in self._lendable:
            if not self.is_online(name):
                continue
            short, resting = self._short_of(name), name in self._book.cooling
            why = "while the node rests" if resting else "by the node's owner"
            for lease in list(self._book.ledger.on_node(name)) if short or resting else ():
                victim = gives_way(lease, short, resting)
                if victim is not None and lease.id not in self._yielding:
                    self._yielding.add(lease.id)
                    self._book.spawn(self._yield(victim, why))

    def _short_of(self, node: str) -> list[str]:
        """The types that its owner has needed himself for a while. What he does on a GPU that is lent can't be told
        from what its borrower does."""
        now, reasons = time.monotonic(), dict(self._lendable[node].reasons)
        for kind in ("cpu", "memory"):
            if kind not in reasons:
                self._busy_since.pop((node, kind), None)
        return [kind for kind in ("cpu", "memory") if kind in reasons
                and now - self._busy_since.setdefault((node, kind), now) >= OWNER_BACK_S]  # fmt: skip

    async def _yield(self, victim: Victim, why: str) -> None:
        try:
            await self._book.room.preempt(victim, why)
        except GridError as error:
            log.warning("%s could not give way: %s", victim.lease.id, error.message)
        finally:
            self._yielding.discard(victim.lease.id)

    # -- time -----------------------------------------------------------------------------------------------------

    def _expire(self) -> None:
        now = time.time()
        for lease in list(self._book.ledger.leases.values()):
            if lease.state is LeaseState.RELEASING or lease.state is LeaseState.CLAIMING:
                continue
            if lease.kind == "run" and not lease.tasks:
                begun = max(lease.created, self._started)
                if lease.id not in self._book.being_started and now - begun > ORPHAN_S:
                    self.end(lease, "nothing was started under it")
            elif lease.overdue and not lease.tasks:
                self.end(lease, "its time was up", LeaseState.EXPIRED)
            elif lease.expires is not None and not lease.overdue:
                self._expire_one(lease, now, lease.expires)

    def _expire_one(self, lease: Lease, now: float, expires: float) -> None:
        whole = expires - lease.created
        if now >= expires + min(GRACE_S, whole * GRACE_PART):
            self.warned.discard(lease.id)
            if lease.tasks:
                tasks = ", ".join(lease.tasks)
                self._book.set(lease.id, overdue=True, reason="its time is up")
                text = f"{lease.id[:8]} has expired; {tasks} goes on until another needs the place"
                self._book.tell(lease, "boost.overdue", text)
            else:
                self._book.tell(
                    lease, f"{lease.kind}.expired", f"{lease.grant.amounts} of {lease.node} go back: {lease.id[:8]}"
                )
                self.end(lease, "its time was up", LeaseState.EXPIRED)
        elif now >= expires - min(WARNING_S, whole * WARNING_PART) and lease.id not in self.warned:
            self.warned.add(lease.id)
            left = f"{max(0.0, expires - now):.0f} s"
            text = f"{lease.grant.amounts} of {lease.node} expire in {left}: grid boost renew {lease.id[:8]}"
            self._book.tell(lease, f"{lease.kind}.expiring", text)

    def _release_again(self) -> None:
        """What its agent would not take back when it was asked."""
        for lease in list(self._book.ledger.leases.values()):
            if lease.state is LeaseState.RELEASING and self.is_online(lease.node) and self._book.is_due_again(lease.id):
                self.end(lease, lease.reason)

    def end(self, lease: Lease, reason: str, state: LeaseState = LeaseState.RELEASED) -> None:
        """Give it back in the background."""
        self._book.spawn(self._end(lease, reason, state))

    async def _end(self, lease: Lease, reason: str, state: LeaseState) -> None:
        try:
            await self._book.release(lease.id, reason=reason, state=state)
        except GridError as error:
            log.warning("%s could not be given back: %s", lease.id, error.message)

    def forget_task(self, task_id: str) -> None:
        """It has ended: a run's lease goes back with it, any other is kept."""
        lease_id = self._book.task_lease.pop(task_id, "")
        lease = self._book.ledger.leases.get(lease_id)
        if lease is None:
            return
        left = tuple(one for one in lease.tasks if one != task_id)
        lease = self._book.set(lease_id, durable=False, tasks=left)
        if not left and lease.state is not LeaseState.RELEASING:
            if lease.kind == "run" and self.claims.was_started_anew(lease.node):
                self.claims.lose(lease)
            elif lease.kind == "run":
                self.end(lease, "its command has ended")
            elif lease.overdue:
                self.end(lease, "its time was up", LeaseState.EXPIRED)
