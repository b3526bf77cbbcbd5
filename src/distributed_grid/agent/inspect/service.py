"""The calls by which the daemon looks at processes and nodes before a move. None of them changes a process."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from distributed_grid.agent.inspect.candidates import (
    Identities,
    TreeSample,
    above_ours,
    group_trees,
    summarise,
    with_details,
)
from distributed_grid.agent.inspect.facts import inspect_tree, read_environment
from distributed_grid.agent.inspect.target import target_facts
from distributed_grid.agent.node import AgentNode
from distributed_grid.core.errors import Refused, UsageError
from distributed_grid.monitoring.snapshot import ProcessSample
from distributed_grid.wire.rpc import CallContext, method

NEW_LOOK_LIMIT_S = 1.0
NONCE_PREFIX = ".grid-nonce-"  # what NodeService.read_nonce agrees to read


class InspectService:
    def __init__(self, node: AgentNode) -> None:
        self._node = node
        self._identities = Identities()
        self._scan = asyncio.Lock()

    @method
    async def inspect(self, context: CallContext, *, pid: int, start_ticks: int = 0) -> dict[str, Any]:
        """`TreeFacts` of the tree below that very process."""
        return (await asyncio.to_thread(inspect_tree, pid, start_ticks)).to_wire()

    @method
    async def candidates(
        self,
        context: CallContext,
        *,
        min_cpu_cores: float = 0.0,
        min_memory_bytes: int = 0,
        min_gpu_memory_bytes: int = 0,
        min_age_s: float = 0.0,
        pid: int = 0,
    ) -> list[dict[str, Any]]:
        """`TreeSample`s of users' jobs that reach one of the amounts; with `pid`, the one tree below that process."""
        async with self._scan:
            found = await asyncio.to_thread(
                self._candidates, min_cpu_cores, min_memory_bytes, min_gpu_memory_bytes, min_age_s, pid
            )
        return [one.to_wire() for one in found]

    def _samples(self, pid: int) -> list[ProcessSample]:
        """As of the last look; a process that is younger than that gets a new one."""
        limit = time.monotonic() + NEW_LOOK_LIMIT_S
        while True:
            samples = self._node.sampler.processes()
            known = not pid or any(one.pid == pid for one in samples)
            if known or not Path(f"/proc/{pid}").exists() or time.monotonic() > limit:
                return samples
            self._node.sampler.sample()
            time.sleep(0.05)

    def _candidates(
        self, cpu_cores: float, memory_bytes: int, gpu_bytes: int, age_s: float, pid: int
    ) -> list[TreeSample]:
        samples = self._samples(pid)
        identities = self._identities.of(samples)
        gpus = self._node.latest.gpus
        if pid:
            by_parent: dict[int, list[int]] = {}
            for one in samples:
                by_parent.setdefault(one.ppid, []).append(one.pid)
            wanted = [pid]
            for parent in wanted:
                wanted += by_parent.get(parent, [])
            members = [one for one in samples if one.pid in set(wanted)]
            groups = [(one, members) for one in members if one.pid == pid]
        else:
            groups = group_trees(samples, identities)
        names = {one.pid: (one.ppid, one.comm) for one in samples}
        above = above_ours(samples, identities)
        found = []
        for root, members in groups:
            # A bound from above first: most trees are small, and their exact memory would have to be read.
            if not pid and root.age_s < age_s:
                continue
            used = sum(one.rss_bytes for one in members)
            busy = sum(max(one.cpu_cores, one.cpu_cores_1m + one.cpu_wait_1m) for one in members)
            if not pid and used < memory_bytes and busy < cpu_cores and not gpus:
                continue
            tree = summarise(root, members, identities[root.pid], gpus)
            if root.pid in above:
                tree = replace(tree, origin="above")
            reaches = (
                tree.memory_bytes >= memory_bytes
                or max(tree.cpu_cores, tree.cpu_cores_wanted) >= cpu_cores
                or (gpu_bytes > 0 and tree.gpu_memory_bytes >= gpu_bytes)
            )
            if pid or reaches:
                found.append(with_details(tree, names))
        return sorted(found, key=lambda one: (-one.cpu_cores_1m, -one.memory_bytes, one.pid))

    @method
    async def target_facts(
        self, context: CallContext, *, paths: list[str], uid: int = -1, user: str = ""
    ) -> dict[str, Any]:
        """`TargetFacts` of this node, and of those files on it; asked of both sides of a move."""
        gpus = self._node.latest.gpus
        facts = await asyncio.to_thread(target_facts, self._node.name, paths=paths, uid=uid, user=user, gpus=gpus)
        return facts.to_wire()

    @method
    async def environment(self, context: CallContext, *, pid: int, start_ticks: int) -> dict[str, str]:
        """Variables with their values, for starting the same program elsewhere."""
        return await asyncio.to_thread(read_environment, pid, start_ticks)

    @method
    async def write_nonce(self, context: CallContext, *, directory: str) -> dict[str, str]:
        """A small file of a name nobody else has; `read_nonce` on another node says whether it is there too."""
        return await asyncio.to_thread(_write_nonce, directory)

    @method
    async def remove_nonce(self, context: CallContext, *, path: str) -> None:
        if not Path(path).name.startswith(NONCE_PREFIX):
            raise UsageError(f"{path} is no nonce of ours", code="bad-argument")
        await asyncio.to_thread(Path(path).unlink, missing_ok=True)


def _write_nonce(directory: str) -> dict[str, str]:
    path, text = Path(directory) / f"{NONCE_PREFIX}{secrets.token_hex(8)}", secrets.token_hex(16)
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise Refused(f"cannot write in {directory}", cause=error.strerror or "", code="nonce") from None
    with open(fd, "w") as file:
        file.write(text)
    return {"path": str(path), "text": text}
