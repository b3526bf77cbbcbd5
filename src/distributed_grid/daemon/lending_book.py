"""The ledger at work: requests wait, are matched, journalled and claimed at the agents; what ends is given back."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Callable, Coroutine
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from distributed_grid.core.errors import GridError, InternalError, NoResources, Refused, TimedOut, Unavailable
from distributed_grid.core.resources import AllocationPriority
from distributed_grid.daemon.lending_room import AVOID_S, RoomMaker
from distributed_grid.orchestration.resource_sharing.model import (
    OVER,
    Amounts,
    Lease,
    LeaseState,
    Ledger,
)
from distributed_grid.orchestration.resource_sharing.preempt import choose_victims
from distributed_grid.orchestration.resource_sharing.queue import FairShare, KeptFree, Request, in_order, weight
from distributed_grid.store.leases import LeaseRow

if TYPE_CHECKING:
    from distributed_grid.daemon.control import ControlPlane

log = logging.getLogger(__name__)

CLAIM_LIMIT_S = 10.0
RELEASE_LIMIT_S = 60.0
#: What an agent would not take back is tried again after this long.
RELEASE_AGAIN_S = 5.0
#: What follows a grant in the journal waits this long: the answer comes first.
AFTER_ANSWER_S = 0.001


@dataclass(slots=True, eq=False)
class Waiter:
    """A request in the queue, or (with `resume`) a suspended lease that wants back what it gave."""

    request: Request
    kind: str
    target: str
    duration_s: float | None
    granted: asyncio.Future[Lease]
    resume: str = ""
    #: A claim or a preemption for it is under way.
    busy: bool = False
    #: Where room is being made for it: nobody else is served there meanwhile.
    room_on: str = ""
    avoid: dict[str, float] = field(default_factory=dict)
    last_error: str = ""


class LendingBook:
    def __init__(self, plane: ControlPlane) -> None:
        self.plane = plane
        self.ledger = Ledger()
        self.share = FairShare()
        self.waiters: dict[str, Waiter] = {}
        #: Leases whose caller is there and about to start his command: files may take long.
        self.being_started: set[str] = set()
        self.task_lease: dict[str, str] = {}
        #: Nodes that rest: they lend nothing new, and what was suspended there stays so.
        self.cooling: set[str] = set()
        #: Leases that are being claimed, or given back, at their agents just now.
        self.claiming: set[str] = set()
        self._going: set[str] = set()
        #: What a lease becomes once its agent has let go of it, and when that was last tried.
        self._final: dict[str, LeaseState] = {}
        self._tried: dict[str, float] = {}
        #: Called with each lease that changed.
        self.on_change: list[Callable[[Lease], None]] = []
        self._work: set[asyncio.Task[None]] = set()
        self.room = RoomMaker(self)

    # -- the journal ----------------------------------------------------------------------------------------------

    def restore(self) -> None:
        """At the daemon's start: everything that was not over. Its nodes are known once they answer."""
        store = self.plane.journal.leases
        for row in store.list(oldest_first=True):
            if row.state in OVER:
                continue
            try:
                lease = Lease.from_wire(row.data)
                self._known_node(lease.node)
                self.ledger.add(lease)
            except (KeyError, ValueError, InternalError) as error:
                log.error("lease %s in the journal makes no sense: %s", row.id, error)
                store.update(row.id, state=LeaseState.LOST.value)
                continue
            self.task_lease.update(dict.fromkeys(lease.tasks, lease.id))
            if lease.state is LeaseState.SUSPENDED:
                self.wait_to_resume(lease)

    def _known_node(self, node: str) -> None:
        if node not in self.ledger.nodes:
            self.ledger.set_node(node, 0, (), 0)

    def write(self, lease: Lease, *, durable: bool = True) -> Lease:
        """In the journal; not `durable` where a power cut that takes it away does no harm (see docs/resilience.md)."""
        row = LeaseRow(
            lease.id, lease.kind, lease.state.value, lease.node, lease.target, lease.uid, lease.fence,
            lease.created, lease.expires, lease.to_wire(),
        )  # fmt: skip
        self.plane.journal.leases.put(row, durable=durable)
        self._changed(lease)
        return lease

    def _changed(self, lease: Lease) -> None:
        for tell in self.on_change:
            tell(lease)

    def set(self, lease_id: str, *, durable: bool = True, **changes: Any) -> Lease:
        """In the ledger and in the journal, or (with an error) in neither."""
        before = self.ledger.leases[lease_id]
        lease = self.ledger.change(lease_id, **changes)
        try:
            return self.write(lease, durable=durable)
        except BaseException:
            self.ledger.change(lease_id, **{name: getattr(before, name) for name in changes})
            raise

    def adopt(self, lease: Lease) -> None:
        """A claim that an agent holds and the journal does not know: the agent is right about its node."""
        self._known_node(lease.node)
        self.write(self.ledger.add(lease))
        self.task_lease.update(dict.fromkeys(lease.tasks, lease.id))
        if lease.state is LeaseState.SUSPENDED:
            self.wait_to_resume(lease)
        text = f"{lease.id[:8]} ({lease.grant.amounts}) is held on {lease.node}; the journal did not know it"
        self.plane.events.publish("lease.adopted", text, node=lease.node, lease=lease.id)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._work.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._work.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("lending: %s", error, exc_info=error)

    async def close(self) -> None:
        for task in list(self._work):
            task.cancel()
        await asyncio.gather(*self._work, return_exceptions=True)

    # -- asking ---------------------------------------------------------------------------------------------------

    def enqueue(
        self, lease_id: str, amounts: Amounts, priority: AllocationPriority, uid: int, *, kind: str, target: str,
        nodes: tuple[str, ...] = (), duration_s: float | None = None,
    ) -> Waiter:  # fmt: skip
        request = Request(lease_id, amounts, priority, uid, time.time(), nodes)
        waiter = Waiter(request, kind, target, duration_s, asyncio.get_running_loop().create_future())
        self.waiters[lease_id] = waiter
        self.pump()
        return waiter

    async def forget(self, waiter: Waiter) -> None:
        """Nobody waits any more: out of the queue, and what was granted meanwhile goes back."""
        self.waiters.pop(waiter.request.id, None)
        if waiter.granted.done() and not waiter.granted.cancelled() and waiter.granted.exception() is None:
            lease = self.ledger.leases.get(waiter.request.id)
            if lease is not None and not lease.tasks:
                await self.release(lease.id, reason="whoever asked for it has gone")
        else:
            waiter.granted.cancel()

    def wait_to_resume(self, lease: Lease) -> None:
        request = Request(
            f"resume:{lease.id}", lease.grant.amounts, lease.priority, lease.uid, time.time(), (lease.node,)
        )
        future: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()
        self.waiters[request.id] = Waiter(request, lease.kind, lease.target, None, future, resume=lease.id)

    def ordered(self) -> list[Request]:
        now, requests = time.time(), [one.request for one in self.waiters.values()]
        use = {uid: self.share.of(uid, now) for uid in {one.uid for one in requests}}
        if len(use) > 1:  # what they have right now counts too
            for lease in self.ledger.leases.values():
                if lease.uid in use:
                    use[lease.uid] += weight(lease.held.amounts) * max(0.0, now - lease.created)
        return in_order(requests, use, now)

    def position(self, waiter: Waiter) -> dict[str, Any]:
        place = [one.id for one in self.ordered()]
        at = place.index(waiter.request.id) + 1 if waiter.request.id in place else 0
        return {"position": at, "of": len(place), "reason": self.why_waiting(waiter)}

    def why_waiting(self, waiter: Waiter) -> str:
        if waiter.busy:
            return "room is being made for it" if waiter.room_on else "its node is asked just now"
        books = self.ledger.nodes.values()
        named = [book for book in books if not waiter.request.nodes or book.name in waiter.request.nodes]
        asked = waiter.request.amounts
        free = "; ".join(f"{book.name} has {_of_kinds(book.free, asked)} free" for book in named)
        return f"{asked} asked for; {free or 'no worker is online'}"

    # -- matching -------------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Serve whoever can be served now, in order. Called after every change; never waits, and raises nothing.

        What goes wrong with one request (the journal can't be written) is told to whoever asked for that one.
        """
        now, kept = time.time(), KeptFree()
        making = {one.room_on for one in self.waiters.values() if one.room_on}
        for request in self.ordered():
            waiter = self.waiters.get(request.id)
            if waiter is None or waiter.busy:
                continue
            try:
                served = self._serve(waiter, making | kept.from_(request), now)
            except GridError as error:
                self.fail(waiter, error)
                continue
            if waiter.room_on:
                making.add(waiter.room_on)
            if not served and kept.is_due(request, now):
                kept.add(request, self._could_serve(waiter, now))

    def fail(self, waiter: Waiter, error: GridError) -> None:
        if waiter.resume:  # it stays in the queue
            log.warning("%s could not go on: %s", waiter.resume, error.message)
            return
        self.waiters.pop(waiter.request.id, None)
        waiter.busy, waiter.room_on = False, ""
        if not waiter.granted.done():
            waiter.granted.set_exception(error)

    def _closed_to(self, waiter: Waiter, now: float) -> AbstractSet[str]:
        return {waiter.target, *(node for node, until in waiter.avoid.items() if until > now)}

    def _could_serve(self, waiter: Waiter, now: float) -> list[str]:
        """The nodes that lend so much, were it all free: not one that is away, at rest, or needed by its owner."""
        request, closed = waiter.request, self._closed_to(waiter, now)
        books = (self.ledger.nodes.get(name) for name in request.nodes or self.ledger.nodes)
        return [book.name for book in books if book and book.name not in closed and request.amounts.fits_in(book.room)]

    def _serve(self, waiter: Waiter, closed: AbstractSet[str], now: float) -> bool:
        if waiter.resume:
            return self.room.resume(waiter, closed)
        exclude = closed | self._closed_to(waiter, now)
        request = waiter.request
        node = self.ledger.find(request.amounts, request.nodes, exclude)
        if node is not None:
            self.grant(waiter, node)
            return True
        room = choose_victims(self.ledger, request.amounts, request.priority, request.nodes, exclude)
        if room is None:
            return False
        waiter.busy, waiter.room_on = True, room.node
        self.spawn(self.room.make(waiter, room))
        return True

    def grant(self, waiter: Waiter, node: str) -> None:
        """Journalled before the agent is asked: a daemon that dies now finds it and asks the agent."""
        request, now = waiter.request, time.time()
        grant = self.ledger.nodes[node].choose(request.amounts)
        expires = now + waiter.duration_s if waiter.duration_s else None
        lease = self.ledger.add(
            Lease(
                request.id, waiter.kind, node, waiter.target, request.uid, request.priority, grant,
                self.plane.journal.leases.next_fence(), now, expires, held=grant,
            )
        )  # fmt: skip
        try:
            self.write(lease, durable=False)
        except BaseException:  # the journal could not be written (a full disk): then it was not lent
            self.ledger.remove(request.id)
            raise
        waiter.busy = True
        self.claiming.add(lease.id)
        self.spawn(self._claim(waiter, lease, self._ask_agent(lease)))

    def _ask_agent(self, lease: Lease) -> asyncio.Future[Any]:
        try:
            return self.plane.links.get(lease.node).ask("lease_claim", lease=lease.to_wire())
        except GridError as error:
            refused: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            refused.set_exception(error)
            return refused

    async def _claim(self, waiter: Waiter, lease: Lease, answer: asyncio.Future[Any]) -> None:
        try:
            await self._claimed(waiter, lease, answer)
        except Exception as error:  # a fault here must not leave the caller waiting, nor the agent holding
            log.exception("the claim of %s failed", lease.id)
            told = error if isinstance(error, GridError) else InternalError("the claim failed", cause=str(error))
            self.fail(waiter, told)
            await self._undo(lease.id, str(error))
        finally:
            self.claiming.discard(lease.id)

    async def _claimed(self, waiter: Waiter, lease: Lease, answer: asyncio.Future[Any]) -> None:
        """Granted once its agent holds it. The journal has had it since before the agent was asked: it outlives us.

        For a power cut here the fsync follows the answer (ADR 10): nobody who got that answer outlives the cut, and the
        agent's claim does. A command's lease waits for no disk at all: its start does.
        """
        try:
            async with asyncio.timeout(CLAIM_LIMIT_S):
                await answer
        except TimeoutError:
            self._refused(waiter, lease, TimedOut(f"{lease.node} did not answer within {CLAIM_LIMIT_S:g} s"))
            return
        except GridError as error:
            self._refused(waiter, lease, error)
            return
        if self._is_not_wanted(waiter, lease.id):
            return
        self.waiters.pop(lease.id, None)
        lease = self.ledger.change(lease.id, state=LeaseState.ACTIVE)
        if waiter.granted.cancelled():
            await self._undo(lease.id, "whoever asked for it has gone")
            return
        waiter.granted.set_result(lease)
        asyncio.get_running_loop().call_later(AFTER_ANSWER_S, self._settle, lease.id)

    def _settle(self, lease_id: str) -> None:
        """What the journal and the events say of a grant; whoever asked has his answer."""
        lease = self.ledger.leases.get(lease_id)
        if lease is None or lease.state is not LeaseState.ACTIVE:
            return
        try:
            with self.plane.journal.transaction(durable=False):
                self.write(lease)
                if lease.kind in ("boost", "allocation"):
                    text = f"{lease.grant.amounts} of {lease.node} lent to {lease.target} ({lease.kind} {lease.id[:8]})"
                    self.tell(lease, f"{lease.kind}.granted", text)
            if lease.kind != "run":
                self.plane.journal.leases.synced().add_done_callback(_note_sync)
        except GridError as error:
            log.warning("%s is granted, which could not be told: %s", lease_id, error.message)

    def _refused(self, waiter: Waiter, lease: Lease, error: GridError) -> None:
        """Another node is tried, or the same one a little later."""
        waiter.avoid[lease.node] = time.time() + AVOID_S
        waiter.last_error = error.message
        if self._is_not_wanted(waiter, lease.id):
            return
        self.waiters.pop(lease.id, None)
        if isinstance(error, Unavailable | TimedOut | InternalError):  # it may have it: taken back once it answers
            self._mark_releasing(lease.id, error.message)
            waiter.request = _renamed(waiter.request)
        else:
            self.ledger.remove(lease.id)
            with contextlib.suppress(GridError):  # the agent has not got it: a new daemon asks for it again, or not
                self.plane.journal.leases.delete(lease.id)
        if not waiter.granted.cancelled():
            waiter.busy = False
            self.waiters[waiter.request.id] = waiter
        self.pump()

    def _is_not_wanted(self, waiter: Waiter, lease_id: str) -> bool:
        """It was given back while it was being claimed."""
        lease = self.ledger.leases.get(lease_id)
        if lease is not None and lease.state is LeaseState.CLAIMING:
            return False
        self.fail(waiter, Refused(f"{lease_id[:8]} was given back while it was being granted", code="lease-over"))
        return True

    # -- the end --------------------------------------------------------------------------------------------------

    def check_startable(self, lease_id: str) -> Lease:
        """The lease as it is now, if something may be started under it this moment."""
        lease = self.ledger.leases.get(lease_id)
        if lease is None or lease.state is not LeaseState.ACTIVE or lease.overdue:
            state = "over" if lease is None else "expired" if lease.overdue else lease.state.value
            cause = lease.reason if lease else ""
            raise Refused(f"{lease_id[:8]} is {state}: nothing can start in it", cause=cause, code="lease-not-active")
        return lease

    async def release(
        self, lease_id: str, *, reason: str = "", state: LeaseState = LeaseState.RELEASED, grace_s: float | None = None
    ) -> bool:
        """Give it back; False while its node does not answer (it follows by itself). What it had is free only then.

        An error of the agent's is raised, and tried again all the same. `grace_s`: what runs under it has so long to
        end; None: what the agent gives.
        """
        lease = self.ledger.leases.get(lease_id)
        if lease is None:
            return True
        if lease.state is not LeaseState.RELEASING:
            changes = {"state": LeaseState.RELEASING, "reason": reason or lease.reason}
            lease = self.set(lease_id, durable=False, **changes)
            self._final[lease_id] = state
            self.waiters.pop(f"resume:{lease_id}", None)
        more = {} if grace_s is None else {"grace_s": grace_s}
        self._going.add(lease_id)
        try:
            await self.at_agent(lease, "lease_release", RELEASE_LIMIT_S + (grace_s or 0.0), **more)
        except (Unavailable, TimedOut) as error:
            log.info("%s is given back when %s answers: %s", lease.id, lease.node, error.message)
            return False
        except GridError as error:
            if error.code != "unknown-node":
                raise
            return False
        finally:
            self._going.discard(lease_id)
            self._tried[lease_id] = time.monotonic()
        self.finish(lease_id)
        if lease.kind != "run":
            await asyncio.shield(self.plane.journal.leases.synced())
        return True

    def is_due_again(self, lease_id: str) -> bool:
        """Its agent would not take it back, a while ago."""
        waited = time.monotonic() - self._tried.get(lease_id, float("-inf"))
        return lease_id not in self._going and waited > RELEASE_AGAIN_S

    def _mark_releasing(self, lease_id: str, reason: str) -> None:
        """For what nobody was told of: it goes back whether the journal can be written or not."""
        changes = {"state": LeaseState.RELEASING, "reason": reason}
        try:
            self.set(lease_id, durable=False, **changes)
        except GridError as error:
            log.warning("%s goes back, which could not be written: %s", lease_id, error.message)
            self._changed(self.ledger.change(lease_id, **changes))

    async def _undo(self, lease_id: str, reason: str) -> None:
        lease = self.ledger.leases.get(lease_id)
        if lease is None:
            return
        if lease.state is not LeaseState.RELEASING:
            self._mark_releasing(lease_id, reason)
        try:
            await self.release(lease_id)
        except GridError as error:  # tried again before long
            log.warning("%s could not be given back: %s", lease_id, error.message)

    async def settled(self, deadline: float) -> bool:
        """Wait while something is just being given back; whether there was anything to wait for."""
        waited = False
        while self._going and time.monotonic() < deadline:
            waited = True
            await asyncio.sleep(0.005)
        return waited

    def finish(self, lease_id: str, state: LeaseState | None = None) -> None:
        """The agent has let go of it. `state`: None: what `release` was told.

        Whoever is told so waits for the disk first; who has the place next does too, for the same log.
        """
        lease = self.ledger.leases.get(lease_id)
        if lease is None:
            return
        state = state or self._final.get(lease_id, LeaseState.RELEASED)
        self.write(replace(lease, state=state), durable=False)  # first: if that fails, it is tried again
        self.ledger.remove(lease_id)
        self._final.pop(lease_id, None)
        self._tried.pop(lease_id, None)
        now = time.time()
        self.share.add(lease.uid, lease.grant.amounts, max(0.0, now - lease.created), now)
        for task in lease.tasks:
            self.task_lease.pop(task, None)
        self.pump()

    async def at_agent(self, lease: Lease, verb: str, timeout_s: float, **more: Any) -> None:
        link = self.plane.links.get(lease.node)
        await link.call(verb, timeout_s=timeout_s, lease_id=lease.id, fence=lease.fence, **more)

    def tell(self, lease: Lease, kind: str, text: str) -> None:
        facts: dict[str, Any] = {"lease": lease.id, "uid": lease.uid, "tasks": list(lease.tasks)}
        with self.plane.journal.transaction(durable=False):
            self.plane.events.publish(kind, text, node=lease.node, **facts)


def new_lease_id() -> str:
    return str(uuid.uuid4())


def _renamed(request: Request) -> Request:
    """A second try needs an id of its own: the first may still be held where nobody answers."""
    return Request(
        new_lease_id(), request.amounts, request.priority, request.uid, request.asked_at, request.nodes
    )


def _note_sync(done: asyncio.Future[None]) -> None:
    if not done.cancelled() and (error := done.exception()) is not None:
        log.warning("a grant is not on disk yet: %s", error)


def _of_kinds(found: Amounts, asked: Amounts) -> Amounts:
    """Only the types that were asked for."""
    return Amounts(
        found.cpu if asked.cpu else 0, found.gpu if asked.gpu else 0, found.memory_bytes if asked.memory_bytes else 0
    )


def not_enough(asked: Amounts, largest: Amounts, why: str = "") -> NoResources:
    parts = _of_kinds(largest, asked)
    return NoResources(
        "No nodes have sufficient available resources",
        cause=why or f"asked for: {asked}; the most that one node lends: {parts}",
        hint="ask for less, or see `grid shared-status`",
        code="no-resources",
        largest=parts.to_wire(),
    )
