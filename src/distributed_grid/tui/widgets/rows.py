"""A list of one-line rows with a cursor; draws only what is seen, so that hundreds cost nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from distributed_grid.orchestration.auto_offload.policy import printable

_PLAIN = Style()


class RowList(ScrollView, can_focus=True):
    DEFAULT_CSS = "RowList { background: transparent; scrollbar-size-vertical: 1; overflow-x: hidden; }"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", show=False),
        Binding("down,j", "move(1)", show=False),
        Binding("pageup", "move(-10)", show=False),
        Binding("pagedown", "move(10)", show=False),
        Binding("home", "move(-1000000)", show=False),
        Binding("end", "move(1000000)", show=False),
        Binding("enter", "choose", show=False),
    ]

    class Chosen(Message):
        """Enter, or a click on the row under the cursor."""

        def __init__(self, rows: RowList, key: str) -> None:
            super().__init__()
            self.rows = rows
            self.key = key

    def __init__(self, *, id: str | None = None, empty: str = "none") -> None:
        super().__init__(id=id)
        self._rows: list[tuple[str, Callable[[], Text]]] = []
        self._empty = empty
        self.cursor = 0

    def set_rows(self, rows: Sequence[tuple[str, Callable[[], Text]]]) -> None:
        """Each with its key and what draws it; the cursor stays on its row, wherever that is now."""
        key = self.selected
        self._rows = list(rows)
        keys = [one for one, _ in self._rows]
        self.cursor = keys.index(key) if key in keys else max(0, min(self.cursor, len(keys) - 1))
        size = Size(max(1, self.scrollable_content_region.width), len(self._rows))
        if self.virtual_size != size:
            self.virtual_size = size
        self.refresh()

    @property
    def selected(self) -> str | None:
        return self._rows[self.cursor][0] if self._rows else None

    def render_line(self, y: int) -> Strip:
        width = self.scrollable_content_region.width
        index = y + self.scroll_offset.y
        if not self._rows and y == 0:
            text = Text(self._empty, style="dim")
        elif index >= len(self._rows):
            return Strip.blank(width, _PLAIN)
        else:
            text = self._rows[index][1]()
        base = Style(reverse=True) if self._rows and index == self.cursor and self.has_focus else _PLAIN
        # Every segment needs a style: without colours, Textual's filter asks each for its own.
        parts = text.render(self.app.console, end="")
        segments = [Segment(printable(one.text), (one.style or _PLAIN) + base) for one in parts]
        return Strip(segments).adjust_cell_length(width, base)

    def action_move(self, by: int) -> None:
        if self._rows:
            self.cursor = max(0, min(len(self._rows) - 1, self.cursor + by))
            top, height = self.scroll_offset.y, max(1, self.scrollable_content_region.height)
            if not top <= self.cursor < top + height:
                self.scroll_to(y=self.cursor if self.cursor < top else self.cursor - height + 1, animate=False)
            self.refresh()

    def action_choose(self) -> None:
        if self.selected is not None:
            self.post_message(self.Chosen(self, self.selected))

    def on_click(self, event: events.Click) -> None:
        index = event.y + self.scroll_offset.y
        if 0 <= index < len(self._rows):
            again = index == self.cursor and event.chain > 1
            self.cursor = index
            self.refresh()
            if again:
                self.action_choose()

    def on_focus(self) -> None:
        self.refresh()

    def on_blur(self) -> None:
        self.refresh()
