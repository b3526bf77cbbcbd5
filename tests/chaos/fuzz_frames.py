"""Has atheris look for frames that a memory server, or its client, can't take; a process, for it never returns.

`python -m tests.chaos.fuzz_frames CORPUS -max_total_time=600 …`: ends with 0 if nothing was found. The first byte says
who is attacked, what follows is all that comes over the line. There are no threads: atheris sees one.
"""

from __future__ import annotations

import contextlib
import logging
import random
import socket
import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["distributed_grid.agent.memory"]):
    from distributed_grid.agent.memory import connection, packing
    from distributed_grid.agent.memory.blocks import BlockTable
    from distributed_grid.agent.memory.clients import Client, Clients
    from distributed_grid.agent.memory.protocol import REPLY, set_limits
    from distributed_grid.agent.memory.serving import Serving

from distributed_grid.core.errors import GridError, UsageError
from tests.unit.agent.memory import fuzz

#: What a socket takes without anybody reading.
MOST_BYTES = 64 * 1024
SIZE = fuzz.SIZE


class Server:
    """What `Serving` needs of one."""

    class stopping:
        @staticmethod
        def is_set() -> bool:
            return True

    def __init__(self) -> None:
        self.clients = Clients()
        self.table = BlockTable()
        self.table.allocate(fuzz.PLAIN, fuzz.UID, fuzz.GENERATION, SIZE, shared=False, most_bytes=4 * SIZE)
        self.table.allocate(
            fuzz.KEPT_PACKED, fuzz.UID, fuzz.GENERATION, SIZE, shared=False, most_bytes=4 * SIZE, codec=packing.LZ4
        )
        self.table.set_growth(4 * SIZE)
        self.table.allocate(fuzz.WITNESS, fuzz.UID + 1, 1, SIZE, shared=False, most_bytes=4 * SIZE)

    def admin(self, method: str, arguments: dict[str, object]) -> dict[str, object]:
        raise UsageError(f"there is no call named {method!r}")


SERVER = Server()
connection.prove = lambda sock, uid, key: (1, 1, sock)  # the line begins after that


def attack_server(data: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        set_limits(ours, 0.05)  # for an answer that is longer than what fits on the line
        theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)
        serving = Serving(SERVER, Client(ours, 1, fuzz.UID), fuzz.UID)  # type: ignore[arg-type]
        try:
            while serving.one_request():
                take_all(theirs)
        except (GridError, OSError):
            pass
        finally:
            serving.close()
    assert bytes(SERVER.table._find(fuzz.WITNESS, fuzz.UID + 1, 1).view) == bytes(SIZE), "another user's block changed"
    for block in SERVER.table._blocks.values():
        assert not block.users and not block.writers and not block.marks and not block.sockets


def take_all(sock: socket.socket) -> None:
    with contextlib.suppress(BlockingIOError):
        while sock.recv(1 << 20, socket.MSG_DONTWAIT):
            pass


def attack_client(data: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        client = connection.MemoryConnection(ours, fuzz.UID, b"")
        theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)
        length = REPLY.unpack_from(data)[-1] if len(data) >= REPLY.size else 0
        view = memoryview(bytearray(min(length, SIZE)))  # what was asked for, more often than not
        try:
            client.read_into(1, 1, 0, view, packed=packing.ZSTD)
            client.admin("stats")
        except GridError:
            pass


def one(data: bytes) -> None:
    if data[:1] and data[0] % 4 == 0:
        attack_client(data[1:MOST_BYTES])
    else:
        attack_server(data[1:MOST_BYTES])


def main() -> None:
    corpus = Path(sys.argv[1])
    rng = random.Random(5)
    for number in range(200):
        (corpus / f"request-{number}").write_bytes(b"\1" + fuzz.request(rng)[:MOST_BYTES])
        (corpus / f"reply-{number}").write_bytes(b"\0" + fuzz.reply(rng, rng.randbytes(rng.randrange(4000))))
    logging.disable()
    atheris.Setup(sys.argv, one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
