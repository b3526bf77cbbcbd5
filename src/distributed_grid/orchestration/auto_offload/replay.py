"""Runs the policy over a recorded history: what it would have done, whether that helped, what it would have spared."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from distributed_grid.core.errors import UsageError
from distributed_grid.core.resources import ResourceType
from distributed_grid.orchestration.auto_offload.policy import Decision, decide, say
from distributed_grid.orchestration.auto_offload.ranking import DEFAULT_BYTES_PER_S, FIXED_S
from distributed_grid.orchestration.auto_offload.signals import (
    RESOURCES,
    Candidate,
    Inputs,
    NodeSignals,
    Point,
    Settings,
)
from distributed_grid.orchestration.auto_offload.state import PolicyState, move_ended

#: A record may be this much apart and still be one history.
POINTS_KEPT_S = 600.0


@dataclass(slots=True)
class Moved:
    """A move the policy made in the replay."""

    candidate: Candidate
    target: str
    resource: ResourceType
    began: float
    ended: float
    reason: str
    helped: bool = False
    #: The process was gone before its move was over, or its worker was.
    failed: str = ""


@dataclass(slots=True)
class Outcome:
    """What came of a replay."""

    name: str = ""
    seconds: float = 0.0
    moves: list[Moved] = field(default_factory=list)
    cannot_help: int = 0
    #: Seconds in which it would have moved something, but which processes there were is not in the record.
    unknown_s: float = 0.0
    #: Seconds above a threshold, as recorded and with the moves made.
    over_s: float = 0.0
    over_with_s: float = 0.0
    peak: float = 0.0
    peak_with: float = 0.0
    decisions: list[tuple[float, Decision]] = field(default_factory=list)

    @property
    def ping_pong(self) -> int:
        keys = [move.candidate.key for move in self.moves if not move.failed]
        return len(keys) - len(set(keys))

    @property
    def useless(self) -> int:
        return sum(1 for move in self.moves if not move.helped)

    def row(self) -> dict[str, Any]:
        return {
            "history": self.name, "seconds": round(self.seconds), "moves": len(self.moves),
            "useless": self.useless, "ping_pong": self.ping_pong, "cannot_help": self.cannot_help,
            "unknown_s": round(self.unknown_s), "over_s": round(self.over_s), "over_with_s": round(self.over_with_s),
            "peak": round(self.peak, 3), "peak_with": round(self.peak_with, 3),
        }  # fmt: skip


def read_history(path: str | Path) -> list[Inputs]:
    """Records as `grid offload auto --record` writes them: one JSON object per line."""
    found = []
    try:
        with open(path, encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    try:
                        found.append(Inputs.from_wire(json.loads(line)))
                    except (ValueError, KeyError, TypeError, AttributeError) as error:
                        cause = f"line {number}: {type(error).__name__}: {error}"
                        raise UsageError(f"{path} is not a recorded history", cause=cause, code="history") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} can't be read", cause=str(error), code="history") from None
    if not found:
        raise UsageError(f"{path} holds no history", hint="grid offload auto --record FILE", code="history")
    return sorted(found, key=lambda one: one.at)


def write_history(path: str | Path, history: Iterable[Mapping[str, Any]]) -> None:
    with open(path, "w", encoding="utf-8") as out:
        out.writelines(json.dumps(record) + "\n" for record in history)


def replay(history: list[Inputs], settings: Settings, name: str = "") -> Outcome:
    """Decide at every record as the daemon would; a process that was moved counts at its target from then on."""
    state, outcome = PolicyState(), Outcome(name, history[-1].at - history[0].at)
    points: list[Point] = []
    flying: Moved | None = None
    last_seen: dict[str, Candidate] = {}
    scanned = False
    for index, record in enumerate(history):
        step_s = record.at - history[index - 1].at if index else 0.0
        # A record without a scan says nothing about processes: what was last known of them holds.
        if record.candidates is not None:
            last_seen, scanned = {one.key: one for one in record.candidates}, True
        if flying is not None and record.at >= flying.ended:
            flying.failed = _failure(flying, record, last_seen)
            flying.helped = not flying.failed and _helps(flying, history[index:], settings)
            state = move_ended(
                state, record.at, settings, flying.candidate.key, flying.target, failed=flying.failed,
                fault="target" if flying.failed.startswith(flying.target) else "process",
            )  # fmt: skip
            flying = None
        away = [move for move in outcome.moves if not move.failed and move is not flying]
        head = _head_with(record.head, [last_seen[m.candidate.key] for m in away if m.candidate.key in last_seen])
        points.extend(_points_with(record, head) or [Point(record.at, head.cpu, head.memory, head.gpu)])
        points = [point for point in points if point.at > record.at - POINTS_KEPT_S]
        _measure(outcome, record.head, head, settings, step_s)
        gone = {move.candidate.key for move in away}
        inputs = replace(
            record, head=head, points=tuple(points), workers=tuple(_workers_with(record.workers, away, last_seen)),
            candidates=None, busy=f"PID {flying.candidate.pid} to {flying.target}" if flying else "",
        )  # fmt: skip
        state, decision = decide(state, inputs, settings)
        if decision.action == "scan":
            left = tuple(one for key, one in last_seen.items() if key not in gone)
            if scanned:
                state, decision = decide(state, replace(inputs, candidates=left), settings)
            else:
                state, decision = say(state, _not_known(decision), record.at)
                outcome.unknown_s += step_s
        if decision.news:
            outcome.decisions.append((record.at, decision))
            outcome.cannot_help += decision.action == "cannot_help"
        if decision.move is not None:
            best = decision.move
            speed = record.bandwidth.get(best.target.node, DEFAULT_BYTES_PER_S)
            took_s = FIXED_S + (best.candidate.memory_bytes + best.candidate.gpu_memory_bytes) / max(1.0, speed)
            resource = ResourceType(str(decision.figures["resource"]))
            flying = Moved(best.candidate, best.target.node, resource, record.at, record.at + took_s, decision.reason)
            outcome.moves.append(flying)
    if flying is not None:  # the record ends while it is under way
        flying.helped = True
    return outcome


def _not_known(scan: Decision) -> Decision:
    text = f"{scan.reason}: it would act, but no processes are recorded up to here, so on which is not known"
    return replace(scan, action="nothing", key="unknown", reason=text)


def _head_with(head: NodeSignals, away: list[Candidate]) -> NodeSignals:
    """The head without what was moved."""
    memory, cores = sum(one.memory_bytes for one in away), sum(one.cpu_cores for one in away)
    gpu = sum(one.gpu_memory_bytes for one in away)
    return replace(
        head, memory=max(0.0, head.memory - memory / max(1, head.memory_bytes)),
        cpu=max(0.0, head.cpu - cores / max(0.01, head.cpu_cores)),
        gpu=max(0.0, head.gpu - gpu / head.gpu_memory_bytes) if head.gpu_memory_bytes else head.gpu,
        memory_full=0.0 if away else head.memory_full,
    )  # fmt: skip


def _points_with(record: Inputs, head: NodeSignals) -> list[Point]:
    """The record's own points, lowered by what was moved."""
    less = {r: record.head.level(r) - head.level(r) for r in RESOURCES}
    return [
        Point(
            point.at, max(0.0, point.cpu - less[ResourceType.CPU]), max(0.0, point.memory - less[ResourceType.MEMORY]),
            max(0.0, point.gpu - less[ResourceType.GPU]),
        )
        for point in record.points
    ]  # fmt: skip


def _workers_with(
    workers: tuple[NodeSignals, ...], away: list[Moved], last_seen: Mapping[str, Candidate]
) -> Iterator[NodeSignals]:
    for worker in workers:
        here = [last_seen[m.candidate.key] for m in away if m.target == worker.node and m.candidate.key in last_seen]
        memory = sum(one.memory_bytes for one in here)
        yield replace(
            worker, memory=min(1.0, worker.memory + memory / max(1, worker.memory_bytes)),
            memory_available_bytes=max(0, worker.memory_available_bytes - memory),
            cpu=min(1.0, worker.cpu + sum(one.cpu_cores for one in here) / max(0.01, worker.cpu_cores)),
        )  # fmt: skip


def _failure(move: Moved, record: Inputs, last_seen: Mapping[str, Candidate]) -> str:
    worker = next((one for one in record.workers if one.node == move.target), None)
    if worker is None or not worker.online or worker.online_s < record.at - move.began:
        return f"{move.target} went away"
    return "" if move.candidate.key in last_seen else "the process ended before"


def _helps(move: Moved, rest: list[Inputs], settings: Settings) -> bool:
    """Whether, with this process still on the head, pressure would have gone on after the move was done."""
    for record in rest:
        alive = record.candidates is None or any(one.key == move.candidate.key for one in record.candidates)
        if not alive:
            return False
        if record.at > move.ended and record.head.level(move.resource) > settings.clear_level(move.resource):
            return True
    return False


def _measure(outcome: Outcome, was: NodeSignals, now: NodeSignals, settings: Settings, step_s: float) -> None:
    for node, over, peak in ((was, "over_s", "peak"), (now, "over_with_s", "peak_with")):
        if any(node.level(r) > settings.threshold(r) for r in RESOURCES):
            setattr(outcome, over, getattr(outcome, over) + step_s)
        setattr(outcome, peak, max(getattr(outcome, peak), node.memory))
