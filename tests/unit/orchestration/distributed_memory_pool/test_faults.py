"""Killed in the middle of a transfer, on either side: one typed error, and everything else goes on."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from distributed_grid.orchestration.distributed_memory_pool import BlockLost
from tests.lab.waiting import wait_until
from tests.unit.orchestration.distributed_memory_pool.world import World

MIB = 1024**2


@pytest.mark.parametrize("what", ["read", "write"])
def test_a_server_that_is_killed_under_a_transfer(what: str, make_world: Callable[..., World]) -> None:
    world = make_world(shared=False)
    data = bytes(range(256)) * (32 * MIB // 256)
    with world.pool(compression="off") as pool:
        block = pool.allocate(len(data), "gpu1", strict=True)
        pool.write(block, data)
        begun, failed = threading.Event(), []

        def transfer() -> None:
            try:
                while True:
                    if what == "write":
                        pool.write(block, data)
                    else:
                        assert pool.read(block) == data
                    begun.set()
            except BaseException as error:  # noqa: BLE001 - looked at below
                failed.append(error)
                begun.set()

        threads = [threading.Thread(target=transfer) for _ in range(3)]
        for thread in threads:
            thread.start()
        assert begun.wait(60)
        world.kill("gpu1")
        for thread in threads:
            thread.join(90)
        assert [type(error) for error in failed] == [BlockLost] * 3, failed
        other = pool.allocate(MIB, "gpu1", strict=True)
        pool.write(other, data[:MIB])
        assert pool.read(other) == data[:MIB]


WRITER = """
import sys
from distributed_grid.orchestration.distributed_memory_pool import SyncMemoryPool
with SyncMemoryPool(compression="off") as pool:
    while True:
        pool.write(sys.argv[1], b"w" * 2**25)
        print("written", flush=True)
"""


def test_a_client_that_is_killed_under_a_write(make_world: Callable[..., World]) -> None:
    world = make_world(shared=False)
    with world.pool(compression="off") as pool:
        block, other = pool.allocate(32 * MIB, "gpu1"), pool.allocate(MIB, "gpu1")
        pool.write(other, b"o" * MIB)
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, block], stdout=subprocess.PIPE, env=dict(os.environ)
        ) as process:
            assert process.stdout and process.stdout.readline() == b"written\n"
            before = pool.stats()["nodes"]["gpu1"]["connections"]
            process.kill()
        wait_until(lambda: pool.stats()["nodes"]["gpu1"]["connections"] < before, 60, "its connection to be given up")
        assert pool.read(other) == b"o" * MIB and pool.read(block) == b"w" * 32 * MIB
        pool.write(block, b"x" * 32 * MIB)
        assert pool.read(block, 10) == b"x" * 10
        pool.deallocate(block)
        assert world.run(lambda: world.held("gpu1"))[0]["size_bytes"] == MIB
