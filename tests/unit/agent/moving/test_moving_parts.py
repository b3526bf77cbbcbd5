"""The parts of a move that need no CRIU: ranges, image files, the data plane, write tracking."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed_grid.agent.moving import criu, images, ranges, stream
from distributed_grid.agent.moving.target import allowed
from distributed_grid.agent.moving.track import Tracker, read_into, self_test
from distributed_grid.core.errors import GridError, Refused, TimedOut

some_ranges = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 12)).map(lambda one: (one[0], one[0] + one[1])))


def points(given: list[ranges.Range]) -> set[int]:
    return {n for start, end in given for n in range(start, end)}


@given(some_ranges, some_ranges)
def test_ranges_are_sets(wanted: list[ranges.Range], had: list[ranges.Range]) -> None:
    merged, other = ranges.merge(wanted), ranges.merge(had)
    assert points(merged) == points(wanted)
    assert all(a[1] < b[0] for a, b in pairwise(merged))
    assert points(ranges.subtract(merged, other)) == points(wanted) - points(had)
    groups = list(ranges.batches(merged, 7, 3))
    assert all(ranges.total_bytes(group) <= 7 and len(group) <= 3 for group in groups)
    assert [n for group in groups for n in sorted(points(group))] == sorted(points(merged))


def varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out += bytes([value & 127 | 128])
        value >>= 7
    return out + bytes([value])


def test_pagemap_of_old_and_new_kind(tmp_path: Path) -> None:
    def message(**numbers: int) -> bytes:
        body = b"".join(varint(int(key[1:]) << 3) + varint(value) for key, value in numbers.items())
        return struct.pack("<I", len(body)) + body

    high = 0x7F0000000000
    path = tmp_path / "pagemap-12.img"
    path.write_bytes(
        b"magic123" + message(n1=1) + message(n1=high, n2=3, n4=images.LAZY, n5=3)
        + message(n1=4096, n2=2, n4=images.LAZY) + message(n1=65536, n2=1, n4=images.PRESENT)
    )  # fmt: skip
    assert images.lazy_by_pid(tmp_path) == {12: [(4096, 3 * 4096), (high, high + 3 * 4096)]}


def linked(encrypt: bool, source_key: bytes, target_key: bytes, source_encrypt: bool | None = None) -> Any:
    listener = stream.listen("127.0.0.1")
    got: list[Any] = []

    def take() -> None:
        try:
            got.append(stream.accept(listener, target_key, encrypt=encrypt, stall_s=30, wait_s=1))
        except GridError as error:
            got.append(error)

    thread = threading.Thread(target=take)
    thread.start()
    try:
        port = listener.getsockname()[1]
        mode = encrypt if source_encrypt is None else source_encrypt
        up = stream.connect("127.0.0.1", port, source_key, encrypt=mode)
    finally:
        thread.join()
        listener.close()
    return up, got[0]


@pytest.mark.parametrize("encrypt", [True, False])
def test_pages_are_packed_on_a_slow_link_where_that_helps(encrypt: bool) -> None:
    key = os.urandom(32)
    up, down = linked(encrypt, key, key)
    plain, noise = bytes(range(256)) * 4096, os.urandom(stream.FRAME_BYTES)

    def cross(data: bytes) -> int:
        """What it took on the wire."""
        before = up.bytes_sent
        sending = threading.Thread(target=up.send, args=(stream.PAGES, data))
        sending.start()
        op, body = down.receive()
        sending.join()
        assert op == stream.PAGES and body == data
        return int(up.bytes_sent - before)

    try:
        up._s_per_byte = 0.0  # as fast as can be
        assert cross(plain) > len(plain)
        up._s_per_byte = 1e-3  # a kilobyte a second, whatever this machine says meanwhile
        assert cross(plain) < len(plain) // 10 and up.packed_frames == 1
        assert cross(noise) > len(noise)
        assert cross(plain) > len(plain)  # what does not pack is not tried each time
        up.send(stream.PACKED, b"not packed at all")
        with pytest.raises(Refused):
            down.receive()
    finally:
        up.close()
        down.close()


@pytest.mark.parametrize("encrypt", [True, False])
def test_frames_cross_whole_and_a_changed_one_is_refused(encrypt: bool) -> None:
    key = os.urandom(32)
    up, down = linked(encrypt, key, key)
    try:
        data = os.urandom(stream.FRAME_BYTES)
        sending = threading.Thread(target=lambda: [up.send(stream.PAGES, data), up.send(stream.END, b"{}")])
        sending.start()
        op, body = down.receive()
        assert op == stream.PAGES and body == data
        assert down.receive()[0] == stream.END
        sending.join()
        down.send(stream.ANSWER, b"yes")
        assert bytes(up.receive()[1]) == b"yes"
        up.sock.sendall(struct.pack("<IB", 3, stream.END) + b"abc" + bytes(16))
        with pytest.raises(Refused):
            down.receive()
        down.sock.settimeout(0.05)
        with pytest.raises(TimedOut):
            down.receive()
    finally:
        up.close()
        down.close()


@pytest.mark.parametrize("case", ["key", "mode"])
def test_a_peer_without_the_key_or_the_mode_is_turned_away(case: str) -> None:
    key = os.urandom(32)
    with pytest.raises(GridError):
        linked(True, os.urandom(32) if case == "key" else key, key, source_encrypt=case == "key")


def test_files_only_beneath_the_roots(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/link").symlink_to("/etc")
    assert allowed(tmp_path / "in/new/file", [str(tmp_path / "in")]).parent.is_dir()
    for bad in ("in/../out", "in/link/passwd", "in/.."):
        with pytest.raises(Refused):
            allowed(tmp_path / bad, [str(tmp_path / "in")])


def test_log_lines_in_words(tmp_path: Path) -> None:
    log = tmp_path / "dump.log"
    log.write_text(
        "(00.0) Error (criu/util.c:1): rlimit: Can't setup RLIMIT_NOFILE for self\n"
        "(00.1) Error (criu/sk-inet.c:2): inet: Connected TCP socket, consider using --tcp-established option.\n"
    )
    error = criu.explain(log, "no")
    assert error.code == "criu-tcp" and "TCP" in error.message and "RLIMIT" not in error.cause
    assert criu.explain(tmp_path / "none", "no").code == "criu"


PROGRAM = (
    "import ctypes, mmap, sys\n"
    "libc = ctypes.CDLL(None); libc.mremap.restype = libc.mmap.restype = ctypes.c_void_p\n"
    "size = 4 << 20\n"
    "at = libc.mmap(None, ctypes.c_size_t(size), 3, 0x22, -1, ctypes.c_long(0))\n"
    "ctypes.memset(ctypes.c_void_p(at), 1, size)\n"
    "print(at, flush=True)\n"
    "for line in sys.stdin:\n"
    " what, n = line.split(); n = int(n)\n"
    " if what == 'w': ctypes.memset(ctypes.c_void_p(at + n * 4096), 7, 1)\n"
    " if what == 'p': libc.mprotect(ctypes.c_void_p(at), ctypes.c_size_t(size), n)\n"
    " if what == 'u': libc.munmap(ctypes.c_void_p(at), ctypes.c_size_t(size));"
    " libc.mmap(ctypes.c_void_p(at), ctypes.c_size_t(size), 3, 0x32, -1, ctypes.c_long(0));"
    " ctypes.memset(ctypes.c_void_p(at + n * 4096), 9, 1)\n"
    " print('k', flush=True)\n"
)


@pytest.mark.root
@pytest.mark.criu
def test_what_is_written_is_seen() -> None:
    assert self_test() == ""
    child = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdin and child.stdout
    stdin, stdout = child.stdin, child.stdout

    def tell(order: str) -> None:
        stdin.write(order + "\n")
        stdin.flush()
        assert stdout.readline() == "k\n"

    try:
        base = int(stdout.readline())
        tracker = Tracker(child.pid)
        inside: Callable[[], set[int]] = lambda: {  # noqa: E731
            (at - base) // 4096
            for low, high in tracker.written()
            for at in range(low, high, 4096)
            if base <= at < base + (4 << 20)
        }
        try:
            assert inside() == set(range(1024))
            assert inside() == set()
            tell("w 5")
            tell("w 700")
            assert inside() == {5, 700}
            tell("w 9")
            tell("p 0")  # written, then out of reach: still to be sent
            assert inside() == {9}
            view = memoryview(bytearray(8192))
            assert read_into(child.pid, [(base + 9 * 4096, base + 10 * 4096)], view)
            assert view[0] == 7
            tell("p 3")
            tell("u 33")  # another mapping in the same place
            assert 33 in inside()
            assert tracker.same_program()
        finally:
            tracker.close()
        tell("w 1")
        assert child.poll() is None
    finally:
        stdin.close()
        child.wait(30)
        stdout.close()
