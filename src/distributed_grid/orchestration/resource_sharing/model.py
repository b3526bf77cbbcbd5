"""The ledger: what each node owns, lends and has lent. Pure, and never lends a core, a byte or a GPU twice."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from distributed_grid.core.errors import InternalError
from distributed_grid.core.resources import GB, AllocationPriority, ResourceType, format_bytes


@dataclass(frozen=True, slots=True)
class Amounts:
    """How much of each type; cores and GPUs are lent whole."""

    cpu: int = 0
    gpu: int = 0
    memory_bytes: int = 0

    def fits_in(self, room: Amounts) -> bool:
        return self.cpu <= room.cpu and self.gpu <= room.gpu and self.memory_bytes <= room.memory_bytes

    def shares_a_type(self, other: Amounts) -> bool:
        return bool(
            (self.cpu and other.cpu) or (self.gpu and other.gpu) or (self.memory_bytes and other.memory_bytes)
        )

    def of(self, kind: ResourceType) -> float:
        """In the units of the command line: cores, GPUs, GB."""
        if kind is ResourceType.MEMORY:
            return self.memory_bytes / GB
        return self.cpu if kind is ResourceType.CPU else self.gpu

    @property
    def kinds(self) -> list[ResourceType]:
        return [kind for kind in ResourceType if self.of(kind)]

    def __str__(self) -> str:
        parts = [f"{self.cpu} core{'s' * (self.cpu != 1)}"] if self.cpu else []
        parts += [f"{self.gpu} GPU{'s' * (self.gpu != 1)}"] if self.gpu else []
        parts += [f"{format_bytes(self.memory_bytes)} memory"] if self.memory_bytes else []
        return ", ".join(parts) or "nothing"

    def to_wire(self) -> dict[str, int]:
        return {"cpu": self.cpu, "gpu": self.gpu, "memory_bytes": self.memory_bytes}

    @classmethod
    def from_wire(cls, data: dict[str, Any]) -> Amounts:
        return cls(int(data.get("cpu", 0)), int(data.get("gpu", 0)), int(data.get("memory_bytes", 0)))


@dataclass(frozen=True, slots=True)
class Grant:
    """The very cores, the very GPUs, so many bytes."""

    cores: tuple[int, ...] = ()
    gpus: tuple[int, ...] = ()
    memory_bytes: int = 0

    @property
    def amounts(self) -> Amounts:
        return Amounts(len(self.cores), len(self.gpus), self.memory_bytes)

    def to_wire(self) -> dict[str, Any]:
        return {"cores": list(self.cores), "gpus": list(self.gpus), "memory_bytes": self.memory_bytes}

    @classmethod
    def from_wire(cls, data: dict[str, Any]) -> Grant:
        return cls(tuple(data.get("cores", ())), tuple(data.get("gpus", ())), int(data.get("memory_bytes", 0)))


NOTHING = Grant()


class LeaseState(StrEnum):
    CLAIMING = "claiming"  # matched and journalled; its agent has not said yes yet
    ACTIVE = "active"
    SUSPENDED = "suspended"  # gave up all or part of what it holds to another; gets it back by itself
    RELEASING = "releasing"  # over, but its agent has not confirmed: what it holds is not lent again yet
    RELEASED = "released"
    EXPIRED = "expired"
    LOST = "lost"


OVER = frozenset({LeaseState.RELEASED, LeaseState.EXPIRED, LeaseState.LOST})


@dataclass(frozen=True, slots=True)
class Lease:
    """A claim on one node. `grant` is what it is for, `held` what it has right now (less while it is suspended)."""

    id: str
    kind: str  # run, boost, allocation, auto, pool
    node: str
    target: str  # the node that it is for
    uid: int
    priority: AllocationPriority
    grant: Grant
    fence: int
    created: float
    expires: float | None = None
    state: LeaseState = LeaseState.CLAIMING
    held: Grant = NOTHING
    tasks: tuple[str, ...] = ()
    #: Past its time, but something still runs under it: it goes on until anybody else wants the place.
    overdue: bool = False
    reason: str = ""

    @property
    def over(self) -> bool:
        return self.state in OVER

    def to_wire(self) -> dict[str, Any]:
        return {
            "id": self.id, "kind": self.kind, "node": self.node, "target": self.target, "uid": self.uid,
            "priority": str(self.priority), "fence": self.fence, "created": self.created, "expires": self.expires,
            "state": self.state.value, "grant": self.grant.to_wire(), "held": self.held.to_wire(),
            "tasks": list(self.tasks), "overdue": self.overdue, "reason": self.reason,
        }  # fmt: skip

    @classmethod
    def from_wire(cls, data: dict[str, Any]) -> Lease:
        return cls(
            id=data["id"], kind=data["kind"], node=data["node"], target=data["target"], uid=int(data["uid"]),
            priority=AllocationPriority.parse(data["priority"]), grant=Grant.from_wire(data["grant"]),
            fence=int(data["fence"]), created=float(data["created"]), expires=data.get("expires"),
            state=LeaseState(data["state"]), held=Grant.from_wire(data.get("held") or data["grant"]),
            tasks=tuple(data.get("tasks", ())), overdue=bool(data.get("overdue")), reason=str(data.get("reason", "")),
        )  # fmt: skip


@dataclass(slots=True)
class NodeBook:
    """One node's page. `lendable` is the most that may be lent in all just now, what is lent already included."""

    name: str
    cores: int
    gpus: frozenset[int]
    memory_bytes: int
    lendable: Amounts = Amounts()
    lendable_gpus: frozenset[int] = frozenset()
    lent_cores: set[int] = field(default_factory=set)
    lent_gpus: set[int] = field(default_factory=set)
    lent_memory_bytes: int = 0
    leases: set[str] = field(default_factory=set)

    @property
    def free(self) -> Amounts:
        """What a new lease can have here."""
        cores = min(self.cores, self.lendable.cpu) - len(self.lent_cores)
        memory_bytes = min(self.memory_bytes, self.lendable.memory_bytes) - self.lent_memory_bytes
        return Amounts(max(0, cores), len(self.lendable_gpus - self.lent_gpus), max(0, memory_bytes))

    @property
    def room(self) -> Amounts:
        """What it lends at most just now, whoever has it."""
        return Amounts(
            min(self.cores, self.lendable.cpu), len(self.lendable_gpus),
            min(self.memory_bytes, self.lendable.memory_bytes),
        )  # fmt: skip

    @property
    def owned(self) -> Amounts:
        return Amounts(self.cores, len(self.gpus), self.memory_bytes)

    @property
    def lent(self) -> Amounts:
        return Amounts(len(self.lent_cores), len(self.lent_gpus), self.lent_memory_bytes)

    def choose(self, asked: Amounts) -> Grant:
        """The lowest free indices, so that a lease's cores lie together."""
        cores = tuple(core for core in range(self.cores) if core not in self.lent_cores)[: asked.cpu]
        gpus = tuple(sorted(self.lendable_gpus - self.lent_gpus))[: asked.gpu]
        return Grant(cores, gpus, asked.memory_bytes)


class Ledger:
    """Nodes and leases. Finding a place costs by the number of *kinds* of free nodes, not by the number of nodes."""

    def __init__(self) -> None:
        self.nodes: dict[str, NodeBook] = {}
        self.leases: dict[str, Lease] = {}
        #: (free cores, free GPUs) -> [(free bytes, name)] sorted: the index that `find` walks.
        self._free: dict[tuple[int, int], list[tuple[int, str]]] = {}
        self._where: dict[str, tuple[tuple[int, int], tuple[int, str]]] = {}

    # -- nodes ----------------------------------------------------------------------------------------------------

    def set_node(self, name: str, cores: int, gpus: Iterable[int], memory_bytes: int) -> NodeBook:
        """What a node owns. It may shrink below what is lent: then it lends nothing until that is back."""
        book = self.nodes.get(name)
        if book is None:
            book = self.nodes[name] = NodeBook(name, cores, frozenset(gpus), memory_bytes)
        book.cores, book.gpus, book.memory_bytes = cores, frozenset(gpus), memory_bytes
        book.lendable_gpus &= book.gpus
        self._index(book)
        return book

    def offer(self, name: str, lendable: Amounts, gpus: Iterable[int] = ()) -> None:
        """The most that may be lent in all just now (with what is lent already), and of which GPUs."""
        book = self.nodes[name]
        book.lendable, book.lendable_gpus = lendable, frozenset(gpus) & book.gpus
        self._index(book)

    def drop_node(self, name: str) -> None:
        book = self.nodes[name]
        if book.leases:
            raise InternalError(f"{name} still lends: {', '.join(sorted(book.leases))}")
        self._unindex(name)
        del self.nodes[name]

    def _unindex(self, name: str) -> None:
        place = self._where.pop(name, None)
        if place:
            row = self._free[place[0]]
            del row[bisect_left(row, place[1])]
            if not row:
                del self._free[place[0]]

    def _index(self, book: NodeBook) -> None:
        self._unindex(book.name)
        free = book.free
        key, entry = (free.cpu, free.gpu), (free.memory_bytes, book.name)
        insort(self._free.setdefault(key, []), entry)
        self._where[book.name] = (key, entry)

    # -- matching -------------------------------------------------------------------------------------------------

    def find(self, asked: Amounts, only: Collection[str] = (), exclude: Collection[str] = ()) -> str | None:
        """The node to lend `asked`: fewest GPUs left over, then most free cores, then most free memory."""
        if only:
            return self._best_of(asked, [name for name in only if name not in exclude])
        rows = [key for key in self._free if key[0] >= asked.cpu and key[1] >= asked.gpu]
        rows.sort(key=lambda key: (key[1], -key[0]))
        best: tuple[int, str] | None = None
        for key in rows:
            for entry in reversed(self._free[key]):
                if entry[0] < asked.memory_bytes:
                    break
                if entry[1] not in exclude:
                    if asked.cpu or asked.gpu:
                        return self._first_named(key, entry, exclude)
                    if best is None or entry[0] > best[0]:  # memory alone: where there is most of it
                        best = (entry[0], self._first_named(key, entry, exclude))
                    break
        return best[1] if best else None

    def _first_named(self, key: tuple[int, int], entry: tuple[int, str], exclude: Collection[str]) -> str:
        """Of those with exactly as much free, the first by name: the same question gets the same answer."""
        row = self._free[key]
        at = bisect_left(row, (entry[0], ""))
        while row[at][1] in exclude:
            at += 1
        return row[at][1]

    def _best_of(self, asked: Amounts, names: Iterable[str]) -> str | None:
        fitting = [book for name in names if (book := self.nodes.get(name)) and asked.fits_in(book.free)]
        return fitting[0].name if fitting else None  # the order they were named in is the order of preference

    def largest(self, only: Collection[str] = ()) -> Amounts:
        """The most of each type that any one of the nodes owns."""
        books = [book for name, book in self.nodes.items() if not only or name in only]
        return Amounts(
            max((book.cores for book in books), default=0),
            max((len(book.gpus) for book in books), default=0),
            max((book.memory_bytes for book in books), default=0),
        )

    def ever_fits(self, asked: Amounts, only: Collection[str] = ()) -> bool:
        """Whether one of the nodes owns that much, were it all free."""
        if only:
            return any(asked.fits_in(self.nodes[name].owned) for name in only if name in self.nodes)
        return any(asked.fits_in(book.owned) for book in self.nodes.values())

    # -- leases ---------------------------------------------------------------------------------------------------

    def add(self, lease: Lease) -> Lease:
        """Take a lease in, with what it holds. Refuses what another lease holds or the node does not have."""
        if lease.id in self.leases:
            raise InternalError(f"{lease.id} is in the ledger already")
        self._take(lease.node, lease.held)
        self.leases[lease.id] = lease
        self.nodes[lease.node].leases.add(lease.id)
        return lease

    def change(self, lease_id: str, **changes: Any) -> Lease:
        """Any field; a changed `held` is checked like a new lease."""
        old = self.leases[lease_id]
        new = replace(old, **changes)
        if new.held != old.held:
            self._give_back(old.node, old.held)
            try:
                self._take(old.node, new.held)
            except InternalError:
                self._take(old.node, old.held)
                raise
        self.leases[lease_id] = new
        return new

    def remove(self, lease_id: str) -> Lease:
        lease = self.leases.pop(lease_id)
        self.nodes[lease.node].leases.discard(lease_id)
        self._give_back(lease.node, lease.held)
        return lease

    def _take(self, node: str, grant: Grant) -> None:
        book = self.nodes[node]
        cores, gpus = set(grant.cores), set(grant.gpus)
        twice = len(cores) != len(grant.cores) or len(gpus) != len(grant.gpus)
        if cores & book.lent_cores or gpus & book.lent_gpus or twice or grant.memory_bytes < 0:
            raise InternalError(f"{node}: {grant} would be lent twice")
        book.lent_cores |= cores
        book.lent_gpus |= gpus
        book.lent_memory_bytes += grant.memory_bytes
        self._index(book)

    def _give_back(self, node: str, grant: Grant) -> None:
        book = self.nodes[node]
        book.lent_cores -= set(grant.cores)
        book.lent_gpus -= set(grant.gpus)
        book.lent_memory_bytes -= grant.memory_bytes
        self._index(book)

    def on_node(self, node: str) -> Iterator[Lease]:
        book = self.nodes.get(node)
        return (self.leases[lease_id] for lease_id in sorted(book.leases)) if book else iter(())

    def check(self) -> None:
        """Every page against the leases, from nothing; for tests."""
        for book in self.nodes.values():
            leases = [self.leases[lease_id] for lease_id in book.leases]
            cores = [core for lease in leases for core in lease.held.cores]
            gpus = [gpu for lease in leases for gpu in lease.held.gpus]
            assert len(cores) == len(set(cores)) and set(cores) == book.lent_cores, book.name
            assert len(gpus) == len(set(gpus)) and set(gpus) == book.lent_gpus, book.name
            assert sum(lease.held.memory_bytes for lease in leases) == book.lent_memory_bytes, book.name
            key, entry = self._where[book.name]
            assert key == (book.free.cpu, book.free.gpu) and entry[0] == book.free.memory_bytes
        assert sum(len(row) for row in self._free.values()) == len(self.nodes)
        assert sum(len(book.leases) for book in self.nodes.values()) == len(self.leases)
