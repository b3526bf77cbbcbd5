"""Named objects: as a dictionary, and as files for all that opens files through fsspec."""

from __future__ import annotations

import array
import importlib
import io
import os
import pickle
import signal
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distributed_grid.config import load_cluster_config
from distributed_grid.core.errors import UsageError
from distributed_grid.orchestration.distributed_memory_pool import (
    BlockLost,
    GridMemoryFileSystem,
    PoolFull,
    SyncMemoryPool,
    objects,
)  # fmt: skip
from distributed_grid.orchestration.distributed_memory_pool.filesystem import close_pools
from tests.lab.waiting import wait_until
from tests.unit.orchestration.distributed_memory_pool.world import GB, World

MIB = 1024**2


@pytest.fixture
def files(pool: SyncMemoryPool) -> GridMemoryFileSystem:
    return GridMemoryFileSystem(pool=pool, skip_instance_cache=True)


@pytest.fixture
def own_pool() -> Iterator[None]:
    """For file systems that open their pool themselves."""
    GridMemoryFileSystem.clear_instance_cache()
    yield
    close_pools()
    GridMemoryFileSystem.clear_instance_cache()


def test_the_files_that_the_guide_names() -> None:
    root = Path(__file__).resolve().parents[4]
    package = importlib.import_module("distributed_grid.orchestration.distributed_memory_pool")
    assert package.__file__ and all(hasattr(package, name) for name in package.__all__)
    compile((root / "examples" / "distributed_memory_usage.py").read_text(), "example", "exec")
    config = load_cluster_config(root / "config" / "my-cluster-enhanced.yaml")
    assert config.resource_sharing.pressure_thresholds.memory.high == 0.7


def test_a_dictionary(world: World, pool: SyncMemoryPool) -> None:
    here: MutableMapping[str, Any] = pool.objects
    assert isinstance(here, MutableMapping) and not here and list(here) == [] and "a" not in here
    here["a"] = b"first"
    here["dir/b"] = array.array("I", range(1000))
    here["empty"] = b""
    here.update(c=memoryview(b"third"))
    assert here["a"] == b"first" and here["dir/b"] == array.array("I", range(1000)).tobytes() and here["empty"] == b""
    here["a"] = np.arange(5, dtype=np.uint8)
    with world.pool() as other:
        assert other.objects["a"] == bytes(range(5))
        assert sorted(other.objects.keys()) == ["a", "c", "dir/b", "empty"] and len(other.objects) == 4
        assert list(other.objects.under("dir")) == ["b"] and "b" in other.objects.under("dir")
        del other.objects["a"]
    assert "a" not in here and here.get("a") is None and here.pop("a", 5) == 5 and here.pop("c") == b"third"
    for missing in (lambda: here["a"], lambda: here.__delitem__("a"), lambda: here.pop("a")):
        with pytest.raises(KeyError):
            missing()
    for name in ("", 5, None):
        with pytest.raises(UsageError):
            here[name] = b""  # type: ignore[index]
    with pytest.raises(UsageError, match="no bytes"):
        here["text"] = "text"
    pool.allocate(10)  # one without a name is no object
    assert len(here) == 2
    here.clear()
    assert not here and len(pool.list_blocks()) == 1


def test_a_value_is_replaced_whole(world: World, pool: SyncMemoryPool) -> None:
    values = [bytes([number]) * (20_000 + number) for number in range(8)]
    pool.objects["x"] = values[0]
    ended = threading.Event()

    def write() -> None:
        with world.pool() as other:
            for number in range(60):
                other.objects["x"] = values[number % 8]
        ended.set()

    thread = threading.Thread(target=write)
    thread.start()
    seen = set()
    while not ended.is_set():
        seen.add(pool.objects["x"])
    thread.join()
    assert seen <= set(values)
    assert len(pool.list_blocks()) == 1


def test_one_killed_while_it_stores_leaves_nothing(world: World, pool: SyncMemoryPool) -> None:
    pool.objects["x"] = b"old"
    program = """if True:
        import sys
        from distributed_grid.orchestration.distributed_memory_pool import GridMemoryFileSystem
        with GridMemoryFileSystem().open("x", "wb", size=1000) as file:
            file.write(b"new" * 100)
            file.flush()
            print("written", flush=True)
            sys.stdin.read()
    """
    process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout and process.stdout.readline() == b"written\n" and len(pool.list_blocks()) == 2
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    wait_until(lambda: len(pool.list_blocks()) == 1, 60, "its block to be freed")
    assert pool.objects["x"] == b"old"


def test_a_lost_object_is_told_and_can_be_replaced(world: World, pool: SyncMemoryPool) -> None:
    for name in ("x", "y"):
        objects.put(pool, name, b"here", preferred_node="gpu1", strict=True)
    world.kill("gpu1")
    wait_until(lambda: {one["state"] for one in pool.list_blocks()} == {"lost"}, 60, "the loss to be known")
    with pytest.raises(BlockLost):
        pool.objects["x"]
    assert "x" in pool.objects
    del pool.objects["x"]
    pool.objects["y"] = b"again"
    assert dict(pool.objects) == {"y": b"again"}


def test_files(world: World, pool: SyncMemoryPool, files: GridMemoryFileSystem, tmp_path: Path) -> None:
    data = os.urandom(3 * MIB)
    with files.open("gridmem://data/one.bin", "wb") as file:
        for at in range(0, len(data), 100_000):
            file.write(data[at : at + 100_000])
        assert not files.exists("data/one.bin")  # not before it is whole
    assert files.cat_file("gridmem://data/one.bin") == data and files.size("data/one.bin") == len(data)
    assert files.cat_file("data/one.bin", 5, -5) == data[5:-5] and files.cat_file("data/one.bin", -9) == data[-9:]
    with files.open("data/one.bin") as file:
        assert file.seekable() and file.seek(MIB) == MIB and file.read(100) == data[MIB : MIB + 100]
        assert file.seek(-10, 2) and file.read() == data[-10:] and file.read() == b"" and file.tell() == len(data)
        target = bytearray(MIB)
        assert file.seek(7) and file.readinto(target) == MIB and target == data[7 : MIB + 7]
        file.seek(0)
        assert file.read() == data
    with files.open("data/one.bin", "ab") as file:
        file.write(b"more")
    assert files.cat_file("data/one.bin") == data + b"more"
    with files.open("text", "w") as file:
        file.write("first\nsecond\n")
    with files.open("text", "r") as file:
        assert list(file) == ["first\n", "second\n"]
    files.pipe_file("data/sub/two", b"2")
    files.touch("nothing")
    assert files.size("nothing") == 0 and files.cat_file("nothing") == b""

    assert files.ls("", detail=False) == ["data", "nothing", "text"]
    assert files.ls("gridmem://data", detail=False) == ["data/one.bin", "data/sub"]
    assert files.isdir("data/sub") and files.isfile("data/sub/two") and not files.exists("data/su")
    assert files.find("data") == ["data/one.bin", "data/sub/two"] and files.glob("data/*.bin") == ["data/one.bin"]
    assert files.info("text")["node"] in ("gpu1", "gpu2") and files.created("text").year > 2000
    block = files.ukey("text")
    files.mv("text", "moved/text")
    files.mv("data", "elsewhere", recursive=True)
    assert files.ukey("moved/text") == block and not files.exists("text")
    assert files.find("") == ["elsewhere/one.bin", "elsewhere/sub/two", "moved/text", "nothing"]
    files.cp_file("moved/text", "copy")
    files.put_file(str(Path(__file__)), "program")
    files.get_file("program", str(tmp_path / "program"))
    assert (tmp_path / "program").read_bytes() == Path(__file__).read_bytes()
    assert pickle.loads(pickle.dumps(files)).protocol == "gridmem"
    files.rm("elsewhere", recursive=True)
    files.rm(["copy", "program", "nothing"])
    assert files.find("") == ["moved/text"] and len(pool.list_blocks()) == 1


def test_files_that_can_not_be(pool: SyncMemoryPool, files: GridMemoryFileSystem) -> None:
    for work in (files.open, files.info, files.ls, files.cat_file, files.rm_file, files.rm):
        with pytest.raises(FileNotFoundError):
            work("gridmem://missing")
    with pytest.raises(FileNotFoundError):
        files.mv("missing", "other")
    files.pipe_file("there", b"old")
    with pytest.raises(FileExistsError):
        files.open("there", "xb")
    with pytest.raises(UsageError):
        files.open("there", "r+b")
    with pytest.raises(UsageError):
        files.pipe_file("gridmem://", b"")
    with pytest.raises(ZeroDivisionError), files.open("there", "wb") as file:
        file.write(b"half" * MIB * 5)
        raise ZeroDivisionError
    with pytest.raises(PoolFull):
        files.open("there", "wb", size=100 * GB)
    with pytest.raises(ValueError, match="announced"), files.open("there", "wb", size=3) as file:
        file.write(b"more than that")
    assert files.cat_file("there") == b"old" and len(pool.list_blocks()) == 1


def test_a_long_file_of_unknown_length(
    pool: SyncMemoryPool, files: GridMemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "HELD_BYTES", MIB)
    monkeypatch.setattr(objects, "PART_BYTES", 10 * MIB)
    data = os.urandom(MIB)
    for count in (9, 10, 23, 30):
        with files.open("long", "wb") as file:
            for _ in range(count):
                file.write(data)
        assert files.size("long") == count * MIB and files.cat_file("long") == data * count
        assert [one["size_bytes"] for one in pool.list_blocks()] == [count * MIB]


def test_archives_and_arrays_in_files(world: World, own_pool: None) -> None:
    files = GridMemoryFileSystem(preferred_node="gpu2")
    with files.open("archive.zip", "wb") as file, zipfile.ZipFile(file, "w") as archive:
        archive.writestr("inside", b"x" * 100_000)
    with files.open("archive.zip") as file, zipfile.ZipFile(file) as archive:
        assert archive.read("inside") == b"x" * 100_000
    with files.open("array.npy", "wb") as file:
        np.save(file, np.arange(100_000))
    with files.open("array.npy") as file:
        assert np.array_equal(np.load(file), np.arange(100_000))
    assert {one["node"] for one in files.ls("")} == {"gpu2"}
    with io.TextIOWrapper(files.open("lines", "wb")) as text:
        text.writelines(f"{number}\n" for number in range(1000))
    assert sum(int(line) for line in files.open("lines", "rt")) == 499_500
