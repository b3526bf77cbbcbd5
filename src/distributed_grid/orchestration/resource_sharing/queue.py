"""Who is served next: priority, raised slowly by waiting, then the user who had least lately, then who came first."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from distributed_grid.core.resources import AllocationPriority
from distributed_grid.orchestration.resource_sharing.model import Amounts

#: Waiting this long raises a request by one level, up to HIGH: it never gains the right to preempt.
AGING_S = 300.0
#: What a user had counts half after this long.
HALF_LIFE_S = 3600.0
#: After this long nothing of the same or a lower level overtakes: a large request must not starve on small ones.
PATIENCE_S = 60.0
#: What one of each weighs in the use of a user, in cores.
GPU_WEIGHT, GB_WEIGHT = 8.0, 0.25


@dataclass(frozen=True, slots=True)
class Request:
    id: str
    amounts: Amounts
    priority: AllocationPriority
    uid: int
    asked_at: float
    #: Only these nodes; empty: any.
    nodes: tuple[str, ...] = ()

    def level(self, now: float) -> int:
        raised = self.priority + int(max(0.0, now - self.asked_at) // AGING_S)
        return max(int(self.priority), min(raised, int(AllocationPriority.HIGH)))


def weight(amounts: Amounts) -> float:
    return amounts.cpu + amounts.gpu * GPU_WEIGHT + amounts.memory_bytes / 1024**3 * GB_WEIGHT


@dataclass(slots=True)
class FairShare:
    """Core-seconds of each user, decayed."""

    _use: dict[int, tuple[float, float]] = field(default_factory=dict)  # uid -> (use, when)

    def of(self, uid: int, now: float) -> float:
        use, when = self._use.get(uid, (0.0, now))
        return float(use * 0.5 ** (max(0.0, now - when) / HALF_LIFE_S))

    def add(self, uid: int, amounts: Amounts, seconds: float, now: float) -> None:
        self._use[uid] = (self.of(uid, now) + weight(amounts) * seconds, now)


def in_order(requests: Iterable[Request], use: Mapping[int, float], now: float) -> list[Request]:
    """`use`: what each user had, as `FairShare` counts it."""
    return sorted(requests, key=lambda one: (-one.level(now), use.get(one.uid, 0.0), one.asked_at, one.id))


@dataclass(slots=True)
class KeptFree:
    """What requests that have waited long keep free for themselves: their types, on the nodes that could serve them.

    To be told of requests in their order, so that each one that comes later is of the same level or a lower one.
    """

    _kept: list[tuple[Amounts, Collection[str]]] = field(default_factory=list)

    def is_due(self, request: Request, now: float) -> bool:
        """Whether it has waited so long that nothing of the same or a lower level may overtake it."""
        return now - request.asked_at > PATIENCE_S

    def add(self, request: Request, nodes: Collection[str]) -> None:
        """`nodes`: those that lend as much as it asks for, were nothing lent. One that is away keeps nothing free."""
        self._kept.append((request.amounts, nodes))

    def from_(self, request: Request) -> set[str]:
        """The nodes that a later request must leave alone."""
        return {node for amounts, nodes in self._kept if amounts.shares_a_type(request.amounts) for node in nodes}
