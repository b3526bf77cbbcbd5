"""The claim of a lease at its node: checked again, kept on disk, and held against everything that runs under it."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from distributed_grid.agent import job_input
from distributed_grid.agent import lease_checkpoints as checkpoints
from distributed_grid.agent.feed import PARTS
from distributed_grid.agent.lease_claims import Claim, Claims
from distributed_grid.agent.lease_jobs import JobFiles
from distributed_grid.agent.node import AgentNode
from distributed_grid.agent.services import _told
from distributed_grid.agent.spool import ENDED, EXIT, PIPE, TaskSpec
from distributed_grid.core.errors import GridError, NotFound, Refused
from distributed_grid.core.process import CLOCK_TICKS_S, read_stat
from distributed_grid.wire.rpc import CallContext, method

log = logging.getLogger(__name__)

FILE = "leases.jsonl"
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
TERMINAL, SIZE = [sys.executable, "-I", "-S", str(Path(__file__).with_name("terminal.py"))], ".grid-terminal"
#: Ends are seen this soon; figures are taken once a second.
LOOK_S, FIGURES_S = 0.05, 1.0
STOP_LIMIT_S = 10.0
#: How often the directories of jobs that were forgotten are taken away.
SWEEP_S = 60.0
NO_CORES_NICE = 10
#: Whoever needs the memory waits so long for it, else the task is asked to end.
STORE_LIMIT_S, BRING_BACK_LIMIT_S = 100.0, 120.0

class LeaseCalls:
    """Each call is safe to repeat."""

    def __init__(self, node: AgentNode) -> None:
        self._node = node
        self._tasks = node.tasks
        self._claims = Claims(node.node_dir / FILE)
        #: Under the claims' lock: tasks that are in a claim and about to be there, and leases about to go.
        self._starting: set[str] = set()
        self._ending: set[str] = set()
        self._files = JobFiles(node.node_dir / "jobs", node.name)
        self._files.sweep({status.task_id for status in self._tasks.list()})
        self._ticks: dict[int, tuple[int, int, float]] = {}
        self._sweep_due = time.monotonic() + SWEEP_S

    # -- claims ---------------------------------------------------------------------------------------------------

    @method
    def lease_claim(self, context: CallContext, *, lease: dict[str, Any]) -> None:
        shot = self._node.latest
        gpus = {gpu.index for gpu in shot.gpus} or set(range(shot.gpu_count))

        with self._claims.changing(lease["id"]):  # it waits for nothing: it is one short line in a file
            self._claims.take(lease, int(shot.cpu_cores_total), gpus, shot.memory_total_bytes, self._node.name)

    @method
    async def lease_list(self, context: CallContext) -> list[dict[str, Any]]:
        return list(self._claims.held.values())

    @method
    async def lease_release(
        self, context: CallContext, *, lease_id: str, fence: int, grace_s: float = 5.0
    ) -> None:
        """Whatever runs under it is ended first; only then is it free. Nothing starts under it meanwhile."""
        with self._claims.lock:
            claim = self._claims.held.get(lease_id)
            is_ours = claim is not None and int(claim["fence"]) <= fence
            if is_ours:
                self._ending.add(lease_id)
        try:
            if is_ours:
                await self._end_tasks(lease_id, grace_s)
            with self._claims.changing(lease_id):
                known = self._claims.held.get(lease_id)
                if known is None or int(known["fence"]) <= fence:
                    self._claims.held.pop(lease_id, None)
                    self._claims.ended[lease_id] = max(fence, self._claims.ended.get(lease_id, 0))
        finally:
            self._ending.discard(lease_id)

    async def _end_tasks(self, lease_id: str, grace_s: float) -> None:
        """All at once, each with its grace; one that is just being started is waited for, then ended too."""
        tasks = [str(one) for one in self._claims.held[lease_id]["tasks"]]
        while self._starting.intersection(tasks):
            await asyncio.sleep(LOOK_S)
        living = [
            one for one in tasks
            if self._alive(one) or checkpoints.state_of(self._tasks.spool / one) != "running"
        ]  # fmt: skip
        ended = await asyncio.gather(*(self._tasks.cancel(one, grace_s) for one in living), return_exceptions=True)
        for error in ended:
            if isinstance(error, BaseException):
                raise error

    def _alive(self, task_id: str) -> list[int]:
        try:
            return self._tasks.processes(task_id)
        except NotFound:
            return []

    @method
    async def lease_end_tasks(self, context: CallContext, *, lease_id: str, fence: int, grace_s: float) -> None:
        """The lease makes room: what runs under it is asked to end, then made to."""
        self._claims.get(lease_id, fence, self._node.name)
        await self._end_tasks(lease_id, grace_s)

    # -- running under one ----------------------------------------------------------------------------------------

    @method
    async def lease_start(
        self, context: CallContext, *, lease_id: str, fence: int, task_id: str, spec: dict[str, Any]
    ) -> dict[str, Any]:
        """Start a command on the very cores, with the very GPUs and at most the memory of the lease."""

        def start() -> dict[str, Any]:
            # Its directory first: a task that the claim names and that has none counts as lost.
            self._claims.get(lease_id, fence, self._node.name)
            self._files.place(task_id, str(spec.get("user", "")))
            try:
                with self._claims.changing(lease_id):
                    claim = self._claims.get(lease_id, fence, self._node.name)
                    _check_in_use(claim, lease_id in self._ending, task_id in claim["tasks"])
                    if task_id not in claim["tasks"]:
                        tasks = [*(one for one in claim["tasks"] if not self._has_exit(one)), task_id]
                        claim = self._claims.held[lease_id] = {**claim, "tasks": tasks}
                    self._starting.add(task_id)
                told = TaskSpec.from_wire(self._bound(claim, task_id, spec))
                status = _told(self._tasks.start(task_id, told))
            finally:
                self._starting.discard(task_id)
            now = self._claims.held.get(lease_id)
            if now is not None and now.get("state") == "suspended":  # since: it stops like all the others
                self._stop_all(now)
            return status

        return await asyncio.to_thread(start)

    def _bound(self, claim: Claim, task_id: str, spec: dict[str, Any]) -> dict[str, Any]:
        grant = claim["grant"]
        cores = self._real_cores(grant["cores"])
        place = self._files.place(task_id, str(spec.get("user", "")))
        env = {
            **spec.get("env", {}),
            "GRID_LEASE_ID": claim["id"], "GRID_NODE": self._node.name, "GRID_JOB_DIR": str(place),
            "GRID_LEASE_CORES": ",".join(map(str, grant["cores"])), "GRID_LEASE_MEMORY": str(grant["memory_bytes"]),
            # Empty without a GPU in the lease: none is free to take. The order is that of NVML's indices.
            "CUDA_VISIBLE_DEVICES": ",".join(map(str, grant["gpus"])), "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        }  # fmt: skip
        if grant["cores"]:
            env["OMP_NUM_THREADS"] = spec.get("env", {}).get("OMP_NUM_THREADS", str(len(grant["cores"])))
        spec, size = dict(spec), str(spec.get("terminal") or "")
        spec.pop("terminal", None)
        if size:
            takes = "stdin" if spec.pop("terminal_stdin", False) else "none"
            spec["argv"] = [*TERMINAL, size, str(place / SIZE), takes, *spec["argv"]]
        return {
            **spec, "env": env, "cwd": spec.get("cwd") or str(place), "cores": cores,
            "cpu_quota_cores": float(len(grant["cores"])), "memory_limit_bytes": int(grant["memory_bytes"]),
            "stdin": PIPE if spec.get("stdin") == PIPE else "",
            "group": f"lease-{claim['id']}" if grant["memory_bytes"] else "",
            # Without cores of its own it is on everybody's: those who were lent them go first.
            "nice": 0 if grant["cores"] else NO_CORES_NICE,
        }  # fmt: skip

    def _real_cores(self, leased: list[int]) -> list[int]:
        """On a small machine with more cores declared, they come round again."""
        real = sorted(os.sched_getaffinity(0))
        return sorted({real[core % len(real)] for core in leased})

    @method
    async def job_put(
        self, context: CallContext, *, task_id: str, user: str, data: bytes, last: bool, first: bool = False
    ) -> None:
        """A part of the tar file with the job's files; after the last one they lie in its directory."""
        await asyncio.to_thread(self._files.put, task_id, user, data, first, last)

    @method
    async def job_input(
        self, context: CallContext, *, task_id: str, data: bytes, offset: int, last: bool = False
    ) -> bool:
        """What the job reads from its standard input, from `offset` on; waits while the job does not take it.

        False if nobody reads it any more.
        """
        return await job_input.accept(
            self._tasks.spool / task_id, data, offset, last, lambda: self._has_exit(task_id),
            lambda: self._tasks.wake_shim(task_id),
        )  # fmt: skip

    @method
    async def job_input_state(self, context: CallContext, *, task_id: str) -> dict[str, Any]:
        """How much of its input has been accepted, whether that is all of it, and whether it reads it; or is over."""
        folder = self._tasks.spool / task_id / PARTS
        accepted, ended = job_input.accepted_bytes(folder)
        self._tasks.wake_shim(task_id)  # whoever left the last part may have died before that
        return {"accepted": accepted, "ended": ended, "reads": folder.is_dir(), "over": self._has_exit(task_id)}

    @method
    async def job_resize(self, context: CallContext, *, task_id: str, size: str) -> None:
        """The caller's terminal has another size now (`ROWSxCOLUMNS`)."""
        place = self._files.find(task_id)
        if place is not None:
            (place / SIZE).write_text(size)
            self._tasks.signal(task_id, signal.SIGWINCH)

    # -- making room ----------------------------------------------------------------------------------------------

    @method
    async def lease_suspend(self, context: CallContext, *, lease_id: str, fence: int, held: dict[str, Any]) -> None:
        """Stop all that runs under it; it keeps `held`. Said on disk first, so that a new agent keeps it stopped."""
        claim = await self._change(lease_id, fence, held, "suspended")
        deadline = time.monotonic() + STOP_LIMIT_S
        while await asyncio.to_thread(self._stop_all, claim) and time.monotonic() < deadline:
            await asyncio.sleep(0.01)

    @method
    async def lease_checkpoint(self, context: CallContext, *, lease_id: str, fence: int) -> None:
        """All that runs under it goes to disk, and it holds nothing any more; refused where that does not work."""
        before = self._claims.get(lease_id, fence, self._node.name)
        # Said first that it does not run: whoever finds it so after a death of ours has it brought back.
        await self._change(lease_id, fence, before["held"], "suspended")
        places = {self._tasks.spool / task: self._alive(task) for task in before["tasks"] if not self._has_exit(task)}
        try:
            await checkpoints.store_all(places, self._real_cores(before["grant"]["cores"]), STORE_LIMIT_S)
        except GridError:
            await self._change(lease_id, fence, before["held"], str(before.get("state", "active")))
            raise
        await self._change(lease_id, fence, {"cores": [], "gpus": [], "memory_bytes": 0}, "suspended")

    @method
    async def lease_resume(
        self, context: CallContext, *, lease_id: str, fence: int, grant: dict[str, Any]
    ) -> None:
        """Go on, on these cores now."""
        claim = await self._change(lease_id, fence, grant, "active", grant=grant)
        await asyncio.to_thread(self._go_on, claim)
        cores = self._real_cores(grant["cores"])
        for task_id in claim["tasks"]:
            place = self._tasks.spool / task_id
            if checkpoints.state_of(place) != "running":
                await checkpoints.bring_back(place, cores, BRING_BACK_LIMIT_S)

    async def _change(
        self, lease_id: str, fence: int, held: dict[str, Any], state: str, **more: Any
    ) -> Claim:
        def change() -> Claim:
            with self._claims.changing(lease_id):
                known = self._claims.get(lease_id, fence, self._node.name)
                shot = self._node.latest
                gpus = {gpu.index for gpu in shot.gpus} or set(range(shot.gpu_count))
                claim = {**known, **more, "held": held, "state": state}
                self._claims.take(claim, int(shot.cpu_cores_total), gpus, shot.memory_total_bytes, self._node.name)
                return self._claims.held[lease_id]

        return await asyncio.to_thread(change)

    def _stop_all(self, claim: Claim) -> bool:
        """True while something still ran: a tree can fork while it is stopped."""
        running = False
        for task_id in claim["tasks"]:
            if checkpoints.state_of(self._tasks.spool / task_id) != "running":
                continue  # on disk, or on its way: what lives there is not the task
            for pid in self._alive(task_id):
                stat = read_stat(pid)
                if stat and stat.state not in "TtZX":
                    stat.id.signal(signal.SIGSTOP)
                    running = True
        return running

    def _go_on(self, claim: Claim) -> None:
        cores = self._real_cores(claim["grant"]["cores"])
        for task_id in claim["tasks"]:
            pids = self._alive(task_id)
            for pid in pids if cores else ():
                for thread in _threads(pid):
                    try:
                        os.sched_setaffinity(thread, cores)
                    except OSError:
                        continue  # it has just ended
            for pid in pids:
                stat = read_stat(pid)
                if stat:
                    stat.id.signal(signal.SIGCONT)

    # -- what the daemon is told ----------------------------------------------------------------------------------

    @method
    async def leases_watch(self, context: CallContext) -> AsyncIterator[dict[str, Any]]:
        """What leased work uses, once a second; which of its tasks have ended, as soon as they do."""
        told: set[str] = set()
        due = 0.0
        while True:
            ended = {task for claim in self._claims.held.values() for task in claim["tasks"] if self._has_exit(task)}
            now = time.monotonic()
            if now >= due:
                due = now + FIGURES_S
                item = await asyncio.to_thread(self._figures)
                ended |= set(item.pop("lost"))
                told = ended
                yield {**item, "ended": sorted(ended)}
            elif ended - told:
                told |= ended
                yield {"ended": sorted(ended)}
            await asyncio.sleep(LOOK_S)

    def _has_exit(self, task_id: str) -> bool:
        return (self._tasks.spool / task_id / EXIT).exists()

    def _figures(self) -> dict[str, Any]:
        cpu, memory, over, lost = 0.0, 0, [], []
        seen: dict[int, tuple[int, int, float]] = {}
        for claim in list(self._claims.held.values()):
            used = 0
            for task_id in claim["tasks"]:
                if self._has_exit(task_id):
                    continue
                pids = self._alive(task_id)
                if not pids and self._is_over(task_id):
                    lost.append(task_id)
                for pid in pids:
                    stat = read_stat(pid)
                    if stat is None:
                        continue
                    now, ticks = time.monotonic(), stat.utime_ticks + stat.stime_ticks
                    before = self._ticks.get(pid)
                    if before and before[0] == stat.start_ticks and now > before[2]:
                        cpu += (ticks - before[1]) / CLOCK_TICKS_S / (now - before[2])
                    seen[pid] = (stat.start_ticks, ticks, now)
                    used += stat.rss_pages * PAGE_BYTES
            memory += used
            limit = int(claim["grant"]["memory_bytes"])
            if limit and used > limit:
                over.append({"lease": claim["id"], "used_bytes": used, "limit_bytes": limit})
                self._kill_unlimited(claim)
            if claim.get("state") == "suspended":
                self._stop_all(claim)  # somebody may have woken it
            else:
                self._fetch_back(claim)
        self._ticks = seen
        if time.monotonic() > self._sweep_due:
            self._sweep_due = time.monotonic() + SWEEP_S
            self._files.sweep({status.task_id for status in self._tasks.list()})
        return {"cpu_cores": cpu, "memory_bytes": memory, "over": over, "lost": lost}

    def _fetch_back(self, claim: Claim) -> None:
        """An agent that died in between, or a try that failed: what should run is not left on disk."""
        for task_id in claim["tasks"]:
            place = self._tasks.spool / task_id
            if checkpoints.state_of(place) == "stored":
                checkpoints.order(place, "run", cores=self._real_cores(claim["grant"]["cores"]))

    def _is_over(self, task_id: str) -> bool:
        try:
            return self._tasks.status(task_id).state in ENDED
        except NotFound:
            return not (self._tasks.spool / task_id).exists() and not self._files.is_fresh(task_id)

    def _kill_unlimited(self, claim: Claim) -> None:
        """Where the kernel does not hold the limit, we do."""
        for task_id in claim["tasks"]:
            try:
                if not self._tasks.status(task_id).memory_limited:
                    self._tasks.signal(task_id, signal.SIGKILL, whole_tree=True)
            except NotFound:
                continue


def _check_in_use(claim: Claim, is_ending: bool, is_started: bool) -> None:
    """Nothing new starts under a lease that gave away what it was granted, and nothing at all under one that goes."""
    if is_ending:
        raise Refused(f"{claim['id'][:8]} is being given back", code="lease-not-active")
    if not is_started and (claim.get("state") == "suspended" or claim["held"] != claim["grant"]):
        raise Refused(f"{claim['id'][:8]} is suspended", cause="it makes room for another", code="lease-not-active")


def _threads(pid: int) -> list[int]:
    try:
        return [int(one.name) for one in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return []
