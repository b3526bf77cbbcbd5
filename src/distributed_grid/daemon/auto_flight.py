"""The one automatic move that is under way, as it is kept on disk: its end must count also after a restart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

#: Between nodes, and soon over one way or the other. A move in doubt may stay so until its worker is back.
UNDER_WAY = ("PLANNED", "FROZEN", "COPIED", "STAGED", "COMMITTED")
ARRIVED = ("RUNNING", "CLEANED", "ENDED", "MOVED")


@dataclass(frozen=True, slots=True)
class Flight:
    key: str
    pid: int | str
    node: str
    target: str
    #: When it was begun (wall clock): the same process may have been moved before.
    began: float

    def __str__(self) -> str:
        return f"PID {self.pid} to {self.target}"

    def find(self, moves: Mapping[str, Any]) -> dict[str, Any]:
        """Its row in `offload_status`; empty if it never got there."""
        for move in [*moves.get("active", []), *moves.get("finished", [])]:
            same = str(move["pid"]) == str(self.pid) and move["target"] == self.target
            if same and move.get("automatic") and float(move.get("created", 0.0)) >= self.began - 1.0:
                return dict(move)
        return {}

    def to_wire(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_wire(data: Any) -> Flight | None:
        try:
            return Flight(**data) if data else None
        except TypeError:
            return None
