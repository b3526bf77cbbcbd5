"""The calls of lending: asking for, using, showing and giving back what workers lend."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from distributed_grid.core.errors import NotFound, Refused, Unavailable, UsageError
from distributed_grid.core.resources import AllocationPriority, ResourceType
from distributed_grid.daemon.lending_auto import Rebalancer
from distributed_grid.daemon.lending_book import LendingBook, Waiter, new_lease_id, not_enough
from distributed_grid.daemon.lending_boosts import BoostFile, boost_view, lease_view
from distributed_grid.daemon.lending_jobs import LendingJobs
from distributed_grid.daemon.lending_loop import LendingLoop
from distributed_grid.daemon.lending_ray import RayGroups
from distributed_grid.daemon.tasks import user_name
from distributed_grid.orchestration.resource_sharing.amounts import check_duration, check_wait
from distributed_grid.orchestration.resource_sharing.model import Amounts, Lease, LeaseState
from distributed_grid.orchestration.resource_sharing.offers import offers_of
from distributed_grid.store.leases import LeaseRow
from distributed_grid.wire.rpc import CallContext, method

if TYPE_CHECKING:
    from distributed_grid.daemon.control import ControlPlane

#: What is just being given back is waited for this long before a request is refused.
SETTLE_S = 2.0
LOOK_S = 0.02


class LendingService:
    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane
        self.book = LendingBook(plane)
        self.loop = LendingLoop(plane, self.book)
        self._boosts = BoostFile(plane.paths.boosts, self.book)
        self._groups = RayGroups(plane, self.book)
        self._rebalancer = Rebalancer(plane, self)
        self.jobs = LendingJobs(plane, self)

    def start(self) -> None:
        self._plane.journal.leases.grow_log()
        self.book.restore()
        self.jobs.start()
        self._plane.tasks.on_end.append(self.loop.forget_task)
        self._boosts.start()
        self._groups.start()
        self._rebalancer.start()
        self.loop.start()

    async def close(self) -> None:
        await self._rebalancer.close()
        await self._groups.close()
        await self.loop.close()
        await self.book.close()
        await self._boosts.close()

    def lent(self, node: str) -> dict[str, int]:
        book = self.book.ledger.nodes.get(node)
        return (book.lent if book else Amounts()).to_wire()

    # -- for the other rooms --------------------------------------------------------------------------------------

    async def reserve(
        self, amounts: Amounts, *, kind: str, uid: int, priority: AllocationPriority = AllocationPriority.NORMAL,
        nodes: tuple[str, ...] = (), duration_s: float | None = None, target: str = "",
    ) -> Lease:  # fmt: skip
        """A lease now, or NoResources; for the memory pool, the moves and the rebalancer."""
        waiter = self.ask(new_lease_id(), amounts, priority, uid, kind, target, nodes, duration_s)
        return await self.wait(waiter, 0.0)

    async def unreserve(self, lease_id: str, reason: str = "") -> bool:
        return await self.book.release(lease_id, reason=reason)

    def _heads(self) -> list[Lease]:
        """What the head holds to put its own processes in: boosts, and what the rebalancer reserved."""
        head = self._plane.config.head.name
        return [
            lease for lease in self.book.ledger.leases.values()
            if lease.kind in ("boost", "auto") and lease.target == head and lease.state is LeaseState.ACTIVE
        ]  # fmt: skip

    def boosted_nodes(self) -> list[str]:
        """Nodes on which the head holds a boost: moves of processes prefer them."""
        return [lease.node for lease in self._heads()]

    def taken(self, node: str) -> dict[str, int]:
        """What of a node a move must leave alone: all that is lent, but for what the head itself holds there."""
        lent, own = Amounts.from_wire(self.lent(node)), [one.held for one in self._heads() if one.node == node]
        return Amounts(
            lent.cpu - sum(len(held.cores) for held in own), lent.gpu - sum(len(held.gpus) for held in own),
            lent.memory_bytes - sum(held.memory_bytes for held in own),
        ).to_wire()  # fmt: skip

    # -- asking ---------------------------------------------------------------------------------------------------

    def ask(
        self, lease_id: str, amounts: Amounts, priority: AllocationPriority, uid: int, kind: str, target: str,
        nodes: tuple[str, ...], duration_s: float | None,
    ) -> Waiter:  # fmt: skip
        config = self._plane.config
        if not config.resource_sharing.enabled:
            raise Refused(
                "Resource sharing not enabled",
                cause=f"`resource_sharing.enabled` is false in {config.path or 'the configuration'}",
                hint="set `resource_sharing: {enabled: true}`; it is read again by itself",
                code="sharing-off",
            )
        target = target or config.head.name
        if target not in [node.name for node in config.nodes]:
            names = ", ".join(node.name for node in config.nodes)
            raise NotFound(
                "Target node not found in cluster", cause=f"{target!r} is none of {names}", hint="grid status",
                code="unknown-target",
            )  # fmt: skip
        for name in nodes:
            node = config.node(name)
            if node.is_head or name == target:
                why = "it is the head: workers lend to it" if node.is_head else "it is the target itself"
                raise Refused(f"{name} can't lend here", cause=why, code="not-a-lender")
        if min(amounts.cpu, amounts.gpu, amounts.memory_bytes) < 0 or amounts == Amounts():
            raise UsageError("nothing is asked for", hint="--resource-type cpu --amount 2", code="amount")
        if duration_s is not None:
            check_duration(duration_s)
        self.loop.refresh_if_old()
        if self.book.ledger.find(amounts, nodes, (target,)) is None:
            self.loop.refresh()  # nobody is refused, or has to make room, for figures that are old
        candidates = nodes or tuple(name for name in self.book.ledger.nodes if name != target)
        online = [name for name in candidates if self.loop.is_online(name)]
        if not online:
            raise Unavailable(
                "No resource offers available", cause="no worker that could lend is online",
                hint="grid status; grid cluster start", code="no-offers",
            )  # fmt: skip
        if not self.book.ledger.ever_fits(amounts, candidates):
            raise not_enough(amounts, self.book.ledger.largest(candidates))
        return self.book.enqueue(
            lease_id, amounts, priority, uid, kind=kind, target=target, nodes=nodes, duration_s=duration_s
        )

    async def wait(self, waiter: Waiter, wait_s: float | None) -> Lease:
        """Until it is granted, or the time is up; nothing is left behind whatever happens here."""
        try:
            wait_s = check_wait(wait_s)
            deadline = None if wait_s is None else time.monotonic() + wait_s
            while not waiter.granted.done():
                late = deadline is not None and time.monotonic() >= deadline and not waiter.busy
                if late and deadline is not None and not await self.book.settled(deadline + SETTLE_S):
                    why = self.book.why_waiting(waiter)
                    waited = f"waited {wait_s:g} s: " if wait_s else ""
                    raise not_enough(waiter.request.amounts, Amounts(), f"{waited}{waiter.last_error or why}")
                left = 1.0 if deadline is None else max(0.005, min(1.0, deadline - time.monotonic()))
                await asyncio.wait({waiter.granted}, timeout=left)
            return waiter.granted.result()
        except BaseException:
            await asyncio.shield(self.book.forget(waiter))
            raise

    @method
    def lease_request(
        self, context: CallContext, *, amounts: dict[str, int], kind: str = "allocation", target: str = "",
        priority: str = "normal", nodes: list[str] | None = None, duration_s: float | None = None,
        wait_s: float = 0.0, lease_id: str = "",
    ) -> Coroutine[Any, Any, dict[str, Any]]:  # fmt: skip
        """A lease that is kept until it is released or its time is up. Safe to repeat with the same `lease_id`.

        Where there is room its node is asked in the very turn of the loop in which we are.
        """
        if kind not in ("allocation", "boost"):
            raise UsageError(f"there is no such lease: {kind}", code="lease-kind")

        def ask(new_id: str) -> Waiter:
            return self.ask(
                new_id, Amounts.from_wire(amounts), AllocationPriority.parse(priority), context.uid,
                kind, target, tuple(nodes or ()), duration_s,
            )  # fmt: skip

        if lease_id in self.book.ledger.leases or lease_id in self.book.waiters:
            return self._asked_before(context, lease_id, ask, wait_s)
        return self._granted(context, ask(lease_id or new_lease_id()), wait_s)

    async def _granted(self, context: CallContext, waiter: Waiter, wait_s: float) -> dict[str, Any]:
        return lease_view(self.own(context, await self.wait(waiter, wait_s)))

    async def _asked_before(
        self, context: CallContext, lease_id: str, ask: Callable[[str], Waiter], wait_s: float
    ) -> dict[str, Any]:
        known = await self.known(lease_id)
        if known is not None:
            return lease_view(self.own(context, known))
        going = lease_id in self.book.ledger.leases  # the last of that id is still going back
        return await self._granted(context, ask(new_lease_id() if going else lease_id), wait_s)

    async def known(self, lease_id: str) -> Lease | None:
        """The lease of an id that was asked for before, once it is granted; None: there is none, ask (anew)."""
        while (lease := self.book.ledger.leases.get(lease_id)) or lease_id in self.book.waiters:
            if lease is not None and lease.state in (LeaseState.ACTIVE, LeaseState.SUSPENDED):
                return lease
            if lease is not None and lease.state is LeaseState.RELEASING:
                return None
            if lease is not None and lease_id not in self.book.claiming and not self.loop.is_online(lease.node):
                raise Unavailable(
                    f"{lease_id[:8]} is in doubt", cause=f"{lease.node} is not online", hint="grid status",
                    code="node-offline",
                )  # fmt: skip
            await asyncio.sleep(LOOK_S)
        return None

    # -- using ----------------------------------------------------------------------------------------------------

    @method
    async def lease_ray(self, context: CallContext, *, lease_id: str, wait_s: float = 60.0) -> dict[str, Any]:
        """The placement group with which Ray tasks use a lease."""
        lease = self.usable(context, lease_id)
        return {"placement_group": await self._groups.ready(lease, wait_s), "node": lease.node}

    # -- giving back ----------------------------------------------------------------------------------------------

    def own(self, context: CallContext, lease: Lease) -> Lease:
        if context.uid not in (0, os.geteuid(), lease.uid):
            raise Refused(f"{lease.id[:8]} belongs to {user_name(lease.uid)}", code="not-yours")
        return lease

    def _find(self, context: CallContext, lease_id: str, *kinds: str) -> Lease:
        """By any unique beginning of its id; one that is over is told apart from one that never was."""
        store = self._plane.journal.leases
        live = [state.value for state in LeaseState if state not in (LeaseState.RELEASED, LeaseState.EXPIRED)]
        equals: dict[str, Any] = {"kind": list(kinds)} if kinds else {}
        try:
            row: LeaseRow = store.get_by_prefix(lease_id, state=live, **equals)
        except NotFound:
            over = store.get_by_prefix(lease_id, **equals)
            raise Refused(f"{over.id[:8]} is already {over.state}", code="lease-over") from None
        lease = self.book.ledger.leases.get(row.id)
        if lease is None:
            raise Refused(f"{row.id[:8]} is already {row.state}", code="lease-over")
        return self.own(context, lease)

    def usable(self, context: CallContext, lease_id: str) -> Lease:
        lease = self._find(context, lease_id)
        if lease.state is not LeaseState.ACTIVE or lease.overdue:
            raise Refused(
                f"{lease.id[:8]} is {'expired' if lease.overdue else lease.state.value}", cause=lease.reason,
                code="lease-not-active",
            )  # fmt: skip
        return lease

    @method
    async def lease_release(
        self, context: CallContext, *, lease_id: str, force: bool = False, boost: bool = False
    ) -> dict[str, Any]:
        lease = self._find(context, lease_id, *(["boost"] if boost else []))
        if lease.tasks and not force:
            raise Refused(
                f"{lease.id[:8]} is in use: {', '.join(lease.tasks)}", hint="--force ends what runs under it",
                code="lease-in-use",
            )  # fmt: skip
        done = await self.book.release(lease.id, reason="released")
        if done:
            self.book.tell(lease, f"{lease.kind}.released", f"{lease.grant.amounts} went back to {lease.node}")
        await self._boosts.written()
        return {**lease_view(lease), "state": "released" if done else "releasing"}

    @method
    async def boost_renew(self, context: CallContext, *, boost_id: str, duration_s: float) -> dict[str, Any]:
        """Its time begins anew."""
        lease = self._find(context, boost_id, "boost")
        check_duration(duration_s)
        lease = self.book.set(lease.id, expires=time.time() + duration_s, overdue=False)
        self.loop.warned.discard(lease.id)
        await self._boosts.written()
        return boost_view(lease)

    # -- showing --------------------------------------------------------------------------------------------------

    @method
    async def boost_list(self, context: CallContext, *, node: str = "") -> dict[str, Any]:
        """Active boosts, those for one target or of one source if `node` is named; totals by type."""
        if node:
            self._plane.config.node(node)
        found = [one for one in self._boosts.active() if not node or node in (one["target_node"], one["source_node"])]
        totals = {
            kind.value: sum(one["amount"] for one in found if one["resource_type"] == kind.value)
            for kind in ResourceType
        }  # fmt: skip
        return {"total": len(found), "totals": totals, "boosts": found}

    @method
    async def lending_status(self, context: CallContext) -> dict[str, Any]:
        """Offers, leases, the queue, and why a node does not offer more."""
        await self.book.settled(time.monotonic() + SETTLE_S)
        self.loop.refresh()
        sharing, now = self._plane.config.resource_sharing, time.time()
        ledger = self.book.ledger
        offers = [
            offer for name, book in ledger.nodes.items() if self.loop.is_online(name)
            for offer in offers_of(book, sharing, self.loop.offered_at(name))
        ]  # fmt: skip
        queue = []
        for place, request in enumerate(self.book.ordered(), 1):
            waiter = self.book.waiters[request.id]
            queue.append(
                {
                    "id": request.id, "position": place, "user": user_name(request.uid), "resume": waiter.resume,
                    "priority": str(request.priority), "amounts": request.amounts.to_wire(),
                    "waited_s": round(now - request.asked_at, 1), "reason": self.book.why_waiting(waiter),
                }
            )  # fmt: skip
        return {
            "enabled": sharing.enabled, "mode": sharing.mode, "policy": sharing.policy, "at": now,
            "offers": offers if sharing.enabled else [], "queue": queue,
            "allocations": [lease_view(lease) for lease in ledger.leases.values()],
            "nodes": [self.loop.node_view(name) for name in ledger.nodes],
        }  # fmt: skip

    @method
    async def lending_cooldown(self, context: CallContext, *, node: str = "", end: bool = False) -> dict[str, Any]:
        """A node rests until that is ended: it lends nothing new, and what it runs below high priority is frozen."""
        if context.uid not in (0, os.geteuid()):
            raise Refused("only the daemon's owner may do that", code="not-owner")
        names = [node] if node else [one.name for one in self._plane.config.workers]
        for name in names:
            self._plane.config.node(name)
            self.loop.cool(name, not end)
        return {"nodes": names, "cooling": sorted(self.book.cooling), "leases": [
            lease_view(lease) for name in names for lease in self.book.ledger.on_node(name)
        ]}  # fmt: skip
