"""Files and pipes into the pool and out of it: the very bytes, or nothing at all."""

from __future__ import annotations

import contextlib
import io
import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from distributed_grid.agent.memory.errors import BlockNotFound, OutOfRange, PoolFull
from distributed_grid.commands import memory_transfer as transfer
from distributed_grid.commands.memory_transfer import Place, retrieve, store
from distributed_grid.core.errors import GridError, NotFound, UsageError
from distributed_grid.orchestration.distributed_memory_pool import SyncMemoryPool, objects
from tests.unit.orchestration.distributed_memory_pool.world import GB, World

KIB = 1024


@pytest.fixture(scope="module")
def small_chunks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfer, "CHUNK_BYTES", 4 * KIB)
        patch.setattr(objects, "HELD_BYTES", 4 * KIB)
        patch.setattr(objects, "PART_BYTES", 16 * KIB)
        yield


@pytest.fixture
def pool(grid_home: Path, small_chunks: None) -> Iterator[SyncMemoryPool]:
    world = World(grid_home, shared=False)
    try:
        with world.pool() as made:
            yield made
    finally:
        world.close()


@contextlib.contextmanager
def fifo(path: Path, data: bytes) -> Iterator[str]:
    """A pipe with a name, written to by somebody else."""
    os.mkfifo(path)

    def write() -> None:
        with contextlib.suppress(BrokenPipeError):
            path.write_bytes(data)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        yield str(path)
    finally:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb"):  # if nobody read it, it need not wait
            path.unlink()
        writer.join(60)


def names(pool: SyncMemoryPool) -> list[str]:
    return sorted(block["name"] for block in pool.list_blocks())


def fetched(pool: SyncMemoryPool, key: str, to: Path, **part: Any) -> bytes:
    retrieve(pool, pool.info(pool.find(key)), str(to), **part)
    return to.read_bytes()


def test_what_goes_in_comes_out(pool: SyncMemoryPool, tmp_path: Path) -> None:
    file, out = tmp_path / "in.bin", tmp_path / "out.bin"
    for size in (0, 1, 4 * KIB, 50 * KIB + 7):
        data = os.urandom(size)
        file.write_bytes(data)
        found, _ = store(pool, "k", str(file), Place("gpu2", strict=True))
        assert found["node"] == "gpu2" and found["meta"] == {"size_bytes": size}
        assert not found["owned"]
        assert fetched(pool, "k", out) == data
        assert names(pool) == ["k"]  # each takes the place of the one before
    assert fetched(pool, "k", out, offset=10, size=5000) == data[10:5010]
    assert fetched(pool, "k", out, offset=len(data)) == b""
    found, _ = store(pool, "k", str(file), Place(at_rest="zstd"))
    assert found["at_rest"] == "zstd" and fetched(pool, "k", out) == data
    store(pool, "k", "/proc/self/cmdline", Place())  # a file that says it is empty
    assert fetched(pool, "k", out) == Path("/proc/self/cmdline").read_bytes()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["in.bin", "out.bin"]


@pytest.mark.parametrize("size", [0, 100, 4 * KIB, 16 * KIB, 32 * KIB, 70 * KIB + 3])
def test_pipes(pool: SyncMemoryPool, tmp_path: Path, size: int) -> None:
    data = os.urandom(size)
    with fifo(tmp_path / "pipe", data) as pipe:
        store(pool, "k", pipe, Place("gpu1"))
    assert fetched(pool, "k", tmp_path / "out") == data
    assert names(pool) == ["k"]
    with fifo(tmp_path / "again", data) as pipe:
        store(pool, "k", pipe, Place(), most_bytes=size + 10)
    assert fetched(pool, "k", tmp_path / "out") == data
    if size:
        with fifo(tmp_path / "longer", data) as pipe, pytest.raises(UsageError, match="more came"):
            store(pool, "k", pipe, Place(), most_bytes=size - 1)
        assert fetched(pool, "k", tmp_path / "out") == data
    assert names(pool) == ["k"]


class Interrupted(io.FileIO):
    """As if somebody pressed Ctrl-C in the middle."""

    def readinto(self, buffer: Any) -> int:
        if self.tell() > 40 * KIB:
            raise KeyboardInterrupt
        return super().readinto(buffer)


@pytest.mark.parametrize("way", ["known", "at_most", "unknown", "shorter"])
def test_breaking_off_leaves_all_as_it_was(
    pool: SyncMemoryPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_bytes(b"old")
    store(pool, "k", str(old), Place())
    new.write_bytes(bytes(30 * KIB if way == "shorter" else 100 * KIB))

    @contextlib.contextmanager
    def source(file: str) -> Iterator[tuple[Any, int | None]]:
        with Interrupted(new) as stream:
            yield stream, 100 * KIB if way in ("known", "shorter") else None

    monkeypatch.setattr(transfer, "source", source)
    with pytest.raises((KeyboardInterrupt, GridError)) as stop:
        store(pool, "k", "-", Place(), 200 * KIB if way == "at_most" else None)
    assert "got shorter" in str(stop.value) if way == "shorter" else stop.type is KeyboardInterrupt
    assert names(pool) == ["k"]
    assert fetched(pool, "k", tmp_path / "out") == b"old"


def test_no_room(pool: SyncMemoryPool, tmp_path: Path) -> None:
    (tmp_path / "small").write_bytes(b"s")
    store(pool, "k", str(tmp_path / "small"), Place())
    with open(tmp_path / "huge", "wb") as huge:
        huge.truncate(100 * GB)
    with pytest.raises(PoolFull, match="Failed to allocate memory block") as full:
        store(pool, "k", str(tmp_path / "huge"), Place())
    assert "grid memory deallocate k" in full.value.hint and "largest" in full.value.cause
    with fifo(tmp_path / "pipe", b"x") as pipe, pytest.raises(PoolFull):
        store(pool, "k", pipe, Place(), most_bytes=100 * GB)
    assert names(pool) == ["k"]


def test_files_that_can_not_be(pool: SyncMemoryPool, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="none"):
        store(pool, "k", str(tmp_path / "none"), Place())
    with pytest.raises(UsageError, match="directory"):
        store(pool, "k", str(tmp_path), Place())
    assert names(pool) == []
    (tmp_path / "f").write_bytes(b"12345")
    store(pool, "k", str(tmp_path / "f"), Place())
    found = pool.info(pool.find("k"))
    for output, error in ((tmp_path / "no" / "out", NotFound), (tmp_path, UsageError)):
        with pytest.raises(error):
            retrieve(pool, found, str(output))
    with pytest.raises(GridError, match="No space left"):
        retrieve(pool, found, "/dev/full")


def test_an_output_is_whole_or_untouched(pool: SyncMemoryPool, tmp_path: Path) -> None:
    file, out, link = tmp_path / "in", tmp_path / "out", tmp_path / "link"
    file.write_bytes(os.urandom(20 * KIB))
    store(pool, "k", str(file), Place())
    found = pool.info(pool.find("k"))
    out.write_bytes(b"mine")
    out.chmod(0o640)
    link.symlink_to("out")
    for offset, size in ((0, 20 * KIB + 1), (20 * KIB + 1, None)):
        with pytest.raises(OutOfRange):
            retrieve(pool, found, str(out), offset, size)
    pool.deallocate(found["id"])
    with pytest.raises(BlockNotFound):
        retrieve(pool, found, str(out))
    assert out.read_bytes() == b"mine" and len(list(tmp_path.iterdir())) == 3
    store(pool, "k", str(file), Place())
    assert fetched(pool, "k", link) == file.read_bytes()
    assert link.is_symlink() and stat.S_IMODE(out.stat().st_mode) == 0o640
    umask = os.umask(0o027)
    try:
        fetched(pool, "k", tmp_path / "new")
    finally:
        os.umask(umask)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o640
