"""Calls that are broken off, forked, refused or repeated: nothing is leaked, overwritten or shared that must not be."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from distributed_grid.agent.memory.connection import MemoryConnection
from distributed_grid.agent.memory.service import MemoryService
from distributed_grid.core.errors import GridError, InternalError, UsageError
from distributed_grid.core.process import ProcessId
from distributed_grid.daemon import memory as memory_module
from distributed_grid.daemon import memory_care
from distributed_grid.daemon.memory_care import MemoryCare
from distributed_grid.orchestration.distributed_memory_pool import (
    BlockLost,
    BlockNotFound,
    DistributedMemoryPool,
    SyncMemoryPool,
    shared,
    sync,
)  # fmt: skip
from distributed_grid.orchestration.distributed_memory_pool.blocks import new_block_id
from distributed_grid.orchestration.distributed_memory_pool.directory import _Line
from distributed_grid.store.blocks import Blocks
from tests.lab.waiting import wait_until
from tests.unit.orchestration.distributed_memory_pool.world import World

MIB = 1024**2


def run_program(text: str, *arguments: str) -> str:
    done = subprocess.run([sys.executable, "-c", text, *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


# -- forks ---------------------------------------------------------------------------------------------------------

READS_IN_BOTH = """
import os, sys, threading, time
from distributed_grid.orchestration.distributed_memory_pool import SyncMemoryPool
pool = SyncMemoryPool(compression="off"); pool.initialize()
block, pages = sys.argv[1], 200
def check(numbers, seconds=1.0):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for i in numbers:
            assert pool.read(block, 4096, offset=i * 4096) == bytes([i % 251]) * 4096
            if i % 50 == 0:
                assert pool.info(block)["id"] == block
check(range(pages), 0.1)
busy = threading.Thread(target=check, args=(range(1, pages, 3), 1.5))  # in the middle of something when it is forked
busy.start()
children = []
for part in (1, 2):
    pid = os.fork()
    if not pid:
        try:
            check(range(part, pages, 3))
            os._exit(0)
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
    children.append(pid)
check(range(0, pages, 3))
busy.join()
assert all(os.waitpid(pid, 0)[1] == 0 for pid in children)
pool.shutdown()
"""


def test_a_forked_child_has_connections_of_its_own(world: World, pool: SyncMemoryPool) -> None:
    block = pool.allocate(200 * 4096, "gpu1")
    for i in range(200):
        pool.write(block, bytes([i % 251]) * 4096, offset=i * 4096)
    run_program(READS_IN_BOTH, block)


LEAVES_IT_TO_THE_PARENT = """
import asyncio, os, sys
from distributed_grid.orchestration.distributed_memory_pool import SyncMemoryPool, DistributedMemoryPool
import fsspec
pool = SyncMemoryPool(); pool.initialize()
array = pool.array(1000, "uint8", name="numbers")
array[5] = 1                        # not flushed yet
file = fsspec.open("gridmem://half", "wb").open()
file.write(b"one half")
async def use(again):
    await again.initialize()
    return again
later = asyncio.run(use(DistributedMemoryPool()))
pid = os.fork()
if not pid:
    array[6] = 2
    array.flush()
    assert asyncio.run(later.find("numbers")) == array.block
    sys.exit(0)                     # with all that an interpreter does at its end
assert os.waitpid(pid, 0)[1] == 0
other = SyncMemoryPool(); other.initialize()
assert other.read(array.block, 3, offset=5) == bytes([0, 2, 0]), "the child wrote what is its parent's"
assert "half" not in other.objects
array.flush()
file.write(b", other half")
file.close()
assert other.read(array.block, 3, offset=5) == bytes([1, 2, 0])
assert other.objects["half"] == b"one half, other half"
asyncio.run(later.shutdown())
"""


def test_what_is_not_written_yet_is_the_parents_to_write(make_world: Callable[..., World]) -> None:
    make_world(shared=False)
    run_program(LEAVES_IT_TO_THE_PARENT)


# -- broken off ----------------------------------------------------------------------------------------------------


async def test_a_cancelled_write_is_over_when_it_returns(make_world: Callable[..., World]) -> None:
    """What another pool writes then is never overwritten by what was still on its way."""
    world, size = make_world(shared=False), 32 * MIB
    old, new = b"O" * size, b"N" * 64
    places = list(range(0, size, MIB // 4))
    with world.pool(compression="off") as other:
        async with DistributedMemoryPool(world.config, compression="off") as pool:
            block = await pool.allocate(size, "gpu1")
            for turn in range(25):
                task = asyncio.ensure_future(pool.write(block, old))
                await asyncio.sleep(0.001 + 0.0004 * turn)
                task.cancel()
                await asyncio.wait([task])
                other.writev(block, [(at, new) for at in places])
                await asyncio.sleep(0.02)
                assert other.readv(block, [(at, 64) for at in places]) == [new] * len(places)


def test_no_write_before_a_broken_off_one_has_ended(
    make_world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the server does not say that it has, the next call asks again before it does anything."""
    world = make_world(shared=False)
    ended: list[int] = []
    plain = MemoryConnection.end

    def end(self: MemoryConnection, number: int) -> None:
        ended.append(number)
        if len(ended) == 1:
            raise KeyboardInterrupt  # Ctrl-C again
        plain(self, number)

    monkeypatch.setattr(MemoryConnection, "end", end)
    with world.pool(compression="off") as pool:
        block = pool.allocate(MIB, "gpu1")
        pool.write(block, b"o" * MIB)

        def interrupted(*_: Any) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(MemoryConnection, "_take_reply", interrupted)
            with pytest.raises(KeyboardInterrupt):
                pool.write(block, b"o" * MIB)
        assert len(ended) == 1
        pool.write(block, b"n" * MIB)
        assert len(ended) == 2 and ended[0] == ended[1] and not pool._connections._broken
        assert pool.read(block) == b"n" * MIB


async def test_a_cancelled_call_is_out_of_the_callers_buffer(
    make_world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world(shared=True)
    began, go_on = threading.Event(), threading.Event()
    plain = shared.copy

    def slow(target: int, source: int, size: int) -> None:
        began.set()
        assert go_on.wait(60)
        plain(target, source, size)

    async with DistributedMemoryPool(world.config) as pool:
        block = await pool.allocate(1000, "gpu1")
        await pool.write(block, b"x" * 1000)
        monkeypatch.setattr(shared, "copy", slow)
        buffer = bytearray(1000)
        task = asyncio.ensure_future(pool.read_into(block, buffer))
        await asyncio.to_thread(began.wait, 60)
        for _ in range(3):  # however often
            task.cancel()
            await asyncio.sleep(0.05)
        assert not task.done() and not any(buffer)
        go_on.set()
        await asyncio.wait([task])
        assert task.cancelled() and buffer == b"x" * 1000


# -- allocate ------------------------------------------------------------------------------------------------------


def slow_allocate(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """The agent's own step waits: (it has begun, it may go on)."""
    began, go_on = threading.Event(), threading.Event()
    plain = MemoryService._ask

    def ask(self: MemoryService, record: Any, name: str, **arguments: Any) -> dict[str, Any]:
        if name == "allocate":
            began.set()
            assert go_on.wait(60)
        return plain(self, record, name, **arguments)

    monkeypatch.setattr(MemoryService, "_ask", ask)
    return began, go_on


def nothing_is_left(world: World) -> None:
    wait_until(lambda: not world.directory.rows, 60, "the directory to be empty")
    for node in ("gpu1", "gpu2"):
        assert world.run(lambda node=node: world.held(node)) == []
    assert not world.told("memory.adopted")


async def test_a_cancelled_allocate_leaves_nothing(
    make_world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world(shared=False)
    began, go_on = slow_allocate(monkeypatch)
    async with DistributedMemoryPool(world.config) as pool:
        task = asyncio.ensure_future(pool.allocate(MIB, "gpu1"))
        await asyncio.to_thread(began.wait, 60)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        assert [row.state for row in world.directory.rows.values()] in ([], ["freeing"])
        go_on.set()
        await asyncio.to_thread(nothing_is_left, world)
        assert (await pool.allocate(MIB, "gpu1")).node == "gpu1"


async def test_an_allocate_that_was_done_when_it_was_cancelled(
    make_world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world(shared=False)
    made, go_on = threading.Event(), threading.Event()
    plain = SyncMemoryPool._learn

    def learn(self: SyncMemoryPool, found: dict[str, Any]) -> Any:
        made.set()
        assert go_on.wait(60)
        return plain(self, found)

    async with DistributedMemoryPool(world.config) as pool:
        for make in (lambda: pool.allocate(MIB), lambda: pool.array(10), lambda: pool.put_array(np.ones(10))):
            made.clear()
            go_on.clear()
            monkeypatch.setattr(SyncMemoryPool, "_learn", learn)
            task = asyncio.ensure_future(make())
            await asyncio.to_thread(made.wait, 60)
            task.cancel()
            await asyncio.sleep(0.05)
            monkeypatch.setattr(SyncMemoryPool, "_learn", plain)
            go_on.set()
            await asyncio.wait([task])
            assert task.cancelled()
            await asyncio.to_thread(nothing_is_left, world)


def test_a_client_killed_while_it_allocates(make_world: Callable[..., World], monkeypatch: pytest.MonkeyPatch) -> None:
    world = make_world(shared=False)
    began, go_on = slow_allocate(monkeypatch)
    program = (
        "from distributed_grid.orchestration.distributed_memory_pool import SyncMemoryPool\n"
        "pool = SyncMemoryPool(); pool.initialize(); pool.allocate(1000)"
    )
    with subprocess.Popen([sys.executable, "-c", program]) as process:
        assert began.wait(60)
        process.kill()
    wait_until(lambda: [row.state for row in world.directory.rows.values()] == ["freeing"], 60, "it to be given up")
    go_on.set()
    nothing_is_left(world)


# -- names ---------------------------------------------------------------------------------------------------------


def test_a_rename_that_fails_changes_nothing(
    world: World, pool: SyncMemoryPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool.objects["best"] = b"the old one"
    block = pool.allocate(100)
    for meta in ({"loss": math.nan}, {"raw": b"bytes"}):
        with pytest.raises(UsageError, match="not JSON"):
            pool.rename(block, "best", meta)
        with pytest.raises(UsageError, match="not JSON"):
            pool._ask("memory_rename", block_id=str(block), key="best", meta=meta)
        with pytest.raises(UsageError, match="not JSON"):
            pool.allocate(100, name="best", meta=meta)
    plain = Blocks.put

    def full(self: Blocks, row: Any) -> Any:
        if row.id == block:
            raise InternalError("the disk is full")
        return plain(self, row)

    with monkeypatch.context() as patch:
        patch.setattr(Blocks, "put", full)
        with pytest.raises(InternalError):
            pool.rename(block, "best", {})
    world.run(world.directory.care._round)
    assert pool.objects["best"] == b"the old one" and pool.info(block)["name"] == ""
    pool.rename(block, "best")
    assert pool.find("best") == block and len(pool.list_blocks()) == 1


def test_objects_with_metadata_and_pickled_ones(pool: SyncMemoryPool) -> None:
    pool.objects.put("model", b"weights", meta={"loss": 0.5})
    assert pool.objects["model"] == b"weights" and pool.objects.meta("model") == {"loss": 0.5, "size_bytes": 7}
    with pytest.raises(UsageError, match="not pickled"):
        pool.objects.load("model")
    pool.objects.put("state", {"epoch": (1, 2)}, pickled=True)
    assert pool.objects.load("state") == {"epoch": (1, 2)}
    with pytest.raises(UsageError):
        pool.objects.put("bad", b"", meta={"loss": math.inf})
    assert sorted(pool.objects) == ["model", "state"] and len(pool.list_blocks()) == 2


# -- slow, or gone -------------------------------------------------------------------------------------------------


def test_a_server_that_is_slow_is_not_lost(make_world: Callable[..., World], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_care, "PROBE_LIMIT_S", 0.3)
    world = make_world(shared=False)
    with world.pool() as pool:
        block = pool.allocate(1000, "gpu1", strict=True)
        pool.write(block, b"x" * 1000)
        record = world.record("gpu1")
        assert record
        server = ProcessId(record.pid, record.start_ticks)
        server.signal(signal.SIGSTOP)
        try:
            world.run(lambda: world.directory.care.check_node("gpu1"))
            assert pool.info(block)["state"] == "ready" and not world.told("memory.lost")
            world.links.get("gpu1").state.online = False  # its agent is silent too
            world.run(lambda: world.directory.care.check_node("gpu1"))
            with pytest.raises(BlockLost):
                pool.info(block)
        finally:
            server.signal(signal.SIGCONT)
        world.links.get("gpu1").state.online = True
        wait_until(lambda: world.told("memory.back"), 60, "it to be found again")
        assert pool.read(block, 10) == b"x" * 10


# -- copies --------------------------------------------------------------------------------------------------------

ENDS_BETWEEN_COPIES = """
import os, sys
from distributed_grid.agent.memory.connection import MemoryConnection
from distributed_grid.orchestration.distributed_memory_pool import SyncMemoryPool
plain, written = MemoryConnection.write, []
def write(self, *arguments, **options):
    if written:
        os._exit(9)
    plain(self, *arguments, **options)
    written.append(1)
MemoryConnection.write = write
pool = SyncMemoryPool(); pool.initialize()
pool.write(sys.argv[1], b"new")
"""


def test_copies_are_equal_again_after_a_writer_was_killed(make_world: Callable[..., World]) -> None:
    world = make_world(shared=False)
    with world.pool() as pool:
        block = pool.allocate(MIB, "gpu1", replicas=2)
        pool.write(block, b"old" * 1000)
        before = pool.info(block)["generation"]
        done = subprocess.run([sys.executable, "-c", ENDS_BETWEEN_COPIES, block], timeout=120)
        assert done.returncode == 9
        wait_until(lambda: pool.info(block)["generation"] >= before + 2, 60, "a new copy")
        assert len(pool.info(block)["copies"]) == 2
        expected = b"new" + b"old" * 999
        assert pool.read(block, 3000) == expected
        world.kill("gpu1")
        assert pool.read(block, 3000) == expected
        for turn in range(20):  # those who end in order leave nothing to mend
            pool.write(block, bytes([turn]) * 100)
        generation = pool.info(block)["generation"]
        world.run(world.directory.care._round)
        assert pool.info(block)["generation"] in (generation, generation + 1)  # a second copy, where there is room


def test_a_copy_in_many_steps_under_writers_keeps_nobody_waiting(
    make_world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_care, "COPY_STEP_BYTES", MIB)
    monkeypatch.setattr(memory_care, "COPY_REST_BYTES", 2 * MIB)
    world, size = make_world(shared=False), 16 * MIB
    calls: list[str] = []
    held, plain = threading.Event(), MemoryCare._admin

    async def admin(self: MemoryCare, node: str, call: str, **arguments: Any) -> Any:
        calls.append(call)
        while call == "copy" and calls.count("copy") == 3 and not held.is_set():
            await asyncio.sleep(0.02)
        return await plain(self, node, call, **arguments)

    with world.pool(compression="off") as pool:
        block = pool.allocate(size, "gpu1", replicas=2)
        pool.write(block, b"a" * size)
        monkeypatch.setattr(MemoryCare, "_admin", admin)
        world.kill("gpu2")
        wait_until(lambda: calls.count("copy") == 3, 60, "the copy to be under way")
        pool.write(block, b"b" * 100, offset=50)  # at once: nobody is held up
        pool.write(block, b"c" * 100, offset=size - 100)
        other = pool.allocate(1000, "gpu1")
        world.run(lambda: asyncio.sleep(0))
        row = world.directory.rows[other]

        async def disown() -> None:  # its owner ended: care sees to that meanwhile
            world.directory.put(row, owner=[2**22 - 1, 1])

        world.run(disown)
        wait_until(lambda: other not in world.directory.rows, 60, "the other block to be freed")
        assert "freeze" not in calls
        held.set()
        wait_until(lambda: len(pool.info(block)["copies"]) == 2, 60, "the copy")
        assert calls.count("copy") > size // MIB and calls.index("freeze") > calls.index("changed")
        world.kill("gpu1")
        assert pool.read(block) == b"a" * 50 + b"b" * 100 + b"a" * (size - 250) + b"c" * 100


def test_a_copy_that_fails_is_put_off(make_world: Callable[..., World], monkeypatch: pytest.MonkeyPatch) -> None:
    world = make_world(shared=False)
    tried: list[float] = []
    plain = MemoryCare._admin

    async def admin(self: MemoryCare, node: str, call: str, **arguments: Any) -> Any:
        if call == "copy":
            tried.append(time.monotonic())
            raise GridError("the link is slow")
        return await plain(self, node, call, **arguments)

    monkeypatch.setattr(memory_care, "COPY_AGAIN_S", 0.5)
    with world.pool() as pool:
        block = pool.allocate(MIB, "gpu1", replicas=2)
        monkeypatch.setattr(MemoryCare, "_admin", admin)
        world.kill("gpu2")
        wait_until(lambda: len(tried) >= 3, 60, "three tries")
        assert tried[1] - tried[0] >= 0.5 and tried[2] - tried[1] >= 1.0
        pool.write(block, b"x" * MIB)  # no writer is kept waiting in between


# -- whose, and how many -------------------------------------------------------------------------------------------


def test_an_owner_is_who_the_kernel_says(world: World, pool: SyncMemoryPool) -> None:
    """A program in a pid namespace of its own says another pid."""
    block = new_block_id()
    pool._ask("memory_allocate", block_id=block, size_bytes=100, owner_pid=1)
    assert world.directory.rows[block].data["owner"][0] == os.getpid()


def test_lists_of_many_blocks(world: World, pool: SyncMemoryPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_module, "PAGE_BLOCKS", 3)
    monkeypatch.setattr(sync, "PAGE_BLOCKS", 3)
    made = [pool.allocate(100) for _ in range(7)]
    assert [one["id"] for one in pool.list_blocks()] == made[::-1]
    world.stop()
    world.start()
    assert [one["id"] for one in pool.list_blocks()] == made[::-1]


def test_a_read_of_zeros_tells_nothing_about_the_link(make_world: Callable[..., World]) -> None:
    world = make_world(shared=False)
    with world.pool(compression="auto") as pool:
        block = pool.allocate(4 * MIB, "gpu1")
        pool.read(block)
        assert pool._links["gpu1"].rate_bytes_s == 0
        pool.write(block, os.urandom(4 * MIB))
        measured = pool._links["gpu1"].rate_bytes_s
        pool.read(block)
        assert 0 < measured != pool._links["gpu1"].rate_bytes_s


# -- repeated ------------------------------------------------------------------------------------------------------


def test_calls_whose_answer_was_lost(world: World, pool: SyncMemoryPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon did it and was killed before it could say so."""
    lost: list[str] = []
    plain = _Line.call

    def call(self: _Line, name: str, arguments: dict[str, Any], timeout_s: float) -> Any:
        answer = plain(self, name, arguments, timeout_s)
        if name in ("memory_allocate", "memory_deallocate") and name not in lost:
            lost.append(name)
            raise ConnectionError("the daemon closed the connection")
        return answer

    monkeypatch.setattr(_Line, "call", call)
    block = pool.allocate(100)
    assert len(pool.list_blocks()) == 1
    pool.deallocate(block)
    assert lost == ["memory_allocate", "memory_deallocate"] and pool.list_blocks() == []
    with pytest.raises(BlockNotFound):
        pool.deallocate(block)


def test_an_allocate_that_a_killed_daemon_had_begun(
    world: World, pool: SyncMemoryPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    block_id = new_block_id()
    ids = iter([block_id, new_block_id()])
    monkeypatch.setattr(sync, "new_block_id", lambda: next(ids))

    async def begin(state: str) -> None:
        row = world.directory.rows[gone]
        world.directory.put(type(row)(block_id, "gpu1", row.uid, state, 100, row.created, {**row.data, "name": ""}))

    gone = pool._ask("memory_allocate", block_id=new_block_id(), size_bytes=100)["id"]
    world.run(lambda: begin("freeing"))
    assert pool._ask("memory_allocate", block_id=block_id, size_bytes=100)["id"] == block_id  # freed first
    pool.deallocate(block_id)
    world.run(lambda: begin("allocating"))
    assert pool.allocate(100) != block_id
    world.run(lambda: begin("freeing"))
    pool._ask("memory_deallocate", block_id=block_id)
