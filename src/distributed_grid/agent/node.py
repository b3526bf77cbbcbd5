"""A node as its agent holds it: who it is, its tasks, and its latest figures for whoever watches."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from distributed_grid.agent.spool import EXIT, SHIM, read_json
from distributed_grid.agent.tasks import TaskKeeper
from distributed_grid.cluster.probe import memory_bytes
from distributed_grid.monitoring.capacity import Capacity
from distributed_grid.monitoring.node_sampler import NodeSampler
from distributed_grid.monitoring.snapshot import NodeSnapshot

log = logging.getLogger(__name__)

SPOOL = "spool"


class AgentNode:
    def __init__(
        self, name: str, role: str, address: str, node_dir: Path, *, embedded: bool, declared: Capacity | None
    ) -> None:
        self.name = name
        self.role = role
        self.address = address
        self.node_dir = node_dir
        self.embedded = embedded
        self.tasks = TaskKeeper(node_dir / SPOOL, name)
        #: By spool, what has ended there, (name, inode): hundreds are kept, and every look would read them all again.
        self._ended: dict[Path, set[tuple[str, int]]] = {}
        belongs = self._shims if embedded else None
        self.sampler = NodeSampler(
            name, declared=declared, belongs=belongs, everything_else=embedded and role == "head"
        )
        self.latest: NodeSnapshot = self.sampler.latest
        self._fresh = asyncio.Condition()

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> AgentNode:
        told = config.get("declared")
        declared = None
        if told:  # what is not declared is as measured
            declared = Capacity(
                cpu_cores=float(told.get("cpu_count") or os.cpu_count() or 1),
                memory_bytes=int(told.get("memory_bytes") or memory_bytes()),
                gpu_count=int(told.get("gpu_count", 0)),
            )
        return cls(
            config["node"], config["role"], config["address"], Path(config["node_dir"]),
            embedded=bool(config.get("embedded")), declared=declared,
        )  # fmt: skip

    def _shims(self) -> set[int]:
        """Root pids of what shims run: this worker's own; for the head, those of all the other nodes here."""
        dirs = [self.node_dir]
        if self.role == "head":
            dirs = [one for one in self.node_dir.parent.iterdir() if one != self.node_dir]
        spools = [one / SPOOL for one in dirs]
        self._ended = {spool: self._ended.get(spool, set()) for spool in spools}
        return {pid for spool in spools for pid in self._running(spool)}

    def _running(self, spool: Path) -> Iterator[int]:
        try:
            with os.scandir(spool) as entries:
                present = {(entry.name, entry.inode()) for entry in entries}
        except FileNotFoundError:  # a node that has not begun
            return
        ended = self._ended[spool]
        ended &= present  # a removed one's name may come again, in another directory
        for entry in present - ended:
            task_dir = spool / entry[0]
            if (task_dir / EXIT).exists():
                ended.add(entry)
            elif data := read_json(task_dir / SHIM):
                yield int(data["pid"])

    async def take_sample(self) -> None:
        self.latest = await asyncio.to_thread(self.sampler.sample)
        async with self._fresh:
            self._fresh.notify_all()

    async def next_sample(self) -> NodeSnapshot:
        async with self._fresh:
            await self._fresh.wait()
        return self.latest
