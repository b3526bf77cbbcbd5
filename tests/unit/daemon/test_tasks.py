"""Whose account a command runs under on a node, and commands that cannot be taken over at once."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from distributed_grid.daemon import tasks as tasks_module
from distributed_grid.daemon.events import EventHub
from distributed_grid.daemon.links import LinkState
from distributed_grid.daemon.tasks import TaskService, account_on, user_name
from distributed_grid.store.journal import Journal
from distributed_grid.store.snapshot import disk_full
from distributed_grid.wire.rpc import CallContext

OWNER = os.geteuid()
OTHER = 54321
NOT_ROOT = 1001


class FakeLink:
    """An agent of `uid` that starts everything and holds `tasks`."""

    def __init__(self, uid: int | None, tasks: list[dict[str, Any]]) -> None:
        self.node = "gpu1"
        self.state = LinkState("gpu1", online=True, agent={} if uid is None else {"uid": uid})
        self.tasks = tasks
        self.specs: list[dict[str, Any]] = []

    async def client(self, _wait_s: float = 0.0) -> None:
        return None

    async def call(self, name: str, **arguments: Any) -> Any:
        if name == "task_start":
            self.specs.append(arguments["spec"])
            return {"task_id": arguments["task_id"], "state": "running", "argv": arguments["spec"]["argv"]}
        return self.tasks


class FakeLinks(list[FakeLink]):
    def get(self, node: str) -> FakeLink:
        return next(link for link in self if link.node == node)


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with Journal.open(tmp_path / "journal.sqlite3") as found:
        yield found


def service(journal: Journal, link: FakeLink) -> TaskService:
    return TaskService(journal.tasks, FakeLinks([link]), EventHub(journal.events))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("caller", "agent", "account"),
    [
        (OWNER, NOT_ROOT, ""),  # whom the configuration's `user` lets in there
        (OWNER, 0, user_name(OWNER)),
        (OTHER, NOT_ROOT, str(OTHER)),  # never somebody else's account
        (OTHER, 0, str(OTHER)),
        (OWNER, None, user_name(OWNER)),  # nothing is known of it: never more rights than one's own
    ],
)
async def test_whose_account(journal: Journal, caller: int, agent: int | None, account: str) -> None:
    link = FakeLink(agent, [])
    assert account_on(link, caller) == account  # type: ignore[arg-type]
    await service(journal, link).task_start(CallContext(uid=caller), node="gpu1", argv=["true"])
    assert [spec["user"] for spec in link.specs] == [account]


async def test_what_a_full_disk_kept_from_being_taken_over_is_taken_over_later(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = service(journal, FakeLink(0, [{"task_id": "task_1", "state": "running", "argv": ["true"], "user": ""}]))

    def full(*_words: Any) -> None:
        raise disk_full(journal.path)

    with monkeypatch.context() as patch:
        patch.setattr(journal.tasks, "put", full)
        await tasks.adopt("gpu1")  # the line is not to blame
    assert journal.tasks.list() == []
    monkeypatch.setattr(tasks_module, "LOOK_EVERY_S", 0.0)
    running = asyncio.create_task(tasks.run())
    async with asyncio.timeout(60):
        while not journal.tasks.list(state="running"):
            await asyncio.sleep(0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
