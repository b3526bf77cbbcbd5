"""`grid offload watch`: the head's pressure, the workers, what was moved and what happened, live, with keys."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any, ClassVar, Protocol

from rich.text import Text
from textual import events, work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.notifications import SeverityLevel
from textual.screen import Screen
from textual.widgets import Input, Static

from distributed_grid.core.errors import GridError
from distributed_grid.orchestration.auto_offload.policy import printable
from distributed_grid.tui.view import UNDER_WAY, View
from distributed_grid.tui.widgets import panels
from distributed_grid.tui.widgets.dialogs import HELP, CandidatesDialog, QuestionDialog, TextDialog, plan_text
from distributed_grid.tui.widgets.moves import details_text, move_line, over_line
from distributed_grid.tui.widgets.rows import RowList

MIN_WIDTH, MIN_HEIGHT = 40, 10
#: Below this there is no room for lines between the sections.
SHORT_HEIGHT = 20
#: Events may come in hundreds; the screen follows at most this often.
REDRAW_S = 0.1
#: Without frames the age of the figures is what changes.
TICK_S = 1.0
#: From here on there is room for the offloads that are over.
TALL_HEIGHT = 30
#: What came home runs there, or has ended since.
ARRIVED = ("RUNNING", "CLEANED", "ENDED", "MOVED")
TAIL_LINES = 12
TAIL_LIMIT_S = 3.0

SORTS: list[tuple[str, Callable[[dict[str, Any]], Any]]] = [
    ("newest", lambda move: -float(move["created"])),
    ("oldest", lambda move: float(move["created"])),
    ("command", lambda move: str(move["command"])),
    ("target", lambda move: (str(move["target"]), -float(move["created"]))),
    ("state", lambda move: (move["state"] not in UNDER_WAY, str(move["state"]))),
]


class Source(Protocol):
    """What the dashboard needs of a feed."""

    view: View
    on_change: Callable[[], None]

    async def run(self) -> None: ...

    def refresh(self) -> None: ...

    async def call(self, name: str, *, timeout_s: float = 60.0, **arguments: Any) -> Any: ...

    def stream(self, name: str, **arguments: Any) -> AsyncIterator[Any]: ...


class Base(Screen[Any]):
    """The dashboard's own screen: it hears of a new size when it has it."""

    def on_resize(self, _event: events.Resize) -> None:
        if isinstance(self.app, OffloadDashboard):
            self.app.call_later(self.app.draw)


class OffloadDashboard(App[None]):
    TITLE = "Grid offload monitor"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { layout: vertical; background: $background; }
    #frame { border: round $primary; height: 1fr; padding: 0 1; }
    #frame > Static { height: auto; }
    .section { border-top: solid $primary-darken-2; }
    #moves { height: 1fr; min-height: 1; }
    #filter { height: 1; border: none; padding: 0; display: none; }
    #filter.on { display: block; }
    #footer { height: 1; padding: 0 1; }
    #tiny { display: none; }
    Screen.-short .section { border-top: none; }
    Screen.-tiny #frame, Screen.-tiny #footer { display: none; }
    Screen.-tiny #tiny { display: block; height: 1fr; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", show=False),
        Binding("p", "pause", show=False),
        Binding("r", "refresh_now", show=False),
        Binding("o", "offload", show=False),
        Binding("slash", "filter", show=False),
        Binding("s", "sort", show=False),
        Binding("c", "cancel", show=False),
        Binding("b", "bring_back", show=False),
        Binding("question_mark", "help", show=False),
        Binding("escape", "clear_filter", show=False),
    ]

    def __init__(self, source: Source, *, readonly: bool = False) -> None:
        super().__init__()
        self._source = source
        self._readonly = readonly
        self._paused = False
        self._sort = 0
        self._dirty = False
        #: Asked for by a key while the picture is held: the frame after this one is shown.
        self._asked_after: int | None = None
        self._drawn: dict[str, Text] = {}

    @property
    def view(self) -> View:
        return self._source.view

    @property
    def _now(self) -> float:
        return self.view.clock.time()

    @property
    def may_act(self) -> bool:
        return not self._readonly and self.view.source == "daemon"

    def compose(self) -> ComposeResult:
        with Vertical(id="frame"):
            yield Static(id="header")
            yield Static(id="head", classes="section")
            yield Static(id="workers", classes="section")
            yield Static(id="offloads", classes="section")
            yield RowList(id="moves")
            yield Input(placeholder="filter: part of a command, pid or node", id="filter")
            yield Static(id="events", classes="section")
        yield Static(id="footer")
        yield Static(id="tiny")

    def on_mount(self) -> None:
        self.query_one("#moves").focus()
        self._source.on_change = self._changed
        self.run_worker(self._source.run(), name="feed", exit_on_error=True)
        self.set_interval(TICK_S, self._tick)
        self.draw()

    def _tick(self) -> None:
        """The age of the figures goes on; where frames come, they do it."""
        if self.view.clock.monotonic() - self.view.received > TICK_S:
            self._changed()

    @property
    def _holds(self) -> bool:
        answered = self._asked_after is not None and self.view.frames > self._asked_after
        return self._paused and not answered

    def _changed(self) -> None:
        if not self._holds and not self._dirty:
            self._dirty = True
            self.set_timer(REDRAW_S, self._draw_changes)

    def _draw_changes(self) -> None:
        self._dirty = False
        if not self._holds:
            self._asked_after = None
            self.draw()

    def get_default_screen(self) -> Screen[Any]:
        return Base()

    # -- drawing --------------------------------------------------------------------------------------------------

    def draw(self) -> None:
        """Put the view on the screen; what has not changed is not touched."""
        base = self._base()
        if base is None:
            return
        width, height = base.size or self.size
        base.set_class(width < MIN_WIDTH or height < MIN_HEIGHT, "-tiny")
        base.set_class(height < SHORT_HEIGHT, "-short")
        if width < MIN_WIDTH or height < MIN_HEIGHT:
            self._put("tiny", panels.tiny(self.view, width, height))
            return
        inner = width - 4
        lines = height - 4 - (0 if height < SHORT_HEIGHT else 4) - 4
        workers = max(1, min(len(self.view.workers) or 1, lines // 3))
        happened = max(1, (lines - workers - 2) * 4 // 7)
        view, readonly = self.view, not self.may_act
        self._put("header", panels.header(view, inner, paused=self._paused, readonly=self._readonly))
        self._put("head", panels.head(view, inner))
        self._put("workers", panels.workers(view, inner, workers))
        self._put("events", panels.events(view, inner, happened) if height >= 14 else Text())
        self._put("footer", panels.footer(width - 2, paused=self._paused, readonly=readonly))
        self._put_moves(inner)

    def _base(self) -> Screen[Any] | None:
        """The dashboard's screen; None before it is there and once it is being taken down."""
        stack = self.screen_stack
        return stack[0] if self.is_running and stack and stack[0].query("#moves") else None

    def _put(self, name: str, text: Text) -> None:
        old = self._drawn.get(name)
        if old is not None and old.plain == text.plain and old.spans == text.spans:
            return
        self._drawn[name] = text
        same_size = old is not None and old.plain.count("\n") == text.plain.count("\n")
        self.screen_stack[0].query_one(f"#{name}", Static).update(text, layout=not same_size)

    def _put_moves(self, width: int) -> None:
        wanted = self._filter.value.lower()
        name, key = SORTS[self._sort]
        moves = self.view.active
        shown = sorted(moves, key=key)
        if wanted:
            shown = [m for m in shown if wanted in f"{m['pid']} {m['command']} {m['target']} {m['state']}".lower()]
        title = f"ACTIVE OFFLOADS ({len(moves)})"
        asides = [f"filter: {wanted} ({len(shown)})" if wanted else "", f"by {name}" if self._sort else ""]
        aside = "  ".join(text for text in asides if text)
        self._put("offloads", Text.assemble((title, "bold"), (f"  {aside}" if aside else "", "dim")))
        now = self._now
        rows = [(str(move["id"]), partial(move_line, move, width - 1, now)) for move in shown]
        if self.screen_stack[0].size.height >= TALL_HEIGHT:
            over = [move for move in self.view.finished if wanted in f"{move['pid']} {move['command']}".lower()]
            rows += [(str(move["id"]), partial(over_line, move, width - 1, now)) for move in over]
        self.screen_stack[0].query_one("#moves", RowList).set_rows(rows)

    @property
    def _filter(self) -> Input:
        return self.screen_stack[0].query_one("#filter", Input)

    def _selected(self) -> dict[str, Any] | None:
        key = self.screen_stack[0].query_one("#moves", RowList).selected
        return next((move for move in [*self.view.active, *self.view.finished] if str(move["id"]) == key), None)

    def _selected_active(self) -> dict[str, Any] | None:
        move = self._selected()
        if move is not None and move not in self.view.active:
            self._tell(f"{move['id']} is over", severity="warning")
            return None
        return move if self._allowed() else None

    # -- keys -----------------------------------------------------------------------------------------------------

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """The dashboard's keys are its own: a dialog over it has others."""
        return len(self.screen_stack) == 1 or action == "quit"

    def action_pause(self) -> None:
        self._paused = not self._paused
        self.draw()

    def action_refresh_now(self) -> None:
        self._asked_after = self.view.frames
        self._source.refresh()

    def action_help(self) -> None:
        self.push_screen(TextDialog("KEYS", HELP))

    def action_sort(self) -> None:
        self._sort = (self._sort + 1) % len(SORTS)
        self.draw()

    def action_filter(self) -> None:
        self._filter.add_class("on").focus()

    def action_clear_filter(self) -> None:
        self._filter.value = ""
        self._filter.remove_class("on")
        self.query_one("#moves").focus()
        self.draw()

    def on_input_changed(self) -> None:
        self.draw()

    def on_input_submitted(self) -> None:
        self._filter.set_class(bool(self._filter.value), "on")
        self.query_one("#moves").focus()

    def _allowed(self) -> bool:
        if self._readonly:
            self._tell("this dashboard only looks (--readonly)", severity="warning")
        elif self.view.source != "daemon":
            self._tell("no daemon: nothing can be moved; grid daemon start", severity="warning")
        return self.may_act

    def _fault(self, error: GridError) -> None:
        text = f"{error.message}: {error.cause}" if error.cause else error.message
        self._tell(text, severity="error", timeout=10)

    def _tell(self, text: str, *, severity: SeverityLevel = "information", timeout: float | None = None) -> None:
        """What is told holds command lines, in which brackets are no markup."""
        lines = "\n".join(printable(line) for line in text.splitlines())
        self.notify(lines, severity=severity, timeout=timeout, markup=False)

    @work(exclusive=True, group="offload")
    async def action_offload(self) -> None:
        """Choose a process, see its plan, confirm."""
        if not self._allowed():
            return
        head = self.view.head
        try:
            found = await self._source.call("offload_scan", node=head.name if head else None)
            chosen = await self.push_screen_wait(CandidatesDialog([one for one in found if one["movable"]]))
            if chosen is None:
                return
            plan = await self._source.call("offload_plan", pid=chosen["pid"])
        except GridError as error:
            self._fault(error)
            return
        possible = plan.get("strategy") in ("live", "relaunch")
        title = f"MOVE PID {chosen['pid']}?  {chosen['command']}"
        if await self.push_screen_wait(QuestionDialog(title, plan_text(plan), possible=possible)):
            self._execute(chosen["pid"], plan.get("target"))

    @work(group="moves")
    async def _execute(self, pid: int | str, target: str | None) -> None:
        self._tell(f"moving PID {pid}" + (f" to {target}" if target else ""))
        try:
            async for step in self._source.stream("offload_execute", pid=pid, target_node=target):
                if "done" in step:
                    move = step["done"]
                    self._tell(f"PID {pid} on {move['target']}: {str(move['state']).lower()}")
                self._source.refresh()  # how far it is comes with the moves
        except GridError as error:
            self._fault(error)
        self._source.refresh()

    @work(exclusive=True, group="change")
    async def action_cancel(self) -> None:
        move = self._selected_active()
        if move is None:
            return
        under_way = move["state"] in UNDER_WAY
        text = "The move is called off; the process stays." if under_way else "The process is ended on its worker."
        text = f"{printable(move['command'])}\n{text}"
        if await self.push_screen_wait(QuestionDialog(f"CANCEL {move['id']}?", text)):
            await self._do("offload_cancel", move, "is cancelled")

    @work(exclusive=True, group="change")
    async def action_bring_back(self) -> None:
        move = self._selected_active()
        if move is None:
            return
        text = f"It comes home to {move['node']}, and automatic offload leaves it there for a while."
        text = f"{printable(move['command'])}\n{text}"
        if await self.push_screen_wait(QuestionDialog(f"BRING {move['id']} BACK?", text)):
            await self._return(move)

    async def _return(self, move: dict[str, Any]) -> None:
        done: dict[str, Any] = {}
        try:
            async for step in self._source.stream("offload_return", move_id=move["id"]):
                done = step.get("done") or done
                self._source.refresh()
        except GridError as error:
            self._fault(error)
            return
        state = str(done.get("state") or "unknown")
        if state in ARRIVED:
            self._tell(f"{move['id']} is back")
        else:
            why = f": {done['reason']}" if done.get("reason") else ""
            self._tell(f"{move['id']} is not back, {state.lower()}{why}", severity="warning")

    async def _do(self, name: str, move: dict[str, Any], told: str) -> None:
        try:
            await self._source.call(name, move_id=move["id"], timeout_s=300)
            self._tell(f"{move['id']} {told}")
        except GridError as error:
            self._fault(error)
        self._source.refresh()

    def on_row_list_chosen(self, event: RowList.Chosen) -> None:
        if event.rows.id == "moves":
            self._details()

    @work(exclusive=True, group="details")
    async def _details(self) -> None:
        move = self._selected()
        if move is None:
            return
        dialog = TextDialog(f"{move['id']}", details_text(move, self.view.moves_of(move["pid"]), "…", self._now))
        await self.push_screen(dialog)
        move, tail = await self._whole(move), await self._tail(move)
        if dialog.is_current:
            dialog.set_text(details_text(move, self.view.moves_of(move["pid"]), tail, self._now))

    async def _whole(self, move: dict[str, Any]) -> dict[str, Any]:
        """With its steps, which are not asked for each second."""
        try:
            told = await self._source.call("offload_status", limit=1000)
        except GridError:
            return move
        return next((one for one in [*told["active"], *told["finished"]] if one["id"] == move["id"]), move)

    async def _tail(self, move: dict[str, Any]) -> str:
        """The end of what the process has written since it moved."""
        written = b""
        try:
            async with asyncio.timeout(TAIL_LIMIT_S):
                async with contextlib.aclosing(
                    self._source.stream("offload_follow", move_id=move["id"], wait=False)  # type: ignore[type-var]
                ) as items:
                    async for item in items:
                        for name in ("stdout", "stderr", "data"):
                            part = item.get(name)
                            written += part.encode() if isinstance(part, str) else part or b""
                        written = written[-65536:]
        except TimeoutError:
            pass
        except GridError as error:
            return error.message
        lines = written.decode(errors="replace").splitlines()[-TAIL_LINES:]
        return "\n".join(lines) or "nothing yet"


def plain_text(view: View, width: int = 80) -> str:
    """The same picture without a screen, for `--once`."""
    now, gap = view.clock.time(), Text("")
    parts = [
        panels.header(view, width), gap, panels.head(view, width), gap, panels.workers(view, width, 1000), gap,
        Text(f"ACTIVE OFFLOADS ({len(view.active)})"), *(move_line(move, width, now) for move in view.active), gap,
        panels.events(view, width, 10),
    ]  # fmt: skip
    return "\n".join(line.rstrip() for part in parts for line in part.plain.splitlines() or [""])
