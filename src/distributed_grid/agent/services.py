"""The calls that an agent answers: figures, tasks, links. Each is safe to repeat."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from distributed_grid.agent.node import AgentNode
from distributed_grid.agent.spool import GO, SPEC, STARTED, TaskSpec, TaskStatus, read_json
from distributed_grid.cluster.probe import probe_machine
from distributed_grid.core.process import boot_id
from distributed_grid.wire.rpc import CallContext, method

#: How long a task that was told to go may take to its exec; shorter than the daemon waits for the answer.
GO_LIMIT_S = 30.0
GO_POLL_S = 0.002


class NodeService:
    def __init__(self, node: AgentNode) -> None:
        self._node = node

    @method
    async def watch(self, context: CallContext) -> AsyncIterator[dict[str, Any]]:
        """The node's figures now and each time they are taken: also the daemon's sign that the node is alive."""
        yield self._node.latest.to_wire()
        while True:
            yield (await self._node.next_sample()).to_wire()

    @method
    async def processes(self, context: CallContext) -> list[dict[str, Any]]:
        return [sample.to_wire() for sample in await asyncio.to_thread(self._node.sampler.processes)]

    @method
    async def probe(self, context: CallContext) -> dict[str, Any]:
        """What `grid doctor` asks of a node."""
        return await asyncio.to_thread(probe_machine)

    @method
    async def clock(self, context: CallContext) -> float:
        return time.time()

    @method
    async def read_nonce(self, context: CallContext, *, path: str) -> str:
        """The small file another node wrote: whether the two share that file system."""
        file = Path(path)
        if not file.name.startswith(".grid-nonce-"):
            return ""
        try:
            return file.read_text()[:100]
        except OSError:
            return ""


def _told(status: TaskStatus) -> dict[str, Any]:
    failure = status.failure()
    return {**status.to_wire(), "error": failure.to_wire() if failure else None}


class TaskCalls:
    def __init__(self, node: AgentNode) -> None:
        self._tasks = node.tasks

    @method
    async def task_start(
        self, context: CallContext, *, task_id: str, spec: dict[str, Any], cwd_optional: bool = False
    ) -> dict[str, Any]:
        if cwd_optional and spec.get("cwd") and not Path(spec["cwd"]).is_dir():
            spec = {**spec, "cwd": ""}
        return _told(await asyncio.to_thread(self._tasks.start, task_id, TaskSpec.from_wire(spec)))

    @method
    async def task_go(self, context: CallContext, *, task_id: str) -> dict[str, Any]:
        """Let a held task exec, and what came of it; `started`: it did, `going`: it was told to, now or before."""
        await asyncio.to_thread(self._tasks.go, task_id)
        limit = time.monotonic() + GO_LIMIT_S
        while (status := self._tasks.status(task_id)).state == "staged" and time.monotonic() < limit:
            await asyncio.sleep(GO_POLL_S)
        task_dir = self._tasks.spool / status.task_id
        spec = read_json(task_dir / SPEC) or {}
        return {
            **_told(status), "started": (task_dir / STARTED).exists(), "going": (task_dir / GO).exists(),
            "rebooted": spec.get("boot_id", boot_id()) != boot_id(),
        }  # fmt: skip

    @method
    async def task_status(self, context: CallContext, *, task_id: str) -> dict[str, Any]:
        return {**_told(self._tasks.status(task_id)), "processes": self._tasks.processes(task_id)}

    @method
    async def task_place(self, context: CallContext, *, task_id: str) -> dict[str, str]:
        """Where a task's directory is, and the Python that can read it."""
        status = self._tasks.status(task_id)
        return {"dir": str(self._tasks.spool / status.task_id), "python": sys.executable}

    @method
    async def task_list(self, context: CallContext, *, task_ids: list[str] | None = None) -> list[dict[str, Any]]:
        """All, or those of the given ids that are here."""
        return [_told(status) for status in await asyncio.to_thread(self._tasks.list, task_ids)]

    @method
    async def task_signal(self, context: CallContext, *, task_id: str, number: int, tree: bool = False) -> bool:
        return self._tasks.signal(task_id, number, whole_tree=tree)

    @method
    async def task_cancel(self, context: CallContext, *, task_id: str, grace_s: float = 5.0) -> dict[str, Any]:
        return _told(await self._tasks.cancel(task_id, grace_s))

    @method
    async def task_remove(self, context: CallContext, *, task_id: str) -> None:
        await asyncio.to_thread(self._tasks.remove, task_id)

    @method
    async def task_follow(
        self, context: CallContext, *, task_id: str, stdout_from: int = 0, stderr_from: int = 0, wait: bool = True
    ) -> AsyncIterator[dict[str, Any]]:
        """Output and end; without `wait` what there is by now, then how it stands."""
        if wait:
            async for item in self._tasks.follow(task_id, stdout_from, stderr_from):
                yield {"exit": _told(TaskStatus.from_wire(item["exit"]))} if "exit" in item else item
            return
        async for item in self._tasks.read(task_id, stdout_from, stderr_from):
            yield item
        yield {"exit": _told(self._tasks.status(task_id))}
