"""Every key of the dashboard, its texts at three sizes, and what it says when something is missing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot
from textual.widgets import Input

from distributed_grid.core.errors import Refused
from distributed_grid.tui.offload_dashboard import REDRAW_S, OffloadDashboard, plain_text
from distributed_grid.tui.widgets.dialogs import CandidatesDialog, QuestionDialog, TextDialog
from distributed_grid.tui.widgets.rows import RowList
from tests.unit.tui.conftest import GB, FakeFeed, move, node_row, screen_text

SNAPSHOTS = Path(__file__).parent / "snapshots"
CANDIDATES = [
    {"pid": 71, "node": "gpu-master", "command": "python big.py", "type": "Training", "cpu_cores": 1.0,
     "memory_bytes": 9 * GB, "age_s": 100.0, "movable": True, "why_not": ""},
    {"pid": 72, "node": "gpu-master", "command": "python busy.py", "type": "Batch Jobs", "cpu_cores": 7.5,
     "memory_bytes": 2 * GB, "age_s": 500.0, "movable": True, "why_not": ""},
]  # fmt: skip
PLAN = {"strategy": "live", "why": "CRIU works on both sides", "target": "gpu1", "bytes": 9 * GB,
        "expected_pause_s": 2.5, "notices": ["two sockets will be closed"], "blocking": []}  # fmt: skip


async def until(pilot: Pilot[Any], true: Callable[[], bool], limit_s: float = 30.0) -> None:
    limit = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < limit, screen_text(pilot.app)
        await pilot.pause()
        await asyncio.sleep(0.01)


def shows(pilot: Pilot[Any], *texts: str) -> Callable[[], bool]:
    return lambda: all(text in screen_text(pilot.app) for text in texts)


@pytest.mark.parametrize("size", [(80, 24), (120, 36), (200, 50)])
async def test_the_documents_picture(feed: FakeFeed, size: tuple[int, int]) -> None:
    async with OffloadDashboard(feed).run_test(size=size) as pilot:
        await until(pilot, shows(
            pilot, "GRID OFFLOAD MONITOR", "Auto: ● ENABLED", "HEAD NODE: gpu-master", "62%", "89% ⚠ HIGH", "31%",
            "reaches 90% in 3m 40s", "WORKERS (offload targets)", "gpu1:  CPU 23%  Mem 45%  GPU 12%   ✓ Available",
            "gpu2:  CPU 67%  Mem 52%  GPU 88%   ✓ Available", "ACTIVE OFFLOADS (2)",
            "• PID 4521 → gpu1  python train.py", "Running 5m",
            "• PID 4892 → gpu2  jupyter kernel", "Running 2m", "RECENT EVENTS",
            "Memory pressure detected (89%)", "Offloaded PID 4521 to gpu1", "Offloaded PID 4892 to gpu2",
            "[q] Quit  [p] Pause  [r] Refresh now  [o] Manual offload",
        ))  # fmt: skip
        lines = screen_text(pilot.app).splitlines()
        assert len(lines) == size[1] and max(map(len, lines)) <= size[0]
        memory = next(line for line in lines if "Memory [" in line)
        assert "┃" in memory and "░" in memory


@pytest.mark.parametrize("size", [(80, 24), (120, 36), (200, 50)], ids=lambda size: f"{size[0]}x{size[1]}")
async def test_the_whole_screen(feed: FakeFeed, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Line by line as in the file; `SNAPSHOTS=write` writes what stands there now."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    flying = move(99, "gpu1", "python grow.py", state="FROZEN", step="copying", bytes=3 * GB, bytes_total=9 * GB,
                  rate_bytes_s=float(GB), eta_s=6.0, ago_s=20.5)  # fmt: skip
    feed.view.take_moves({"active": [flying, *feed.view.active], "finished": feed.view.finished})
    file = SNAPSHOTS / f"dashboard-{size[0]}x{size[1]}.txt"
    try:
        async with OffloadDashboard(feed).run_test(size=size) as pilot:
            await until(pilot, shows(pilot, "ACTIVE OFFLOADS (3)", "[q] Quit"))
            if os.environ.get("SNAPSHOTS") == "write":
                await pilot.pause(1.0)
                file.write_text(screen_text(pilot.app) + "\n")
            kept = file.read_text()
            with contextlib.suppress(AssertionError):
                await until(pilot, lambda: screen_text(pilot.app) + "\n" == kept, limit_s=10)
            assert (screen_text(pilot.app) + "\n").splitlines() == kept.splitlines()
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize("size", [(20, 5), (5, 2), (45, 12), (60, 16)])
async def test_small_terminals(feed: FakeFeed, size: tuple[int, int]) -> None:
    async with OffloadDashboard(feed).run_test(size=size) as pilot:
        await until(pilot, shows(pilot, "gpu-m"))
        assert max(len(line) for line in screen_text(pilot.app).splitlines()) <= size[0]
        await pilot.resize_terminal(80, 24)
        await until(pilot, shows(pilot, "GRID OFFLOAD MONITOR", "RECENT EVENTS"))


async def test_quit(feed: FakeFeed) -> None:
    app = OffloadDashboard(feed)
    async with app.run_test() as pilot:
        await pilot.press("q")
    assert app.return_code == 0


async def test_pause_holds_the_picture(feed: FakeFeed) -> None:
    async with OffloadDashboard(feed).run_test(size=(80, 24)) as pilot:
        await pilot.press("p")
        await until(pilot, shows(pilot, "PAUSED", "[p] Resume"))
        feed.view.events.append({"seq": 9, "at": 0.0, "kind": "x", "text": "something new"})
        feed.on_change()
        await pilot.pause(5 * REDRAW_S)  # by then it would have been drawn
        assert "something new" not in screen_text(pilot.app)
        await pilot.press("p")
        await until(pilot, shows(pilot, "something new", "[p] Pause"))


async def test_a_refresh_while_paused_shows_its_answer_and_holds_on(feed: FakeFeed) -> None:
    async with OffloadDashboard(feed).run_test(size=(80, 24)) as pilot:
        await pilot.press("p")
        await until(pilot, shows(pilot, "PAUSED"))
        await pilot.press("r")
        await until(pilot, lambda: feed.refreshed == 1)
        feed.view.take_nodes([node_row("gpu-master", "head", 0.62, 0.41, 0.31)])
        feed.on_change()
        await until(pilot, shows(pilot, " 41%", "PAUSED"))
        feed.view.take_nodes([node_row("gpu-master", "head", 0.62, 0.42, 0.31)])
        feed.on_change()
        await pilot.pause(5 * REDRAW_S)
        assert " 41%" in screen_text(pilot.app)


async def test_a_daemon_that_stands_still_is_said(feed: FakeFeed) -> None:
    async with OffloadDashboard(feed).run_test(size=(80, 24)) as pilot:
        await until(pilot, shows(pilot, "● ENABLED", "figures 0s old"))
        feed.clock.advance(3)
        await until(pilot, shows(pilot, "● ENABLED", "figures 3s old"))  # no frame, and it goes on all the same
        feed.clock.advance(30)
        await until(pilot, shows(pilot, "Auto: ○ UNKNOWN", "the daemon has not answered for 33s", "? Silent for 33s"))
        feed.view.take_nodes([node_row("gpu-master", "head", 0.1, 0.2, None)])
        feed.on_change()
        await until(pilot, shows(pilot, "● ENABLED", "figures 0s old"))


async def test_brackets_in_an_error_are_no_markup(feed: FakeFeed) -> None:
    text = "process 71 (python x.py +paths=[/data/a]) has [eventpoll] open"
    feed.answers = {"offload_scan": Refused(text, cause="a\nb\x1b[31mc")}
    async with OffloadDashboard(feed).run_test(size=(160, 24), notifications=True) as pilot:
        await pilot.press("o")
        await until(pilot, shows(pilot, "+paths=[/data/a])", "[eventpoll]"))
        assert "\x1b" not in screen_text(pilot.app)


EVIL = 'python -c "import time\nwhile 1:\x1b]0;mine\x07 pass"'


async def test_command_lines_with_newlines_and_escapes_are_one_line(feed: FakeFeed) -> None:
    candidate = {**CANDIDATES[0], "command": EVIL}
    plan = {**PLAN, "notices": ["two\x1b[31m"]}
    feed.answers = {"offload_scan": [candidate], "offload_plan": plan,
                    "offload_follow": [{"stdout": b"bad \x1b[2J end\n"}]}  # fmt: skip
    evil = [move(66, "gpu1", EVIL), move(67, "gpu1", "python fine.py")]
    feed.view.take_moves({"active": evil, "finished": [move(68, "gpu2", EVIL, state="ENDED")]})
    feed.view.events.append({"seq": 9, "at": 0.0, "kind": "x", "text": f"Moving {EVIL}"})
    app = OffloadDashboard(feed)

    def clean() -> bool:
        strips = app.screen._compositor.render_strips()
        found = [segment.text for strip in strips for segment in strip]
        assert all(text.isprintable() for text in found), [text for text in found if not text.isprintable()]
        return True

    async with app.run_test(size=(140, 40)) as pilot:
        await until(pilot, shows(pilot, "import time while 1:", "python fine.py", "Moving python"))
        assert clean()
        assert len([line for line in screen_text(app).splitlines() if "while 1:" in line]) == 3
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(app.screen, TextDialog))
        await until(pilot, shows(pilot, "bad", "end"))
        assert clean()
        await pilot.press("escape", "c")
        await until(pilot, lambda: isinstance(app.screen, QuestionDialog))
        assert clean()
        await pilot.press("n", "o")
        await until(pilot, lambda: isinstance(app.screen, CandidatesDialog))
        await until(pilot, shows(pilot, "import time while 1:"))
        assert clean()
        await pilot.press("enter")
        await until(pilot, shows(pilot, "MOVE PID 71?"))
        assert clean()
    assert "\x1b" not in plain_text(feed.view)


async def test_refresh(feed: FakeFeed) -> None:
    async with OffloadDashboard(feed).run_test() as pilot:
        await pilot.press("r")
        await until(pilot, lambda: feed.refreshed == 1)


async def test_manual_offload_from_prompt_to_progress(feed: FakeFeed) -> None:
    feed.answers = {"offload_scan": CANDIDATES, "offload_plan": PLAN, "offload_execute": [
        {"plan": PLAN}, {"state": "PLANNED", "step": "copying", "bytes": 3 * GB, "bytes_total": 9 * GB,
                         "rate_bytes_s": GB, "eta_s": 6},
        {"done": move(72, "gpu1", "python busy.py")},
    ]}  # fmt: skip
    async with OffloadDashboard(feed).run_test(size=(100, 30)) as pilot:
        await pilot.press("o")
        await until(pilot, lambda: isinstance(pilot.app.screen, CandidatesDialog))
        await until(pilot, shows(pilot, "MOVE WHICH PROCESS? (2)", "python big.py", "9.0 GB", "7.5 cores"))
        await pilot.press("s")  # by cores: the other one is first now
        await until(pilot, shows(pilot, "by cores"))
        await pilot.press("home", "enter")
        await until(pilot, lambda: isinstance(pilot.app.screen, QuestionDialog))
        await until(pilot, shows(pilot, "MOVE PID 72?", "live to gpu1", "pause 2.5 s", "two sockets", "[y] Yes"))
        await pilot.press("y")
        await until(pilot, lambda: any(name == "offload_execute" for name, _ in feed.asked))
        assert ("offload_execute", {"pid": 72, "target_node": "gpu1"}) in feed.asked
        assert ("offload_plan", {"pid": 72}) in feed.asked
        await until(pilot, lambda: len(pilot.app.screen_stack) == 1)


async def test_the_prompt_filters_and_closes(feed: FakeFeed) -> None:
    feed.answers = {"offload_scan": CANDIDATES}
    async with OffloadDashboard(feed).run_test(size=(100, 30)) as pilot:
        await pilot.press("o")
        await until(pilot, lambda: isinstance(pilot.app.screen, CandidatesDialog))
        await pilot.press("slash", *"busy", "enter")
        await until(pilot, shows(pilot, "MOVE WHICH PROCESS? (1)"))
        await pilot.press("escape")
        await until(pilot, lambda: len(pilot.app.screen_stack) == 1)
        assert [name for name, _ in feed.asked] == ["offload_scan"]


async def test_a_plan_that_refuses_can_not_be_confirmed(feed: FakeFeed) -> None:
    plan = {**PLAN, "strategy": "refuse", "why": "it holds a device", "blocking": ["/dev/kvm is open"]}
    feed.answers = {"offload_scan": CANDIDATES, "offload_plan": plan}
    async with OffloadDashboard(feed).run_test(size=(100, 30)) as pilot:
        await pilot.press("o")
        await until(pilot, lambda: isinstance(pilot.app.screen, CandidatesDialog))
        await pilot.press("enter")
        await until(pilot, shows(pilot, "can't: /dev/kvm is open", "[esc] Close"))
        await pilot.press("y")
        await until(pilot, lambda: len(pilot.app.screen_stack) == 1)
        assert "offload_execute" not in [name for name, _ in feed.asked]


async def test_progress_of_a_move_in_flight(feed: FakeFeed) -> None:
    flying = move(99, "gpu1", "python grow.py", state="FROZEN", step="copying", bytes=3 * GB, bytes_total=9 * GB,
                  rate_bytes_s=float(GB), eta_s=6.0)  # fmt: skip
    feed.view.take_moves({"active": [flying], "finished": []})
    async with OffloadDashboard(feed).run_test(size=(100, 24)) as pilot:
        await until(pilot, shows(pilot, "Moving: copying, 3.0 GB/9.0 GB, 1.0 GB/s, 6s left"))


async def test_filter_and_sort_the_offloads(feed: FakeFeed) -> None:
    async with OffloadDashboard(feed).run_test(size=(80, 24)) as pilot:
        rows = pilot.app.query_one("#moves", RowList)
        await until(pilot, lambda: rows.selected == "offload_1700000000_4892")  # the newest
        await pilot.press("s")
        await pilot.press("home")
        await until(pilot, lambda: rows.selected == "offload_1700000000_4521" and "by oldest" in screen_text(pilot.app))
        await pilot.press("slash", *"jup", "enter")
        await until(pilot, shows(pilot, "filter: jup (1)"))
        await until(pilot, lambda: "train.py" not in screen_text(pilot.app))
        await pilot.press("escape")
        await until(pilot, lambda: pilot.app.query_one(Input).value == "" and "train.py" in screen_text(pilot.app))


async def test_details(feed: FakeFeed) -> None:
    feed.answers = {"offload_follow": [{"stdout": b"epoch 41\nepoch 42\n"}]}
    async with OffloadDashboard(feed).run_test(size=(100, 40)) as pilot:
        await pilot.press("down", "enter")
        await until(pilot, lambda: isinstance(pilot.app.screen, TextDialog))
        await until(pilot, shows(
            pilot, "python train.py", "why: memory 89% (threshold 70%)", "its moves:", "ended", "epoch 42",
        ))  # fmt: skip
        await pilot.press("escape")
        await until(pilot, lambda: len(pilot.app.screen_stack) == 1)


@pytest.mark.parametrize(("key", "call"), [("c", "offload_cancel"), ("b", "offload_return")])
async def test_cancel_and_bring_back(feed: FakeFeed, key: str, call: str) -> None:
    feed.answers = {"offload_cancel": {}, "offload_return": [{"state": "PLANNED", "step": "x"}]}
    async with OffloadDashboard(feed).run_test(size=(80, 24)) as pilot:
        await pilot.press(key)
        await until(pilot, shows(pilot, "offload_1700000000_4892", "[y] Yes"))
        await pilot.press("n")
        await until(pilot, lambda: len(pilot.app.screen_stack) == 1)
        assert feed.asked == []
        await pilot.press(key)
        await until(pilot, lambda: len(pilot.app.screen_stack) == 2)
        await pilot.press("y")
        await until(pilot, lambda: feed.asked == [(call, {"move_id": "offload_1700000000_4892"})])


@pytest.mark.parametrize(
    ("done", "told"),
    [
        ({"state": "CLEANED"}, "offload_1700000000_4892 is back"),
        ({"state": "ABORTED", "reason": "no room"}, "offload_1700000000_4892 is not back, aborted: no room"),
        ({}, "offload_1700000000_4892 is not back, unknown"),
    ],
)
async def test_bringing_back_tells_how_it_ended(feed: FakeFeed, done: dict[str, Any], told: str) -> None:
    feed.answers = {"offload_return": [{"state": "PLANNED", "step": "x"}, {"done": done}]}
    async with OffloadDashboard(feed).run_test(size=(100, 24), notifications=True) as pilot:
        await pilot.press("b")
        await until(pilot, shows(pilot, "[y] Yes"))
        await pilot.press("y")
        await until(pilot, lambda: told in [one.message for one in pilot.app._notifications])


async def test_errors_are_shown_and_it_goes_on(feed: FakeFeed) -> None:
    feed.answers = {"offload_scan": Refused("not today", cause="a rule")}
    async with OffloadDashboard(feed).run_test(size=(80, 24), notifications=True) as pilot:
        await pilot.press("o")
        await until(pilot, shows(pilot, "not today: a rule"))
        assert len(pilot.app.screen_stack) == 1


async def test_help(feed: FakeFeed) -> None:
    async with OffloadDashboard(feed).run_test(size=(80, 24)) as pilot:
        await pilot.press("question_mark")
        await until(pilot, shows(pilot, "bring it back to the head", "┃ marks the threshold"))
        await pilot.press("escape")
        await until(pilot, lambda: len(pilot.app.screen_stack) == 1)


async def test_the_mouse_chooses(feed: FakeFeed) -> None:
    async with OffloadDashboard(feed).run_test(size=(80, 24)) as pilot:
        rows = pilot.app.query_one("#moves", RowList)
        await pilot.click("#moves", offset=(5, 1))
        await until(pilot, lambda: rows.selected == "offload_1700000000_4521")


async def test_readonly_does_nothing_but_look(feed: FakeFeed) -> None:
    async with OffloadDashboard(feed, readonly=True).run_test(size=(80, 24), notifications=True) as pilot:
        for key in "ocb":
            await pilot.press(key)
        await until(pilot, shows(pilot, "--readonly"))
        assert feed.asked == [] and len(pilot.app.screen_stack) == 1
        assert "Manual offload" not in screen_text(pilot.app)
        await pilot.resize_terminal(160, 24)
        await until(pilot, shows(pilot, "[s] Sort"))
        assert "Cancel" not in screen_text(pilot.app) and "Bring back" not in screen_text(pilot.app)


async def test_a_daemon_and_a_node_that_vanish_are_said(feed: FakeFeed) -> None:
    async with OffloadDashboard(feed).run_test(size=(80, 24)) as pilot:
        feed.view.source, feed.view.trouble = "local", "the daemon is gone, read-only, this machine only"
        feed.view.take_nodes([
            node_row("gpu-master", "head", 0.1, 0.2, None), node_row("gpu1", "worker", 0.1, 0.1, None, online=False),
        ])  # fmt: skip
        feed.on_change()
        await until(pilot, shows(pilot, "Auto: ○ READ-ONLY", "the daemon is gone", "✗ Offline: the link is down"))
        feed.view.take_nodes([node_row("gpu-master", "head", 0.1, 0.2, None)])
        feed.on_change()
        await until(pilot, lambda: "gpu1:" not in screen_text(pilot.app))


async def test_without_colour(feed: FakeFeed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    async with OffloadDashboard(feed).run_test(size=(80, 24)) as pilot:
        await until(pilot, shows(pilot, "89% ⚠ HIGH", "● ENABLED"))
        assert pilot.app.no_color


async def test_a_full_list_of_five_hundred(feed: FakeFeed) -> None:
    many = [move(n, "gpu1", f"python p{n}.py", ago_s=n) for n in range(1, 501)]
    feed.view.take_moves({"active": many, "finished": []})
    async with OffloadDashboard(feed).run_test(size=(80, 24)) as pilot:
        await until(pilot, shows(pilot, "ACTIVE OFFLOADS (500)", "p1.py"))
        await pilot.press("end")
        await until(pilot, shows(pilot, "p500.py"))
        feed.on_change()
        await until(pilot, lambda: pilot.app.query_one("#moves", RowList).selected == "offload_1700000000_500")


def test_plain_text(feed: FakeFeed) -> None:
    text = plain_text(feed.view, 100)
    assert "HEAD NODE: gpu-master" in text and "• PID 4521 → gpu1  python train.py" in text
    assert "Offloaded PID 4892 to gpu2" in text and "\x1b" not in text
