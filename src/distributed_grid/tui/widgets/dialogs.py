"""What opens over the dashboard: help, a question, the candidates, a plan, the details of a move."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Input, Static

from distributed_grid.core.resources import format_bytes, format_duration
from distributed_grid.orchestration.auto_offload.policy import printable
from distributed_grid.tui.widgets.rows import RowList

HELP = """q       quit
p       pause, resume
r       refresh now
o       move a process by hand: choose it, see the plan, confirm
↑ ↓     choose an offload, also by mouse
enter   its details: why, its moves, its last output
c       cancel the chosen one
b       bring it back to the head
/       filter the list; esc clears
s       sort: newest, oldest, command, target, state
?       this help

Bars go from 0 to 100%; ┃ marks the threshold. Esc closes."""

_BOX = """
    { align: center middle; background: $background 60%; }
    #box { width: 90%; max-width: 120; height: auto; max-height: 90%; border: round $primary; padding: 0 1;
           background: $surface; }
    #title { text-style: bold; height: auto; }
    #list { height: 1fr; min-height: 3; }
    #filter { height: 1; border: none; padding: 0; display: none; }
    #filter.on { display: block; }
"""


class Dialog(ModalScreen[Any]):
    DEFAULT_CSS = f"Dialog {_BOX}"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "close", show=False)]

    def action_close(self) -> None:
        self.dismiss(None)


class TextDialog(Dialog):
    """Text that can be scrolled; any of `closing` closes it."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("q,enter,question_mark", "close", show=False)]

    def __init__(self, title: str, text: str | Text) -> None:
        super().__init__()
        self._title, self._text = title, text

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="box"):
            yield Static(Text(printable(self._title)), id="title")
            yield Static(self._text, id="text", markup=False)

    def set_text(self, text: str | Text) -> None:
        self.query_one("#text", Static).update(text)

    def on_mount(self) -> None:
        self.query_one("#box").focus()


class QuestionDialog(Dialog):
    """Yes or no; no is what everything but `y` (or enter) means."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y,enter", "answer(True)", show=False),
        Binding("n,q", "answer(False)", show=False),
    ]

    def __init__(self, title: str, text: str, *, possible: bool = True) -> None:
        super().__init__()
        self._title, self._text, self._possible = title, text, possible

    def compose(self) -> ComposeResult:
        keys = "[y] Yes  [n] No" if self._possible else "[esc] Close"
        with VerticalScroll(id="box"):
            yield Static(Text(printable(self._title)), id="title")
            yield Static(Text(f"{self._text}\n\n{keys}"), id="text")

    def action_answer(self, yes: bool) -> None:
        self.dismiss(yes and self._possible)


class CandidatesDialog(Dialog):
    """The processes that may be moved; the chosen one is the answer."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("slash", "filter", show=False),
        Binding("s", "sort", show=False),
        Binding("q", "close", show=False),
    ]
    SORTS: ClassVar[list[tuple[str, Callable[[dict[str, Any]], Any]]]] = [
        ("memory", lambda one: -one["memory_bytes"]),
        ("cores", lambda one: -one["cpu_cores"]),
        ("age", lambda one: -one["age_s"]),
        ("command", lambda one: one["command"]),
    ]

    def __init__(self, candidates: list[dict[str, Any]]) -> None:
        super().__init__()
        self._candidates = candidates
        self._sort = 0

    def compose(self) -> ComposeResult:
        with Vertical(id="box"):
            yield Static("", id="title")
            yield RowList(id="list", empty="nothing that may be moved runs; grid offload scan --all says why")
            yield Input(placeholder="filter", id="filter")

    def on_mount(self) -> None:
        self.query_one("#box").styles.height = "80%"
        self.query_one(RowList).focus()
        self._show()

    def _show(self) -> None:
        name, key = self.SORTS[self._sort]
        wanted = self.query_one("#filter", Input).value.lower()
        shown = sorted((one for one in self._candidates if wanted in f"{one['pid']} {one['command']}".lower()), key=key)
        title = f"MOVE WHICH PROCESS? ({len(shown)})  by {name}   [enter] Plan  [/] Filter  [s] Sort  [esc] Close"
        self.query_one("#title", Static).update(Text(title))
        self.query_one(RowList).set_rows([(str(one["pid"]), partial(_candidate_line, one)) for one in shown])

    def action_sort(self) -> None:
        self._sort = (self._sort + 1) % len(self.SORTS)
        self._show()

    def action_filter(self) -> None:
        self.query_one("#filter", Input).add_class("on").focus()

    def on_input_changed(self) -> None:
        self._show()

    def on_input_submitted(self) -> None:
        self.query_one(RowList).focus()

    def on_row_list_chosen(self, event: RowList.Chosen) -> None:
        event.stop()
        self.dismiss(next(one for one in self._candidates if str(one["pid"]) == event.key))


def _candidate_line(one: dict[str, Any]) -> Text:
    line = (
        f"{one['pid']!s:>8}  {format_bytes(one['memory_bytes']):>8}  {one['cpu_cores']:>5.1f} cores  "
        f"{format_duration(one['age_s']):>8}  {one['type']:<18.18}  {one['command']}"
    )
    return Text(printable(line))


def plan_text(plan: dict[str, Any]) -> str:
    lines = [f"{plan.get('strategy')} to {plan.get('target')}: {plan.get('why', '')}"]
    size, pause = plan.get("bytes"), plan.get("expected_pause_s")
    told = "not known yet" if pause is None else f"{pause:.1f} s"
    lines.append(f"{format_bytes(size or 0)} to carry, expected pause {told}")
    lines += [f"  can't: {line}" for line in plan.get("blocking") or []]
    lines += [f"  note: {line}" for line in plan.get("notices") or []]
    return "\n".join(printable(line) for line in lines)
