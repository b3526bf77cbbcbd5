"""The real feed: over the daemon's socket from something that answers like one, and from files of any shape."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from distributed_grid.config.paths import GridPaths
from distributed_grid.daemon.server import DaemonServer
from distributed_grid.store.audit import AuditLog
from distributed_grid.tui import feed as feeds
from distributed_grid.tui.feed import Feed
from distributed_grid.tui.offload_dashboard import plain_text
from distributed_grid.wire.rpc import CallContext, method
from tests.unit.tui.conftest import move, node_row


class Answers:
    """As much of a daemon as a dashboard asks for; it stands still while `held` is set."""

    def __init__(self) -> None:
        self.held = False
        self.rows = [node_row("gpu-master", "head", 0.1, 0.2, None)]

    @method
    async def offload_status(self, context: CallContext, *, limit: int = 20, brief: bool = False) -> dict[str, Any]:
        return {"active": [move(7, "gpu1", "python x.py")], "finished": []}

    @method
    async def auto_status(self, context: CallContext) -> dict[str, Any]:
        return {"enabled": True, "dry_run": False}

    @method
    async def events_recent(self, context: CallContext, *, limit: int = 50) -> list[dict[str, Any]]:
        return []

    @method
    async def events_follow(self, context: CallContext, *, since: int = 0) -> AsyncIterator[dict[str, Any]]:
        await asyncio.Event().wait()
        yield {}

    @method
    async def snapshots_follow(self, context: CallContext, *, interval_s: float) -> AsyncIterator[list[dict[str, Any]]]:
        while True:
            if not self.held:
                yield self.rows
            await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def served(answers: Answers) -> AsyncIterator[GridPaths]:
    paths = GridPaths.default().ensure()
    audit = AuditLog(paths.audit_log)
    server = DaemonServer(paths.socket, paths.socket, [answers], audit, list, dict)
    await server.start()
    try:
        yield paths
    finally:
        await server.close()
        audit.close()


@contextlib.asynccontextmanager
async def running(feed: Feed) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(feed.run())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(true: Callable[[], bool]) -> None:
    limit = time.monotonic() + 30
    while not true():
        assert time.monotonic() < limit
        await asyncio.sleep(0.01)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "RETRY_S", 0.05)


async def test_a_daemon_that_goes_is_said_and_found_again() -> None:
    answers = Answers()
    paths = GridPaths.default()
    feed = Feed(0.05, paths=paths, head_name="here")
    async with running(feed):
        async with served(answers):
            await until(lambda: feed.view.source == "daemon" and "gpu-master" in feed.view.nodes)
            assert feed.view.notice == "" and feed.view.auto_word() == "● ENABLED"
        await until(lambda: feed.view.source == "local" and "here" in feed.view.nodes)
        assert "read-only, this machine only" in feed.view.notice and feed.view.auto_word() == "○ READ-ONLY"
        async with served(answers):
            await until(lambda: feed.view.source == "daemon" and not feed.view.notice)


async def test_a_daemon_that_stands_still_is_said() -> None:
    answers = Answers()
    async with served(answers) as paths:
        feed = Feed(0.05, paths=paths, head_name="here")
        assert feed.view.patience_s == feeds.SILENT_S
        feed.view.patience_s = 0.5
        async with running(feed):
            await until(lambda: feed.view.source == "daemon" and bool(feed.view.nodes))
            answers.held = True
            await until(lambda: feed.view.is_silent)
            assert "the daemon has not answered for" in feed.view.notice and feed.view.auto_word() == "○ UNKNOWN"
            head = feed.view.head
            assert head is not None and (feed.view.age_s(head) or 0) > 0.5
            answers.held = False
            await until(lambda: not feed.view.notice)


async def test_what_cannot_be_understood_is_said_and_it_goes_on() -> None:
    answers = Answers()
    fine, answers.rows = answers.rows, [{"of": "another version"}]
    async with served(answers) as paths:
        feed = Feed(0.05, paths=paths, head_name="here")
        async with running(feed) as task:
            await until(lambda: "KeyError" in feed.view.trouble)
            assert not task.done()
            answers.rows = fine
            await until(lambda: feed.view.source == "daemon" and not feed.view.notice)


SHAPES = [
    "damaged",
    [1],
    {"active_offloads": None, "history": None, "finished_offloads": 7},
    {"history": [{"text": "no time"}, {"at": "soon", "text": "x"}, {"at": 1.0}, 7, {"at": 1.0, "text": "kept"}]},
    {"active_offloads": [{"id": "a"}, "x", {**move(7, "gpu1", "python kept.py"), "created": None}]},
    {"active_offloads": [{"id": "a", "pid": 7, "target": "gpu1", "state": "RUNNING", "created": 1.0, "bytes": "many"}]},
    {"active_offloads": [{**move(7, "gpu1", "x"), "state": 9, "pause_s": "long", "updated": None, "eta_s": []}]},
]


@pytest.mark.parametrize("content", SHAPES, ids=range(len(SHAPES)))
async def test_a_state_file_of_any_shape_harms_nothing(tmp_path: Path, content: Any) -> None:
    file = tmp_path / "state.json"
    file.write_text(json.dumps(content))
    feed = Feed(0.05, head_name="here", state_path=file)
    view = await feed.once()
    text = plain_text(view, 100)
    assert "HEAD NODE: here" in text
    assert ("kept" in text) == ("kept" in json.dumps(content) and "history" in content)
    json.dumps(view.to_wire())
