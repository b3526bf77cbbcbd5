"""Many connections to one memory server: broken off, too many, encrypted, and writing to the same block."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from xxhash import xxh3_64_intdigest

from distributed_grid.agent.memory import blocks, clients, packing
from distributed_grid.agent.memory import connection as connection_module
from distributed_grid.agent.memory import server as server_module
from distributed_grid.agent.memory.blocks import BlockTable
from distributed_grid.agent.memory.clients import Clients
from distributed_grid.agent.memory.connection import MemoryConnection, incarnation_at, open_socket
from distributed_grid.agent.memory.errors import BlockNotFound, ChecksumMismatch, ServerLost, WrongKey
from distributed_grid.agent.memory.launch import RECORD
from distributed_grid.agent.memory.protocol import (
    ADMIN_UID,
    FAILED,
    GREETING,
    MAGIC,
    OK,
    REPLY,
    SUM,
    TLS,
    receive,
    user_key,
)
from distributed_grid.agent.memory.server import MemoryServer
from distributed_grid.agent.memory.tls import ServerTls, TlsSocket
from distributed_grid.core.errors import GridError
from tests.lab.waiting import wait_until

KEY = b"k" * 32
MIB = 1024**2
SIZE = 8 * MIB


@contextlib.contextmanager
def serving(**options: bool) -> Iterator[MemoryServer]:
    made = MemoryServer("127.0.0.1", KEY, **options)
    made.start()
    made.table.allocate(1, 7, 5, SIZE, shared=False, most_bytes=8 * SIZE)
    try:
        yield made
    finally:
        made.close()
        wait_until(lambda: not len(made.clients), 30, "all connections to end")


@pytest.fixture
def server() -> Iterator[MemoryServer]:
    with serving() as made:
        yield made


@contextlib.contextmanager
def connected(server: MemoryServer, uid: int = 7, port: int = 0) -> Iterator[MemoryConnection]:
    connection = MemoryConnection.open("127.0.0.1", port or server.port, uid, user_key(KEY, uid))
    try:
        yield connection
    finally:
        connection.close()


def read(connection: MemoryConnection, offset: int, size: int, *, packed: int = 0) -> bytes:
    found = memoryview(bytearray(size))
    connection.read_into(1, 5, offset, found, packed=packed)
    return bytes(found)


def test_an_answer_that_comes_in_pieces() -> None:
    data = b"some data"
    right = REPLY.pack(MAGIC, OK, 0, 0, len(data)) + data + SUM.pack(xxh3_64_intdigest(data))
    error = REPLY.pack(MAGIC, FAILED, 0, 0, 2) + b"{}"
    for said, told in ((right, None), (right[:-1] + b"!", ChecksumMismatch), (error, ServerLost), (b"", ServerLost)):
        ours, theirs = socket.socketpair()
        with ours, theirs, pytest.MonkeyPatch.context() as patch:
            patch.setattr(connection_module, "prove", lambda sock, uid, key: (1, 1, sock))
            connection = MemoryConnection(ours, 7, KEY)
            answer = connection.begin_read(1, 5, 0, len(data))
            assert not connection.usable and answer.take() is None
            try:
                for at in range(len(said)):
                    theirs.sendall(said[at : at + 1])
                    found = answer.take()
                    assert (found == data) == (at == len(said) - 1) and connection.usable == (found is not None)
                theirs.close()
                if told:
                    answer.take()
            except GridError as refused:
                assert told and isinstance(refused, told) and not connection.usable
            else:
                assert told is None


def test_who_writes_a_little_is_seen_by_who_reads_much(server: MemoryServer) -> None:
    """His next write may come while a slice is summed and sent."""
    block = server.table._find(1, 7, 5)
    with connected(server) as client:
        assert not block.has_writers() and not block.has_other_writers()
        client.write(1, 5, 0, memoryview(b"a little"))
        block.little_at += 60
        assert block.has_writers() and block.has_other_writers()
        block.little_at -= 120
        assert not block.has_writers() and read(client, 0, 8) == b"a little"


# -- broken off ----------------------------------------------------------------------------------------------------


def test_one_that_just_proved_itself_is_ended_too() -> None:
    """It may have sent a request before the server has noted whose it is."""
    many, table = Clients(), BlockTable()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        client = many.came(ours)
        assert client
        ending = threading.Thread(target=many.end, args=[client.number, 7, table])
        ending.start()
        ending.join(0.05)
        assert ending.is_alive() and many.proved(client, 7, ours)
        assert theirs.recv(1) == b"" and ending.is_alive()
        many.went(client)
        ending.join(30)
        assert not ending.is_alive()


def test_a_write_that_was_ended_is_over(server: MemoryServer) -> None:
    old, places = memoryview(b"O" * SIZE), [(at, 64) for at in range(0, SIZE, MIB // 4)]
    with connected(server) as second, connected(server, 8) as stranger:
        for turn in range(30):
            with connected(server) as first:

                def write(first: MemoryConnection = first) -> None:
                    with contextlib.suppress(GridError):
                        first.write(1, 5, 0, old)

                thread = threading.Thread(target=write)
                thread.start()
                time.sleep(0.0002 * turn)
                stranger.end(first.number)  # not his to end
                first.abort()
                thread.join()
                assert first.writing or read(second, SIZE - 1, 1) == b"O"
                second.end(first.number)
            second.writev(1, 5, places, [memoryview(b"N" * 64)] * len(places))
            assert first.number not in server.clients._all
            assert all(read(second, at, 64) == b"N" * 64 for at, _ in places)


def test_one_who_waits_for_a_frozen_block_can_be_ended(server: MemoryServer) -> None:
    server.table.freeze(1)
    with connected(server) as first, connected(server) as second:
        failed: list[GridError] = []

        def write() -> None:
            try:
                first.write(1, 5, 0, memoryview(b"late"))
            except GridError as error:
                failed.append(error)

        thread = threading.Thread(target=write)
        thread.start()
        wait_until(lambda: server.clients._all[first.number].busy, 30, "it to wait")
        second.end(first.number)
        thread.join(30)
        assert isinstance(failed[0], ServerLost)
        server.table.thaw(1, 5)
        assert read(second, 0, 4) == bytes(4)


# -- too many ------------------------------------------------------------------------------------------------------


def test_strangers_keep_nobody_out(server: MemoryServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "MOST_UNPROVED", 5)
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(open_socket("127.0.0.1", server.port, 5))
        assert incarnation_at("127.0.0.1", server.port) == server.incarnation
        with connected(server) as mine, connected(server, ADMIN_UID) as admin:
            mine.ping()
            assert admin.admin("stats")["blocks"] == 1
        wait_until(lambda: len(server.clients) <= 6, 30, "strangers to go")


def test_one_user_keeps_nobody_out(server: MemoryServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "MOST_PER_USER", 3)
    with contextlib.ExitStack() as stack:
        many = [stack.enter_context(connected(server)) for _ in range(3)]
        for one in (many[0], many[2]):
            one.ping()
        stack.enter_context(connected(server)).ping()  # in the place of the one that was idle longest
        for one in (many[0], many[2]):
            one.ping()
        with pytest.raises(ServerLost):
            many[1].ping()
        stack.enter_context(connected(server, 8)).ping()


OF_FEW_DESCRIPTORS = """
import resource, sys
from distributed_grid.agent.memory.server import MemoryServer
server = MemoryServer("127.0.0.1", b"k" * 32)
resource.setrlimit(resource.RLIMIT_NOFILE, (25, 25))
server.start()
print(server.port, server.incarnation, flush=True)
sys.stdin.read()
"""


def test_a_server_without_descriptors_still_says_who_it_is() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OF_FEW_DESCRIPTORS], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process, contextlib.ExitStack() as stack:
        assert process.stdout and process.stdin
        port, incarnation = map(int, process.stdout.readline().split())
        for _ in range(30):
            stack.enter_context(open_socket("127.0.0.1", port, 5))
        assert incarnation_at("127.0.0.1", port, 10) == incarnation
        process.stdin.close()


def test_blocks_go_on_where_descriptors_get_short(monkeypatch: pytest.MonkeyPatch) -> None:
    table = BlockTable()
    assert table.allocate(1, 7, 1, 100, shared=True, most_bytes=1000)
    monkeypatch.setattr(blocks, "KEPT_DESCRIPTORS", 2**40)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (0, 0))
    assert not table.allocate(2, 7, 1, 100, shared=True, most_bytes=1000)
    assert [one["shared"] for one in table.describe()] == [True, False]
    table.free_all()


def test_lists_come_in_pages(server: MemoryServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "PAGE_BLOCKS", 3)
    for number in (9, 3, 2**64 - 1, 4):
        server.table.allocate(number, 7, 1, 100, shared=False, most_bytes=8 * SIZE)
    with connected(server, ADMIN_UID) as admin:
        first = admin.admin("list")
        assert [one["id"] for one in first["blocks"]] == [1, 3, 4] and first["more"]
        second = admin.admin("list", after=4)
        assert [one["id"] for one in second["blocks"]] == [9, 2**64 - 1] and not second["more"]
        assert admin.admin("stats", block=9)["held"] and not admin.admin("stats", block=8)["held"]


# -- the same bytes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", [0, packing.ZSTD])
def test_what_is_written_while_it_is_read_is_no_wrong_sum(server: MemoryServer, codec: int) -> None:
    stop, wrong = threading.Event(), 0

    def write() -> None:
        with connected(server) as mine:
            number = 0
            while not stop.is_set():
                number += 1
                mine.write(1, 5, 0, memoryview(bytes([number % 251]) * SIZE))

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(30):
            with connected(server) as mine:
                try:
                    read(mine, 0, SIZE, packed=codec)
                except ChecksumMismatch:
                    wrong += 1
    finally:
        stop.set()
        thread.join()
    # Of one who began to write in the very middle of a slice; the pool reads that again. A server that looked away
    # from its writers is wrong a dozen times.
    assert wrong <= 6


def test_a_writer_that_goes_before_all_copies_are_written(server: MemoryServer) -> None:
    with connected(server, ADMIN_UID) as admin:
        with connected(server) as mine:
            mine.marked = True
            mine.write(1, 5, 0, memoryview(b"both"))
            mine.settle()
        with connected(server) as mine:
            mine.ping()
        assert admin.admin("torn")["blocks"] == []
        with connected(server) as mine:
            mine.marked = True
            mine.writev(1, 5, [(0, 3)], [memoryview(b"one")])
        wait_until(lambda: admin.admin("torn")["blocks"] == [1], 30, "it to be seen")
        admin.admin("mend", block=1)
        assert admin.admin("torn")["blocks"] == []


def test_two_writers_of_the_same_bytes_of_a_block_with_copies(server: MemoryServer) -> None:
    """The second begins when the first has written all copies, so that no copy has another order."""
    with connected(server) as first, connected(server) as second, connected(server) as reader:
        first.marked = second.marked = True
        first.write(1, 5, 0, memoryview(b"first"))
        second.write(1, 5, 5, memoryview(b"beside"))
        second.settle()
        second.marked = True
        thread = threading.Thread(target=second.write, args=(1, 5, 4, memoryview(b"second")))
        thread.start()
        wait_until(lambda: server.clients._all[second.number].busy, 30, "it to come")
        assert read(reader, 0, 11) == b"firstbeside"
        first.settle()
        thread.join(30)
        assert read(reader, 0, 11) == b"firsseconde"
        second.settle()
        assert server.table.torn() == []


def test_what_was_written_while_a_copy_is_made() -> None:
    table, sock = BlockTable(), socket.socket()
    size = 5 * blocks.LEAST_PART_BYTES + 7
    table.allocate(1, 7, 1, size, shared=False, most_bytes=2 * size)

    def write(*pieces: tuple[int, int]) -> None:
        with table.use(1, 7, 1, sock, write=True, pieces=pieces):
            pass

    write((0, 1))
    table.track(1)
    assert table.changed(1) == []
    write((MIB - 1, 2), (size - 1, 1), (3 * MIB, 0))
    write((0, 2**44))  # refused later, for being too long
    assert table.changed(1) == [(0, size)]
    write((MIB - 1, 2), (size - 1, 1))
    assert table.changed(1) == [(0, 2 * MIB), (5 * MIB, 7)]
    table.thaw(1, 1)
    with pytest.raises(GridError):
        table.changed(1)
    table.free_all()
    sock.close()


# -- encrypted -----------------------------------------------------------------------------------------------------


def test_encrypted() -> None:
    with serving(tls=True) as server, connected(server) as mine, connected(server, ADMIN_UID) as admin:
        assert isinstance(mine.sock, TlsSocket) and mine.sock.version() == "TLSv1.3"
        data = os.urandom(SIZE)
        mine.write(1, 5, 0, memoryview(data))
        assert read(mine, 0, SIZE) == data and read(mine, 5, 64) == data[5:69]
        mine.write(1, 5, 0, memoryview(b"text " * 100_000), codec=packing.ZSTD)
        assert read(mine, 0, 500_000, packed=packing.LZ4) == b"text " * 100_000
        pieces = [(at, 10) for at in range(0, 3000, 30)]
        found = memoryview(bytearray(1000))
        mine.readv_into(1, 5, pieces, found)
        assert found == b"text text " * 100
        assert mine.is_alive() and admin.admin("stats")["blocks"] == 1
        with pytest.raises(WrongKey):
            MemoryConnection.open("127.0.0.1", server.port, 7, user_key(KEY, 8))
        with pytest.raises(BlockNotFound):
            admin.read_into(2, 1, 0, found)
        assert not MemoryConnection.open_local(server.local_name, 7, user_key(KEY, 7)).close()
        polled = MemoryConnection(open_socket("127.0.0.1", server.port, 5), 7, user_key(KEY, 7), busy_poll_s=0.01)
        assert read(polled, 0, 4) == b"text"
        polled.close()
        server.stop()
        wait_until(lambda: not mine.is_alive(), 30, "the end to be seen")


def between(server: MemoryServer, play: Callable[[socket.socket, socket.socket], None]) -> tuple[int, threading.Thread]:
    """Somebody in the middle, for one connection."""
    listener = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        onward = open_socket("127.0.0.1", server.port, 5)
        with listener, listener.accept()[0] as theirs, onward, contextlib.suppress(OSError, GridError):
            play(theirs, onward)

    thread = threading.Thread(target=run)
    thread.start()
    return int(listener.getsockname()[1]), thread


def pass_on(one: socket.socket, other: socket.socket) -> None:
    def pump(a: socket.socket, b: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := a.recv(65536):
                b.sendall(data)
            b.shutdown(socket.SHUT_WR)

    thread = threading.Thread(target=pump, args=(one, other))
    thread.start()
    pump(other, one)
    thread.join()


def test_nobody_in_the_middle() -> None:
    """Who shows a certificate of his own, or says that there is none, is found out by the challenge."""

    def own_certificate(theirs: socket.socket, onward: socket.socket) -> None:
        theirs.sendall(receive(onward, GREETING.size))
        from distributed_grid.agent.memory.tls import join

        with ServerTls().wrap(theirs, 10) as left, join(onward, 10)[0] as right:
            right.sendall(left.recv(1000))
            left.sendall(right.recv(1000))

    def no_certificate(theirs: socket.socket, onward: socket.socket) -> None:
        magic, incarnation, flags, nonce = GREETING.unpack(receive(onward, GREETING.size))
        assert flags == TLS
        from distributed_grid.agent.memory.tls import join

        theirs.sendall(GREETING.pack(magic, incarnation, 0, nonce))
        with join(onward, 10)[0] as right:
            right.sendall(theirs.recv(1000))
            theirs.sendall(right.recv(1000))

    with serving(tls=True) as server:
        port, thread = between(server, pass_on)
        with connected(server, port=port) as fine:
            fine.ping()
        thread.join(30)
        for play in (own_certificate, no_certificate):
            port, thread = between(server, play)
            with pytest.raises((WrongKey, ServerLost)):
                MemoryConnection.open("127.0.0.1", port, 7, user_key(KEY, 7))
            thread.join(30)


def test_an_encrypted_write_that_is_broken_off_leaves_no_noise() -> None:
    with serving(tls=True) as server, connected(server) as second:
        for turn in range(10):
            second.write(1, 5, 0, memoryview(bytes(SIZE)))
            with connected(server) as first:
                thread = threading.Thread(target=lambda one=first: _try(one))
                thread.start()
                time.sleep(0.002 * turn)
                second.end(first.number)
                thread.join()
            assert set(read(second, 0, SIZE)) <= {0, ord("x")}


def _try(connection: MemoryConnection) -> None:
    with contextlib.suppress(GridError):
        connection.write(1, 5, 0, memoryview(b"x" * SIZE))


# -- how it is started ---------------------------------------------------------------------------------------------

PREFERRED_BY_THE_OOM_KILLER = """
import sys
from pathlib import Path
from distributed_grid.agent.memory.launch import ensure_server
Path("/proc/self/oom_score_adj").write_text("500")
record = ensure_server(Path(sys.argv[1]), "gpu1", "127.0.0.1", b"k" * 32, tls=True)
print(record.pid, record.port)
"""


def test_rays_preference_for_being_killed_is_undone(tmp_path: Path) -> None:
    told = subprocess.run(
        [sys.executable, "-c", PREFERRED_BY_THE_OOM_KILLER, str(tmp_path / "m")], capture_output=True, check=True
    ).stdout.split()
    pid, port = map(int, told)
    try:
        assert Path(f"/proc/{pid}/oom_score_adj").read_text().strip() == "0"
        limits = Path(f"/proc/{pid}/limits").read_text()
        soft, hard = next(line.split()[3:5] for line in limits.splitlines() if line.startswith("Max open files"))
        assert soft == hard
        connection = MemoryConnection.open("127.0.0.1", port, ADMIN_UID, user_key(KEY, ADMIN_UID))
        assert isinstance(connection.sock, TlsSocket)
        connection.close()
    finally:
        (tmp_path / "m" / RECORD).unlink()
        wait_until(lambda: not Path(f"/proc/{pid}").exists(), 60, "the server to end")
