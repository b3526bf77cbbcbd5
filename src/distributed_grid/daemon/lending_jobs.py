"""Commands under leases: the files they are sent, their start in the lease, their input, and what they are told."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from distributed_grid.core.errors import GridError, NotFound, Refused, TimedOut, Unavailable, UsageError
from distributed_grid.core.resources import AllocationPriority
from distributed_grid.daemon.lending_book import Waiter, new_lease_id
from distributed_grid.daemon.lending_boosts import lease_view
from distributed_grid.daemon.tasks import ENDED, NODE_PATIENCE_S, account_on, new_task_id, user_name
from distributed_grid.orchestration.resource_sharing.model import Amounts, Lease, LeaseState
from distributed_grid.store.tasks import TaskRow
from distributed_grid.wire.rpc import CallContext, method

if TYPE_CHECKING:
    from distributed_grid.daemon.control import ControlPlane
    from distributed_grid.daemon.lending import LendingService

log = logging.getLogger(__name__)

STAGING_LIMIT_S = 600.0
#: Who waits is told so after the first, and whenever it changes.
FIRST_LOOK_S, LOOK_S = 0.3, 0.5
#: A command's end is known here so soon after it.
FORGOTTEN_S = 2.0
#: How the reasons of those begin that made room for another.
PREEMPTED = "preempted"


class LendingJobs:
    def __init__(self, plane: ControlPlane, lending: LendingService) -> None:
        self._plane = plane
        self._lending = lending
        self._book = lending.book
        self._staged: dict[str, tuple[str, asyncio.Event]] = {}  # task -> (node, all files are there)
        self._notices: dict[str, _Notices] = {}  # task -> what whoever runs it is to be told

    def start(self) -> None:
        self._book.on_change.append(self._notify)

    @method
    async def lease_run(
        self, context: CallContext, *, argv: list[str], task_id: str, amounts: dict[str, int] | None = None,
        lease: str = "", priority: str = "normal", nodes: list[str] | None = None, wait_s: float | None = None,
        env: dict[str, str] | None = None, files: bool = False, stdin: bool = False, cwd: str = "",
        lease_id: str = "", terminal: str = "", terminal_stdin: bool = False,
    ) -> AsyncIterator[dict[str, Any]]:  # fmt: skip
        """Run a command under a lease of its own, or (`lease`) under one that is there.

        Yields {waiting}, {send: node} where `files` are to come by `job_put`, {started}, {notice}…, {over}. Whoever
        hangs up before {started} leaves nothing behind; afterwards the command goes on without him.
        """
        if not argv or not argv[0]:
            raise UsageError("no command given", hint="grid run-shared -r cpu -a 2 hostname", code="no-command")
        task_id = task_id or new_task_id()
        held: Lease | None = None
        starting: asyncio.Future[dict[str, Any]] | None = None
        started = False
        known = self._book.task_lease.get(task_id)
        is_ours_to_end = known is None  # an error of ours must not end what was started long ago
        try:
            there = self._book.ledger.leases.get(lease_id)
            if known is not None:  # asked again after the daemon was away
                held = self._lending.own(context, self._book.ledger.leases[known])
            elif lease:
                held = self._lending.usable(context, lease)
            elif there is not None and there.state is not LeaseState.RELEASING:
                held = self._lending.own(context, there)
            else:
                waiter = self._lending.ask(
                    lease_id if lease_id and there is None else new_lease_id(), Amounts.from_wire(amounts or {}),
                    AllocationPriority.parse(priority), context.uid, "run", "", tuple(nodes or ()), None,
                )  # fmt: skip
                async for item in self._waiting(waiter, wait_s):
                    yield item
                held = await waiter.granted
            notices = self._notices[task_id] = _Notices(held.id)
            self._book.being_started.add(held.id)
            if files and known is None:
                all_there = asyncio.Event()
                self._staged[task_id] = (held.node, all_there)
                yield {"send": held.node}
                async with asyncio.timeout(STAGING_LIMIT_S):
                    await all_there.wait()
            spec = {
                "argv": argv, "env": env or {}, "user": await self._account(context, held.node),
                "stdin": "pipe" if stdin else "", "cwd": cwd,
                **({"terminal": terminal, "terminal_stdin": terminal_stdin} if terminal else {}),
            }  # fmt: skip
            if known is None:
                async for item in self._until_active(held):
                    yield item
                held = self._book.check_startable(held.id)
            starting = asyncio.ensure_future(self._start(context, held, task_id, spec))
            starting.add_done_callback(_look_at)
            status = await asyncio.shield(starting)
            started = True
            self._book.being_started.discard(held.id)
            yield {"started": {**status, "node": held.node, "lease": lease_view(held)}}
            while held.id in self._book.ledger.leases and task_id in self._book.task_lease:
                text = await notices.next(LOOK_S)
                if text:
                    yield {"notice": text}
            while text := notices.left():
                yield {"notice": text}
            yield {"over": True}
        except TimeoutError:
            raise TimedOut(f"the files of {task_id} did not come", code="staging") from None
        except (asyncio.CancelledError, GeneratorExit):
            is_ours_to_end = not self._plane.stop_asked.is_set()  # else he comes back, to the next daemon
            raise
        finally:
            self._staged.pop(task_id, None)
            self._notices.pop(task_id, None)
            if held is not None:
                self._book.being_started.discard(held.id)
            if held is not None and not started and is_ours_to_end:
                self._book.spawn(self._call_off(context, held, task_id, starting, bool(lease)))

    async def _until_active(self, lease: Lease) -> AsyncIterator[dict[str, Any]]:
        """A command's own lease may have to make room before anything runs under it: then it is waited for."""
        told: dict[str, Any] = {}
        while (now := self._book.ledger.leases.get(lease.id)) is not None and now.kind == "run":
            if now.state not in (LeaseState.CLAIMING, LeaseState.SUSPENDED):
                return
            waiter = self._book.waiters.get(f"resume:{lease.id}")
            if waiter is not None and (place := self._book.position(waiter)) != told:
                told = place
                yield {"waiting": place}
            await asyncio.sleep(LOOK_S / 10)

    async def _call_off(
        self, context: CallContext, lease: Lease, task_id: str, starting: asyncio.Future[Any] | None, is_kept: bool
    ) -> None:
        """Whoever asked for it has gone, or it can't be: nothing of it is left, whether it just began or not."""
        if starting is not None:
            await asyncio.wait({starting})
        try:
            if not is_kept:
                await self._book.release(lease.id, reason="nothing was started under it")
            elif starting is not None and task_id in self._book.task_lease:
                await self._plane.tasks.task_cancel(context, task_id=task_id)
        except GridError as error:
            if error.code != "already-ended":
                log.warning("%s on %s could not be called off: %s", task_id, lease.node, error.message)

    async def _account(self, context: CallContext, node: str) -> str:
        link = self._plane.links.get(node)
        await link.client(NODE_PATIENCE_S)  # it says under which account it runs
        return account_on(link, context.uid)

    async def _waiting(self, waiter: Waiter, wait_s: float | None) -> AsyncIterator[dict[str, Any]]:
        """Where it stands in the queue, whenever that changes."""
        told: dict[str, Any] = {}
        waiting = asyncio.ensure_future(self._lending.wait(waiter, wait_s))
        try:
            done, _ = await asyncio.wait({waiting}, timeout=FIRST_LOOK_S)
            while not done:
                now = self._book.position(waiter)
                is_found = waiter.request.id in self._book.ledger.leases  # only its agent has yet to say yes
                if now != told and not is_found:
                    told = now
                    yield {"waiting": now}
                done, _ = await asyncio.wait({waiting}, timeout=LOOK_S)
            waiting.result()
        finally:
            if not waiting.done():
                waiting.cancel()
                await asyncio.gather(waiting, return_exceptions=True)

    async def _start(
        self, context: CallContext, lease: Lease, task_id: str, spec: dict[str, Any]
    ) -> dict[str, Any]:
        """The task is in the journal and in the lease before it can run."""
        store = self._plane.journal.tasks
        with self._plane.journal.transaction():
            if store.find(task_id) is None:
                detail = {"lease": lease.id}
                row = TaskRow(task_id, lease.node, context.uid, spec["argv"], "prepared", time.time(), detail=detail)
                store.put(row)
            current = self._book.ledger.leases[lease.id]
            if task_id not in current.tasks:
                self._book.set(lease.id, tasks=(*current.tasks, task_id))
        self._book.task_lease[task_id] = lease.id
        try:
            status: dict[str, Any] = await self._plane.links.get(lease.node).call(
                "lease_start", wait_s=20, timeout_s=60, lease_id=lease.id, fence=lease.fence, task_id=task_id, spec=spec
            )
        except GridError as error:
            if not isinstance(error, Unavailable | TimedOut):  # else it may run: the agent will say
                self._lending.loop.forget_task(task_id)
                store.update(task_id, state="failed", ended=time.time(), detail={"error": error.to_wire()})
            raise
        with self._plane.journal.transaction(durable=False):  # the agent knows it
            self._plane.tasks.note(lease.node, status)
        return status

    @method
    async def job_put(
        self, context: CallContext, *, task_id: str, data: bytes, last: bool, first: bool = False
    ) -> None:
        """Files for a job that waits for them."""
        if task_id not in self._staged:
            raise NotFound(f"{task_id} waits for no files", code="not-staging")
        node, all_there = self._staged[task_id]
        await self._plane.links.get(node).call(
            "job_put", timeout_s=120, task_id=task_id, user=await self._account(context, node), data=data, last=last,
            first=first,
        )  # fmt: skip
        if last:
            all_there.set()

    @method
    async def job_input(
        self, context: CallContext, *, task_id: str, data: bytes, offset: int, last: bool = False
    ) -> None:
        """What it reads from its standard input, from `offset` on; safe to repeat."""
        link = self._plane.links.get(self._own_task(context, task_id).node)
        await link.call(
            "job_input", wait_s=NODE_PATIENCE_S, timeout_s=700, task_id=task_id, data=data, offset=offset, last=last
        )

    @method
    async def job_made_room(self, context: CallContext, *, task_id: str, lease_id: str) -> str:
        """Why a command that has ended had to make room; empty if that was not it."""
        deadline = time.monotonic() + FORGOTTEN_S
        while task_id in self._book.task_lease and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        lease = self._book.ledger.leases.get(lease_id)
        row = self._plane.journal.leases.find(lease_id)
        if lease is None and row is not None:
            lease = Lease.from_wire(row.data)
        if lease is None or lease.state is LeaseState.ACTIVE:
            return ""
        reason = self._lending.own(context, lease).reason
        return reason if reason.startswith(PREEMPTED) else ""

    @method
    async def job_resize(self, context: CallContext, *, task_id: str, size: str) -> None:
        """The caller's terminal has another size now."""
        await self._plane.links.get(self._own_task(context, task_id).node).call(
            "job_resize", task_id=task_id, size=size
        )

    def _own_task(self, context: CallContext, task_id: str) -> TaskRow:
        row = self._plane.journal.tasks.get(task_id)
        if context.uid not in (0, os.geteuid(), row.uid):
            raise Refused(f"{row.id} belongs to {user_name(row.uid)}", code="not-yours")
        return row

    def _notify(self, lease: Lease) -> None:
        """Tell whoever runs something under it what became of it."""
        for notices in self._notices.values():
            if notices.lease_id == lease.id:
                notices.hear(lease)
        if lease.over and lease.tasks:
            self._book.spawn(self._note_ends(lease))

    async def _note_ends(self, lease: Lease) -> None:
        """What was ended with its lease: from now on no watch of leases tells of it."""
        for task_id in lease.tasks:
            try:
                status = await self._plane.links.get(lease.node).call("task_status", task_id=task_id)
                with self._plane.journal.transaction(durable=False):  # the agent keeps the exit code
                    self._plane.tasks.note(lease.node, status)
            except NotFound:
                row = self._plane.journal.tasks.find(task_id)
                if row is not None and row.state not in ENDED:
                    self._plane.journal.tasks.update(task_id, state="lost", ended=time.time())
            except GridError as error:  # asked again when the line is new
                log.info("how %s on %s ended is not known yet: %s", task_id, lease.node, error.message)


class _Notices:
    """For one command: what became of its lease, in words, in the order it happened."""

    def __init__(self, lease_id: str) -> None:
        self.lease_id = lease_id
        self._queue: asyncio.Queue[str] = asyncio.Queue()
        self._told = LeaseState.ACTIVE

    def hear(self, lease: Lease) -> None:
        text = ""  # only a reason to look again
        if lease.state is not self._told:
            if lease.reason and lease.state in (LeaseState.SUSPENDED, LeaseState.RELEASING):
                text = f"{lease.state.value}: {lease.reason}"
            elif self._told is LeaseState.SUSPENDED and lease.state is LeaseState.ACTIVE:
                text = "it goes on"
            self._told = lease.state
        self._queue.put_nowait(text)

    async def next(self, limit_s: float) -> str:
        try:
            async with asyncio.timeout(limit_s):
                return await self._queue.get()
        except TimeoutError:
            return ""

    def left(self) -> str:
        while not self._queue.empty():
            if text := self._queue.get_nowait():
                return text
        return ""


def _look_at(done: asyncio.Future[Any]) -> None:
    """Its error is told to whoever still waits for it; nobody may."""
    if not done.cancelled():
        done.exception()
