"""An acknowledged write is on disk: under kill -9, in the system calls, on a full disk."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from distributed_grid.core.errors import GridError
from distributed_grid.store.journal import Journal
from distributed_grid.store.snapshot import read_json, write_json_atomically
from tests.unit.store.kill_rounds import WRITER, kill_rounds

ROUNDS = 12  # fifty in tests/chaos


@pytest.mark.timeout(600)  # thousands of fsyncs, on whatever disk there is
def test_acknowledged_writes_survive_kill_9(tmp_path: Path) -> None:
    kill_rounds(tmp_path / "journal.sqlite3", ROUNDS, seed=1)


def test_acknowledged_writes_survive_kill_9_without_wal(tmp_path: Path) -> None:
    kill_rounds(tmp_path / "journal.sqlite3", 4, seed=2, wal=False)


@pytest.mark.parametrize("mode", ["wal", "truncate"])
def test_fsync_comes_before_the_acknowledgement(tmp_path: Path, mode: str, strace: str) -> None:
    path, trace = tmp_path / "journal.sqlite3", tmp_path / "trace"
    writes = 10
    calls = "trace=fsync,fdatasync,write,pwrite64,pwritev,ftruncate"
    argv = [strace, "-f", "-y", "-e", calls, "-o", str(trace), sys.executable, str(WRITER), str(path), "s"]
    done = subprocess.run([*argv, str(writes), mode], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr

    dirty: set[str] = set()  # files of the journal written and not yet fsynced
    synced = acknowledged = 0
    for line in trace.read_text().splitlines():
        call = re.search(r"(\w+)\(\d+<([^>]*)>", line)
        if call is None:
            continue
        name, file = call.groups()
        if name == "write" and '"ack ' in line:
            assert not dirty, f"acknowledged before fsync of {dirty}: {line}"
            assert synced, f"acknowledged without any fsync: {line}"
            synced, acknowledged = 0, acknowledged + 1
        elif file.startswith(str(path)) and not file.endswith("-shm"):
            if name in ("fsync", "fdatasync"):
                assert re.search(r"= 0$", line.rstrip()), line
                dirty.discard(file)
                synced += 1
            else:
                dirty.add(file)
    assert acknowledged == writes


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    directory = tmp_path / "disk"
    directory.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(directory)], check=True, timeout=30)
    try:
        yield directory
    finally:
        subprocess.run(["umount", str(directory)], check=True, timeout=30)


@pytest.mark.root
def test_full_disk_changes_nothing(small_disk: Path) -> None:
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(200 * 1024))
    with Journal.open(small_disk / "journal.sqlite3") as journal:
        write_json_atomically(small_disk / "state.json", {"kept": True})
        written = 0
        with pytest.raises(GridError) as caught:
            while written < 10_000:
                with journal.transaction():
                    journal.kv.put("written", written + 1)
                    journal.events.add("test", "x" * 2000)
                written += 1
        assert caught.value.code == "disk-full"
        assert 0 < written < 10_000
        assert journal.kv.get("written") == written == journal.events.last_seq()

        with pytest.raises(GridError) as caught:
            write_json_atomically(small_disk / "state.json", {"kept": "x" * 2_000_000})
        assert caught.value.code == "disk-full"
        assert read_json(small_disk / "state.json") == {"kept": True}
        assert not list(small_disk.glob(".*.tmp"))

        ballast.unlink()
        journal.kv.put("after", True)
    with Journal.open(small_disk / "journal.sqlite3") as journal:
        assert journal.recovered is None
        assert journal.kv.get("after") is True
        assert journal.kv.get("written") == written == len(journal.events.list(limit=20_000))


@pytest.mark.root
def test_no_room_for_a_journal(small_disk: Path) -> None:
    with pytest.raises(OSError), (small_disk / "ballast").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    with pytest.raises(GridError) as caught:
        Journal.open(small_disk / "journal.sqlite3")
    assert caught.value.code == "disk-full"
    (small_disk / "ballast").unlink()
    with Journal.open(small_disk / "journal.sqlite3") as journal:
        assert journal.recovered is None
