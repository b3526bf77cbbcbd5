"""The way back of a move: the record first, then its source runs on and its copy goes, now or when they answer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from distributed_grid.core.errors import GridError, NotFound, Refused
from distributed_grid.daemon.events import EventHub
from distributed_grid.daemon.links import NodeLinks
from distributed_grid.daemon.staging import FileStaging
from distributed_grid.orchestration.offloading.model import next_state
from distributed_grid.store.moves import MoveRow, Moves

log = logging.getLogger(__name__)

BEFORE_COMMIT = ("PLANNED", "FROZEN", "COPIED", "STAGED")
UNSETTLED = ("COMMITTED", "IN_DOUBT")
#: It runs on the target: RUNNING while its source is still to be replaced, CLEANED from then on.
AWAY = ("RUNNING", "CLEANED")
OVER = ("ENDED", "LOST", "MOVED", "ABORTED")
SWEEP_AGAIN_S = 5.0

T = TypeVar("T")


class WayBack:
    def __init__(self, moves: Moves, links: NodeLinks, events: EventHub, files: FileStaging) -> None:
        self._files = files
        self._moves = moves
        self._links = links
        self._events = events
        #: What goes on although whoever asked for it has left.
        self._tasks: set[asyncio.Task[Any]] = set()
        #: By move: only one of us at a time lets its source go, replaces it or ends its copy.
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def step(self, move_id: str, state: str, story: str, **changes: Any) -> MoveRow:
        """Enter a state that may follow, on disk before whatever comes next; else it is a fault of ours."""
        before = self._moves.get(move_id)
        past = (f"{one.state}: {one.story}" for one in self._moves.steps(move_id))
        next_state(before.state, state, move_id=move_id, story=past)
        return self._moves.step(move_id, state, story, **changes)

    # -- called off -----------------------------------------------------------------------------------------------

    async def abort(self, move_id: str, reason: str, *, commit_tried: bool = True) -> None:
        """The record first; then the source runs on; what is left on the target is swept, now or when it is back.

        Before the commit it is never given up: a record that cannot be written is written as soon as it can be. The
        source waits for it only where COMMITTED was tried, because a failed write may still have reached the disk; else
        what is on disk leads to ABORTED anyhow.
        """
        row = self._moves.get(move_id)
        if row.state not in (*BEFORE_COMMIT, *UNSETTLED):
            return
        try:
            self._enter_aborted(row, reason)
        except GridError as error:
            if row.state in UNSETTLED:
                raise  # it stays in doubt, and whoever decided may do so again
            log.warning("%s is called off, which could not be written yet: %s", move_id, error.message)
            self._spawn(self._keep_aborting(move_id, reason), f"abort-{move_id}")
            if not commit_tried:
                with contextlib.suppress(GridError):  # else with the record
                    await self.release_source(move_id)
            return
        await self._swept(row, reason)

    def _enter_aborted(self, row: MoveRow, reason: str) -> None:
        if row.state == "COMMITTED":
            self.step(row.id, "IN_DOUBT", reason)
        self.step(row.id, "ABORTED", reason, data=self._with(row.id, reason=reason))

    async def _swept(self, row: MoveRow, reason: str) -> None:
        self._publish(
            "offload.aborted", f"PID {row.pid} stays on {row.node}: {reason}", node=row.node, move=row.id, pid=row.pid
        )
        with contextlib.suppress(GridError):
            self._files.forget(row.id)
        if not await self.sweep(row.id):
            self._spawn(self.keep_sweeping(row.id), f"sweep-{row.id}")

    async def _keep_aborting(self, move_id: str, reason: str) -> None:
        while True:
            await asyncio.sleep(SWEEP_AGAIN_S)
            with contextlib.suppress(GridError):
                row = self._moves.get(move_id)
                if row.state in BEFORE_COMMIT:
                    self._enter_aborted(row, reason)
                    await self._swept(row, reason)
                return

    # -- swept ----------------------------------------------------------------------------------------------------

    async def sweep(self, move_id: str) -> bool:
        """Of an aborted move: its source runs on, its copy goes; whether both are done.

        A copy that may have been let go is ended first, where its node can be asked: never both. Where it cannot, a
        person has said that the source is the one.
        """
        async with self._lock(move_id):
            try:
                committed = self._was_committed(move_id)
                work = [("released", self.release_source), ("dropped", self.drop_target)]
                for flag, one in reversed(work) if committed else work:
                    row = self._moves.get(move_id)
                    if row.data.get(flag):
                        continue
                    try:
                        await one(move_id)
                    except GridError as error:
                        log.info("%s is not swept yet: %s %s", move_id, error.message, error.cause)
                        if committed and flag == "dropped" and self._answers(row.target):
                            return False
                data = self._moves.get(move_id).data
            except GridError as error:  # the journal cannot be read now
                log.warning("%s is not swept yet: %s", move_id, error.message)
                return False
        return bool(data.get("released") and data.get("dropped"))

    async def keep_sweeping(self, move_id: str) -> None:
        """A source that is away, or could not be let go at once, is let go as soon as it can be."""
        while not await self.sweep(move_id):
            await asyncio.sleep(SWEEP_AGAIN_S)

    async def release_source(self, move_id: str) -> None:
        row = self._moves.get(move_id)
        source = self._links.get(row.node)  # without a link (the cluster is down) nobody can say that it holds nothing
        try:
            await source.call("out_abort", move_id=move_id, timeout_s=120, wait_s=5)
        except NotFound as error:
            if error.code != "move-not-found":
                raise
            # It was never begun there.
        self._moves.update(move_id, data=self._with(move_id, released=True))

    async def drop_target(self, move_id: str) -> None:
        row = self._moves.get(move_id)
        target = self._links.get(row.target)
        try:
            ran = await (self._drop_copy(row) if row.data.get("strategy") == "live" else self._drop_task(row))
        except NotFound as error:
            if error.code not in ("move-not-found", "task-not-found"):
                raise
            ran = False
        if row.data.get("strategy") == "live":
            with contextlib.suppress(NotFound):
                await target.call("move_forget", move_id=move_id)
        self._moves.update(move_id, data=self._with(move_id, dropped=True))
        if ran:
            text = f"the copy of PID {row.pid} on {row.target} had been let go and was ended: it runs on {row.node}"
            self._publish("offload.copy_ended", text, node=row.target, move=move_id, pid=row.pid)

    async def _drop_copy(self, row: MoveRow) -> bool:
        """Whether it had been let go."""
        target = self._links.get(row.target)
        try:
            await target.call("in_drop", move_id=row.id, timeout_s=60)
            return False
        except Refused as error:
            if error.code != "running" or not self._was_committed(row.id):
                raise
        # The word to go reached it, and was withdrawn since by the record ABORTED.
        with contextlib.suppress(NotFound):
            await target.call("task_cancel", task_id=row.id, grace_s=0.0, timeout_s=60)
            await target.call("task_remove", task_id=row.id)
        return True

    async def _drop_task(self, row: MoveRow) -> bool:
        target = self._links.get(row.target)
        ran = bool((await target.call("task_status", task_id=row.id))["state"] == "running")
        await target.call("task_cancel", task_id=row.id, grace_s=0.0, timeout_s=60)
        await target.call("task_remove", task_id=row.id)
        return ran

    # -- shared with the way forward ------------------------------------------------------------------------------

    def _lock(self, move_id: str) -> asyncio.Lock:
        return self._locks.setdefault(move_id, asyncio.Lock())

    def _was_committed(self, move_id: str) -> bool:
        return any(step.state == "COMMITTED" for step in self._moves.steps(move_id))

    def _answers(self, node: str) -> bool:
        return node in self._links.names() and bool(self._links.get(node).state.online)

    def _with(self, move_id: str, **more: Any) -> dict[str, Any]:
        return {**self._moves.get(move_id).data, **more}

    def _publish(self, kind: str, text: str, **facts: Any) -> None:
        """An event decides nothing: one that cannot be written must not stop what it tells of."""
        try:
            self._events.publish(kind, text, **facts)
        except GridError as error:
            log.warning("%s: %s (could not be written: %s)", kind, text, error.message)

    def _spawn(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s failed", task.get_name(), exc_info=error)
