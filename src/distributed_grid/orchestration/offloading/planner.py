"""A plan says before anything happens what a move would be: where, how, why, how long, and what it cannot carry."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from distributed_grid.agent.inspect.facts import TreeFacts
from distributed_grid.agent.inspect.target import TargetFacts
from distributed_grid.core.errors import Refused
from distributed_grid.core.resources import format_bytes
from distributed_grid.orchestration.offloading.matcher import Target
from distributed_grid.orchestration.offloading.model import Classification, Finding, Need, Strategy, process_name
from distributed_grid.orchestration.offloading.preflight import MoveOptions, Preflight, choose, preflight
from distributed_grid.orchestration.offloading.preflight_gpu import gpu_bytes

#: The pause without any experience: freezing and restoring, then what changes meanwhile and open files over the wire.
_BASE_PAUSE_S = 0.25
_PAUSE_PER_BYTE_S = 0.2 / (1 << 30)
#: Off the GPU, through CRIU and onto the other GPU; seen on an H200 (docs/figures.md).
_PARKING_PER_BYTE_S = 3.0 / (1 << 30)
_UNKNOWN_BYTES_S = 100e6
_RELAUNCH_S = 1.0
_SIMILAR = 4.0


@dataclass(frozen=True, slots=True)
class PastMove:
    strategy: str
    bytes: int
    pause_s: float
    target: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    node: str
    pid: int
    start_ticks: int
    pids: tuple[int, ...]
    uid: int
    user: str
    argv: tuple[str, ...]
    target: str
    strategy: Strategy | None  # None: it cannot be moved
    why: str
    target_reasons: tuple[str, ...]
    need: Need
    memory_bytes: int
    file_bytes: int
    files: tuple[str, ...]
    expected_pause_s: float
    pause_basis: str
    findings: tuple[Finding, ...]
    classification: Classification | None = None
    gpus: tuple[int, ...] = ()
    mover: dict[str, Any] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        return self.file_bytes + (self.memory_bytes if self.strategy == "live" else 0)

    @property
    def obstacles(self) -> tuple[Finding, ...]:
        """What cannot be carried, or only with an option."""
        return tuple(one for one in self.findings if one.severity != "notice" and self._concerns(one))

    @property
    def notices(self) -> tuple[Finding, ...]:
        """What the program, or whoever watches it, will notice."""
        return tuple(one for one in self.findings if one.severity == "notice" and self._concerns(one))

    def _concerns(self, one: Finding) -> bool:
        return self.strategy is None or one.strategy in (self.strategy, "both")

    def require(self) -> Plan:
        """Itself, or the one error that says why it cannot be done."""
        if self.strategy is not None:
            return self
        helps = [one.help for one in self.obstacles if one.help]
        raise Refused(
            f"process {self.pid} cannot be moved to {self.target}", cause=self.why, hint=helps[0] if helps else "",
            code="cannot-carry", reasons=[one.to_wire() for one in self.obstacles],
        )  # fmt: skip

    def to_wire(self, head: str = "") -> dict[str, Any]:
        kind = self.classification
        return {
            "pid": process_name(self.node, self.pid, head or self.node), "node": self.node,
            "start_ticks": self.start_ticks, "pids": list(self.pids), "uid": self.uid, "user": self.user,
            "argv": list(self.argv), "command": " ".join(self.argv),
            "type": kind.type.value if kind else None, "confidence": kind.confidence if kind else None,
            "target": self.target, "target_reasons": list(self.target_reasons),
            "strategy": self.strategy or "refuse", "why": self.why, "need": self.need.to_wire(),
            "bytes": self.bytes, "memory_bytes": self.memory_bytes, "file_bytes": self.file_bytes,
            "files": list(self.files), "expected_pause_s": round(self.expected_pause_s, 3),
            "pause_basis": self.pause_basis, "cannot_carry": [one.to_wire() for one in self.obstacles],
            "will_notice": [one.to_wire() for one in self.notices], "gpus": list(self.gpus),
            "mover_options": self.mover,
        }  # fmt: skip


def make_plan(
    facts: TreeFacts,
    *,
    node: str,
    need: Need,
    target: Target,
    source_facts: TargetFacts,
    target_facts: TargetFacts,
    options: MoveOptions,
    classification: Classification | None = None,
    past: Sequence[PastMove] = (),
    bandwidth_bytes_s: float | None = None,
) -> Plan:
    """Put together what the others found. Pure; a plan that refuses is a plan too (`strategy` None)."""
    checked = preflight(facts, source_facts, target_facts, options, target.gpus)
    parked = gpu_bytes(facts, source_facts)
    strategy, why = choose(checked, options)
    findings = list(checked.findings)
    findings += [Finding("shortage", "notice", f"{target.node}: {text}", "", "both") for text in target.shortages]
    root = facts.root
    memory = facts.memory_bytes - facts.clean_bytes + (parked if strategy != "relaunch" else 0)
    sent = checked.file_bytes + (memory if strategy != "relaunch" else 0)
    pause, basis = expected_pause(strategy or "live", memory, checked, past, bandwidth_bytes_s, parked)
    return Plan(
        node=node, pid=root.pid, start_ticks=root.start_ticks, pids=facts.pids, uid=root.uid, user=root.user,
        argv=root.argv, target=target.node, strategy=strategy, why=why, target_reasons=target.reasons, need=need,
        memory_bytes=memory, file_bytes=checked.file_bytes, files=checked.files, expected_pause_s=pause,
        pause_basis=basis if strategy else f"{format_bytes(sent)} would travel", findings=tuple(findings),
        classification=classification, gpus=target.gpus, mover={**checked.mover, "files": list(checked.files)},
    )  # fmt: skip


def expected_pause(
    strategy: Strategy,
    memory_bytes: int,
    checked: Preflight,
    past: Sequence[PastMove],
    bandwidth_bytes_s: float | None = None,
    parked_bytes: int = 0,
) -> tuple[float, str]:
    """Seconds, and what they are based on: moves of a like size, else scaled from all, else figures of our own."""
    same = [one for one in past if one.strategy == strategy and one.pause_s > 0]
    size = max(1, memory_bytes)
    near = [one for one in same if 1 / _SIMILAR <= max(1, one.bytes) / size <= _SIMILAR]
    if near:
        basis = f"from {len(near)} past move{'s' if len(near) > 1 else ''} of a like size"
        return statistics.median(one.pause_s for one in near), basis
    if strategy == "relaunch":
        if same:
            return statistics.median(one.pause_s for one in same), f"from {len(same)} past relaunches"
        return _RELAUNCH_S, "an estimate: nothing was relaunched yet"
    rate = bandwidth_bytes_s or _UNKNOWN_BYTES_S
    in_pause = checked.file_bytes + (parked_bytes if checked.mover.get("precopy", True) else memory_bytes)
    pause = _BASE_PAUSE_S + memory_bytes * _PAUSE_PER_BYTE_S + in_pause / rate + parked_bytes * _PARKING_PER_BYTE_S
    return pause, "an estimate: nothing of this size was moved yet"
