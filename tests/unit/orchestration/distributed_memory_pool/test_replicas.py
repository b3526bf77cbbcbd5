"""Blocks with a copy: they outlive a node, and get a new copy."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest

from distributed_grid.daemon.memory_care import MemoryCare
from distributed_grid.orchestration.distributed_memory_pool import BlockLost, PoolFull, SyncMemoryPool
from tests.lab.waiting import wait_until
from tests.unit.orchestration.distributed_memory_pool.world import GB, World

MIB = 1024**2


def nodes_of(pool: SyncMemoryPool, block: str) -> list[str]:
    return [copy["node"] for copy in pool.info(block)["copies"]]


@pytest.mark.parametrize("victim", ["gpu1", "gpu2"])
def test_a_block_with_two_copies_outlives_either(victim: str, make_world: Callable[..., World]) -> None:
    world = make_world()
    data = os.urandom(MIB)
    with world.pool() as pool, world.pool() as other:
        block = pool.allocate(MIB, "gpu1", replicas=2)
        single = pool.allocate(MIB, victim)
        pool.write(block, data)
        assert nodes_of(pool, block) == ["gpu1", "gpu2"]
        assert other.read(block) == data

        world.kill(victim)
        pool.write(block, b"changed", offset=5)
        expected = data[:5] + b"changed" + data[12:]
        assert other.read(block) == expected and pool.read(block) == expected
        with pytest.raises(BlockLost):
            pool.read(single, 1)
        # Its place is taken as soon as there is room: here by the victim's new server.
        wait_until(lambda: len(nodes_of(pool, block)) == 2, 60, "a new copy")
        survivor = "gpu2" if victim == "gpu1" else "gpu1"
        assert nodes_of(pool, block) == [survivor, victim]
        pool.write(block, b"again")
        world.kill(survivor)
        assert other.read(block) == b"again" + expected[5:]
        pool.deallocate(block)


def test_copies_need_room_on_as_many_nodes(make_world: Callable[..., World]) -> None:
    world = make_world()
    with world.pool() as pool:
        pool.allocate(2 * GB, "gpu2")
        with pytest.raises(PoolFull) as full:
            pool.allocate(2 * GB, replicas=2)
        assert "on 2 nodes is 1.0 GiB" in full.value.cause
        with pytest.raises(PoolFull):
            pool.allocate(10, replicas=3)


def test_writers_during_the_making_of_a_copy(make_world: Callable[..., World]) -> None:
    """Whatever was written when the last writer is done is on both copies."""
    world = make_world()
    with world.pool() as pool:
        block = pool.allocate(32 * MIB, "gpu1", replicas=2)
        stop = threading.Event()
        written = [0] * 4
        failed: list[BaseException] = []

        def write(place: int) -> None:
            try:
                while not stop.is_set():
                    number = written[place] + 1
                    pool.write(block, number.to_bytes(8, "big") * 1000, offset=place * 8 * MIB)
                    written[place] = number
            except BaseException as error:  # noqa: BLE001 - told by the test's own thread
                failed.append(error)

        threads = [threading.Thread(target=write, args=[place]) for place in range(4)]
        for thread in threads:
            thread.start()
        try:
            wait_until(lambda: failed or all(written), 60, "all writers to write")
            world.kill("gpu2")
            wait_until(lambda: failed or world.told("memory.copied"), 60, "a new copy")
            after = list(written)
            wait_until(lambda: failed or all(a < b for a, b in zip(after, written, strict=True)), 60, "more writes")
        finally:
            stop.set()
            for thread in threads:
                thread.join(60)
        assert not failed
        for _ in ("gpu1", "gpu2"):
            for place in range(4):
                assert pool.read(block, 8000, offset=place * 8 * MIB) == written[place].to_bytes(8, "big") * 1000
            world.kill("gpu1")


@pytest.mark.parametrize("restart", [False, True])
def test_a_block_that_is_freed_while_it_is_copied_does_not_come_back(
    restart: bool, make_world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world()
    begun, go_on = threading.Event(), threading.Event()
    plain = MemoryCare._admin

    async def admin(self: MemoryCare, node: str, call: str, **arguments: Any) -> Any:
        if call == "copy":
            begun.set()
            while not go_on.is_set():
                await asyncio.sleep(0.02)
        return await plain(self, node, call, **arguments)

    with world.pool() as pool:
        block = pool.allocate(MIB, "gpu1", replicas=2)
        monkeypatch.setattr(MemoryCare, "_admin", admin)
        world.kill("gpu2")
        assert begun.wait(60)
        pool.deallocate(block)
        if restart:
            world.stop()
            world.start()
        go_on.set()
        held = [lambda node=node: world.run(lambda: world.held(node)) == [] for node in ("gpu1", "gpu2")]
        for is_empty in held:
            wait_until(is_empty, 60, "every copy to be freed")
        assert pool.list_blocks() == [] and not world.told("memory.adopted")
        wait_until(lambda: not world.directory.rows, 60, "the directory to forget it")
