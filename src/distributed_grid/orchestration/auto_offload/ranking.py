"""Which process to move and where: what a move frees against what it costs, after the owner's marks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from distributed_grid.core.resources import ResourceType, format_bytes
from distributed_grid.orchestration.auto_offload.signals import Candidate, NodeSignals, Settings
from distributed_grid.orchestration.auto_offload.state import pair

#: What a move is taken to do where the link was never measured.
DEFAULT_BYTES_PER_S = 100e6
#: What every move costs, however small.
FIXED_S = 2.0
#: Moving less than this share of what the head has is not worth a pause, unless there is nothing larger.
MIN_SHARE = 0.02
#: Then so many small ones may go, if they free at least this part of what is needed.
MOST_SMALL = 40
SMALL_PART = 0.5
#: A link that was up for fewer checks is not trusted with a process.
STEADY_INTERVALS = 6.0
STALE_S = 10.0
#: How full a worker may get by a move: its own pressure is nobody's to relieve. Cores only slow down.
MEMORY_ROOM = 0.85
CPU_ROOM = 0.95
_TIERS = {"prefer": 0, "": 1, "avoid": 2}
_KEPT_TYPES = ("interactive", "daemon")
YOUNG = "it has not run for long enough"
CROWDED = "as crowded as the head"
#: A job that uses less is idle.
BUSY_CORES = 0.02
#: On a full worker a process must get this much more than here.
GAIN = 1.25


@dataclass(frozen=True, slots=True)
class Need:
    """How much of what the head must lose, in cores or bytes (GPU: bytes of its memory)."""

    resource: ResourceType
    amount: float
    total: float
    #: The head will be out of memory before a young process has grown old.
    urgent: bool = False
    #: For cores: how many jobs are busy on the head, and on those workers of which it is known.
    crowds: Mapping[str, int] = field(default_factory=dict)
    head: str = ""
    #: GPUs that are busy rather than full: what a byte of a process's GPU memory stands for.
    per_gpu_byte: float = 1.0

    def frees(self, candidate: Candidate) -> float:
        if self.resource is ResourceType.CPU:
            return candidate.cpu_cores
        if self.resource is ResourceType.MEMORY:
            return float(candidate.memory_bytes)
        return candidate.gpu_memory_bytes * self.per_gpu_byte

    @property
    def least(self) -> float:
        """What even the smallest must free, so that its move is one at all."""
        return BUSY_CORES if self.resource is ResourceType.CPU else 1.0

    def cores_here(self, candidate: Candidate) -> float:
        """What it gets on the head; one that gets its part of a full head will get what leaves gives up."""
        fair = self.total / max(1, self.crowds.get(self.head, 1))
        return max(candidate.cpu_cores, fair) if candidate.cpu_cores >= 0.5 * fair else candidate.cpu_cores

    def cores_there(self, worker: NodeSignals) -> float | None:
        """What a busy process would get on a worker: what is idle there, or its part; None where nobody looked."""
        busy = self.crowds.get(worker.node)
        if self.resource is not ResourceType.CPU or busy is None:
            return None
        return max(worker.cpu_cores * (1 - worker.cpu_taken), worker.cpu_cores / (busy + 1))


@dataclass(frozen=True, slots=True)
class Ranked:
    candidate: Candidate
    target: NodeSignals
    frees: float
    cost_s: float
    score: float


def mark_of(candidate: Candidate, settings: Settings) -> str:
    """`never` wins, then what the process says itself, then the patterns over the command line."""
    if candidate.mark == "never" or _fits(candidate, settings.never):
        return "never"
    if candidate.mark in ("prefer", "avoid"):
        return candidate.mark
    return "prefer" if _fits(candidate, settings.prefer) else "avoid" if _fits(candidate, settings.avoid) else ""


def _fits(candidate: Candidate, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(candidate.command, pattern) for pattern in patterns)


def why_stays(
    candidate: Candidate, need: Need, settings: Settings, head: str, left_alone: Mapping[str, str]
) -> str:
    """Why this process is not moved by itself, whatever the others free; empty if it may be."""
    if candidate.node != head:
        return "not on the head"
    if mark_of(candidate, settings) == "never":
        return "marked never"
    if settings.only and not _fits(candidate, settings.only):
        return "not one of offload.only"
    if not candidate.movable:
        return candidate.why_not or "may not be moved"
    if candidate.type.lower() in _KEPT_TYPES:
        return f"{candidate.type.lower()} processes stay"
    if candidate.key in left_alone or candidate.command in left_alone:
        return left_alone.get(candidate.key) or left_alone[candidate.command]
    if need.frees(candidate) < need.least:
        return _too_little(need)
    if candidate.age_s < settings.min_age_s and not need.urgent:
        return YOUNG
    return ""


def _too_little(need: Need) -> str:
    return f"frees too little {need.resource.value}"


def _without_small(found: list[Ranked], need: Need, settings: Settings) -> tuple[list[Ranked], list[Ranked]]:
    """A small one is not worth its pause while larger ones do; it is where only many of them together help."""
    large: list[Ranked] = []
    small: list[Ranked] = []
    for one in found:
        # What its owner prefers to go may be however small.
        fine = one.frees >= MIN_SHARE * need.total or mark_of(one.candidate, settings) == "prefer"
        (large if fine else small).append(one)
    if sum(one.frees for one in large) >= need.amount:
        return large, small
    most = sorted((one.frees for one in found), reverse=True)[:MOST_SMALL]
    return (found, []) if sum(most) >= SMALL_PART * need.amount else (large, small)


def why_not_there(
    candidate: Candidate, worker: NodeSignals, need: Need, settings: Settings, shunned: Mapping[str, str]
) -> str:
    """Why this worker does not fit; empty if it does. It must have room left with the process on it."""
    if why := shunned.get(worker.node) or shunned.get(pair(candidate.key, worker.node)):
        return why
    if not worker.online:
        return "offline"
    if worker.age_s > STALE_S:
        return f"its figures are {worker.age_s:.0f}s old"
    if worker.online_s < STEADY_INTERVALS * settings.check_interval_s:
        return f"back for only {worker.online_s:.0f}s"
    memory = worker.memory + candidate.memory_bytes / max(1, worker.memory_bytes)
    if memory > max(settings.threshold(ResourceType.MEMORY), MEMORY_ROOM):
        return f"its memory would be at {min(memory, 9.99) * 100:.0f}%"
    if max(candidate.memory_bytes * 1.1, candidate.need_bytes) > worker.memory_free_bytes:
        lent = f" ({format_bytes(worker.lent_memory_bytes)} are lent)" if worker.lent_memory_bytes else ""
        return f"only {format_bytes(worker.memory_free_bytes)} of memory are free there{lent}"
    cpu = worker.cpu_taken + candidate.cpu_cores / max(0.01, worker.cpu_cores)
    there = need.cores_there(worker)
    if there is not None:
        if cpu > CPU_ROOM and there < GAIN * need.cores_here(candidate):
            return CROWDED
    elif cpu > CPU_ROOM and candidate.cpu_cores >= 0.1 and not need.urgent:  # better slow than killed
        return f"its CPU would be at {min(cpu, 9.99) * 100:.0f}%"
    if candidate.gpu_memory_bytes > 0:
        if candidate.gpu_memory_bytes * 1.05 > worker.gpu_memory_free_bytes:
            return "no GPU there has enough free memory"
        if worker.gpu >= settings.threshold(ResourceType.GPU):
            return f"its GPU is at {worker.gpu * 100:.0f}%"
    return ""


def busy_jobs(rows: Sequence[Mapping[str, object]]) -> int:
    """How many of a scan's jobs use cores."""
    return sum(float(str(row.get("cpu_cores") or 0.0)) >= BUSY_CORES for row in rows)


def cost_s(candidate: Candidate, failures: int, bytes_per_s: float) -> float:
    """Seconds that the move is worth: bytes over the link, more for GPUs and for what failed before."""
    seconds = FIXED_S + (candidate.memory_bytes + candidate.gpu_memory_bytes) / max(1.0, bytes_per_s)
    if candidate.gpu_memory_bytes > 0:
        seconds *= 1.5
    return float(seconds * (1 + failures) / max(0.1, candidate.confidence))


def rank(
    candidates: Sequence[Candidate],
    workers: Sequence[NodeSignals],
    need: Need,
    settings: Settings,
    head: str,
    *,
    left_alone: Mapping[str, str],
    shunned: Mapping[str, str],
    failures: Mapping[str, int],
    bandwidth: Mapping[str, float],
) -> tuple[list[Ranked], dict[str, str], dict[str, str]]:
    """Best first, each with its best target; then why processes stay (by pid), and why workers do not fit."""
    found: list[Ranked] = []
    stay: dict[str, str] = {}
    full: dict[str, str] = {}
    for candidate in candidates:
        why = why_stays(candidate, need, settings, head, left_alone)
        if why:
            stay[str(candidate.pid)] = why
            continue
        fitting = []
        for worker in workers:
            misfit = why_not_there(candidate, worker, need, settings, shunned)
            if misfit:
                full[worker.node] = misfit
            else:
                fitting.append(worker)
        if not fitting:
            stay[str(candidate.pid)] = "no worker fits"
            continue
        amount = need.frees(candidate)
        target = min(
            fitting,
            key=lambda one: (
                not one.boosted, -(need.cores_there(one) or 0.0), one.cpu_taken > CPU_ROOM,
                one.level(need.resource) + one.memory, one.node,
            ),
        )
        price = cost_s(candidate, failures.get(candidate.key, 0), bandwidth.get(target.node, DEFAULT_BYTES_PER_S))
        # Squared: one move that suffices beats two cheap ones that do not.
        score = min(1.0, amount / max(need.amount, 1e-9)) ** 2 / price**0.5
        found.append(Ranked(candidate, target, amount, price, score))
    found, small = _without_small(found, need, settings)
    stay |= {str(one.candidate.pid): _too_little(need) for one in small}
    found.sort(key=lambda one: (_TIERS[mark_of(one.candidate, settings)], -one.score, one.candidate.key))
    return found, stay, full
