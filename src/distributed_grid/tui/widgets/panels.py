"""The dashboard's panels as text for a given width: pure, so that they are tested and printed without a screen."""

from __future__ import annotations

import time
from collections.abc import Iterable

from rich.text import Text

from distributed_grid.core.resources import format_duration
from distributed_grid.orchestration.auto_offload.policy import printable
from distributed_grid.tui.view import LABELS, OLD_S, RESOURCES, NodeView, View, availability

#: Told apart by brightness and by signs too, never by red against green alone.
GOOD, WARN, BAD, DIM, MARK = "bold cyan", "bold yellow", "bold reverse yellow", "dim", "bold white"
_BLOCKS = " ▁▂▃▄▅▆▇█"
_MIN_SPARK = 12


def header(view: View, width: int, *, paused: bool = False, readonly: bool = False) -> Text:
    word = view.auto_word()
    right = Text.assemble(
        ("⏸ PAUSED  " if paused else "", WARN), ("view only  " if readonly else "", DIM),
        "Auto: ", (word, GOOD if word.startswith("●") else DIM),
    )  # fmt: skip
    left = Text("GRID OFFLOAD MONITOR" if width >= 44 else "GRID OFFLOAD", style="bold")
    gap = max(1, width - left.cell_len - right.cell_len)
    return Text.assemble(left, " " * gap, right)


def bar(level: float | None, threshold: float, width: int) -> Text:
    """`[████████┃███░░]`: fixed from 0 to 100, the threshold marked."""
    inner = max(4, width - 2)
    filled = round((level or 0.0) * inner)
    mark = min(inner - 1, max(0, round(threshold * inner) - 1))
    colour = WARN if level is not None and level > threshold else "cyan"
    text = Text("[")
    for cell in range(inner):
        if cell == mark:
            text.append("┃" if cell < filled else "│", MARK)
        else:
            text.append("█" if cell < filled else "░", colour if cell < filled else DIM)
    return text.append("]")


def sparkline(values: Iterable[float], width: int) -> str:
    """The last `width` points on a fixed scale from 0 to 100."""
    last = list(values)[-width:]
    return "".join(_BLOCKS[min(8, max(1, round(value * 8)))] for value in last).rjust(width)


def head(view: View, width: int) -> Text:
    node = view.head
    notice, age_s = printable(view.notice), view.age_s(node) if node else None
    if node is None:
        return Text(f"HEAD NODE: {notice or 'no figures yet'}", style=WARN)
    text = Text.assemble(("HEAD NODE: ", "bold"), (node.name, "bold"))
    aside = _age(node, age_s) if not notice else f"⚠ {notice}"
    gap = width - text.cell_len - len(aside)
    if gap >= 2:
        text.append(" " * gap).append(aside, WARN if notice or (age_s or 0) > OLD_S else DIM)
    elif notice:
        text.append("\n").append(aside[:width], WARN)
    ahead = {name: _ahead(view, name) for name in RESOURCES}
    told = max(map(len, ahead.values())) + 4 if any(ahead.values()) else 0
    told = told if width >= 60 else 0
    bar_width = max(6, min(22 if width < 60 else 42, width - 7 - 5 - 7 - told))
    for name in RESOURCES:
        line = _head_line(view, node, name, bar_width)
        if told and ahead[name]:
            line.append(f"  ↗ {ahead[name]}", WARN)
        line.pad_right(max(0, 7 + bar_width + 5 + 7 + told - line.cell_len))
        left = width - line.cell_len - 2
        if left >= _MIN_SPARK:
            line.append("  ").append(sparkline(node.history.get(name, ()), min(80, left)), "blue")
        text.append("\n").append_text(line)
    return text


def _ahead(view: View, name: str) -> str:
    return str((view.auto.get("forecasts") or {}).get(name, "")).removeprefix(f"{name} ")


def _age(node: NodeView, age_s: float | None) -> str:
    if not node.online:
        return f"✗ offline {node.reason}".rstrip()
    return "" if age_s is None else f"figures {format_duration(age_s)} old"


def _head_line(view: View, node: NodeView, name: str, bar_width: int) -> Text:
    level, threshold = node.level(name), view.thresholds[name]
    high = level is not None and level > threshold
    text = Text(f"{LABELS[name]:<6} ").append_text(bar(level, threshold, bar_width))
    text.append(f" {_percent(level):>4}", WARN if high else "")
    if high:
        text.append(" ").append("⚠ HARD" if name in view.auto.get("hard", []) else "⚠ HIGH", BAD)
    return text


def workers(view: View, width: int, lines: int) -> Text:
    text = Text("WORKERS (offload targets)", style="bold")
    found = view.workers
    if not found:
        return text.append("\n  none", DIM)
    longest = min(20, max(len(node.name) for node in found)) + 1
    shown = found if len(found) <= lines else found[: max(0, lines - 1)]
    for node in shown:
        word, kind = availability(node, view.age_s(node), view.thresholds)
        cpu, memory, gpu = (_percent(node.level(name)) for name in RESOURCES)
        figures = f"{f'CPU {cpu:>3}':<9}{f'Mem {memory:>3}':<9}{f'GPU {gpu:>3}':<10}"
        text.append("\n").append(f"{node.name + ':':<{longest}}  ", "").append(figures if node.online else "")
        left = width - longest - 2 - (len(figures) if node.online else 0)
        text.append(word[: max(8, left)], {"ok": GOOD, "full": WARN, "off": BAD}[kind])
        spark = left - len(word) - 2
        if node.online and spark >= _MIN_SPARK + 4:
            text.append("  ").append(f"Mem {sparkline(node.history.get('memory', ()), min(40, spark - 4))}", "blue")
    if len(shown) < len(found):
        text.append(f"\n… and {len(found) - len(shown)} more", DIM)
    return text


def events(view: View, width: int, lines: int) -> Text:
    text = Text("RECENT EVENTS", style="bold")
    for event in list(view.events)[-max(1, lines) :]:
        at = time.strftime("%H:%M:%S", time.localtime(float(event["at"])))
        kind = str(event.get("kind", ""))
        style = WARN if kind.startswith(("pressure.h", "auto.cannot", "auto.failed", "alert", "node.off")) else ""
        line = Text(printable(f"{at}  {event['text']}"), style=style)
        line.truncate(width, overflow="ellipsis")
        text.append("\n").append_text(line)
    return text


def tiny(view: View, width: int, height: int) -> Text:
    """For a terminal that holds nothing else: the head in a few words."""
    node = view.head
    lines = [f"{width}×{height}: too small"]
    if node is None:
        lines.append(printable(view.notice) or "no figures")
    else:
        lines = [node.name, *(f"{LABELS[name][:3]} {_percent(node.level(name))}" for name in RESOURCES), *lines]
    return Text("\n".join(line[:width] for line in lines[:height]))


def footer(width: int, *, paused: bool = False, readonly: bool = False) -> Text:
    keys = [("q", "Quit"), ("p", "Resume" if paused else "Pause"), ("r", "Refresh now"), ("o", "Manual offload")]
    more_keys = [("?", "Help"), ("enter", "Details"), ("/", "Filter"), ("s", "Sort"), ("c", "Cancel"),
                 ("b", "Bring back")]  # fmt: skip
    if readonly:
        keys, more_keys = keys[:3], more_keys[:4]
    text = Text("  ".join(f"[{key}] {word}" for key, word in keys))
    for key, word in more_keys:
        more = f"  [{key}] {word}"
        if text.cell_len + len(more) <= width:
            text.append(more, DIM)
    text.truncate(width)
    return text


def _percent(level: float | None) -> str:
    return "-" if level is None else f"{level * 100:.0f}%"
