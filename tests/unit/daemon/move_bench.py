"""Two nodes that a mover can be tried on without processes: they answer as agents do, and count who runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from distributed_grid.core.errors import GridError, NotFound, Refused, Unavailable
from distributed_grid.daemon.events import EventHub
from distributed_grid.daemon.links import NodeLinks
from distributed_grid.daemon.mover import MoveRequest
from distributed_grid.daemon.offload import OffloadService
from distributed_grid.store.journal import Journal
from distributed_grid.store.moves import MoveRow

ID = "offload_1_100"


class World:
    """The one program: whether it runs at home, whether its copy does."""

    def __init__(self) -> None:
        self.home, self.copy = True, False
        self.both = False

    def set(self, **runs: bool) -> None:
        for name, value in runs.items():
            setattr(self, name, value)
        self.both = self.both or (self.home and self.copy)


class Node:
    """The daemon's link to a node, with an agent's answers behind it."""

    def __init__(self, name: str, world: World) -> None:
        self.node, self.world = name, world
        self.state = SimpleNamespace(online=True)
        self.called: list[str] = []
        #: What a call raises instead of an answer, once each, or for good where it is the last.
        self.errors: dict[str, list[GridError | None]] = {}
        #: What is done just before a call is answered.
        self.before: dict[str, Callable[[], None]] = {}
        self.held: dict[str, Any] = {"alive": True, "held": True, "woken": False, "stub": True}
        self.out = self.staged = self.going = self.started = self.rebooted = False
        self.task_state = "staged"
        self.task_error: dict[str, Any] | None = None

    async def call(self, name: str, *, timeout_s: float = 0, wait_s: float = 0, **arguments: Any) -> Any:
        await asyncio.sleep(0)
        if not self.state.online:
            raise Unavailable(f"{self.node} is not online", code="node-offline")
        self.called.append(name)
        if name in self.before:
            self.before[name]()
        errors = self.errors.get(name)
        if errors and (error := errors[0] if len(errors) == 1 else errors.pop(0)):
            raise error
        return getattr(self, name)(**arguments)

    # the source

    def out_begin(self, **_: Any) -> dict[str, Any]:
        self.out = True
        self.world.set(home=False)
        return {}

    out_hold = out_begin

    def out_wait(self, **_: Any) -> dict[str, Any]:
        return {"phase": "copied", "figures": {}, "mover_alive": True} if self.seen_frozen() else {
            "phase": "frozen", "figures": {}, "mover_alive": True,
        }  # fmt: skip

    def seen_frozen(self) -> bool:
        return self.called.count("out_wait") > 1

    def out_status(self, **_: Any) -> dict[str, Any]:
        return self.held

    def out_abort(self, **_: Any) -> dict[str, Any]:
        if not self.out:
            raise NotFound("there is no such move from here", code="move-not-found")
        self.world.set(home=True)
        return {}

    def out_finish(self, **_: Any) -> dict[str, Any]:
        return self.held

    # the target

    def in_prepare(self, **_: Any) -> dict[str, Any]:
        self.staged = True
        return {"host": "", "port": 0, "key": b""}

    def in_status(self, **_: Any) -> dict[str, Any]:
        if not self.staged:
            raise NotFound("there is no such move to here", code="move-not-found")
        return {"phase": self.task_state, "going": self.going, "rebooted": self.rebooted}

    def in_wait(self, **_: Any) -> dict[str, Any]:
        return {"phase": "staged"}

    def in_go(self, **_: Any) -> dict[str, Any]:
        if not self.staged or self.task_state not in ("staged", "running"):
            raise Refused("there is nothing to let go", code="not-staged")
        self.let_go()
        return {"phase": "running", "pid": 5, "start_ticks": 6, "started_at": 0.0}

    def let_go(self) -> None:
        self.going, self.started, self.task_state = True, True, "running"
        self.world.set(copy=True)

    def in_drop(self, **_: Any) -> dict[str, Any]:
        self.in_status()
        if self.going:
            raise Refused("it was let go: only a cancel ends it now", code="running")
        self.staged = False
        return {}

    def move_forget(self, **_: Any) -> None:
        pass

    def move_list(self, **_: Any) -> list[Any]:
        return []

    def task_start(self, **_: Any) -> dict[str, Any]:
        self.staged = True
        return self.task_status()

    def task_status(self, **_: Any) -> dict[str, Any]:
        if not self.staged:
            raise NotFound("there is no such task", code="task-not-found")
        return {
            "state": self.task_state, "error": self.task_error, "pid": 5, "start_ticks": 6, "started_at": 0.0,
            "started": self.started, "going": self.going, "rebooted": self.rebooted,
        }  # fmt: skip

    def task_go(self, **_: Any) -> dict[str, Any]:
        if self.staged and self.task_state == "staged":
            self.let_go()
        return self.task_status()

    def task_cancel(self, **_: Any) -> dict[str, Any]:
        self.task_status()
        self.world.set(copy=False)
        self.task_state = "exited"
        return self.task_status()

    def task_remove(self, **_: Any) -> None:
        self.staged = False


class Bench:
    def __init__(self, journal: Journal) -> None:
        self.journal, self.moves = journal, journal.moves
        self.world = World()
        self.home, self.target = Node("gpu-master", self.world), Node("gpu1", self.world)
        self.links = NodeLinks(lambda _name: None)  # type: ignore[arg-type, return-value]
        self.open_links()
        plane: Any = SimpleNamespace(journal=journal, links=self.links, events=EventHub(journal.events))
        self.service = OffloadService(plane)
        self.mover = self.service.mover
        self.full = False
        #: How many steps into each state fail although the disk takes others.
        self.unwritable: dict[str, int] = {}
        write = self.moves.step

        def step(move_id: str, state: str, story: str, **changes: Any) -> MoveRow:
            if self.full or self.unwritable.get(state, 0) > 0:
                self.unwritable[state] = self.unwritable.get(state, 0) - 1
                raise GridError("the disk is full", code="disk-full")
            return write(move_id, state, story, **changes)

        self.moves.step = step  # type: ignore[method-assign]

    def open_links(self) -> None:
        self.links._links.update({one.node: one for one in (self.home, self.target)})  # type: ignore[dict-item]

    def close_links(self) -> None:
        """As `grid cluster stop` does."""
        self.links._links.clear()

    def request(self, strategy: str = "live") -> MoveRequest:
        return MoveRequest(ID, "gpu-master", 100, 7, "gpu1", 0, strategy, "train.py", spec={"argv": ["train.py"]})

    async def move(self, strategy: str = "live") -> MoveRow:
        return await self.mover.move(self.request(strategy), lambda _step: None)

    @property
    def row(self) -> MoveRow:
        return self.moves.get(ID)

    def states(self) -> list[str]:
        return [step.state for step in self.moves.steps(ID)]

    def events(self) -> list[str]:
        return [row.kind for row in self.journal.events.latest(100)]

    async def until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(20):
            while not condition():
                await asyncio.sleep(0.001)
