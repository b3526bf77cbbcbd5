"""The calls about moving running processes: scan, plan, execute, status, logs, cancel, return, resolve."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from distributed_grid.agent.spool import ENDED
from distributed_grid.core.errors import GridError, NotFound, Refused, TimedOut, Unavailable
from distributed_grid.daemon.moved import Followers
from distributed_grid.daemon.mover import AWAY, BEFORE_COMMIT, OVER, UNSETTLED, Mover, MoveRequest
from distributed_grid.daemon.planning import Planner
from distributed_grid.daemon.staging import FileStaging
from distributed_grid.daemon.tasks import user_name
from distributed_grid.store.moves import MoveRow
from distributed_grid.wire.rpc import CallContext, method

if TYPE_CHECKING:
    from distributed_grid.daemon.control import ControlPlane

log = logging.getLogger(__name__)

CALL_OFF_LIMIT_S = 120.0


class OffloadService:
    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane
        self._moves = plane.journal.moves
        self._links = plane.links
        self._events = plane.events
        self.files = FileStaging(plane.journal, self._links, self._events)
        self.mover = Mover(self._moves, self._links, self._events, self.files)
        self.followers = Followers(self._moves, self._links, self._events, self.mover, self.files, self._settle)
        self.planner = Planner(plane, self.files)
        self._running: dict[str, asyncio.Task[MoveRow]] = {}
        self._carrying: set[asyncio.Task[Any]] = set()
        #: How far each move under way is.
        self._progress: dict[str, dict[str, Any]] = {}

    # -- looking --------------------------------------------------------------------------------------------------

    @method
    async def offload_scan(
        self, context: CallContext, *, node: str | None = None, everything: bool = False
    ) -> list[dict[str, Any]]:
        """What could be moved; `everything`: also what may not, with the reason."""
        return await self.planner.scan(context.uid, node, everything)

    @method
    async def offload_plan(
        self, context: CallContext, *, pid: int | str, target_node: str | None = None,
        options: dict[str, Any] | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        plan, _request = await self.planner.plan(context.uid, pid, target_node, options or {})
        return plan

    @method
    async def offload_status(self, context: CallContext, *, limit: int = 20, brief: bool = False) -> dict[str, Any]:
        """All moves; `brief`: without their steps and figures, for those who ask each second."""
        rows = [row for row in self._moves.list() if context.uid in (0, os.geteuid(), row.uid)]
        active = [self._told(row, brief) for row in rows if row.state not in OVER]
        finished = [self._told(row, brief) for row in rows if row.state in OVER]
        moved = [row for row in finished if row["state"] == "ENDED"]
        return {
            "statistics": {
                "moves": len(rows),
                "active": len(active),
                "ended": len(moved),
                "aborted": sum(1 for row in finished if row["state"] == "ABORTED"),
                "lost": sum(1 for row in finished if row["state"] == "LOST"),
                "bytes": sum(row["bytes"] or 0 for row in [*active, *finished]),
            },
            "active": active,
            "finished": finished[: max(0, limit)],
        }

    def _told(self, row: MoveRow, brief: bool = False) -> dict[str, Any]:
        figures = row.data.get("figures") or {}
        more = {} if brief else {
            "figures": figures,
            "steps": [{"state": one.state, "at": one.at, "story": one.story} for one in self._moves.steps(row.id)],
        }  # fmt: skip
        away = row.state in AWAY and row.target in self._links.names()
        away = away and not self._links.get(row.target).state.online
        return {
            "id": row.id, "pid": row.pid, "node": row.node, "target": row.target, "state": row.state,
            "user": user_name(row.uid), "strategy": row.data.get("strategy"), "command": row.data.get("command", ""),
            "created": row.created, "updated": row.updated, "bytes": figures.get("wire_bytes") or figures.get("bytes"),
            "pause_s": row.data.get("pause_s"), "exit_code": row.data.get("exit_code"), "stub": row.data.get("stub"),
            "automatic": bool(row.data.get("automatic")), "reason": row.data.get("reason", ""),
            "target_pid": (row.data.get("running") or {}).get("pid"),
            "target_lost": away, **more,
            **self._progress.get(row.id, {}),
        }  # fmt: skip

    def _own(self, context: CallContext, move_id: str) -> MoveRow:
        row = self._moves.get_by_prefix(move_id)
        if context.uid not in (0, os.geteuid(), row.uid):
            raise Refused(f"{row.id} belongs to {user_name(row.uid)}", code="not-yours")
        return row

    # -- moving ---------------------------------------------------------------------------------------------------

    @method
    async def offload_execute(
        self, context: CallContext, *, pid: int | str, target_node: str | None = None,
        options: dict[str, Any] | None = None, automatic: bool = False, reason: str = "",
    ) -> AsyncIterator[dict[str, Any]]:  # fmt: skip
        """Move it: first the plan, then each step, last the move. Before the commit, hanging up calls it off."""
        plan, request = await self.planner.plan(context.uid, pid, target_node, options or {})
        yield {"plan": plan}
        if request is None:
            raise self.planner.refusal(plan)
        request.facts |= {"automatic": automatic, "reason": reason}
        steps: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        task = self._start(request, steps)
        try:
            while (step := await steps.get()) is not None:
                yield step
            await asyncio.wait({task})  # never raises its cancellation: that is not ours
            if task.cancelled() and self._moves.get(request.move_id).state in (*BEFORE_COMMIT, "ABORTED"):
                raise Refused("the move was called off", cause="the process stays where it is", code="cancelled")
            row = self._moves.get(request.move_id) if task.cancelled() else task.result()
        except (asyncio.CancelledError, GeneratorExit):
            if self._moves.find(request.move_id) and self._moves.get(request.move_id).state in BEFORE_COMMIT:
                task.cancel()
            raise
        yield {"done": self._told(row)}

    def _start(self, request: MoveRequest, steps: asyncio.Queue[dict[str, Any] | None]) -> asyncio.Task[MoveRow]:
        key = f"{request.node}:{request.pid}"
        if self._is_carried(key):
            text = f"PID {request.pid} is being moved already"
            raise Refused(text, hint="grid offload status", code="already-moving")
        # Again, because a plan takes its time: another move may have come and gone, and its stub has this very pid.
        self.planner.check_not_moving(request.node, request.pid, request.start_ticks)

        began = time.monotonic()

        def tell(step: dict[str, Any]) -> None:
            known = self._progress.get(request.move_id, {})
            self._progress[request.move_id] = far = how_far(step, known, time.monotonic() - began)
            steps.put_nowait({**step, **far})

        async def run() -> MoveRow:
            try:
                row = await self.mover.move(request, tell)
                with contextlib.suppress(GridError):  # the follower tries again, for as long as it takes
                    await self._moved_on(row.id)
                self.followers.follow(row.id)
                self._spawn(self._show_job(row))
                return self._moves.get(row.id)
            finally:
                self._progress.pop(request.move_id, None)
                steps.put_nowait(None)

        task = asyncio.create_task(run(), name=f"move-{request.move_id}")
        self._running[key] = task
        self._carrying.add(task)
        task.add_done_callback(self._settled)
        return task

    async def _show_job(self, row: MoveRow) -> None:
        """Ray's dashboard shows the moved process as a job of its target. It follows; it owns nothing."""
        if row.state not in AWAY:
            return
        try:
            place = await self._links.get(row.target).call("task_place", task_id=row.id)
            argv = [place["python"], "-m", "distributed_grid.agent.job", place["dir"]]
            facts = {"command": str(row.data.get("command", ""))[:500], "from": row.node, "pid": str(row.pid)}
            await self._plane.keeper.show_job(row.id, row.target, argv, facts)
        except GridError as error:
            log.info("Ray's dashboard does not show %s: %s %s", row.id, error.message, error.cause)

    def _settled(self, task: asyncio.Task[MoveRow]) -> None:
        self._carrying.discard(task)
        if not task.cancelled() and task.exception():
            log.info("a move did not come about: %s", task.exception())

    def _is_carried(self, key: str) -> bool:
        return key in self._running and not self._running[key].done()

    async def _settle(self, move_id: str) -> None:
        """Before a moved process is followed: what is still owed to it or to the move before it."""
        if not await self.mover.pay_go(move_id):
            row = self._moves.get(move_id)
            await self.followers._end(row, {"state": "lost"})
            raise NotFound(f"{row.target} has nothing of {move_id}", code="move-not-found")
        await self._moved_on(move_id)

    async def _moved_on(self, move_id: str) -> None:
        """A second hop, or the way home: the move before it is over, and its stub is served by this one."""
        row = self._moves.get(move_id)
        before = self._moves.find(row.data.get("from_task") or "")
        if before is None or row.state != "CLEANED" or before.state != "CLEANED":
            return
        status = await self._ended_task(before)
        base = {"stdin": 0, **(before.data.get("base") or {"stdout": 0, "stderr": 0})}
        taken = status["input_taken"]
        base = {
            "stdin": base["stdin"] + (taken or 0), "stdout": base["stdout"] + status["stdout_bytes"],
            "stderr": base["stderr"] + status["stderr_bytes"],
        }  # fmt: skip
        home = before.data.get("home") or {"node": before.node, "move": before.id}
        await self._drain(before, home, base)
        data = {**self._moves.get(row.id).data, "home": home, "base": base}
        self._moves.update(row.id, data=data)
        if before.data.get("input") and (taken is None or before.data.get("input_lost")):
            self.followers.lose_input(row)
        self.mover.step(before.id, "MOVED", f"carried on by {row.id}")
        await self.followers.leave(before.id)
        self.files.forget(before.id)

    async def _ended_task(self, before: MoveRow) -> dict[str, Any]:
        """Its shim writes down last how much of its input was read."""
        limit = time.monotonic() + 60
        while True:
            status: dict[str, Any] = await self._links.get(before.target).call("task_status", task_id=before.id)
            if not before.data.get("input") or status["state"] in ENDED:
                return status
            if time.monotonic() > limit:
                raise TimedOut(f"the shim of {before.id} does not end", code="relay")
            await asyncio.sleep(0.02)

    async def _drain(self, before: MoveRow, home: dict[str, Any], base: dict[str, int]) -> None:
        """All that the stopped copy had written must be with the stub before its next home's output is."""
        limit = time.monotonic() + 60
        while before.data.get("stub") or before.data.get("home"):
            written = await self.followers._written(home, {"stdout": 0, "stderr": 0})
            if all(done >= base[name] for name, done in written.items()):
                return
            if time.monotonic() > limit:
                raise GridError("the output of the first part could not be relayed", code="relay")
            await asyncio.sleep(0.05)

    # -- after ----------------------------------------------------------------------------------------------------

    @method
    async def offload_follow(
        self, context: CallContext, *, move_id: str, stdout_from: int = 0, stderr_from: int = 0, wait: bool = True
    ) -> AsyncIterator[dict[str, Any]]:
        """What the process has written since it was moved."""
        row = self._own(context, move_id)
        if row.state in BEFORE_COMMIT or row.state == "ABORTED":
            raise Refused(f"{row.id} did not move: its output is where it always was", code="not-moved")
        async for item in self._plane.tasks.follow(row.target, row.id, stdout_from, stderr_from, wait):
            yield item

    @method
    async def offload_cancel(self, context: CallContext, *, move_id: str, grace_s: float = 10.0) -> dict[str, Any]:
        """End a moved process; a move that is under way is called off and the process stays."""
        row = self._own(context, move_id)
        if row.state in OVER:
            raise Refused(f"{row.id} is over: {row.state.lower()}", hint="grid offload status", code="already-ended")
        if row.state in BEFORE_COMMIT:
            task = self._running.get(f"{row.node}:{row.pid}")
            if task:
                task.cancel()
                await asyncio.wait({task}, timeout=CALL_OFF_LIMIT_S)
            return self._told(self._moves.get(row.id))
        await self._links.get(row.target).call(
            "task_cancel", task_id=row.id, grace_s=grace_s, timeout_s=grace_s + 60, wait_s=5.0
        )
        await self._until(row.id, OVER, 60)
        return self._told(self._moves.get(row.id))

    @method
    async def offload_sync(self, context: CallContext, *, move_id: str) -> dict[str, Any]:
        """Bring the files that a moved process has changed home now."""
        row = self._own(context, move_id)
        if row.state in (*BEFORE_COMMIT, *UNSETTLED, "ABORTED", "MOVED"):
            raise Refused(f"{row.id} is not away: {row.state.lower()}", hint="grid offload status", code="not-away")
        if not self.files.is_pending(row.id):
            text = "nothing to bring: its files are home, or both nodes share them"
            return {"files": [], "conflicts": [], "text": text}
        done = await self.files.bring_home(row.id)
        if row.state in OVER:
            self.files.forget(row.id)
        count = len(done["files"])
        text = f"{count} file{'' if count == 1 else 's'} brought home from {row.target}" if count else "nothing changed"
        return {**done, "text": text}

    async def _until(self, move_id: str, states: tuple[str, ...], limit_s: float) -> None:
        limit = time.monotonic() + limit_s
        while self._moves.get(move_id).state not in states and time.monotonic() < limit:
            await asyncio.sleep(0.05)

    @method
    async def offload_return(
        self, context: CallContext, *, move_id: str, options: dict[str, Any] | None = None
    ) -> AsyncIterator[dict[str, Any]]:
        """Bring a moved process home again."""
        row = self._own(context, move_id)
        if row.state not in AWAY:
            raise Refused(f"{row.id} is not away: {row.state.lower()}", hint="grid offload status", code="not-away")
        home = (row.data.get("home") or {"node": row.node})["node"]
        if row.target == home:
            raise Refused(f"{row.id} is at home already", hint="grid offload status", code="not-away")
        there = (row.data.get("running") or {}).get("pid")
        if not there:
            raise Unavailable(f"{row.target} has not told its pid there yet", hint="grid status", code="target-unclear")
        pid = f"{row.target}:{there}"
        async for step in self.offload_execute(
            context, pid=pid, target_node=home, options={**(options or {}), "return": True}
        ):
            yield step

    @method
    async def offload_resolve(self, context: CallContext, *, move_id: str, here: bool) -> dict[str, Any]:
        """A person decides a move in doubt: it runs here (the copy is given up), or there (the source is)."""
        row = self._own(context, move_id)
        if row.state not in UNSETTLED:
            raise Refused(f"{row.id} is not in doubt: {row.state.lower()}", code="not-in-doubt")
        if here:
            await self.mover.abort(row.id, "decided by hand: it runs on at home")
        else:
            self.mover.decide_there(row.id)
            self.followers.follow(row.id)
        return self._told(self._moves.get(row.id))

    async def call_off(self) -> None:
        """Before the nodes go (`grid cluster stop`): what can still be called off is, so that no source stays held."""
        tasks = set()
        for row in self._moves.list():
            key = f"{row.node}:{row.pid}"
            if row.state in BEFORE_COMMIT and self._is_carried(key):
                self._running[key].cancel()
                tasks.add(self._running[key])
        if tasks:
            await asyncio.wait(tasks, timeout=CALL_OFF_LIMIT_S)

    # -- recovery -------------------------------------------------------------------------------------------------

    def recover(self) -> None:
        """At the daemon's start: every state has its way on."""
        for row in self._moves.list():
            if row.state in BEFORE_COMMIT:
                self._spawn(self.mover.abort(row.id, "the daemon was started anew"))
            elif row.state in UNSETTLED:
                self._spawn(self._finish(row.id))
            elif row.state in AWAY:
                self.followers.follow(row.id)
            elif row.state == "ABORTED" and not (row.data.get("released") and row.data.get("dropped")):
                self._spawn(self.mover.keep_sweeping(row.id))

    async def _finish(self, move_id: str) -> None:
        row = await self.mover.finish(move_id)
        if row.state in AWAY:
            self.followers.follow(move_id)

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._carrying.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._carrying.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("work on a move ended early: %s", error)

    def node_is_down(self, node: str) -> None:
        """What runs there is out of sight: said at once; whether it is gone shows when the node is back."""
        for row in self._moves.list(target=node):
            if row.state in AWAY:
                text = f"PID {row.pid} is out of sight: {node}, where it runs, is lost"
                self._events.publish("offload.lost", text, node=node, move=row.id, pid=row.pid)

    def node_is_up(self, node: str) -> None:
        self._spawn(self._sweep(node))

    async def _sweep(self, node: str) -> None:
        """A node is back: every move that waits for it goes on, one way or the other."""
        waiting = [row for row in self._moves.list() if node in (row.node, row.target)]
        for row in waiting:
            if row.state in (*UNSETTLED, *AWAY) and not self._is_carried(f"{row.node}:{row.pid}"):
                self._spawn(self._finish(row.id))
        for row in waiting:
            if row.state == "ABORTED" and not (row.data.get("released") and row.data.get("dropped")):
                await self.mover.sweep(row.id)
        with contextlib.suppress(GridError):
            for held in await self._links.get(node).call("move_list"):
                if self._moves.find(held["move_id"]) is None:
                    await self._adopt(node, held)

    async def _adopt(self, node: str, held: dict[str, Any]) -> None:
        """The journal was lost: a copy that was let go counts, else the source does."""
        move_id = held["move_id"]
        if held["side"] == "in":
            if not held["going"]:
                with contextlib.suppress(GridError):
                    await self._links.get(node).call("in_drop", move_id=move_id)
            return
        if held["phase"] in ("aborted", "finished"):
            return
        for link in self._links:
            if link.node == node:
                continue
            try:
                there = await link.call("in_status", move_id=move_id, wait_s=10)
            except NotFound:
                continue
            except GridError:
                text = f"{move_id}: the journal is gone and {link.node} is away; nothing runs"
                self._events.publish("offload.in_doubt", text, node=node)
                return
            if there["going"]:
                await self._links.get(node).call("out_finish", move_id=move_id, label=f"moved to {link.node}")
                return
        await self._links.get(node).call("out_abort", move_id=move_id, timeout_s=120)
        self._events.publish("offload.aborted", f"{move_id}: the journal is gone; its source runs on", node=node)

    async def close(self) -> None:
        await self.followers.close()
        for task in list(self._carrying):
            task.cancel()
        await asyncio.gather(*self._carrying, return_exceptions=True)
        await self.mover.close()  # last: what was called off just now may have left it something to sweep


def how_far(step: dict[str, Any], known: dict[str, Any], seconds: float) -> dict[str, Any]:
    """A step of a move with its bytes, their rate and the time that is left, where those can be told."""
    done = int(step.get("bytes") or known.get("bytes") or 0)
    total = step.get("bytes_total") or known.get("bytes_total")
    total = max(total, done) if total else total  # it may have grown since the plan
    rate = done / seconds if done and seconds > 0 else None
    left = max(0, total - done) / rate if rate and total else None
    return {"step": step.get("step", ""), "bytes": done, "bytes_total": total, "rate_bytes_s": rate, "eta_s": left}
