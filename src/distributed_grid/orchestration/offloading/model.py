"""A move as data: its states and which may follow which, its id, and what is known and asked about a process."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Literal

from distributed_grid.agent.inspect.candidates import TreeSample
from distributed_grid.core.errors import InternalError, UsageError

Strategy = Literal["live", "relaunch"]


class MoveState(StrEnum):
    PLANNED = "PLANNED"  # nothing has been touched
    FROZEN = "FROZEN"  # the source is held, or about to be
    COPIED = "COPIED"  # all that must travel is on the target
    STAGED = "STAGED"  # the copy stands ready, stopped
    COMMITTED = "COMMITTED"  # from here only forward
    IN_DOUBT = "IN_DOUBT"  # *go* was sent and not acknowledged: nothing is let go
    RUNNING = "RUNNING"  # the target has acknowledged; the source is still to be replaced by its stub
    CLEANED = "CLEANED"  # it runs on the target only
    ENDED = "ENDED"  # and has ended there, its exit code known
    LOST = "LOST"  # its node died with it
    MOVED = "MOVED"  # another move took it on from there
    ABORTED = "ABORTED"  # the source runs on

    @property
    def over(self) -> bool:
        return self in OVER

    @property
    def active(self) -> bool:
        """Whether the process is on its way or away."""
        return self not in OVER

    @property
    def moving(self) -> bool:
        """Whether a step of the move itself is still to be done."""
        return self.active and self is not MoveState.CLEANED


_S = MoveState
TRANSITIONS: dict[MoveState, frozenset[MoveState]] = {
    _S.PLANNED: frozenset({_S.FROZEN, _S.ABORTED}),
    _S.FROZEN: frozenset({_S.COPIED, _S.ABORTED}),
    _S.COPIED: frozenset({_S.STAGED, _S.ABORTED}),
    _S.STAGED: frozenset({_S.COMMITTED, _S.ABORTED}),
    _S.COMMITTED: frozenset({_S.RUNNING, _S.IN_DOUBT}),
    # Aborted out of doubt: the target was restarted and the copy is gone, or a person said `--here`.
    _S.IN_DOUBT: frozenset({_S.RUNNING, _S.ABORTED}),
    # Whatever becomes of the program, the frozen source must be replaced first: so never straight to an end.
    _S.RUNNING: frozenset({_S.CLEANED}),
    _S.CLEANED: frozenset({_S.ENDED, _S.LOST, _S.MOVED}),
    # A node that was merely silent may come back with the process, or with its exit code.
    _S.LOST: frozenset({_S.CLEANED, _S.ENDED}),
    _S.ENDED: frozenset(),
    _S.MOVED: frozenset(),
    _S.ABORTED: frozenset(),
}
OVER = frozenset({_S.ENDED, _S.LOST, _S.MOVED, _S.ABORTED})


def next_state(
    now: MoveState | str, to: MoveState | str, *, move_id: str = "", story: Iterable[str] = ()
) -> MoveState:
    """The state entered, if it may follow; else a fault of ours, told with how the move came there."""
    now, to = MoveState(now), MoveState(to)
    if to not in TRANSITIONS[now]:
        told = [str(line) for line in story]
        raise InternalError(
            f"move {move_id or '?'} cannot go from {now} to {to}", cause="; ".join(told), code="move-transition",
            story=told,
        )  # fmt: skip
    return to


def move_id(epoch_s: float, pid: int) -> str:
    return f"offload_{int(epoch_s)}_{pid}"


def parse_process(text: str, default_node: str) -> tuple[str, int]:
    """`4521` or `gpu1:4521` -> (node, pid)."""
    node, colon, number = text.strip().rpartition(":")
    if not re.fullmatch(r"[1-9]\d{0,9}", number) or (colon and not node):
        raise UsageError(
            f"{text!r} is not a process", hint="a process id such as 12345, or with its node: gpu1:12345", code="pid"
        )
    return node or default_node, int(number)


def process_name(node: str, pid: int, head: str) -> int | str:
    """How JSON names a process: its number on the head, `node:number` elsewhere."""
    return pid if node == head else f"{node}:{pid}"


class ProcessType(StrEnum):
    TRAINING = "Training"
    INFERENCE = "Inference"
    DATA_PROCESSING = "Data Processing"
    COMPUTE_INTENSIVE = "Compute Intensive"
    BATCH = "Batch Jobs"
    INTERACTIVE = "Interactive"
    DAEMON = "Daemon"

    @property
    def offered(self) -> bool:
        return self not in (ProcessType.INTERACTIVE, ProcessType.DAEMON)


@dataclass(frozen=True, slots=True)
class Classification:
    type: ProcessType
    confidence: float
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Need:
    """What a process asks of a target, headroom included."""

    cpu_cores: float
    memory_bytes: int
    gpu_memory_bytes: int = 0
    gpu_count: int = 0
    gpu_name: str = ""  # a parked process can only be taken up by the same type

    def to_wire(self) -> dict[str, Any]:
        return asdict(self)


#: What is asked for beyond the peak seen.
MEMORY_HEADROOM = 1.2


def need_of(tree: TreeSample, gpu_names: Mapping[int, str] | None = None) -> Need:
    names = {(gpu_names or {}).get(index, "") for index in tree.gpu_indices}
    return Need(
        cpu_cores=round(max(tree.cpu_cores, tree.cpu_cores_1m), 2),
        memory_bytes=int(max(tree.peak_memory_bytes, tree.memory_bytes) * MEMORY_HEADROOM),
        gpu_memory_bytes=int(tree.gpu_memory_bytes * MEMORY_HEADROOM), gpu_count=len(tree.gpu_indices),
        gpu_name=names.pop() if len(names) == 1 else "",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Candidate:
    """A tree that may be worth moving, and what it is taken for."""

    node: str
    tree: TreeSample
    classification: Classification
    need: Need

    @property
    def command(self) -> str:
        return " ".join(self.tree.argv)

    def to_wire(self, head: str) -> dict[str, Any]:
        """For `scan --format json`: `pid` as `execute` takes it, the command line as it is."""
        tree, kind = self.tree, self.classification
        return {
            "pid": process_name(self.node, tree.pid, head), "node": self.node, "start_ticks": tree.start_ticks,
            "pids": list(tree.pids), "user": tree.user, "uid": tree.uid, "command": self.command,
            "argv": list(tree.argv), "type": kind.type.value, "confidence": kind.confidence,
            "reasons": list(kind.reasons), "cpu_cores": round(tree.cpu_cores_1m, 2),
            "cpu_cores_wanted": round(tree.cpu_cores_wanted, 2),
            "memory_bytes": tree.memory_bytes, "peak_memory_bytes": tree.peak_memory_bytes,
            "gpu_memory_bytes": tree.gpu_memory_bytes, "age_s": round(tree.age_s, 1), "threads": tree.threads,
            "need": self.need.to_wire(), "mark": tree.mark,
        }  # fmt: skip


Severity = Literal["blocks", "asks", "notice"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that pre-flight found. `blocks`: not so; `asks`: only with that option; `notice`: said, and done."""

    code: str
    severity: Severity
    text: str
    help: str = ""
    strategy: Literal["live", "relaunch", "both"] = "live"
    option: str = ""  # of the command line, that would allow it
    details: dict[str, Any] = field(default_factory=dict)

    def stops(self, strategy: Strategy) -> bool:
        return self.severity != "notice" and self.strategy in (strategy, "both")

    def to_wire(self) -> dict[str, Any]:
        return asdict(self)
