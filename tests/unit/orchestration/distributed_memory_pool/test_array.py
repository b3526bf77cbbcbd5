"""Arrays on another node: they do what numpy does, and move no more than they must."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as np_st

from distributed_grid.agent.memory.errors import BlockNotFound, PoolClosed
from distributed_grid.core.errors import UsageError
from distributed_grid.orchestration.distributed_memory_pool import DistributedMemoryPool, RemoteArray, SyncMemoryPool
from distributed_grid.orchestration.distributed_memory_pool import cached as cached_module
from distributed_grid.orchestration.distributed_memory_pool.cached import PAGE_BYTES
from distributed_grid.orchestration.distributed_memory_pool.selection import select
from tests.unit.orchestration.distributed_memory_pool.world import World

MIB = 1024**2


@st.composite
def _shape_and_index(draw: Callable[..., Any]) -> tuple[tuple[int, ...], Any]:
    shape = draw(np_st.array_shapes(min_dims=1, max_dims=4, min_side=1, max_side=6))
    return shape, draw(np_st.basic_indices(shape, allow_newaxis=False))


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(_shape_and_index())
def test_an_index_means_the_same_bytes_as_in_numpy(drawn: tuple[tuple[int, ...], Any]) -> None:
    shape, key = drawn
    whole = np.arange(np.prod(shape)).reshape(shape)
    chosen = select(key, shape)
    starts = chosen.starts(0, chosen.runs) if chosen.size else np.empty(0, np.int64)
    assert (np.diff(starts) >= chosen.length).all()
    flat = (starts[:, None] + np.arange(chosen.length)).reshape(-1)[: chosen.size]
    assert chosen.shape == np.asarray(whole[key]).shape
    assert (whole.reshape(-1)[flat].reshape(chosen.counts)[chosen.local] == whole[key]).all()


KEYS: list[Any] = [
    3, -1, (2, 5), (slice(None), 7), slice(10, 50), slice(None, None, -3), (slice(5, 90, 7), slice(50, 2, -5)), ...,
    (..., 4), (1, ...), (slice(20, 20),), (slice(None), slice(3, 900)), (np.int64(4), slice(None, None, 2)), (),
]  # fmt: skip


def test_like_a_local_array(world: World, pool: SyncMemoryPool) -> None:
    local = np.arange(120 * 1000, dtype=np.float64).reshape(120, 1000)
    remote = pool.put_array(local, "gpu1", name="block_like")
    assert (remote.shape, remote.dtype, remote.nbytes, len(remote)) == (local.shape, local.dtype, local.nbytes, 120)
    assert "float64 (120, 1000), 937.5 KiB on gpu1" in repr(remote)
    for number, key in enumerate(KEYS):
        part, wanted = remote[key], local[key]
        assert type(part) is type(wanted) and np.array_equal(part, wanted), key
        value = np.full_like(wanted, number) if number % 2 else number
        remote[key], local[key] = value, value
        assert np.array_equal(remote[key], local[key]), key
    remote[5:9, ::2] = np.arange(4)[:, None]  # broadcast, another type
    local[5:9, ::2] = np.arange(4)[:, None]
    remote[7] += 1
    local[7] += 1
    assert np.array_equal(np.asarray(remote), local) and np.asarray(remote, np.float32).dtype == np.float32
    assert all(np.array_equal(a, b) for a, b in zip(remote, local, strict=True))
    with world.pool() as other:
        remote.flush()
        assert np.array_equal(other.get_array("block_like")[...], local)
        assert np.array_equal(other.get_array(str(remote.block))[3], local[3])
    remote.free()
    with pytest.raises(BlockNotFound):
        pool.get_array("block_like")


@pytest.mark.parametrize("dtype", ["<M8[ns]", "U7", ">i2", "?", "c16", [("a", "<f4"), ("b", "<i8", (2, 3))]])
def test_types(pool: SyncMemoryPool, dtype: Any) -> None:
    remote = pool.array((50, 3), dtype, name="typed")
    local = np.zeros((50, 3), dtype)
    some = np.frombuffer(np.arange(local.itemsize, dtype=np.uint8).tobytes(), np.uint8) % 2
    local[4, 1] = some.view(local.dtype)[0] if local.dtype.kind != "U" else "text"
    remote[4, 1] = local[4, 1]
    remote.flush()
    again = pool.get_array("typed")
    assert again.dtype == local.dtype and again[...].tobytes() == local.tobytes()
    assert again[4, 1] == local[4, 1]


def test_empty_and_without_axes(pool: SyncMemoryPool) -> None:
    empty = pool.array((0, 5), "i4")
    assert empty[...].shape == (0, 5) and list(empty) == [] and empty[:, 2].shape == (0,)
    empty[...] = 1
    single = pool.put_array(np.float64(1.5))
    assert single[()] == 1.5 and single[...].shape == () and float(np.asarray(single)) == 1.5


def test_what_can_not_be(pool: SyncMemoryPool) -> None:
    remote = pool.array((4, 5), "i8")
    for key in (4, (0, 5), (0, 0, 0), [1, 2], np.array([1]), None, True, "a", 1.0, (..., ...), slice("a")):
        with pytest.raises(IndexError) as told:
            remote[key]
        assert isinstance(told.value, UsageError), key
    with pytest.raises(UsageError, match="does not fit") as bad:
        remote[...] = np.zeros((3, 5))
    assert isinstance(bad.value, ValueError)
    with pytest.raises(UsageError, match="can't become"):
        remote[0] = ["a", "b", "c", "d", "e"]
    for dtype in (object, "nonsense", "V0"):
        with pytest.raises(UsageError):
            pool.array(3, dtype)
    for shape in (-1, (2, -1), "ab", 1.5):
        with pytest.raises(UsageError):
            pool.array(shape, "i4")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="copy"):
        np.array(remote, copy=False)
    pool.objects["bytes"] = b"x"
    with pytest.raises(UsageError, match="is no array"):
        pool.get_array("bytes")
    assert not remote[...].any()


def test_small_parts_are_kept_until_they_are_flushed(world: World, pool: SyncMemoryPool) -> None:
    remote = pool.array(100_000, "f8", name="kept")
    with world.pool() as other_pool:
        other = other_pool.get_array("kept", cache_bytes=0)
        before = pool.stats()["client"]["writes"]
        for at in range(0, 1000, 2):
            remote[at] = at
        assert pool.stats()["client"]["writes"] == before and not other[:1000].any()
        other[1] = 7  # between those that the first one has written
        remote.flush()
        assert pool.stats()["client"]["writes"] == before + 1
        assert np.array_equal(other[:1000:2], np.arange(0, 1000, 2)) and other[1] == 7
        assert remote[1] == 7
        other[1] = 8
        assert remote[1] == 7
        remote.refresh()
        assert remote[1] == 8
        remote[3] = 9
        assert remote[:50_000][3] == 9 == other[3]  # a large part goes straight, with all that was written before
        remote[5] = 5
        pool.shutdown()
        assert other[5] == 5
    with pytest.raises(PoolClosed):
        remote[6] = 6


def test_the_cache_is_bounded(world: World, pool: SyncMemoryPool) -> None:
    pages = 10
    remote = pool.array(pages * PAGE_BYTES, "u1", cache_bytes=3 * PAGE_BYTES)
    for at in range(0, pages * PAGE_BYTES, 1000):
        remote[at] = at % 251 + 1
    assert len(remote._bytes._pages) <= 3
    local = np.zeros(pages * PAGE_BYTES, "u1")
    local[::1000] = np.arange(0, pages * PAGE_BYTES, 1000) % 251 + 1
    assert [remote[at] for at in range(0, len(local), 500)] == local[::500].tolist()
    assert len(remote._bytes._pages) <= 3
    assert np.array_equal(remote[...], local)


def test_a_scan_reads_ahead(pool: SyncMemoryPool, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[int] = []

    class Ahead(cached_module._Ahead):
        def __init__(self, pool: SyncMemoryPool, block: str, start: int, size: int) -> None:
            fetched.append(start // MIB)
            super().__init__(pool, block, start, size)

    monkeypatch.setattr(cached_module, "_Ahead", Ahead)
    local = np.arange(8 * MIB // 8, dtype=np.int64)
    remote = pool.put_array(local)
    reads = pool.stats()["client"]["reads"]
    assert sum(int(part.sum()) for part in remote.chunks(MIB)) == int(local.sum())
    assert fetched == [2, 3, 4, 5, 6, 7] and pool.stats()["client"]["reads"] == reads + 8
    parts = []
    for number, part in enumerate(remote.chunks(MIB)):
        if number == 2:
            remote[3 * MIB // 8] = -1  # into what is being fetched
            remote[4 * MIB // 8 : 5 * MIB // 8] = -2
        parts.append(part)
    local[3 * MIB // 8], local[4 * MIB // 8 : 5 * MIB // 8] = -1, -2
    assert np.array_equal(np.concatenate(parts), local)


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["read", "write", "flush", "refresh"]),
        st.integers(0, 300_000 - 1), st.integers(1, 200_000), st.integers(1, 3), st.integers(1, 250),
    ),
    max_size=25,
)  # fmt: skip


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(ACTIONS)
def test_no_wrong_byte_through_the_cache(actions: list[tuple[str, int, int, int, int]]) -> None:
    class Memory:
        """The pool's calls, on plain memory."""

        is_open = True

        def __init__(self) -> None:
            self.data = np.zeros(300_000, np.uint8)
            self.unflushed: set[Any] = set()

        def read_into(self, block: str, buffer: Any, *, offset: int = 0) -> None:
            buffer[:] = self.data[offset : offset + len(buffer)]

        def readv(self, block: str, pieces: list[tuple[int, int]]) -> list[bytes]:
            return [self.data[at : at + size].tobytes() for at, size in pieces]

        def write(self, block: str, data: Any, *, offset: int = 0) -> None:
            self.data[offset : offset + len(data)] = data

        def writev(self, block: str, pieces: list[tuple[int, Any]]) -> None:
            for at, data in pieces:
                self.data[at : at + len(data)] = np.frombuffer(data, np.uint8)

    memory: Any = Memory()
    local = np.zeros(300_000, np.uint8)
    remote = RemoteArray(memory, "block_1", (300_000,), np.dtype("u1"), 3 * PAGE_BYTES)  # type: ignore[arg-type]
    for kind, start, length, step, value in actions:
        key = slice(start, start + length, step)
        if kind == "read":
            assert np.array_equal(remote[key], local[key])
        elif kind == "write":
            remote[key] = local[key] = value
        elif kind == "flush":
            remote.flush()
            assert np.array_equal(memory.data, local) and not memory.unflushed
        else:
            remote.refresh()
    assert np.array_equal(remote[...], local)


def test_with_coroutines(world: World) -> None:
    async def use() -> None:
        async with DistributedMemoryPool(world.config) as pool:
            remote = await pool.put_array(np.arange(1000), "gpu2", name="numbers")
            assert remote.block.node == "gpu2"
            again = await pool.get_array("numbers")
            again[10] = 5
            zeros = await pool.array((3, 4), "i2")
            assert await asyncio.to_thread(lambda: int(zeros[...].sum())) == 0
            pool.objects["more"] = b"bytes"
            assert sorted(pool.objects) == ["more", "numbers"]
        async with DistributedMemoryPool(world.config) as pool:
            assert (await pool.get_array("numbers"))[10] == 5

    asyncio.run(use())
