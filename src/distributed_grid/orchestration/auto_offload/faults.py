"""Whose fault it is that a move could not be planned or made: what is left out for a while depends on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from distributed_grid.core.errors import GridError, NoResources, NotFound, Refused, TimedOut, Unavailable

#: `unclear` counts against both; `user`: somebody called the move off.
Fault = Literal["process", "target", "unclear", "user"]
#: Codes of errors that say it more exactly than their kind does.
_CODES: Mapping[str, Fault] = {
    "cancelled": "user", "gone": "process", "woken": "process", "already-moving": "process", "already-moved": "process",
    "unknown-node": "target", "target-refuses": "target", "target-failed": "target", "stalled": "unclear",
}  # fmt: skip
#: What a plan finds about its target: with another one it may be otherwise.
_OF_TARGET = frozenset({
    "no-criu", "criu-check", "criu-older", "rights", "machine", "cpu", "memory", "memory-relaunch", "tmpfs", "cwd",
    "file-differs", "file-missing", "interpreter", "user", "user-differs", "target-rights",
})  # fmt: skip


def fault_of(error: GridError) -> Fault:
    if error.code in _CODES:
        return _CODES[error.code]
    if isinstance(error, Unavailable | TimedOut | NoResources):
        return "target"
    return "process" if isinstance(error, NotFound | Refused) else "unclear"


def fault_in(plan: Mapping[str, Any]) -> Fault:
    """Of a plan that refuses: the target's only if nothing of the process's own stands in the way."""
    codes = {str(one.get("code")) for one in plan.get("cannot_carry") or []}
    return "target" if codes and codes <= _OF_TARGET else "process"
