"""The ledger never lends anything twice, whatever is asked of it, and finds a place by an index that stays small."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from distributed_grid.core.errors import InternalError
from distributed_grid.core.resources import GB, AllocationPriority
from distributed_grid.orchestration.resource_sharing.model import Amounts, Grant, Lease, LeaseState, Ledger
from distributed_grid.orchestration.resource_sharing.preempt import choose_victims

NODES = {"gpu1": (8, (0,), 32 * GB), "gpu2": (4, (0, 1), 16 * GB), "gpu3": (2, (), 4 * GB)}


def make_lease(ledger: Ledger, number: int, node: str, asked: Amounts, priority: int = 1, tasks: int = 0) -> Lease:
    grant = ledger.nodes[node].choose(asked)
    return ledger.add(
        Lease(
            f"lease-{number}", "run", node, "gpu-master", 0, AllocationPriority(priority), grant, number, float(number),
            state=LeaseState.ACTIVE, held=grant, tasks=tuple(f"task-{number}-{i}" for i in range(tasks)),
        )
    )  # fmt: skip


def full_ledger() -> Ledger:
    ledger = Ledger()
    for name, (cores, gpus, memory) in NODES.items():
        ledger.set_node(name, cores, gpus, memory)
        ledger.offer(name, Amounts(cores, len(gpus), memory), gpus)
    return ledger


amounts = st.builds(
    Amounts, st.integers(0, 9), st.integers(0, 2), st.integers(0, 8).map(lambda count: count * 4 * GB)
).filter(lambda one: one != Amounts())


class Lending(RuleBasedStateMachine):
    """Ask, release, suspend, resume, preempt, let owners come and go, and crash (begin again from what was kept)."""

    leases: Bundle[str] = Bundle("leases")

    @initialize()
    def begin(self) -> None:
        self.ledger = full_ledger()
        self.number = 0

    @rule(target=leases, asked=amounts, priority=st.integers(0, 3), tasks=st.integers(0, 1))
    def ask(self, asked: Amounts, priority: int, tasks: int) -> str:
        node = self.ledger.find(asked)
        fits = [name for name, book in self.ledger.nodes.items() if asked.fits_in(book.free)]
        assert (node in fits) if fits else node is None
        self.number += 1
        if node is not None:
            make_lease(self.ledger, self.number, node, asked, priority, tasks)
        return f"lease-{self.number}"

    @rule(lease=consumes(leases))
    def release(self, lease: str) -> None:
        if lease in self.ledger.leases:
            self.ledger.remove(lease)

    @rule(asked=amounts)
    def preempt(self, asked: Amounts) -> None:
        plan = choose_victims(self.ledger, asked, AllocationPriority.CRITICAL)
        if plan is None:
            return
        for victim in plan.victims:
            assert victim.lease.node == plan.node and victim.lease.priority < AllocationPriority.HIGH
            self.ledger.change(victim.lease.id, held=victim.left, state=LeaseState.SUSPENDED)
        assert self.ledger.find(asked, [plan.node]) == plan.node
        self.number += 1
        make_lease(self.ledger, self.number, plan.node, asked, 3)

    @rule(lease=leases)
    def resume(self, lease: str) -> None:
        held = self.ledger.leases.get(lease)
        if held is None or held.state is not LeaseState.SUSPENDED:
            return
        want, has = held.grant.amounts, held.held.amounts
        missing = Amounts(want.cpu - has.cpu, want.gpu - has.gpu, want.memory_bytes - has.memory_bytes)
        if self.ledger.find(missing, [held.node]):
            more = self.ledger.nodes[held.node].choose(missing)
            grant = Grant(
                held.held.cores + more.cores, held.held.gpus + more.gpus, held.held.memory_bytes + more.memory_bytes
            )
            self.ledger.change(lease, held=grant, grant=grant, state=LeaseState.ACTIVE)

    @rule(node=st.sampled_from(sorted(NODES)), part=st.floats(0, 1))
    def owner(self, node: str, part: float) -> None:
        cores, gpus, memory = NODES[node]
        idle = gpus[: round(len(gpus) * part)]
        self.ledger.offer(node, Amounts(int(cores * part), len(idle), int(memory * part)), idle)

    @rule()
    def crash(self) -> None:
        kept = [lease.to_wire() for lease in self.ledger.leases.values()]
        self.ledger = full_ledger()
        for data in kept:
            self.ledger.add(Lease.from_wire(data))

    @invariant()
    def nothing_is_lent_twice(self) -> None:
        if not hasattr(self, "ledger"):
            return
        self.ledger.check()
        for name, (cores, gpus, memory) in NODES.items():
            book = self.ledger.nodes[name]
            assert book.lent_cores <= set(range(cores)) and book.lent_gpus <= set(gpus)
            assert 0 <= book.lent_memory_bytes <= memory


TestLending = Lending.TestCase
TestLending.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_ten_thousand_random_operations_never_lend_more_than_is_owned() -> None:
    chance, ledger = random.Random(1), full_ledger()
    held: list[Lease] = []
    for number in range(10_000):
        if held and chance.random() < 0.5:
            ledger.remove(held.pop(chance.randrange(len(held))).id)
            continue
        asked = Amounts(chance.randrange(4), chance.randrange(2), chance.randrange(4) * GB)
        node = ledger.find(asked) if asked != Amounts() else None
        if node:
            held.append(make_lease(ledger, number, node, asked))
    ledger.check()
    assert all(book.lent.fits_in(book.owned) for book in ledger.nodes.values())


def test_what_is_held_twice_is_refused() -> None:
    ledger = full_ledger()
    lease = make_lease(ledger, 1, "gpu1", Amounts(cpu=2))
    with pytest.raises(InternalError):
        ledger.add(Lease.from_wire({**lease.to_wire(), "id": "other"}))
    ledger.check()
    assert ledger.nodes["gpu1"].lent_cores == {0, 1}


def test_a_place_is_found_where_it_costs_least() -> None:
    ledger = full_ledger()
    assert ledger.find(Amounts(cpu=2)) == "gpu3", "a node without GPUs is taken first"
    assert ledger.find(Amounts(cpu=1, gpu=1)) == "gpu1", "one GPU is enough"
    assert ledger.find(Amounts(memory_bytes=2 * GB)) == "gpu1", "memory comes from where there is most"
    assert ledger.find(Amounts(gpu=2)) == "gpu2"
    assert ledger.find(Amounts(cpu=2), ["gpu2", "gpu1"]) == "gpu2", "the order of those named counts"
    assert ledger.find(Amounts(cpu=2), exclude={"gpu3"}) == "gpu1"
    assert ledger.find(Amounts(cpu=9)) is None and not ledger.ever_fits(Amounts(cpu=9))
    assert ledger.largest() == Amounts(8, 2, 32 * GB)


def test_the_index_does_not_grow_with_the_cluster() -> None:
    """The cost of `find` is the number of kinds of free nodes; the figure itself is in bench/lending.py."""
    ledger = Ledger()
    for number in range(500):
        name = f"node{number:04}"
        ledger.set_node(name, 8, (0, 1), 32 * GB)
        ledger.offer(name, Amounts(8, 2, 32 * GB), (0, 1))
    for number in range(2000):
        asked = Amounts(cpu=number % 3 + 1, gpu=number % 7 == 0, memory_bytes=GB)
        node = ledger.find(asked)
        if node:
            make_lease(ledger, number, node, asked)
    assert len(ledger._free) <= 9 * 3
    ledger.check()
