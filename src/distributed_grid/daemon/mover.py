"""Carries one move through its states: journal first, one commit point, from any failure the way back or forward."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from distributed_grid.core.errors import GridError, InternalError, NotFound, Refused, TimedOut, Unavailable
from distributed_grid.daemon.events import EventHub
from distributed_grid.daemon.links import NodeLink, NodeLinks
from distributed_grid.daemon.offload_back import AWAY, BEFORE_COMMIT, OVER, UNSETTLED, WayBack
from distributed_grid.daemon.staging import FileStaging
from distributed_grid.store.moves import MoveRow, Moves

__all__ = ["AWAY", "BEFORE_COMMIT", "OVER", "UNSETTLED", "MoveRequest", "Mover", "why_never_ran"]

log = logging.getLogger(__name__)

#: A move that shows no progress for this long is called off (before the commit only).
STALL_S = 120.0
#: A restore that is slower than this is none: with `--strict`, or with a GPU, it takes its time.
SLOW_RESTORE_BYTES_S = 200e6
GO_LIMIT_S = 45.0
RETRY_S = 0.5
#: The target answers, and has nothing that could be let go.
NOTHING_THERE = ("not-staged", "move-not-found", "task-not-found")

Progress = Callable[[dict[str, Any]], None]


@dataclass(slots=True)
class MoveRequest:
    """What is to be moved where, and how; decided by the plan."""

    move_id: str
    node: str
    pid: int
    start_ticks: int
    target: str
    uid: int
    strategy: str
    command: str
    options: dict[str, Any] = field(default_factory=dict)
    #: Relaunch only: the task that starts at the target.
    spec: dict[str, Any] | None = None
    #: More for the journal: automatic, reason, home…
    facts: dict[str, Any] = field(default_factory=dict)


class Mover(WayBack):
    def __init__(self, moves: Moves, links: NodeLinks, events: EventHub, files: FileStaging) -> None:
        super().__init__(moves, links, events, files)
        #: By move, once it is committed: asked for twice, it is done once.
        self._finishing: dict[str, asyncio.Task[MoveRow]] = {}

    # -- forward --------------------------------------------------------------------------------------------------

    async def move(self, request: MoveRequest, progress: Progress) -> MoveRow:
        """From PLANNED to RUNNING; on any failure before the commit the source runs on and the error is raised."""
        data = {
            "command": request.command, "strategy": request.strategy, "options": _plain(request.options),
            **request.facts,
        }  # fmt: skip
        now = time.time()
        row = MoveRow(
            request.move_id, "PLANNED", request.node, request.pid, request.start_ticks, request.target, request.uid,
            now, now, data,
        )  # fmt: skip
        self._moves.start(row, f"to {request.target}, {request.strategy}")
        commit_tried = False
        try:
            self._publish(
                "offload.started", f"Moving PID {request.pid} to {request.target} ({request.strategy})",
                node=request.node, move=request.move_id, pid=request.pid, target=request.target,
            )  # fmt: skip
            if request.strategy == "live":
                await self._carry(request, progress)
            else:
                await self._prepare_relaunch(request, progress)
            self._check_cancelled()
            commit_tried = True
            self.step(request.move_id, "COMMITTED", "the copy is there; from here there is only forward")
        except BaseException as error:
            await asyncio.shield(self._abort_for(request.move_id, error, commit_tried))
            raise
        # Whoever asked may hang up now: what is committed is carried on.
        row = await self.finish(request.move_id, progress)
        if row.state == "ABORTED":
            reason = str(row.data.get("reason", ""))
            raise GridError(f"PID {row.pid} stays on {row.node}", cause=reason, code="not-moved")
        return row

    def _check_cancelled(self) -> None:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise asyncio.CancelledError

    async def _carry(self, request: MoveRequest, progress: Progress) -> None:
        source, target = self._links.get(request.node), self._links.get(request.target)
        move_id = request.move_id
        progress({"state": "PLANNED", "step": f"preparing {request.target}"})
        await self._files.before(move_id, request.node, request.target, request.facts)
        place = await target.call(
            "in_prepare", move_id=move_id, options={**request.options.get("target", {}), "task_id": move_id}
        )
        await source.call(
            "out_begin", move_id=move_id, pid=request.pid, start_ticks=request.start_ticks, host=place["host"],
            port=place["port"], key=place["key"], options=request.options.get("source", {}),
        )  # fmt: skip
        await self._await_copied(request, source, target, progress)
        self.step(move_id, "COPIED", "frozen, and all of it is on the target")
        progress({"state": "COPIED", "step": "restoring"})
        await self._files.after_freeze(move_id, request.node, request.target, request.facts)
        await self._await_staged(request, target)
        self.step(move_id, "STAGED", "restored on the target, stopped")
        await self._check_held(move_id, source)

    async def _check_held(self, move_id: str, source: NodeLink) -> None:
        held = await source.call("out_status", move_id=move_id)
        if held["woken"] or not held["held"]:
            raise Refused("somebody woke or ended the process while it was frozen", code="woken")

    async def _await_copied(self, request: MoveRequest, source: NodeLink, target: NodeLink, progress: Progress) -> None:
        last, moved_at, frozen = -1, time.monotonic(), False
        while True:
            status = await source.call(
                "out_wait", move_id=request.move_id, phases=[] if frozen else ["frozen", "freezing"], within_s=0.5
            )
            figures = status.get("figures") or {}
            if status["phase"] == "copied":
                figures = {**figures, "frozen_at": status.get("frozen_at")}
                self._moves.update(request.move_id, data=self._with(request.move_id, figures=figures))
                return
            if status.get("error"):
                raise GridError.from_wire(status["error"])
            if status["phase"] in ("failed", "aborted") or not status["mover_alive"]:
                raise GridError(
                    "the move broke off", cause=f"the source's mover ended in {status['phase']}", code="mover-lost"
                )
            if not frozen and status["phase"] not in ("new", "precopy"):
                frozen = True
                self.step(request.move_id, "FROZEN", "the source is held")
            there = await target.call("in_status", move_id=request.move_id)
            if there["phase"] in ("failed", "lost"):
                cause = (there.get("error") or {}).get("message", "its receiver ended")
                raise GridError(f"{request.target} could not take it", cause=cause, code="target-failed")
            done = int(there.get("received_bytes") or figures.get("bytes") or 0)
            progress(
                {"state": "FROZEN" if frozen else "PLANNED", "step": status["phase"], "bytes": done,
                 "bytes_total": request.facts.get("bytes_total")}
            )  # fmt: skip
            mark = hash((done, status["phase"], len(figures.get("passes", []))))
            if mark != last:
                last, moved_at = mark, time.monotonic()
            elif time.monotonic() - moved_at > STALL_S:
                raise TimedOut(
                    f"no progress for {STALL_S:.0f} s", cause=f"it stands at {status['phase']}", code="stalled"
                )

    async def _await_staged(self, request: MoveRequest, target: NodeLink) -> None:
        limit = time.monotonic() + STALL_S + int(request.facts.get("bytes_total") or 0) / SLOW_RESTORE_BYTES_S
        while True:
            status = await target.call("in_wait", move_id=request.move_id, phases=["staged"], within_s=2.0)
            if status["phase"] == "staged":
                return
            if status["phase"] in ("failed", "lost", "dropped", "exited"):
                if status.get("error"):
                    raise GridError.from_wire(status["error"])
                raise GridError("the copy could not be restored", cause=status["phase"], code="restore-failed")
            if time.monotonic() > limit:
                raise TimedOut("the copy was not restored in time", code="stalled")

    async def _prepare_relaunch(self, request: MoveRequest, progress: Progress) -> None:
        assert request.spec is not None
        source, target = self._links.get(request.node), self._links.get(request.target)
        progress({"state": "PLANNED", "step": f"preparing {request.target}"})
        await self._files.before(request.move_id, request.node, request.target, request.facts)
        await self._let_save(request, source, progress)
        await source.call("out_hold", move_id=request.move_id, pid=request.pid, start_ticks=request.start_ticks)
        self.step(request.move_id, "FROZEN", "the source is held")
        await self._files.after_freeze(request.move_id, request.node, request.target, request.facts)
        self.step(request.move_id, "COPIED", "its files are there; nothing of its memory is carried")
        status = await target.call("task_start", task_id=request.move_id, spec={**request.spec, "hold": True})
        if status["state"] != "staged":
            error = status.get("error")
            raise (
                GridError.from_wire(error)
                if error
                else GridError("it could not be prepared on the target", cause=status["state"], code="relaunch-failed")
            )
        await self._check_held(request.move_id, source)
        self.step(request.move_id, "STAGED", "prepared on the target up to its start")
        await self._check_held(request.move_id, source)

    async def _let_save(self, request: MoveRequest, source: NodeLink, progress: Progress) -> None:
        """Where a signal for it is configured: the program may save itself before it is held."""
        asked = request.options.get("save") or {}
        if not asked.get("number"):
            return
        progress({"state": "PLANNED", "step": f"letting it save itself, {asked['grace_s']:g} s"})
        alive = await source.call(
            "stage_save", pid=request.pid, start_ticks=request.start_ticks, timeout_s=asked["grace_s"] + 60, **asked
        )
        if not alive:
            raise Refused(f"PID {request.pid} ended when it was asked to save itself", code="gone")

    async def _abort_for(self, move_id: str, error: BaseException, commit_tried: bool) -> None:
        text = f"{error.message}: {error.cause}".rstrip(": ") if isinstance(error, GridError) else "it was called off"
        await self.abort(move_id, text, commit_tried=commit_tried)

    # -- after the commit -----------------------------------------------------------------------------------------

    async def finish(self, move_id: str, progress: Progress | None = None) -> MoveRow:
        """From COMMITTED or IN_DOUBT to RUNNING, however long the target is away; then the stub."""
        task = self._finishing.get(move_id)
        if task is None:
            task = self._finishing[move_id] = self._spawn(self._finish(move_id, progress), f"finish-{move_id}")
            task.add_done_callback(lambda _: self._finishing.pop(move_id, None))
        return await asyncio.shield(task)

    async def _finish(self, move_id: str, progress: Progress | None) -> MoveRow:
        if progress:
            progress({"state": "COMMITTED", "step": "letting it go"})
        while True:
            try:
                row = self._moves.get(move_id)
                if row.state not in UNSETTLED:
                    break
                await self._let_go(row)
                continue
            except GridError as error:
                self._doubt(move_id, error, progress)
            except Exception as error:  # the daemon's loop: what is committed is not given up for a fault of ours
                log.exception("%s could not be finished", move_id)
                self._doubt(move_id, InternalError("it could not be finished", cause=str(error)), progress)
            await asyncio.sleep(RETRY_S)
        if row.state == "RUNNING":
            if progress:
                progress({"state": "RUNNING", "step": f"runs on {row.target}"})
            with contextlib.suppress(GridError):  # whoever follows it does that again, for as long as it takes
                await self.replace_source(move_id)
        return self._moves.get(move_id)

    async def _let_go(self, row: MoveRow) -> None:
        try:
            status = await self._say_go(row)
        except (NotFound, Refused) as error:
            if error.code not in NOTHING_THERE:
                raise
            # It answers, and has nothing to let go: the copy is gone with its memory, so the source is the one.
            await self._check_never_ran(row)
            await self.abort(row.id, f"the copy on {row.target} is gone ({error.message})")
            return
        if self._moves.get(row.id).state not in UNSETTLED:
            return  # a person decided meanwhile
        if row.data.get("strategy") != "live":
            if reason := why_never_ran(status):
                await self.abort(row.id, reason)
                return
            if status["state"] not in ("running", "exited", "failed"):
                raise Unavailable(f"it is {status['state']} on {row.target}", code="target-unclear")
        pause = self._pause_of(row, float(status.get("started_at") or 0.0))
        running = {"pid": status["pid"], "start_ticks": status["start_ticks"]}
        self.step(
            row.id, "RUNNING", f"runs on {row.target}",
            data=self._with(row.id, running=running, pause_s=pause),
        )  # fmt: skip
        self._publish(
            "offload.running", f"Offloaded PID {row.pid} to {row.target}", node=row.node, move=row.id, pid=row.pid,
            target=row.target,
        )  # fmt: skip

    async def _say_go(self, row: MoveRow) -> dict[str, Any]:
        target = self._links.get(row.target)
        status: dict[str, Any]
        if row.data.get("strategy") == "live":
            status = await target.call("in_go", move_id=row.id, timeout_s=GO_LIMIT_S)
        else:
            status = await target.call("task_go", task_id=row.id, timeout_s=GO_LIMIT_S)
        return status

    async def _check_never_ran(self, row: MoveRow) -> None:
        """A copy that was let go and then lost may have run: only a person can say which one counts.

        Unless the whole node was started anew: then it is surely gone, and nothing of what it wrote came home.
        """
        if row.data.get("strategy") != "live":
            return
        try:
            status = await self._links.get(row.target).call("in_status", move_id=row.id)
        except NotFound as error:
            if error.code != "move-not-found":
                raise
            return
        if status.get("going") and not status.get("rebooted"):
            raise Unavailable(f"it was let go on {row.target} and then lost there", code="target-unclear")

    # -- by a person's word ---------------------------------------------------------------------------------------

    def decide_there(self, move_id: str) -> None:
        """A person says that it runs there: the source goes. The word to go may not have arrived, so it is owed."""
        data = self._with(
            move_id, running={"pid": 0, "start_ticks": 0}, reason="decided by hand: it runs there", go_owed=True
        )
        self.step(move_id, "RUNNING", "decided by hand: it runs there", data=data)

    async def pay_go(self, move_id: str) -> bool:
        """Say go where it is owed; False if the target answers and has nothing of it."""
        row = self._moves.get(move_id)
        if not row.data.get("go_owed"):
            return True
        try:
            status = await self._say_go(row)
            if status.get("state") in ("prepared", "staged"):
                raise Unavailable(f"it does not start on {row.target}", code="target-unclear")
        except (NotFound, Refused) as error:
            if error.code not in NOTHING_THERE:
                raise
            try:
                status = await self._links.get(row.target).call("task_status", task_id=row.id)
            except NotFound as gone:
                if gone.code != "task-not-found":
                    raise
                return False
        running = {"pid": status["pid"], "start_ticks": status["start_ticks"]}
        self._moves.update(move_id, data=self._with(move_id, running=running, go_owed=False))
        return True

    # -- figures, doubt, the stub ---------------------------------------------------------------------------------

    def _pause_of(self, row: MoveRow, started_at: float) -> float | None:
        """From the freeze to the first step there; the nodes' clocks may differ, so never more than we saw pass."""
        frozen = [step.at for step in self._moves.steps(row.id) if step.state == "FROZEN"]
        if not frozen:
            return None
        seen = max(0.0, time.time() - frozen[0])
        exact = started_at - float((row.data.get("figures") or {}).get("frozen_at") or 0.0)
        return round(exact if 0 < exact < seen + 5 else seen, 3)

    def _doubt(self, move_id: str, error: GridError, progress: Progress | None) -> None:
        """Once it is told; where even that cannot be written, the move stays COMMITTED and is asked for again."""
        with contextlib.suppress(GridError):
            row = self._moves.get(move_id)
            if row.state != "COMMITTED":
                return
            story = f"{row.target} did not say whether it runs: {error.message}"
            self.step(row.id, "IN_DOUBT", story)
            if progress:
                told = f"{story}; nothing runs until it answers, or grid offload resolve {row.id} --here|--there"
                progress({"state": "IN_DOUBT", "step": told})
            self._publish(
                "offload.in_doubt", f"PID {row.pid}: {story}; nothing runs until it answers", node=row.target,
                move=row.id, hint=f"grid offload resolve {row.id} --here|--there",
            )  # fmt: skip

    async def replace_source(self, move_id: str) -> None:
        """The source's tree goes, its pid lives on as the stub. May be repeated."""
        async with self._lock(move_id):
            await self._replace_source(move_id)

    async def _replace_source(self, move_id: str) -> None:
        row = self._moves.get(move_id)
        if row.state != "RUNNING":
            return
        source = self._links.get(row.node)
        previous = row.data.get("from_task")
        label = f"moved to {row.target}: {row.data.get('command', '')}"
        status = await source.call(
            "out_finish", move_id=move_id, label=label, stub=not previous, moved_task=previous or "", timeout_s=90,
            wait_s=20,
        )  # fmt: skip
        data = self._with(move_id, stub=bool(status["stub"]), stub_reason=status.get("stub_reason", ""))
        story = "its pid at home is a stub" if status["stub"] else "the source is gone"
        self.step(move_id, "CLEANED", story, data=data)
        if not previous and not status["stub"]:
            text = f"PID {row.pid} has no stub at home ({data['stub_reason']}); its program runs on, on {row.target}"
            hint = f"grid offload logs -f {move_id}"
            self._publish("offload.stub_gone", text, node=row.target, move=move_id, hint=hint)


def why_never_ran(status: dict[str, Any]) -> str:
    """Of a relaunch that was told to go: why its program surely never ran, empty where it did or may have."""
    if status["state"] == "lost" and status["rebooted"]:
        return "the target was started anew: its copy is gone"
    if status["started"] or status["state"] not in ("failed", "exited", "lost"):
        return ""
    if status["state"] == "failed":  # up to its exec, and no further
        error = status.get("error") or {}
        return f"{error.get('message') or 'it could not be started'}: {error.get('cause') or ''}".rstrip(": ")
    return "" if status["going"] else "its copy ended before it was let go"


def _plain(options: dict[str, Any]) -> dict[str, Any]:
    """What the journal keeps of the options: never an environment."""
    return {side: {k: v for k, v in values.items() if k != "env"} for side, values in options.items()}
