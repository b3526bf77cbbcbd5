"""A memory server by itself: one per node, hostile frames, what it promises."""

from __future__ import annotations

import os
import random
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distributed_grid.agent.memory import packing
from distributed_grid.agent.memory.accounting import Books
from distributed_grid.agent.memory.connection import MemoryConnection, open_socket
from distributed_grid.agent.memory.errors import BlockNotFound, OutOfRange, PoolFull, ServerLost, StaleBlock, WrongKey
from distributed_grid.agent.memory.launch import RECORD, ensure_server
from distributed_grid.agent.memory.protocol import ADMIN_UID, REQUEST, prove, set_limits, user_key
from distributed_grid.agent.memory.server import MemoryServer
from distributed_grid.core.errors import Refused
from tests.lab.waiting import wait_until
from tests.unit.agent.memory import fuzz

KEY = b"k" * 32


@pytest.fixture
def server() -> Iterator[MemoryServer]:
    made = MemoryServer("127.0.0.1", KEY)
    made.start()
    made.table.allocate(1, 7, 5, 100_000, shared=False, most_bytes=200_000)
    yield made
    made.close()


def connect(server: MemoryServer, uid: int = 7, key: bytes | None = None) -> MemoryConnection:
    return MemoryConnection.open("127.0.0.1", server.port, uid, key or user_key(KEY, uid))


def test_who_may_do_what(server: MemoryServer) -> None:
    mine, other, admin = connect(server), connect(server, 8), connect(server, ADMIN_UID)
    mine.write(1, 5, 10, memoryview(b"hello"))
    found = memoryview(bytearray(5))
    with pytest.raises(BlockNotFound):
        other.read_into(1, 5, 10, found)
    with pytest.raises(StaleBlock):
        mine.read_into(1, 4, 10, found)
    with pytest.raises(OutOfRange):
        mine.write(1, 5, 99_999, memoryview(b"hello"))
    with pytest.raises(Refused):
        other.admin("free", block=1)
    with pytest.raises(PoolFull):
        admin.admin("allocate", block=2, uid=7, generation=1, size_bytes=150_000, most_bytes=200_000)
    with pytest.raises(WrongKey):
        connect(server, 7, user_key(KEY, 8))
    mine.read_into(1, 5, 10, found)  # a refusal leaves the connection in step
    assert bytes(found) == b"hello"
    assert admin.admin("free", block=1) == {"freed": True} and admin.admin("free", block=1) == {"freed": False}
    for connection in (mine, other, admin):
        connection.close()


header = st.builds(
    lambda op, flags, pieces, block, gen, offset, length: REQUEST.pack(
        b"GM", op, flags, pieces, block, gen, offset, length
    ),
    st.integers(0, 255), st.integers(0, 3), st.sampled_from([0, 1, 2, 65535, 2**32 - 1]), st.integers(0, 2),
    st.integers(4, 6), st.sampled_from([0, 1, 99_999, 100_000, 2**63, 2**64 - 1]),
    st.sampled_from([0, 1, 100, 100_000, 100_001, 2**44, 2**64 - 1]),
)  # fmt: skip


@settings(max_examples=150, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(frames=st.lists(st.one_of(header, st.binary(max_size=200)), min_size=1, max_size=4), uid=st.sampled_from([7, 8]))
def test_hostile_frames_harm_nobody(server: MemoryServer, frames: list[bytes], uid: int) -> None:
    with open_socket("127.0.0.1", server.port, 10) as sock:
        sock.setblocking(True)
        set_limits(sock, 10)
        prove(sock, uid, user_key(KEY, uid))
        try:
            for frame in frames:
                sock.sendall(frame)
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(65536):
                pass
        except OSError:
            pass
    server.table.free(3)
    server.table.allocate(3, 9, 1, 1000, shared=False, most_bytes=200_000)
    good = connect(server, 9)
    good.write(3, 1, 0, memoryview(b"fine"))
    found = memoryview(bytearray(4))
    good.read_into(3, 1, 0, found)
    good.close()
    assert bytes(found) == b"fine"
    assert server.table.stats()["promised_bytes"] == 101_000


@pytest.mark.parametrize("codec", [packing.RAW, packing.LZ4, packing.ZSTD])
def test_packed_data(codec: int, server: MemoryServer) -> None:
    mine = connect(server)
    for data in (bytes(90_000), os.urandom(90_000), b"text " * 18_000):
        mine.write(1, 5, 3, memoryview(data), codec=codec)
        found = memoryview(bytearray(90_000))
        mine.read_into(1, 5, 3, found, packed=codec)
        assert found == data
    mine.close()
    packed = packing.pack(memoryview(b"text " * 1000), packing.ZSTD)[1]
    for codec_told, length in ((packing.ZSTD, 4000), (packing.LZ4, 5000), (packing.ZSTD, 6000)):
        with pytest.raises(ServerLost):
            packing.unpack(bytes(packed), codec_told, length)


def test_one_server_per_node(tmp_path: Path) -> None:
    first = ensure_server(tmp_path / "m", "gpu1", "127.0.0.1", KEY)
    assert ensure_server(tmp_path / "m", "gpu1", "127.0.0.1", KEY) == first
    assert Path(f"/proc/{first.pid}/oom_score_adj").read_text().strip() == "0"
    assert Path(f"/proc/{first.pid}/environ").read_bytes() == b""
    (tmp_path / "m" / RECORD).unlink()  # how it is told to end
    wait_until(lambda: not first.is_alive(), 60, "the server to end")
    second = ensure_server(tmp_path / "m", "gpu1", "127.0.0.1", KEY)
    assert second.incarnation != first.incarnation
    os.kill(second.pid, signal.SIGKILL)
    wait_until(lambda: not second.is_alive(), 60, "the server to end")


def test_what_is_promised_is_not_promised_again() -> None:
    assert Books(1000, 0, 0, 100).room() == 900
    assert Books(1000, 600, 0, 100).room() == 300  # promised, not used yet
    assert Books(400, 600, 600, 100).room() == 300  # used: already gone from what is available
    assert Books(1000, 600, 0, 100, limit_bytes=700).room() == 100
    assert Books(50, 0, 0, 100).room() == 0
    with pytest.raises(PoolFull):
        Books(1000, 0, 0, 100).check(901, "gpu1")


def test_frames_that_are_almost_right() -> None:
    rng = random.Random(20)
    with fuzz.watched_server() as (server, complaints):
        for _ in range(80):
            fuzz.attack_server(rng, server)
            fuzz.attack_client(rng)
        fuzz.check_server(server, complaints)
