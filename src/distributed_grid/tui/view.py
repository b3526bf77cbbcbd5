"""What the dashboard shows, as plain data: built by a feed, drawn by the panels, printed by `--once`."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from distributed_grid.core.clock import Clock, SystemClock
from distributed_grid.core.resources import format_bytes, format_duration
from distributed_grid.monitoring.snapshot import NodeSnapshot
from distributed_grid.orchestration.auto_offload.policy import printable

RESOURCES = ("cpu", "memory", "gpu")
LABELS = {"cpu": "CPU", "memory": "Memory", "gpu": "GPU"}
UNDER_WAY = ("PLANNED", "FROZEN", "COPIED", "STAGED", "COMMITTED", "IN_DOUBT")
#: The mover's own words in a user's.
STEPS = {"new": "preparing", "precopy": "copying", "frozen": "copying the rest"}
DEFAULT_THRESHOLDS = {"cpu": 0.8, "memory": 0.7, "gpu": 0.9}
#: Points of the sparklines.
KEPT = 240
EVENTS_KEPT = 500
#: Figures older than this are said to be old.
OLD_S = 5.0


@dataclass(slots=True)
class NodeView:
    name: str
    is_head: bool
    online: bool
    reason: str = ""
    #: As the frame said; `View.age_s` adds the time since.
    told_age_s: float | None = None
    levels: dict[str, float | None] = field(default_factory=dict)
    history: dict[str, deque[float]] = field(default_factory=dict)

    def level(self, resource: str) -> float | None:
        return self.levels.get(resource)


@dataclass(slots=True)
class View:
    """The whole picture. `source` is `daemon` or `local` (no daemon: this machine's own figures, read-only)."""

    nodes: dict[str, NodeView] = field(default_factory=dict)
    active: list[dict[str, Any]] = field(default_factory=list)
    finished: list[dict[str, Any]] = field(default_factory=list)
    events: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=EVENTS_KEPT))
    auto: dict[str, Any] = field(default_factory=dict)
    source: str = ""
    trouble: str = "connecting to the daemon"
    at: float = 0.0
    clock: Clock = field(default_factory=SystemClock)
    #: Frames so far, and when the last came (monotonic).
    frames: int = 0
    received: float = 0.0
    #: A daemon that sends nothing for longer does not answer.
    patience_s: float = OLD_S

    def age_s(self, node: NodeView) -> float | None:
        """How old a node's figures are now, also when no frame comes any more."""
        return None if node.told_age_s is None else node.told_age_s + self._since_frame_s

    @property
    def _since_frame_s(self) -> float:
        return max(0.0, self.clock.monotonic() - self.received) if self.frames else 0.0

    @property
    def is_silent(self) -> bool:
        return self.source == "daemon" and self._since_frame_s > self.patience_s

    @property
    def notice(self) -> str:
        """What is wrong with the picture itself; empty if nothing is."""
        if self.is_silent:
            return f"the daemon has not answered for {format_duration(self._since_frame_s)}"
        return self.trouble

    @property
    def head(self) -> NodeView | None:
        return next((node for node in self.nodes.values() if node.is_head), None)

    @property
    def workers(self) -> list[NodeView]:
        return [node for node in self.nodes.values() if not node.is_head]

    @property
    def thresholds(self) -> Mapping[str, float]:
        return {**DEFAULT_THRESHOLDS, **(self.auto.get("thresholds") or {})}

    def auto_word(self) -> str:
        if self.is_silent:
            return "○ UNKNOWN"
        if self.source != "daemon":
            return "○ READ-ONLY" if self.source else "○ UNKNOWN"
        if not self.auto.get("enabled"):
            return "○ DISABLED"
        return "● DRY RUN" if self.auto.get("dry_run") else "● ENABLED"

    def take_nodes(self, rows: list[dict[str, Any]], now: float | None = None) -> None:
        """A frame of `snapshots_follow`; nodes that are in it no more are gone."""
        self.at = self.clock.time() if now is None else now
        self.frames, self.received = self.frames + 1, self.clock.monotonic()
        known, self.nodes = self.nodes, {}
        for row in rows:
            use = row.get("use")
            old = known.get(row["name"])
            history = old.history if old else {name: deque(maxlen=KEPT) for name in RESOURCES}
            levels: dict[str, float | None] = dict.fromkeys(RESOURCES)
            if use and row["online"]:
                shot = NodeSnapshot.from_wire(use)
                has_gpu = bool(shot.gpus)
                levels = {"cpu": shot.cpu_pressure, "memory": shot.memory_pressure,
                          "gpu": shot.gpu_pressure if has_gpu else None}  # fmt: skip
                for name, level in levels.items():
                    if level is not None:
                        history[name].append(level)
            self.nodes[row["name"]] = NodeView(
                row["name"], row.get("role") == "head", bool(row["online"]),
                printable(str(row.get("reason") or "")),
                row.get("age_s"), levels, history,
            )  # fmt: skip

    def take_moves(self, status: Mapping[str, Any]) -> None:
        self.active, self.finished = _moves(status.get("active")), _moves(status.get("finished"))

    def take_events(self, rows: Any) -> None:
        """Instead of those that were there."""
        self.events.clear()
        self.events.extend(one for one in _dicts(rows) if _is_number(one.get("at")) and "text" in one)

    def moves_of(self, pid: Any) -> list[dict[str, Any]]:
        return [move for move in [*self.active, *self.finished] if move["pid"] == pid]

    def to_wire(self) -> dict[str, Any]:
        return {
            "at": self.at, "source": self.source, "trouble": self.trouble, "auto": dict(self.auto),
            "nodes": [
                {"name": node.name, "role": "head" if node.is_head else "worker", "online": node.online,
                 "reason": node.reason, "age_s": self.age_s(node), "levels": node.levels}
                for node in self.nodes.values()
            ],
            "active_offloads": self.active, "finished_offloads": self.finished, "events": list(self.events),
        }  # fmt: skip


def _dicts(rows: Any) -> list[dict[str, Any]]:
    return [one for one in rows if isinstance(one, dict)] if isinstance(rows, list) else []


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


_NUMBERS = ("bytes", "bytes_total", "rate_bytes_s", "eta_s", "pause_s")


def _moves(rows: Any) -> list[dict[str, Any]]:
    """Those that can be shown: without a daemon they come from a file that anybody may have written."""
    found = []
    for one in _dicts(rows):
        if all(one.get(name) for name in ("id", "pid", "target", "state")) and _is_number(one.get("created")):
            odd = {name: None for name in _NUMBERS if not _is_number(one.get(name))}
            updated = one["updated"] if _is_number(one.get("updated")) else one["created"]
            texts = {name: str(one.get(name) or "") for name in ("node", "target", "state", "command", "reason")}
            found.append({"strategy": "", **one, **texts, **odd, "updated": updated})
    return found


def availability(node: NodeView, age_s: float | None, thresholds: Mapping[str, float]) -> tuple[str, str]:
    """A word with its sign, and how it is meant: `ok`, `full`, `off`."""
    if not node.online:
        return f"✗ Offline{': ' + node.reason if node.reason else ''}", "off"
    if age_s is not None and age_s > OLD_S:
        return f"? Silent for {format_duration(age_s)}", "off"
    full = [name for name in ("memory", "cpu") if (node.level(name) or 0.0) >= max(0.85, thresholds[name])]
    if full:
        return f"✗ Full ({LABELS[full[0]]})", "full"
    return "✓ Available", "ok"


def move_state(move: Mapping[str, Any], now: float, *, narrow: bool = False) -> str:
    """`Running 5m 32s`, or how far a move in flight is: the step, bytes, rate (if there is room), what is left."""
    if move["state"] not in UNDER_WAY:
        word = str(move["state"]).capitalize() if move["state"] not in ("RUNNING", "CLEANED") else "Running"
        return f"{word} {format_duration(now - float(move['created']))}"
    step = str(move.get("step") or move["state"].capitalize())
    parts = [STEPS.get(step, step)]
    done, total = move.get("bytes"), move.get("bytes_total")
    if done:
        parts.append(f"{format_bytes(done)}/{format_bytes(total)}" if total else format_bytes(done))
    if move.get("rate_bytes_s") and not narrow:
        parts.append(f"{format_bytes(move['rate_bytes_s'])}/s")
    if move.get("eta_s") is not None:
        parts.append(f"{format_duration(move['eta_s'])} left")
    return "Moving: " + ", ".join(parts)
