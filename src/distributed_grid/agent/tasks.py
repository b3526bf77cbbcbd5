"""The tasks of a node: starts each once, finds them again after the agent's death, signals, ends and removes them."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import json
import os
import re
import shutil
import signal as signals
import time
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from distributed_grid.agent import cgroup
from distributed_grid.agent.feed import FIFO, PARTS
from distributed_grid.agent.follow import follow, read_so_far
from distributed_grid.agent.launch import launch
from distributed_grid.agent.lease_checkpoints import order, state_of
from distributed_grid.agent.spool import (
    ENV,
    GO,
    LOCK,
    PIPE,
    SHIM,
    SPEC,
    STDERR,
    STDOUT,
    TaskSpec,
    TaskStatus,
    living,
    read_json,
    read_status,
    shim_alive,
)  # fmt: skip
from distributed_grid.agent.users import Account, account_of
from distributed_grid.core.errors import GridError, NotFound, Refused, UsageError
from distributed_grid.core.process import ProcessId, boot_id, process_id, tree_of

__all__ = ["TaskKeeper", "TaskSpec", "TaskStatus"]

TASK_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,119}")
KILL_LIMIT_S = 20.0
#: What ends a task that is on disk instead of in memory.
ENDING = (signals.SIGHUP, signals.SIGINT, signals.SIGTERM, signals.SIGKILL)
#: What a terminal stops a program with.
STOPPING = (signals.SIGTSTP, signals.SIGTTIN, signals.SIGTTOU)
SHIM_END_LIMIT_S = 2.0
POLL_S = 0.02

# The keeper has a method `list`, which hides the type of that name in it.
Statuses = list[TaskStatus]
Pids = list[int]
Ids = list[str]


class TaskKeeper:
    """Holds nothing in memory: the spool is the truth, so any number of keepers agree. Safe to call from threads."""

    def __init__(self, spool: Path, node: str) -> None:
        self.spool = spool
        self.node = node
        self._hierarchies = cgroup.our_hierarchies()
        spool.mkdir(mode=0o700, parents=True, exist_ok=True)

    # -------------------------------------------------------------- start

    def start(self, task_id: str, spec: TaskSpec) -> TaskStatus:
        """Start it, or say how it stands if this id was ever started. A command that cannot run is state `failed`."""
        task_dir = self._dir(task_id)
        if not task_dir.exists():
            spec.check()
            self._prepare(task_dir, spec, account_of(spec.user, self.node))
        if read_status(task_dir).state == "prepared":
            try:
                launch(task_dir)  # the shim's lock decides if two of us do this at once
            except GridError:
                try:
                    self.remove(task_id)
                except Refused:
                    return read_status(task_dir)  # only the launcher died; the shim is there
                raise
        return read_status(task_dir)

    def _prepare(self, task_dir: Path, spec: TaskSpec, account: Account) -> None:
        """The whole directory appears at once, so a directory that is there is complete."""
        name = f"{task_dir.name}-{zlib.crc32(bytes(task_dir)):08x}"  # spools of one machine share the groups
        limits = cgroup.CgroupLimits(spec.memory_limit_bytes, spec.cpu_quota_cores, spec.nice)
        groups, shim_groups, limited = cgroup.create(self._hierarchies, name, limits, spec.group)
        data = spec.to_wire() | {
            "node": self.node, "boot_id": boot_id(), "user": account.name,
            "uid": account.uid, "gid": account.gid, "groups": list(account.groups),
            "cwd": spec.cwd or (account.home if Path(account.home).is_dir() else "/"),
            "stdout": str(task_dir / STDOUT), "stderr": str(task_dir / STDERR),
            "cgroups": [str(one) for one in groups], "shim_cgroups": [str(one) for one in shim_groups],
            "memory_limited": limited, "fed": spec.stdin == PIPE,
            "stdin": str(task_dir / FIFO) if spec.stdin == PIPE else spec.stdin,
        }  # fmt: skip
        del data["env"]
        fresh = self.spool / f".new-{os.getpid()}-{time.monotonic_ns()}"
        try:
            fresh.mkdir(mode=0o700)
            _write(fresh / ENV, json.dumps(account.environment() | spec.env).encode())
            _write(fresh / SPEC, json.dumps(data).encode())
            for stream in (STDOUT, STDERR):
                _write(fresh / stream, b"")
                if account.uid != os.geteuid():
                    os.chown(fresh / stream, account.uid, account.gid)
            if spec.stdin == PIPE:
                (fresh / PARTS).mkdir(mode=0o700)
                os.mkfifo(fresh / FIFO, 0o600)
                os.chown(fresh / FIFO, account.uid, account.gid)
            fresh.rename(task_dir)
        except OSError as error:
            shutil.rmtree(fresh, ignore_errors=True)
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):  # else somebody else was first: theirs counts
                cgroup.destroy(groups)
                raise GridError(
                    f"the process could not be prepared on {self.node}", cause=error.strerror or str(error),
                    hint=f"look at the free space and the rights of {self.spool} there",
                    code="disk-full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "spool",
                ) from error  # fmt: skip

    def go(self, task_id: str) -> None:
        """Let a task that was started with `hold` exec. Said by a file: it stays said if we die now."""
        task_dir = self._dir(task_id)
        if read_status(task_dir).state == "staged":
            _write(task_dir / GO, b"")
            self._signal_shim(task_dir, signals.SIGUSR1)

    # -------------------------------------------------------------- look

    def status(self, task_id: str) -> TaskStatus:
        return read_status(self._dir(task_id))

    def list(self, task_ids: Ids | None = None) -> Statuses:
        """All, or those of the given ids that are here."""
        found = []
        for task_dir in sorted(self.spool.iterdir()) if task_ids is None else map(self._dir, task_ids):
            try:
                if TASK_ID.fullmatch(task_dir.name):
                    found.append(read_status(task_dir))
            except NotFound:
                continue  # not here, or removed while we looked
        return found

    def adopt(self) -> Statuses:
        """At an agent's start: sweep what a dead agent left half-made or half-removed; all tasks, as they are."""
        for left in [*self.spool.glob(".new-*"), *self.spool.glob(".gone-*")]:
            owner = int(left.name.split("-")[1])
            if owner == os.getpid() or process_id(owner) is None:
                shutil.rmtree(left, ignore_errors=True)
        return self.list()

    def processes(self, task_id: str) -> Pids:
        """Pids, as seen on the node, of the program and all it started; not the shim's."""
        task_dir = self._dir(task_id)
        shim = read_json(task_dir / SHIM)
        if shim and shim_alive(shim, boot_id()):
            return living(tree_of(shim["pid"])[1:])
        status = read_status(task_dir)  # without its namespace, a program outlives its shim
        alive = status.state == "lost" and ProcessId(status.pid, status.start_ticks).is_alive()
        return living(tree_of(status.pid)) if alive else []

    def follow(self, task_id: str, stdout_from: int = 0, stderr_from: int = 0) -> AsyncIterator[dict[str, Any]]:
        return follow(self._dir(task_id), stdout_from, stderr_from)

    def read(self, task_id: str, stdout_from: int = 0, stderr_from: int = 0) -> AsyncIterator[dict[str, Any]]:
        """What `follow` would yield so far, without waiting for more."""
        return read_so_far(self._dir(task_id), stdout_from, stderr_from)

    async def wait(self, task_id: str, timeout_s: float) -> TaskStatus:
        """The status once it ended, or as it is when the time is up."""
        deadline = time.monotonic() + timeout_s
        while not (status := self.status(task_id)).ended and time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)
        return status

    # -------------------------------------------------------------- end

    def signal(self, task_id: str, signum: int, whole_tree: bool = False) -> bool:
        """Send a signal to the main process, or to all; False if nobody was there to get it."""
        if signum not in signals.valid_signals():
            raise UsageError(f"there is no signal {signum}", code="bad-signal")
        if state_of(self._dir(task_id)) == "stored":  # on disk there is nobody to handle it
            if signum in ENDING:
                order(self._dir(task_id), "end", signal=signum)
            return signum in ENDING
        if whole_tree:
            targets = [one for one in map(process_id, self.processes(task_id)) if one]
        else:
            status = self.status(task_id)
            targets = [ProcessId(status.pid, status.start_ticks)] if status.pid else []
        return any([self._send(one, signum) for one in targets])  # all of them, not only the first

    def _send(self, target: ProcessId, signum: int) -> bool:
        if signum in STOPPING and not _minds(target.pid, signum):
            signum = signals.SIGSTOP  # without a shell above it the kernel would not stop it for less
        try:
            return target.signal(signum)
        except PermissionError:
            raise Refused(
                f"no permission to signal pid {target.pid} on {self.node}",
                cause="it became another user's process",
                code="signal-refused",
            ) from None

    async def cancel(self, task_id: str, grace_s: float = 5.0) -> TaskStatus:
        """SIGTERM to all of it, SIGKILL to what is left after the grace; the status with its exit."""
        if not (self._dir(task_id) / SHIM).exists():
            return self.status(task_id)  # it never started
        if self.signal(task_id, signals.SIGTERM, whole_tree=True):
            self.signal(task_id, signals.SIGCONT, whole_tree=True)  # a stopped process cannot end by itself
            await self._until_empty(task_id, grace_s)
        deadline = time.monotonic() + KILL_LIMIT_S
        while self.signal(task_id, signals.SIGKILL, whole_tree=True) and time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)  # again and again: a tree can fork while it is killed
        return await self.wait(task_id, KILL_LIMIT_S)

    async def _until_empty(self, task_id: str, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while self.processes(task_id) and time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)

    def remove(self, task_id: str) -> None:
        """Forget an ended task and its output; refused while any process of it lives."""
        task_dir = self._dir(task_id)
        status = read_status(task_dir)
        busy = Refused(f"task {task_id} still runs on {self.node}", hint="cancel it first", code="task-running")
        if not (status.ended or status.state == "prepared") or self.processes(task_id):
            raise busy
        spec = read_json(task_dir / SPEC) or {}
        gone = self.spool / f".gone-{os.getpid()}-{time.monotonic_ns()}"
        # A shim holds the lock for life: with it in hand there is none, and none can start under us.
        lock = os.open(task_dir / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if not _locked_within(lock, SHIM_END_LIMIT_S):
                raise busy
            task_dir.rename(gone)
        finally:
            os.close(lock)
        shutil.rmtree(gone)
        cgroup.destroy([Path(one) for one in spec.get("cgroups", [])])

    # -------------------------------------------------------------- helpers

    def _dir(self, task_id: str) -> Path:
        if not TASK_ID.fullmatch(task_id):
            raise UsageError(f"{task_id!r} is not a task id", code="bad-task-id")
        return self.spool / task_id

    def wake_shim(self, task_id: str) -> None:
        """There is something new for it in the task's directory."""
        self._signal_shim(self._dir(task_id), signals.SIGUSR1)

    def _signal_shim(self, task_dir: Path, signum: int) -> None:
        shim = read_json(task_dir / SHIM)
        if shim and shim_alive(shim, boot_id()):
            ProcessId(shim["pid"], shim["start_ticks"]).signal(signum)


def _minds(pid: int, signum: int) -> bool:
    """Whether it handles or ignores that signal."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    masks = [int(line.split()[1], 16) for line in lines if line.startswith(("SigIgn:", "SigCgt:"))]
    return any(mask >> signum - 1 & 1 for mask in masks)


def _locked_within(fd: int, limit_s: float) -> bool:
    deadline = time.monotonic() + limit_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.002)


def _write(path: Path, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with open(fd, "wb") as file:
        file.write(data)
