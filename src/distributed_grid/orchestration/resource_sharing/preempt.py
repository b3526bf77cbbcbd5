"""Who makes room for a critical request, and how: those of least priority, as few as possible, on one node."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

from distributed_grid.core.resources import AllocationPriority
from distributed_grid.orchestration.resource_sharing.model import (
    NOTHING,
    Amounts,
    Grant,
    Lease,
    LeaseState,
    Ledger,
    NodeBook,
)


class How(StrEnum):
    TAKE = "take"  # nothing runs under it: it gets its place back later
    SUSPEND = "suspend"  # its processes are frozen; only its cores become free
    STORE = "store"  # its processes go to disk; where that does not work, they are asked to end, then made to


@dataclass(frozen=True, slots=True)
class Victim:
    lease: Lease
    how: How

    @property
    def left(self) -> Grant:
        """What it holds on to."""
        if self.how is How.SUSPEND:
            return Grant((), self.lease.held.gpus, self.lease.held.memory_bytes)
        return NOTHING


@dataclass(frozen=True, slots=True)
class Preemption:
    node: str
    victims: tuple[Victim, ...]


def may_be_taken(lease: Lease, by: AllocationPriority) -> bool:
    frozen = lease.state is LeaseState.SUSPENDED and bool(lease.tasks)  # it still has its memory
    if not (lease.state is LeaseState.ACTIVE or frozen) or lease.kind == "pool":
        return False
    if lease.overdue:
        return True
    if lease.held.memory_bytes and not lease.tasks:
        return False  # blocks of the pool may lie in it
    return by is AllocationPriority.CRITICAL and lease.priority < AllocationPriority.HIGH


def choose_victims(
    ledger: Ledger, asked: Amounts, by: AllocationPriority, only: Collection[str] = (), exclude: Collection[str] = ()
) -> Preemption | None:
    """The cheapest way to make room on one node; None where there is none."""
    best: tuple[tuple[int, int, int], Preemption] | None = None
    for name, book in ledger.nodes.items():
        if (only and name not in only) or name in exclude or not asked.fits_in(book.room):
            continue
        found = _on_node(ledger, book, asked, by)
        if found is None:
            continue
        stored = sum(1 for one in found.victims if one.how is How.STORE)
        normal = sum(1 for one in found.victims if one.lease.priority is not AllocationPriority.LOW)
        cost = (stored, normal, len(found.victims))
        if best is None or cost < best[0]:
            best = (cost, found)
    return best[1] if best else None


def _on_node(ledger: Ledger, book: NodeBook, asked: Amounts, by: AllocationPriority) -> Preemption | None:
    free, chosen = book.free, []
    # First the overdue, then the lowest; of these the largest, then the youngest, which has least to lose.
    leases = [lease for lease in ledger.on_node(book.name) if may_be_taken(lease, by)]
    leases.sort(key=lambda one: (not one.overdue, one.priority, -len(one.held.cores), -one.created))
    for lease in leases:
        missing = Amounts(
            max(0, asked.cpu - free.cpu), max(0, asked.gpu - free.gpu), max(0, asked.memory_bytes - free.memory_bytes)
        )
        if missing == Amounts():
            break
        victim = _how(lease, missing)
        if victim is not None:
            chosen.append(victim)
            gained, left = lease.held.amounts, victim.left.amounts
            free = Amounts(
                free.cpu + gained.cpu - left.cpu, free.gpu + gained.gpu - left.gpu,
                free.memory_bytes + gained.memory_bytes - left.memory_bytes,
            )  # fmt: skip
    return Preemption(book.name, tuple(chosen)) if asked.fits_in(free) else None


def _how(lease: Lease, missing: Amounts) -> Victim | None:
    helps_cores = bool(missing.cpu and lease.held.cores)
    helps_rest = bool((missing.gpu and lease.held.gpus) or (missing.memory_bytes and lease.held.memory_bytes))
    if not (helps_cores or helps_rest):
        return None
    if not lease.tasks:
        return Victim(lease, How.TAKE)
    # A frozen process keeps its memory, on the node and on the GPU: freezing helps with cores alone.
    return Victim(lease, How.STORE if helps_rest else How.SUSPEND)


def gives_way(lease: Lease, short: Collection[str], resting: bool) -> Victim | None:
    """How a lease yields to the node itself; None: it does not.

    `short`: the types that the node's owner needs himself now: what runs at low priority gives them back. `resting`:
    the node cools down, and all that a critical request could stop stops too. Nothing is ended for that.
    """
    if not lease.tasks or lease.kind == "pool":
        return None
    active = lease.state is LeaseState.ACTIVE
    if lease.priority is AllocationPriority.LOW:
        if "memory" in short and lease.held.memory_bytes and (active or lease.state is LeaseState.SUSPENDED):
            return Victim(lease, How.STORE)
        if "cpu" in short and lease.held.cores and active:
            return Victim(lease, How.SUSPEND)
    if resting and active and lease.priority < AllocationPriority.HIGH:
        return Victim(lease, How.SUSPEND)
    return None
