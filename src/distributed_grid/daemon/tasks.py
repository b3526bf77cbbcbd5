"""Users' commands on nodes: journalled, started once, followed across the death of anything of ours."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import pwd
import secrets
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from distributed_grid.core.errors import GridError, NotFound, Refused, TimedOut, Unavailable, UsageError
from distributed_grid.daemon.events import EventHub
from distributed_grid.daemon.links import NodeLink, NodeLinks
from distributed_grid.store.tasks import TaskRow, Tasks
from distributed_grid.wire.channel import ChannelClosed
from distributed_grid.wire.rpc import CallContext, method

log = logging.getLogger(__name__)

#: A node that is away for a moment (its agent or Ray was killed) is waited for this long before a command gives up.
NODE_PATIENCE_S = 20.0
#: The agent itself gives a start up after less than that.
START_LIMIT_S = 45.0
#: A command that no agent has started by then has been given up by whoever asked for it.
UNSTARTED_LIMIT_S = 60.0
#: What is remembered of ended commands on each node, with their output there.
KEPT_PER_NODE = 500
SWEEP_EVERY = 100
ENDED = ("exited", "failed", "lost")
ACTIVE = ("prepared", "staged", "running")
#: How often the nodes are asked about commands that nobody follows.
LOOK_EVERY_S = 2.0
#: How the ids of moved processes begin; those are the offload's to follow.
OFFLOAD = "offload_"


def new_task_id() -> str:
    return f"task_{int(time.time())}_{secrets.token_hex(3)}"


def user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def uid_of(name: str) -> int:
    try:
        return pwd.getpwnam(name).pw_uid
    except KeyError:
        return int(name) if name.isdigit() else os.geteuid()


def account_on(link: NodeLink, uid: int) -> str:
    """The account that a caller's commands run under on a node; empty: the agent's own.

    The daemon's owner is whoever the nodes' configuration lets in, under another name on each, perhaps. An agent of
    root's can be anybody, so there he is himself.
    """
    agent_uid = link.state.agent.get("uid", 0)
    return "" if uid == os.geteuid() and agent_uid != 0 else user_name(uid)


class TaskService:
    def __init__(self, store: Tasks, links: NodeLinks, events: EventHub) -> None:
        self._store = store
        self._links = links
        self._events = events
        #: Told the id of each task that has ended.
        self.on_end: list[Callable[[str], None]] = []
        self._ended = 0
        #: Nodes whose commands are not all taken over: the journal could not be written.
        self._owed: set[str] = set()
        self._sweeps: set[asyncio.Future[None]] = set()

    def _own(self, context: CallContext, row: TaskRow) -> TaskRow:
        if context.uid not in (0, os.geteuid(), row.uid):
            raise Refused(f"{row.id} belongs to {user_name(row.uid)}", code="not-yours")
        return row

    def _find(self, context: CallContext, task_id: str) -> TaskRow:
        return self._own(context, self._store.get_by_prefix(task_id))

    @method
    async def task_start(
        self,
        context: CallContext,
        *,
        node: str,
        argv: list[str],
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        task_id: str | None = None,
        cwd_optional: bool = False,
    ) -> dict[str, Any]:
        """Start a command on a node. Safe to repeat with the same `task_id`: it is started once.

        `cwd_optional`: where that directory is not on the node, the user's home there is used.
        """
        if not argv or not argv[0]:
            raise UsageError("no command given", hint="grid execute -n gpu1 hostname", code="no-command")
        link = self._links.get(node)
        task_id = task_id or new_task_id()
        row = self._store.find(task_id)
        if row is None:
            row = TaskRow(task_id, node, context.uid, argv, "prepared", time.time())
            await link.client(NODE_PATIENCE_S)  # a node that is away is told before anything is written
            self._store.put(row)
        self._own(context, row)
        if row.node != node:
            raise Refused(f"{row.id} is a command on {row.node}", code="task-elsewhere")
        if row.state in ENDED:  # asked again after the answer was lost; the node may have forgotten it by now
            return {
                "task_id": row.id, "node": row.node, "state": row.state, "argv": row.argv, "exit_code": row.exit_code,
                "error": row.detail.get("error"),
            }  # fmt: skip
        await link.client(NODE_PATIENCE_S)  # it says under which account it runs
        spec = {"argv": argv, "cwd": cwd or "", "env": env or {}, "user": account_on(link, context.uid)}
        deadline = time.monotonic() + NODE_PATIENCE_S
        while True:
            try:
                status: dict[str, Any] = await link.call(
                    "task_start", wait_s=NODE_PATIENCE_S, timeout_s=START_LIMIT_S, task_id=task_id, spec=spec,
                    cwd_optional=cwd_optional,
                )  # fmt: skip
                break
            except ChannelClosed:  # the agent died over it: the next one starts it, or finds it started
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.1)
            except GridError as error:
                if not isinstance(error, Unavailable | TimedOut):  # else it may run: the agent will say
                    self._end(task_id, "failed", None, error.to_wire())
                raise
        self.note(node, status)
        return status

    def note(self, node: str, status: dict[str, Any]) -> None:
        """Bring the journal up to what the agent says; a task the journal does not know is taken over."""
        row = self._store.find(status["task_id"])
        if row is None:
            uid = uid_of(str(status.get("user", "")))
            row = TaskRow(status["task_id"], node, uid, list(status.get("argv", [])), "prepared", time.time())
            self._store.put(row)
            self._events.publish(
                "task.adopted", f"{row.id} is running on {node}; the journal did not know it", node=node
            )
        if row.state in ENDED:
            return
        if status["state"] in ENDED:
            self._end(row.id, status["state"], status.get("exit_code"), status.get("error"))
            self._events.publish(
                "task.ended", f"{row.id} on {node}: {status['state']} {status.get('exit_code', '')}".rstrip(), node=node
            )
            self._ended += 1
            if self._ended % SWEEP_EVERY == 0:
                self._sweep(node)
        elif row.state != status["state"]:
            self._store.update(row.id, state=status["state"], started=row.started or time.time())

    def _end(self, task_id: str, state: str, exit_code: int | None, error: dict[str, Any] | None) -> None:
        detail = {"error": error} if error else {}
        self._store.update(task_id, state=state, exit_code=exit_code, ended=time.time(), detail=detail)
        for tell in self.on_end:
            tell(task_id)

    def _active(self, node: str | None = None) -> list[TaskRow]:
        return self._store.list(node=node, state=ACTIVE) if node else self._store.list(state=ACTIVE)

    async def run(self) -> None:
        """A command ends in the journal, and is told, also where nobody follows it."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            online = {link.node for link in self._links if link.state.online}
            for node in sorted(({row.node for row in self._active()} | self._owed) & online):
                try:
                    await (self.adopt(node) if node in self._owed else self._look(node))
                except GridError as error:  # the link says when the node is away, and then all is taken over anew
                    log.info("commands on %s: %s", node, error)
                except Exception:
                    log.exception("commands on %s", node)

    async def _look(self, node: str) -> None:
        asked = [row.id for row in self._active(node) if not row.id.startswith(OFFLOAD) and "lease" not in row.detail]
        if asked:
            await self._take_over(node, await self._links.get(node).call("task_list", task_ids=asked), set(asked))

    async def adopt(self, node: str) -> None:
        """What a node's agent holds is the truth about that node: take it over, now or when the journal lets us."""
        statuses = await self._links.get(node).call("task_list")
        self._owed.add(node)
        try:
            await self._take_over(node, statuses, {row.id for row in self._active(node)})
        except GridError as error:  # no fault of the line: to drop it would help nobody
            log.warning("%s: not all commands were taken over yet: %s", node, error)
            return
        self._owed.discard(node)
        self._sweep(node)

    async def _take_over(self, node: str, statuses: list[dict[str, Any]], asked: set[str]) -> None:
        for status in statuses:
            if not status["task_id"].startswith(OFFLOAD):
                self.note(node, status)
        held = {status["task_id"] for status in statuses if status["state"] != "prepared"}
        for row in self._active(node):
            if row.id not in asked or row.id in held or time.time() - row.created < UNSTARTED_LIMIT_S:
                continue
            try:
                await self._links.get(node).call("task_remove", task_id=row.id)  # perhaps prepared, never started
            except NotFound:
                pass
            except Refused:
                continue  # it is being started just now
            self._end(row.id, "lost", None, None)
            self._events.publish("task.lost", f"{row.id}: {node} knows nothing of it", node=node)

    def _sweep(self, node: str) -> None:
        sweeping = asyncio.ensure_future(self._forget_old(node))
        self._sweeps.add(sweeping)
        sweeping.add_done_callback(self._sweeps.discard)

    async def _forget_old(self, node: str) -> None:
        """The oldest ended commands go, here and with their output there; else both would grow without end."""
        ended = [row for row in self._store.list(node=node, state=ENDED) if not row.id.startswith(OFFLOAD)]
        for row in ended[KEPT_PER_NODE:]:
            try:
                with contextlib.suppress(NotFound):
                    await self._links.get(node).call("task_remove", task_id=row.id)
                self._store.delete(row.id)
            except Refused as error:  # what it left behind still runs
                log.info("%s is kept: %s", row.id, error.message)
            except GridError as error:
                log.info("old commands on %s are kept for now: %s", node, error.message)
                return

    @method
    async def task_list(
        self, context: CallContext, *, node: str | None = None, active: bool = False
    ) -> list[dict[str, Any]]:
        rows = self._active(node) if active else (self._store.list(node=node) if node else self._store.list())
        return [dataclasses.asdict(row) for row in rows if context.uid in (0, os.geteuid(), row.uid)]

    @method
    async def task_status(self, context: CallContext, *, task_id: str) -> dict[str, Any]:
        row = self._find(context, task_id)
        if row.state in ENDED:
            return dataclasses.asdict(row)
        status: dict[str, Any] = await self._links.get(row.node).call("task_status", task_id=row.id)
        self.note(row.node, status)
        return {**dataclasses.asdict(self._find(context, row.id)), "processes": status.get("processes", [])}

    @method
    async def task_signal(self, context: CallContext, *, task_id: str, number: int, tree: bool = True) -> bool:
        row = self._find(context, task_id)
        return bool(
            await self._links.get(row.node).call(
                "task_signal", wait_s=NODE_PATIENCE_S, task_id=row.id, number=number, tree=tree
            )
        )

    @method
    async def task_cancel(self, context: CallContext, *, task_id: str, grace_s: float = 5.0) -> dict[str, Any]:
        row = self._find(context, task_id)
        if row.state in ENDED:
            raise Refused(f"{row.id} has already ended", code="already-ended")
        status: dict[str, Any] = await self._links.get(row.node).call(
            "task_cancel", wait_s=NODE_PATIENCE_S, timeout_s=grace_s + 30, task_id=row.id, grace_s=grace_s
        )
        self.note(row.node, status)
        return status

    @method
    async def task_remove(self, context: CallContext, *, task_id: str) -> None:
        row = self._find(context, task_id)
        if row.state not in ENDED:
            raise Refused(f"{row.id} is still running", hint=f"grid jobs cancel {row.id}", code="still-running")
        try:
            await self._links.get(row.node).call("task_remove", task_id=row.id)
        except NotFound:
            pass  # a node that is only away would bring it back: then it is not removed
        self._store.delete(row.id)

    @method
    async def task_follow(
        self, context: CallContext, *, task_id: str, stdout_from: int = 0, stderr_from: int = 0, wait: bool = True
    ) -> AsyncIterator[dict[str, Any]]:
        """The task's output from the given offsets on, then its end."""
        row = self._find(context, task_id)
        wait = wait and row.state not in ENDED
        async for item in self.follow(row.node, row.id, stdout_from, stderr_from, wait):
            if "exit" in item and item["exit"]["state"] in ENDED:
                self.note(row.node, item["exit"])
            yield item

    async def follow(
        self, node: str, task_id: str, stdout_from: int, stderr_from: int, wait: bool
    ) -> AsyncIterator[dict[str, Any]]:
        """Goes on by itself when the agent comes back; without `wait` that is not waited for long."""
        offsets = {"stdout": stdout_from, "stderr": stderr_from}
        told = False
        while True:
            try:
                async for item in self._links.get(node).stream(
                    "task_follow", wait_s=1.0 if wait else NODE_PATIENCE_S, task_id=task_id,
                    stdout_from=offsets["stdout"], stderr_from=offsets["stderr"], wait=wait,
                ):  # fmt: skip
                    told = False
                    yield item
                    if "exit" in item:
                        return
                    offsets[item["stream"]] = item["offset"] + len(item["data"])
            except Unavailable as error:
                if not wait and not isinstance(error, ChannelClosed):
                    raise
                if not told:
                    yield {"away": f"{node} does not answer; the command goes on there", "cause": error.cause}
                    told = True
                await asyncio.sleep(0.3)
