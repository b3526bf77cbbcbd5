"""Stays with a moved process: its output into the stub, the stub's input and signals to it, its end to everybody."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from distributed_grid.core.errors import GridError, TimedOut, Unavailable
from distributed_grid.daemon.events import EventHub
from distributed_grid.daemon.links import NodeLinks
from distributed_grid.daemon.mover import AWAY, Mover
from distributed_grid.daemon.staging import FileStaging
from distributed_grid.store.moves import MoveRow, Moves

log = logging.getLogger(__name__)

RETRY_S = 0.3
FDS = {"stdout": 1, "stderr": 2}


class Followers:
    """One task per process that runs away from home."""

    def __init__(
        self, moves: Moves, links: NodeLinks, events: EventHub, mover: Mover, files: FileStaging,
        moved_on: Callable[[str], Awaitable[None]],
    ) -> None:  # fmt: skip
        self._files = files
        self._moved_on = moved_on
        self._moves = moves
        self._links = links
        self._events = events
        self._mover = mover
        self._tasks: dict[str, asyncio.Task[None]] = {}
        #: By the move that left the stub: the last of its signals that reached the program.
        self._heard: dict[str, int] = {}

    def follow(self, move_id: str) -> None:
        task = self._tasks.get(move_id)
        if task is None or task.done():
            self._tasks[move_id] = asyncio.create_task(self._run(move_id), name=f"moved-{move_id}")

    async def leave(self, move_id: str) -> None:
        task = self._tasks.pop(move_id, None)
        if task:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def close(self) -> None:
        for move_id in list(self._tasks):
            await self.leave(move_id)

    # -- one process ----------------------------------------------------------------------------------------------

    async def _run(self, move_id: str) -> None:
        while self._moves.get(move_id).state in AWAY:
            try:
                await self._mover.replace_source(move_id)
                await self._moved_on(move_id)
                await self._follow(move_id)
                return
            except Unavailable as error:
                if error.code == "stub":
                    await self._check_stub(move_id)
                await asyncio.sleep(RETRY_S)
            except GridError as error:
                log.warning("%s: %s %s", move_id, error.message, error.cause)
                await asyncio.sleep(5 * RETRY_S)
            except Exception:
                log.exception("following %s failed", move_id)
                await asyncio.sleep(10 * RETRY_S)

    async def _check_stub(self, move_id: str) -> None:
        """A stub that was killed: the program lives on, and it is said how to end it."""
        row = self._moves.get(move_id)
        home = row.data.get("home") or {"node": row.node, "move": row.id}
        if row.data.get("stub_gone"):
            return
        with contextlib.suppress(GridError):
            status = await self._links.get(home["node"]).call("out_status", move_id=home["move"])
            if not status["alive"]:
                self._moves.update(move_id, data={**row.data, "stub_gone": True})
                await self._links.get(home["node"]).call("stub_exit", move_id=home["move"])  # what it left behind
                text = f"PID {row.pid} at home was killed; its program runs on, on {row.target}"
                self._events.publish("offload.stub_gone", text, node=row.target, move=move_id)

    async def _follow(self, move_id: str) -> None:
        row = self._moves.get(move_id)
        beside = [asyncio.create_task(work) for work in (self._relay_signals(row), self._relay_input(row))]
        try:
            ended = await self._relay_output(row)
        finally:
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)
        await self._end(row, ended)

    async def _relay_output(self, row: MoveRow) -> dict[str, Any]:
        """Spool to stub, each byte once: the stub knows how much it has written, whatever of ours was killed."""
        home = row.data.get("home") or {"node": row.node, "move": row.id}
        base = row.data.get("base") or {"stdout": 0, "stderr": 0}
        offsets = {"stdout": 0, "stderr": 0}
        stub = await self._has_stub(row)
        if stub:
            offsets = await self._written(home, base)
        target = self._links.get(row.target)
        async for item in target.stream(
            "task_follow", wait_s=5.0, task_id=row.id, stdout_from=offsets["stdout"], stderr_from=offsets["stderr"]
        ):
            if "exit" in item:
                status: dict[str, Any] = item["exit"]
                return status
            if stub:
                await self._links.get(home["node"]).call(
                    "stub_write", wait_s=5.0, move_id=home["move"], fd=FDS[item["stream"]],
                    offset=base[item["stream"]] + item["offset"], data=item["data"],
                )  # fmt: skip
        raise Unavailable(f"{row.target} ended the stream of {row.id}")

    async def _written(self, home: dict[str, Any], base: dict[str, int]) -> dict[str, int]:
        """How much of each stream the stub has written, of what this move's spool holds."""
        offsets = await self._links.get(home["node"]).call("stub_offsets", wait_s=5.0, move_id=home["move"])
        return {name: max(0, int(offsets[str(fd)]) - base[name]) for name, fd in FDS.items()}

    async def _has_stub(self, row: MoveRow) -> bool:
        home = row.data.get("home")
        origin = self._moves.find(home["move"]) if home else row
        return bool(origin and origin.data.get("stub")) and not row.data.get("stub_gone")

    async def _relay_signals(self, row: MoveRow) -> None:
        """What is sent to the pid at home reaches the program, at least once: the stub tells it until it is heard."""
        home = row.data.get("home") or {"node": row.node, "move": row.id}
        if not await self._has_stub(row):
            return
        while True:
            with contextlib.suppress(GridError):
                async for item in self._links.get(home["node"]).stream("stub_follow", wait_s=5.0, move_id=home["move"]):
                    if "signal" in item:
                        await self._deliver(row, home, int(item["signal"]), int(item["number"]))
            await asyncio.sleep(RETRY_S)

    async def _deliver(self, row: MoveRow, home: dict[str, Any], signal: int, number: int) -> None:
        if number > self._heard.get(home["move"], 0):
            target = self._links.get(row.target)
            try:
                if not await target.call("task_signal", wait_s=30.0, task_id=row.id, number=signal):
                    raise Unavailable(f"{row.id} is gone from {row.target}: it ended, or another move carried it on")
            except (Unavailable, TimedOut):
                raise  # it is told again
            except GridError as error:
                log.warning("%s: signal %d is lost: %s %s", row.id, signal, error.message, error.cause)
            self._heard[home["move"]] = number
        await self._links.get(home["node"]).call("stub_heard", wait_s=5.0, move_id=home["move"], upto=number)

    async def _relay_input(self, row: MoveRow) -> None:
        """What comes into the stub goes on to the program, each byte once: its node knows how far that is."""
        while True:
            try:
                await self._feed(row)
                return
            except Unavailable as error:
                if error.code == "stub":
                    await self._check_stub(row.id)
            except GridError as error:
                if error.code == "stub-input":
                    self.lose_input(row)
                elif error.code != "job-input":  # which is a program that takes its time
                    log.warning("the input of %s: %s %s", row.id, error.message, error.cause)
            except Exception:
                log.exception("the input of %s could not be passed on", row.id)
            await asyncio.sleep(RETRY_S)

    def lose_input(self, row: MoveRow) -> None:
        self._moves.update(row.id, data={**self._moves.get(row.id).data, "input_lost": True})
        text = f"PID {row.pid} on {row.target}: nobody knows how much of its input it had read, so that ends here"
        self._events.publish("offload.input_lost", text, node=row.target, move=row.id)

    async def _feed(self, row: MoveRow) -> None:
        home = row.data.get("home") or {"node": row.node, "move": row.id}
        base = int((row.data.get("base") or {}).get("stdin", 0))
        stub, target = self._links.get(home["node"]), self._links.get(row.target)
        if not row.data.get("input"):
            if await self._has_stub(self._moves.get(row.id)):
                await stub.call("stub_input_over", wait_s=5.0, move_id=home["move"])
            return
        there = await target.call("job_input_state", wait_s=5.0, task_id=row.id)
        at, ended, read = int(there["accepted"]), there["ended"], there["reads"] and not there["over"]
        lost = bool(self._moves.get(row.id).data.get("input_lost"))
        while read and not ended:
            part: dict[str, Any] = {"data": b"", "end": True}  # without a stub nobody can read any more of it
            now = self._moves.get(row.id)
            lost = bool(now.data.get("input_lost"))
            if await self._has_stub(now) and not lost:
                part = await stub.call("stub_input", wait_s=5.0, timeout_s=60, move_id=home["move"], offset=base + at)
            if part["data"] or part["end"]:
                read = await target.call(
                    "job_input", wait_s=5.0, timeout_s=700, task_id=row.id, data=part["data"], offset=at,
                    last=part["end"],
                )  # fmt: skip
            else:  # nobody writes for a while
                read = (await target.call("job_input_state", wait_s=5.0, task_id=row.id))["reads"]
            at, ended = at + len(part["data"]), part["end"]
        over = (await target.call("job_input_state", wait_s=5.0, task_id=row.id))["over"]
        if not over and (lost or not read) and await self._has_stub(self._moves.get(row.id)):
            await stub.call("stub_input_over", wait_s=5.0, move_id=home["move"])

    # -- the end --------------------------------------------------------------------------------------------------

    async def _end(self, row: MoveRow, ended: dict[str, Any]) -> None:
        row = self._moves.get(row.id)
        if row.state != "CLEANED":
            return
        state = ended["state"]
        if (ended.get("error") or {}).get("code") == "moved":
            return  # carried on to another node: its next move follows it
        home = row.data.get("home") or {"node": row.node, "move": row.id}
        code, number = ended.get("exit_code"), ended.get("signal")
        if state == "lost":
            story, final = f"{row.target} lost it: its shim ended, or the node was started anew", "LOST"
            code, number = None, 9
        else:
            story, final = f"ended with {code}", "ENDED"
        brought = await self._bring_files(row)  # before whoever waits for the pid at home looks for them
        if await self._has_stub(row):
            await self._links.get(home["node"]).call(
                "stub_exit", wait_s=5.0, move_id=home["move"], code=code or 0, signal=number or 0
            )
        data = {**row.data, "exit_code": code, "ended": time.time(), **brought}
        self._mover.step(row.id, final, story, data=data)
        kind = "offload.lost" if final == "LOST" else "offload.ended"
        self._events.publish(
            kind, f"PID {row.pid} on {row.target}: {story}", node=row.target, move=row.id, exit_code=code
        )
        await self._forget(row)

    async def _bring_files(self, row: MoveRow) -> dict[str, Any]:
        """What it changed comes home; a failure is said, and `grid offload sync` tries again."""
        try:
            done = await self._files.bring_home(row.id)
        except (Unavailable, TimedOut):
            raise  # as soon as both are back
        except GridError as error:
            text = f"files of PID {row.pid} are still on {row.target}: {error.message} {error.cause}".rstrip()
            hint = f"grid offload sync {row.id}"
            self._events.publish("offload.files_left", text, node=row.target, move=row.id, hint=hint)
            return {"files_error": text}
        self._files.forget(row.id)
        return {"files_home": len(done["files"]), "conflicts": done["conflicts"]}

    async def _forget(self, row: MoveRow) -> None:
        """The agents' records of the move; the output stays for `grid offload logs`."""
        sides = [(row.node, row.id), (row.target, row.id)]
        self._heard.pop((row.data.get("home") or {"move": row.id})["move"], None)
        if home := row.data.get("home"):
            sides.append((home["node"], home["move"]))
        for node, move_id in sides:
            with contextlib.suppress(GridError):
                await self._links.get(node).call("move_forget", move_id=move_id)
