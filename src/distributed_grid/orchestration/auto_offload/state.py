"""What automatic offload remembers from one decision to the next, and how the end of a move changes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from distributed_grid.orchestration.auto_offload.faults import Fault
from distributed_grid.orchestration.auto_offload.signals import Settings

FAILED_S = 600.0
RETURNED_S = 1800.0
TARGET_FAILED_S = 120.0
REFUSED_S = 300.0
CALLED_OFF = "it was called off by hand"
_KEPT_NOTES = 200


def pair(key: str, node: str) -> str:
    """A process and a worker that do not suit each other, as a key of `PolicyState.shunned`."""
    return f"{key} to {node}"


@dataclass(frozen=True, slots=True)
class Pressure:
    """Pressure on one resource of the head that has begun and not ended."""

    since: float
    hard: bool
    early: bool = False


@dataclass(frozen=True, slots=True)
class Left:
    """A process (by key or by command) or a worker that is not tried again until then."""

    until: float
    why: str


@dataclass(frozen=True, slots=True)
class PolicyState:
    """What a decision leaves for the next one."""

    pressed: Mapping[str, Pressure] = field(default_factory=dict)
    #: Since when a pressed resource has been below its clear level (or, with `:low`, its threshold).
    below: Mapping[str, float] = field(default_factory=dict)
    cooldown_until: float = 0.0
    last_move_at: float = 0.0
    #: How many more have to go after the last one; they go one after the other, and the cooldown follows the last.
    batch_left: int = 0
    left_alone: Mapping[str, Left] = field(default_factory=dict)
    #: Workers, and workers for one process (`pair`).
    shunned: Mapping[str, Left] = field(default_factory=dict)
    failures: Mapping[str, int] = field(default_factory=dict)
    said: str = ""
    said_at: Mapping[str, float] = field(default_factory=dict)

    def to_wire(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_wire(data: Mapping[str, Any]) -> PolicyState:
        """As far as it can be read: it only saves repeating mistakes after a restart."""
        try:
            return PolicyState(
                pressed={str(k): Pressure(**v) for k, v in dict(data.get("pressed", {})).items()},
                below={str(k): float(v) for k, v in dict(data.get("below", {})).items()},
                cooldown_until=float(data.get("cooldown_until", 0.0)),
                last_move_at=float(data.get("last_move_at", 0.0)),
                batch_left=int(data.get("batch_left", 0)),
                left_alone={str(k): Left(**v) for k, v in dict(data.get("left_alone", {})).items()},
                shunned={str(k): Left(**v) for k, v in dict(data.get("shunned", {})).items()},
                failures={str(k): int(v) for k, v in dict(data.get("failures", {})).items()},
                said=str(data.get("said", "")),
                said_at={str(k): float(v) for k, v in dict(data.get("said_at", {})).items()},
            )  # fmt: skip
        except (TypeError, ValueError, AttributeError):
            return PolicyState()


def move_ended(
    state: PolicyState,
    at: float,
    settings: Settings,
    key: str,
    target: str,
    *,
    failed: str = "",
    fault: Fault = "unclear",
) -> PolicyState:
    """A move is over: the cooldown runs from now, unless more have to go. After a failure whoever's fault it was is
    left out for a while: the target, the process, or both."""
    more = bool(state.batch_left) and not failed
    state = replace(state, cooldown_until=at + (0.0 if more else settings.cooldown_s), last_move_at=at)
    if not failed:
        return replace(state, failures={k: n for k, n in state.failures.items() if k != key})
    state = replace(state, batch_left=0)
    if fault == "user":
        return leave_alone(state, at, key, CALLED_OFF, RETURNED_S)
    if fault in ("target", "unclear"):
        state = shun(state, at, target, f"a move to it failed: {failed}", TARGET_FAILED_S)
    if fault == "target":
        return state
    count = state.failures.get(key, 0) + 1
    state = leave_alone(state, at, key, f"a move of it failed: {failed}", FAILED_S * 2 ** min(count - 1, 5))
    return replace(state, failures=dict(list({**state.failures, key: count}.items())[-_KEPT_NOTES:]))


def refused(state: PolicyState, at: float, key: str, target: str, why: str, fault: Fault) -> PolicyState:
    """The planner refused it: where that is the target's fault another one may do, else the process is left alone."""
    if fault == "target":
        return shun(state, at, pair(key, target), why, TARGET_FAILED_S)
    return leave_alone(state, at, key, why, REFUSED_S)


def shun(state: PolicyState, at: float, key: str, why: str, seconds: float) -> PolicyState:
    return replace(state, shunned=_noted(state.shunned, at, key, why, seconds))


def leave_alone(state: PolicyState, at: float, key: str, why: str, seconds: float) -> PolicyState:
    """By a process's key, or by its command line where it has a new pid."""
    return replace(state, left_alone=_noted(state.left_alone, at, key, why, seconds))


def _noted(notes: Mapping[str, Left], at: float, key: str, why: str, seconds: float) -> dict[str, Left]:
    kept = {k: left for k, left in notes.items() if left.until > at and k != key}
    return dict([*kept.items(), (key, Left(at + seconds, why))][-_KEPT_NOTES:])
