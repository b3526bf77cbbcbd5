"""Kills a daemon at random moments in the middle of calls that write, and looks at what its journal holds."""

from __future__ import annotations

import asyncio
import os
import random
import signal

from distributed_grid.config.paths import GridPaths
from distributed_grid.daemon.client import connect, start_daemon
from distributed_grid.orchestration.distributed_memory_pool.blocks import block_name
from distributed_grid.store.blocks import BlockRow
from distributed_grid.store.journal import Journal
from distributed_grid.wire.channel import ChannelClosed

CALLS = 200
# Nothing of a cluster is needed to give a block another name, which holds "for good from the moment this returns".
BLOCK = {"generation": 1, "copies": [], "replicas": 0, "name": "", "meta": {}, "owner": None, "at_rest": ""}


def kill_rounds(paths: GridPaths, rounds: int, *, seed: int) -> None:
    """Each round sends all calls at once and ends by kill -9 after a random number of answers: those must be there."""
    chance = random.Random(seed)
    blocks = [block_name(number) for number in range(CALLS)]
    with Journal.open(paths.journal) as journal:
        for block in blocks:
            journal.blocks.put(BlockRow(block, "gpu1", os.geteuid(), "ready", 1, 0.0, BLOCK))
    cut_short = 0
    for number in range(rounds):
        start_daemon(paths)
        pid = int(paths.lock.read_text())
        try:
            answered = asyncio.run(_call_until_killed(paths, pid, blocks, f"r{number}", chance.randrange(1, CALLS)))
        finally:
            os.kill(pid, signal.SIGKILL)  # it is our child: there until it is waited for
            os.waitpid(pid, 0)
        with Journal.open(paths.journal) as journal:
            assert journal.recovered is None
            rows = {row.id: row.data for row in journal.blocks.list()}
        named = {block for block in blocks if rows[block]["name"] == _name(f"r{number}", block)}
        assert answered <= named, "answered, and not in the journal"
        assert all(data["name"] == data["meta"].get("name", "") for data in rows.values()), "half a write"
        cut_short += len(named) < CALLS
    assert cut_short, "no kill came in the middle"


async def _call_until_killed(
    paths: GridPaths, pid: int, blocks: list[str], mark: str, after: int
) -> set[str]:
    answered: set[str] = set()
    async with await connect(paths) as client:

        async def rename(block: str) -> None:
            name = _name(mark, block)
            try:
                await client.call("memory_rename", block_id=block, key=name, meta={"name": name})
            except ChannelClosed:
                return
            answered.add(block)
            if len(answered) == after:
                os.kill(pid, signal.SIGKILL)

        await asyncio.gather(*(rename(block) for block in blocks))
    assert len(answered) >= after
    return answered


def _name(mark: str, block: str) -> str:
    return f"{mark}-{block}"
