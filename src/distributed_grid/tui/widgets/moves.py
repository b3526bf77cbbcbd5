"""One move in words: its line in the list, and all about it for the details."""

from __future__ import annotations

import time
from typing import Any

from rich.text import Text

from distributed_grid.core.resources import format_bytes, format_duration
from distributed_grid.orchestration.auto_offload.policy import printable, short
from distributed_grid.tui.view import UNDER_WAY, move_state
from distributed_grid.tui.widgets import panels


def move_line(move: dict[str, Any], width: int, now: float) -> Text:
    """`• PID 4521 → gpu1  python train.py      Running 5m 32s`."""
    left = f"• PID {move['pid']} → {move['target']}  "
    state = move_state(move, now, narrow=width < 90) + (" (auto)" if move.get("automatic") and width >= 70 else "")
    room = max(8, min(width - len(left) - len(state) - 2, 60 if width >= 100 else 200))
    command = short(str(move["command"]), room)
    style = panels.WARN if move["state"] in UNDER_WAY else ""
    return Text.assemble((left, "bold"), f"{command:<{room}}  ", (state, style))


def over_line(move: dict[str, Any], width: int, now: float) -> Text:
    """One that is over, dimmed: `  PID 4521 → gpu2  python train.py  Ended 1h 6m ago, exit 0`."""
    code = f", exit {move['exit_code']}" if move.get("exit_code") is not None else ""
    state = f"{str(move['state']).capitalize()} {format_duration(now - float(move['updated']))} ago{code}"
    left = f"  PID {move['pid']} → {move['target']}  "
    room = max(8, min(width - len(left) - len(state) - 2, 60 if width >= 100 else 200))
    return Text(f"{left}{short(str(move['command']), room):<{room}}  {state}", style="dim")


def details_text(move: dict[str, Any], moves: list[dict[str, Any]], tail: str, now: float) -> str:
    pause = f", paused {move['pause_s']:.2f} s" if move.get("pause_s") is not None else ""
    size = f", {format_bytes(move['bytes'])}" if move.get("bytes") else ""
    why = move.get("reason") or ("by itself" if move.get("automatic") else "by hand")
    lines = [
        str(move["command"]), "",
        f"PID {move['pid']} of {move['node']} → {move['target']}, {move['strategy'] or '-'}: "
        f"{move['state'].lower()}{size}{pause}",
        f"why: {why}", "", "its moves:",
    ]  # fmt: skip
    for one in moves:
        ago = format_duration(now - float(one["created"]))
        lines.append(f"  {one['id']}  {one['node']} → {one['target']}  {str(one['state']).lower()}  {ago} ago")
    for step in move.get("steps") or []:
        at = time.strftime("%H:%M:%S", time.localtime(float(step["at"])))
        lines.append(f"    {at}  {step['state']:<10} {step['story']}")
    return "\n".join(printable(line) for line in [*lines, "", "its last output:", *tail.splitlines()])
