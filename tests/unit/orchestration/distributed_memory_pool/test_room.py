"""What there is room for: blocks that are kept packed, a limit for each user, one account with lending."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from distributed_grid.agent.memory.errors import OutOfRange, PoolFull
from distributed_grid.core.errors import UsageError
from distributed_grid.core.resources import AllocationPriority
from distributed_grid.daemon.lending_loop import LendingLoop
from distributed_grid.orchestration.distributed_memory_pool import sync
from distributed_grid.orchestration.resource_sharing.model import Amounts, Lease, LeaseState, Ledger
from tests.lab.waiting import wait_until
from tests.unit.orchestration.distributed_memory_pool.world import GB, World

MIB = 1024**2


def test_a_node_holds_more_of_what_packs(make_world: Callable[..., World], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync, "AT_REST_PART_BYTES", 5 * MIB)
    world = make_world()
    for node in world.config.nodes:
        node.share.memory = 40 / 1024
    text = json.dumps([{"number": i, "name": "a name"} for i in range(1000)]).encode()
    data = (text * (60 * MIB // len(text) + 1))[: 60 * MIB]
    with world.pool(compression="off") as pool, world.pool(compression="lz4") as other:
        with pytest.raises(PoolFull):
            pool.allocate(60 * MIB, "gpu1", strict=True)
        with pytest.raises(UsageError, match="no compression"):
            pool.allocate(MIB, at_rest="rar")
        block = pool.allocate(60 * MIB, "gpu1", strict=True, at_rest="zstd", replicas=2)
        assert pool.info(block)["at_rest"] == "zstd"
        assert pool.read(block, 100, offset=59 * MIB) == bytes(100)
        pool.write(block, data)
        assert pool.read(block) == data == other.read(block)
        other.write(block, data[: 10 * MIB], offset=77)
        assert pool.readv(block, [(77, 1000), (77 + 10 * MIB, 50)]) == [
            data[:1000], data[77 + 10 * MIB : 127 + 10 * MIB]
        ]  # fmt: skip
        pool.writev(block, [(5, b"five"), (50 * MIB, b"fifty")])
        assert pool.readv(block, [(5, 4), (50 * MIB, 5)]) == [b"five", b"fifty"]
        with pytest.raises(OutOfRange):
            pool.write(block, b"x", offset=60 * MIB)
        with pytest.raises(PoolFull):  # what does not pack takes what it is
            pool.write(block, os.urandom(50 * MIB))
        assert pool.read(block, 4, offset=50 * MIB) == b"fift"  # the rest is as it was, and the pool goes on
        promised = pool.stats()["nodes"]["gpu1"]["promised_bytes"]
        assert 5 * MIB < promised <= 41 * MIB and world.directory.promised_on("gpu1") >= promised
        world.kill("gpu2")  # the other copy is made again, packed too
        wait_until(lambda: len(pool.info(block)["copies"]) == 2, 90, "a new copy")
        assert pool.read(block, 4, offset=50 * MIB) == b"fift"
        pool.deallocate(block)
        wait_until(lambda: world.directory.promised_on("gpu1") == 0, 60, "the room to be there again")


def test_each_user_has_a_limit(make_world: Callable[..., World]) -> None:
    world = make_world()
    world.config.memory_pool.per_user_gb = 100 / 1024
    with world.pool() as pool:
        first = pool.allocate(40 * MIB)
        pool.allocate(20 * MIB, replicas=2)
        with pytest.raises(PoolFull) as full:
            pool.allocate(21 * MIB)
        assert "each user may have" in full.value.cause and "20.0 MiB are left" in full.value.cause
        mine, world.uid = world.uid, world.uid + 1
        with world.pool() as another:
            another.allocate(90 * MIB)
        world.uid = mine
        pool.deallocate(first)
        pool.allocate(21 * MIB)


class Lending:
    """The real loop and ledger over figures that stand still."""

    def __init__(self, world: World, plane: Any) -> None:
        self.ledger = Ledger()
        shot = SimpleNamespace(
            at=1.0, cpu_cores_total=8, cpu_cores_used=0.0, memory_total_bytes=5 * GB, memory_used_bytes=0, gpus=(),
            gpu_count=0,
        )  # fmt: skip
        links = SimpleNamespace(
            names=world.links.names, get=lambda node: SimpleNamespace(state=SimpleNamespace(online=True))
        )
        kv = SimpleNamespace(get=lambda key, default: default)
        self.plane: Any = SimpleNamespace(
            config=world.config, collector=SimpleNamespace(get_latest_snapshot=lambda node: shot), links=links,
            journal=SimpleNamespace(kv=kv),
        )  # fmt: skip
        book: Any = SimpleNamespace(ledger=self.ledger, cooling=set())
        self.loop = LendingLoop(self.plane, book)

    def free_gb(self, node: str) -> float:
        self.loop.refresh()
        return self.ledger.nodes[node].free.memory_bytes / GB

    def lend(self, name: str, node: str, size_bytes: int, kind: str) -> None:
        grant = self.ledger.nodes[node].choose(Amounts(memory_bytes=size_bytes))
        priority = AllocationPriority.NORMAL
        self.ledger.add(
            Lease(name, kind, node, "", 1, priority, grant, 1, 0.0, state=LeaseState.ACTIVE, held=grant)
        )


def test_nothing_is_promised_by_both_the_pool_and_lending(make_world: Callable[..., World]) -> None:
    world = make_world(available_bytes=5 * GB)  # of 5 GiB each node keeps 1
    lending = Lending(world, None)
    lending.plane.memory = world.directory
    world.directory._plane.lending = lending
    with world.pool() as pool:
        assert lending.free_gb("gpu1") == 4
        block = pool.allocate(GB, "gpu1", strict=True)
        assert lending.ledger.nodes["gpu1"].free.memory_bytes == 3 * GB  # at once, not with the next round
        lending.lend("job", "gpu1", 2 * GB, "run")
        assert lending.free_gb("gpu1") == 1
        with pytest.raises(PoolFull):  # though nobody uses a byte of it yet
            pool.allocate(GB + MIB, "gpu1", strict=True)
        more = pool.allocate(GB, "gpu1", strict=True)
        assert lending.free_gb("gpu1") == 0
        pool.deallocate(more)
        lending.lend("boost", "gpu1", GB, "boost")  # a quota: blocks draw on it first
        assert lending.free_gb("gpu1") == 1  # the block that was there is in it now
        assert pool.allocate(GB, "gpu1", strict=True).node == "gpu1"
        with pytest.raises(PoolFull):
            pool.allocate(MIB, "gpu1", strict=True)
        pool.deallocate(block)
        assert lending.free_gb("gpu1") == 1
