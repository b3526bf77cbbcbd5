"""Little requests of the async pool, which go over the event loop itself."""

from __future__ import annotations

import asyncio
import os
import platform
import signal
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from distributed_grid.core.process import ProcessId
from distributed_grid.orchestration.distributed_memory_pool import (
    BlockNotFound,
    DistributedMemoryPool,
    OutOfRange,
    StaleBlock,
)
from distributed_grid.orchestration.distributed_memory_pool import pool as pool_module
from distributed_grid.orchestration.distributed_memory_pool.courtesy import let_others_go_first
from tests.lab.waiting import wait_until
from tests.unit.orchestration.distributed_memory_pool.world import World

SIZE = 1024**2


class Opened:
    def __init__(self, world: World, pool: DistributedMemoryPool, block: str) -> None:
        self.world, self.pool, self.block = world, pool, block
        self.in_threads: list[Any] = []
        record = world.record("gpu1")
        assert record and pool._threads
        self.server = ProcessId(record.pid, record.start_ticks)
        submit: Any = pool._threads.submit

        def noted(*arguments: Any) -> Any:
            self.in_threads.append(arguments)
            return submit(*arguments)

        pool._threads.submit = noted  # type: ignore[method-assign]

    def silence(self) -> None:
        self.server.signal(signal.SIGSTOP)
        threads = Path(f"/proc/{self.server.pid}/task")
        wait_until(
            lambda: all("\nState:\tT" in (one / "status").read_text() for one in threads.iterdir()), 60, "it to stop"
        )

    async def over(self, task: asyncio.Future[Any]) -> None:
        """Cancelled while the server is silent, it is over as soon as the server can be asked."""
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.sleep(0.05)
        self.server.signal(signal.SIGCONT)
        await asyncio.wait([task])
        assert task.cancelled()


@pytest_asyncio.fixture
async def opened(make_world: Callable[..., World]) -> AsyncIterator[Opened]:
    world = make_world(shared=False)
    async with DistributedMemoryPool(world.config, compression="off") as pool:
        block = await pool.allocate(SIZE, "gpu1", strict=True)
        await pool.write(block, bytes(range(256)) * (SIZE // 256))
        yield Opened(world, pool, block)


def test_courtesy_changes_neither_policy_nor_nice() -> None:
    def look() -> tuple[int, int]:
        return os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    def polite() -> tuple[tuple[int, int], bool, tuple[int, int]]:
        return look(), let_others_go_first(), look()

    with ThreadPoolExecutor(1) as threads:  # not this thread, which would keep it
        before, done, after = threads.submit(polite).result()
    assert before == after and done == (platform.machine() in ("x86_64", "aarch64") and before[0] == os.SCHED_OTHER)


async def test_no_thread_is_needed(opened: Opened) -> None:
    pool, block = opened.pool, opened.block
    assert await pool.write(block, b"little", offset=1000) == 6
    assert await pool.read(block, 8, offset=999) == b"\xe7little\xee"
    place = bytearray(4)
    assert await pool.read_into(block, place, offset=SIZE - 4) == 4 and place == b"\xfc\xfd\xfe\xff"
    assert not opened.in_threads
    found = await asyncio.gather(*(pool.read(block, 16, offset=16 * n) for n in range(100)))
    assert b"".join(found) == (bytes(range(256)) * 7)[:1000] + b"little" + (bytes(range(256)) * 7)[1006:1600]
    counts = (await pool.stats())["client"]
    assert (counts["reads"], counts["bytes_read"], counts["writes"]) == (102, 1612, 2)


async def test_what_is_refused_is_told_as_ever(opened: Opened) -> None:
    pool, block = opened.pool, opened.block
    with pytest.raises(OutOfRange):
        await pool.read(block, 2, offset=SIZE - 1)
    with pytest.raises(OutOfRange):
        await pool.write(block, b"x", offset=-1)
    async with DistributedMemoryPool(opened.world.config) as other:
        await other.deallocate(block)
    for call in (pool.read(block, 10), pool.write(block, b"x")):
        with pytest.raises((BlockNotFound, StaleBlock)):
            await call


async def test_a_cancelled_read_leaves_the_buffer_alone(opened: Opened) -> None:
    opened.silence()
    place = bytearray(64)
    await opened.over(asyncio.ensure_future(opened.pool.read_into(opened.block, place)))
    assert place == bytes(64) and not opened.in_threads
    for offset in range(0, 6400, 64):  # no answer to another question
        assert await opened.pool.read(opened.block, 64, offset=offset) == bytes(range(offset % 256, offset % 256 + 64))


async def test_a_cancelled_write_is_over(opened: Opened) -> None:
    with opened.world.pool(compression="off") as other:
        for _ in range(5):
            opened.silence()
            await opened.over(asyncio.ensure_future(opened.pool.write(opened.block, b"old")))
            other.write(opened.block, b"new")
            await asyncio.sleep(0.02)
            assert await opened.pool.read(opened.block, 3) == b"new"


async def test_a_server_that_is_silent_is_asked_again(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "STALL_LIMIT_S", 0.1)
    opened.silence()
    reading = asyncio.ensure_future(opened.pool.read(opened.block, 3))
    await asyncio.sleep(0.3)
    opened.server.signal(signal.SIGCONT)
    assert await reading == b"\0\1\2" and opened.in_threads


async def test_a_server_that_died(opened: Opened) -> None:
    await opened.pool.deallocate(opened.block)
    block = await opened.pool.allocate(SIZE, "gpu1", replicas=2)
    await opened.pool.write(block, b"both")
    assert await opened.pool.read(block, 4) == b"both"
    await asyncio.to_thread(opened.world.kill, "gpu1")
    assert await opened.pool.read(block, 4) == b"both"
    assert await opened.pool.write(block, b"more") == 4
    assert await opened.pool.read(block, 4) == b"more"
