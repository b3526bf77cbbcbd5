"""Blocks from a program's side: what is written is read back, and what can't be is told in one typed error."""

from __future__ import annotations

import array
import asyncio
import os
import pickle
import subprocess
import sys
from collections.abc import Callable

import pytest

from distributed_grid.core.errors import NotFound, UsageError
from distributed_grid.orchestration.distributed_memory_pool import (
    Block,
    BlockLost,
    BlockNotFound,
    DistributedMemoryPool,
    NoNodes,
    OutOfRange,
    PoolClosed,
    PoolFull,
    SyncMemoryPool,
)  # fmt: skip
from tests.lab.waiting import wait_until
from tests.unit.orchestration.distributed_memory_pool.world import GB, World

MIB = 1024**2


def test_the_documented_program(world: World) -> None:
    async def use_remote_memory() -> None:
        pool = DistributedMemoryPool(world.config)
        await pool.initialize()
        block_id = await pool.allocate(24 * MIB, preferred_node="gpu2")
        data = b"Your data here" * 1000000
        await pool.write(block_id, data)
        assert await pool.read(block_id, len(data)) == data
        assert b"".join([part async for part in pool.stream(block_id, chunk_bytes=5 * MIB)])[: len(data)] == data
        await pool.deallocate(block_id)
        with pytest.raises(BlockNotFound):
            await pool.read(block_id, 10)
        await pool.shutdown()
        with pytest.raises(PoolClosed):
            await pool.read(block_id, 10)

    asyncio.run(use_remote_memory())


def test_parts_of_a_block(world: World, pool: SyncMemoryPool) -> None:
    block = pool.allocate(3 * MIB + 5, "gpu1")
    assert block.node == "gpu1" and "3.0 MiB on gpu1" in repr(block) and pickle.loads(pickle.dumps(block)) == block
    assert pool.read(block) == bytes(3 * MIB + 5)
    assert pool.write(block, array.array("I", range(1000)), offset=7) == 4000
    assert pool.read(block, 4000, offset=7) == array.array("I", range(1000)).tobytes()
    target = bytearray(4010)
    assert pool.read_into(block, memoryview(target)[5:-5], offset=7) == 4000
    assert target == bytes(5) + array.array("I", range(1000)).tobytes() + bytes(5)
    pool.writev(block, [(10000 + 100 * i, bytes([i]) * 50) for i in range(200)])
    many = pool.readv(block, [(10000 + 100 * i, 51) for i in range(200)])
    assert many == [bytes([i]) * 50 + b"\0" for i in range(200)]
    assert pool.read(block, 1, offset=3 * MIB + 4) == b"\0" and pool.read(block, 0) == b""
    streamed = b"".join(pool.stream(block, offset=1, size=2 * MIB, chunk_bytes=300_000))
    assert streamed == pool.read(block, 2 * MIB, offset=1)
    pool.deallocate(block)


def test_what_can_not_be(world: World, pool: SyncMemoryPool) -> None:
    block = pool.allocate(100)
    for size in (0, -1, 1.5, True, "5"):
        with pytest.raises(UsageError):
            pool.allocate(size)  # type: ignore[arg-type]
    with pytest.raises(PoolFull, match="Failed to allocate memory block") as full:
        pool.allocate(100 * GB)
    assert "largest that would fit now is 3.0 GiB" in full.value.cause
    with pytest.raises(NotFound, match="gpu9"):
        pool.allocate(10, "gpu9")
    for offset, size in ((0, 101), (100, 1), (-1, 5), (0, -1)):
        with pytest.raises(UsageError):
            pool.read(block, size, offset=offset)
    with pytest.raises(OutOfRange):
        pool.write(block, b"x" * 10, offset=95)
    with pytest.raises(OutOfRange):
        pool.writev(block, [(0, b"x"), (1000, b"x")])
    with pytest.raises(UsageError, match="no bytes"):
        pool.write(block, "text")
    with pytest.raises(UsageError, match="can't be written"):
        pool.read_into(block, b"fixed")
    for name in ("nonsense", "block_0123456789abcdef"):
        with pytest.raises(BlockNotFound):
            pool.read(name, 1)
    assert pool.read(block, 100) == bytes(100)
    pool.deallocate(block)
    with pytest.raises(BlockNotFound):
        pool.deallocate(block)


def test_nodes(world: World, pool: SyncMemoryPool) -> None:
    assert pool.allocate(10).node in ("gpu1", "gpu2")  # never the head
    assert pool.allocate(10, "gpu-master").node == "gpu-master"  # unless asked
    first = pool.allocate(5 * GB // 2, "gpu1")
    assert first.node == "gpu1"
    assert pool.allocate(GB, "gpu1").node == "gpu2"  # promised is promised, though nothing is used yet
    with pytest.raises(PoolFull):
        pool.allocate(GB, "gpu1", strict=True)
    pool.deallocate(first)
    assert pool.allocate(GB, "gpu1", strict=True).node == "gpu1"
    stats = pool.stats()
    assert stats["nodes"]["gpu1"]["promised_bytes"] >= GB and stats["blocks"] == 4
    for link in world.links.links.values():
        link.state.online = False
    with pytest.raises(NoNodes, match="No available nodes for memory allocation"):
        pool.allocate(10)


def test_memory_goes_back(world: World, pool: SyncMemoryPool) -> None:
    block = pool.allocate(64 * MIB, "gpu1")
    pool.write(block, os.urandom(MIB) * 64)
    with world.pool() as other:  # one that still has the block open does not keep its memory
        assert other.read(block, 1000) == pool.read(block, 1000)
        assert world.backed_bytes("gpu1") >= 64 * MIB
        pool.deallocate(block)
        assert world.backed_bytes("gpu1") < 32 * MIB


def test_blocks_outlive_the_client_and_the_daemon(world: World) -> None:
    data = os.urandom(MIB)
    with world.pool() as first:
        block = first.allocate(MIB, "gpu2", name="kept", meta={"a": 1})
        first.write(block, data)
    world.stop()
    world.start()
    with world.pool() as second:
        assert second.find("kept") == block and second.info(block)["meta"] == {"a": 1}
        assert second.read(str(block)) == data
        newer = second.allocate(10, name="kept")
        assert second.find("kept") == newer
        with pytest.raises(BlockNotFound):
            second.read(str(block))
        assert [one["id"] for one in second.list_blocks()] == [newer]
        second.rename(newer, "other")
        with pytest.raises(BlockNotFound):
            second.find("kept")


def test_a_journal_that_is_gone(world: World) -> None:
    with world.pool() as first:
        block = first.allocate(1000, "gpu2")
        first.write(block, b"still here")
    world.stop()
    for file in world.home.glob("journal*"):
        file.unlink()
    world.start()
    with world.pool() as second:
        assert second.read(block, 10) == b"still here"
    assert world.told("memory.adopted")


def test_a_server_that_dies(world: World, pool: SyncMemoryPool) -> None:
    block, other = pool.allocate(MIB, "gpu1"), pool.allocate(MIB, "gpu2")
    pool.write(block, b"x" * MIB)
    pool.write(other, b"y" * MIB)
    world.kill("gpu1")
    for work in (lambda: pool.read(block, 10), lambda: pool.write(block, b"z"), lambda: pool.read(str(block))):
        with pytest.raises(BlockLost):
            work()
    assert len(world.told("memory.lost")) == 1
    assert pool.read(other) == b"y" * MIB
    again = pool.allocate(MIB, "gpu1")  # a new server
    pool.write(again, b"again")
    assert pool.read(again, 5) == b"again"
    with pytest.raises(BlockLost):
        pool.read(block, 10)
    pool.deallocate(block)
    assert [one["id"] for one in pool.list_blocks()] == [again, other]


def test_a_freed_block_is_refused_to_those_who_knew_it(world: World, pool: SyncMemoryPool) -> None:
    block = pool.allocate(1000, "gpu1")
    pool.write(block, b"x" * 1000)
    with world.pool() as other:
        assert other.read(block, 10) == b"x" * 10
        pool.deallocate(block)
        with pytest.raises(BlockNotFound):
            other.read(block, 10)
        with pytest.raises(BlockNotFound):
            other.write(block, b"y")


def test_another_user(world: World, pool: SyncMemoryPool) -> None:
    block = pool.allocate(1000, "gpu1")
    known = pool._locate(block)
    mine, world.uid = world.uid, world.uid + 1
    with world.pool() as stranger:
        for work in (lambda: stranger.read(block, 10), lambda: stranger.info(block)):
            with pytest.raises(BlockNotFound):
                work()
        stranger._known[block] = known  # even who knows where it lies
        with pytest.raises(BlockNotFound):
            stranger.read(block, 10)
    world.uid = mine


def test_an_owner_that_ends(make_world: Callable[..., World]) -> None:
    world = make_world()
    program = (
        "import sys; from distributed_grid.orchestration.distributed_memory_pool import SyncMemoryPool\n"
        "pool = SyncMemoryPool(); pool.initialize(); pool.allocate(1000, owned=True, name='mine')\n"
        "assert 'ray' not in sys.modules and 'asyncio' not in sys.modules\n"
        "print('ready', flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=dict(os.environ)
    )
    assert process.stdin and process.stdout
    assert process.stdout.readline() == b"ready\n"
    with world.pool() as pool:
        assert pool.find("mine")
        process.kill()
        process.wait(60)
        wait_until(lambda: not pool.list_blocks(), 60, "the block to be freed")
    process.stdin.close()
    process.stdout.close()


async def test_a_cancelled_transfer_leaves_the_pool_usable(make_world: Callable[..., World]) -> None:
    world = make_world(shared=False)
    async with DistributedMemoryPool(world.config) as pool:
        block = await pool.allocate(128 * MIB, "gpu1")
        data = os.urandom(MIB) * 128
        for _ in range(5):
            for work in (pool.write(block, data), pool.read(block)):
                task = asyncio.ensure_future(work)
                await asyncio.sleep(0.02)
                task.cancel()
                await asyncio.wait([task])
        await pool.write(block, data)
        assert await pool.read(block) == data
        await pool.deallocate(block)


def test_handles_are_ids() -> None:
    assert {Block("block_0123456789abcdef", 5, "gpu1"): 1} == {"block_0123456789abcdef": 1}
