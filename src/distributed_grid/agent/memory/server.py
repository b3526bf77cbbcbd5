"""The process that holds a node's blocks: a thread for each connection, data straight into the block and out of it.

Started by the agent on first use (see launch.py), it outlives the agent. It ends when its record is taken away, so that
whoever stops a node only has to remove a file, and it never needs to trust a pid.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import socket
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed_grid.agent.memory import packing
from distributed_grid.agent.memory.blocks import BlockTable, check_range
from distributed_grid.agent.memory.clients import Client, Clients
from distributed_grid.agent.memory.connection import MemoryConnection
from distributed_grid.agent.memory.protocol import (
    ADMIN_UID,
    HANDSHAKE_LIMIT_S,
    SLICE_BYTES,
    SOCKET_BUFFER_BYTES,
    STALL_LIMIT_S,
    TLS,
    greet,
    greeting,
    set_limits,
    tune,
    user_key,
)  # fmt: skip
from distributed_grid.agent.memory.serving import Serving
from distributed_grid.core.errors import GridError, UsageError

if TYPE_CHECKING:
    from distributed_grid.agent.memory.tls import ServerTls

log = logging.getLogger(__name__)

#: Blocks in one answer to `list`.
PAGE_BLOCKS = 5000


class MemoryServer:
    def __init__(self, host: str, key: bytes, *, tls: bool = False) -> None:
        self._key = key
        self._tls = _make_tls() if tls else None
        self.table = BlockTable()
        self.incarnation = secrets.randbits(63)
        self.stopping = threading.Event()
        self.clients = Clients()
        #: Given up for a moment when there are no more descriptors, so that who knocks is still told who we are.
        self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._tcp = socket.create_server((host, 0), backlog=128)
        self._tcp.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)  # what is accepted inherits it
        #: Abstract: no path to be too long for, or to lie about; who may use it is proved as on TCP.
        self.local_name = f"grid-memory-{secrets.token_hex(8)}"
        self._local = socket.socket(socket.AF_UNIX)
        self._local.bind("\0" + self.local_name)
        self._local.listen(64)

    @property
    def port(self) -> int:
        return int(self._tcp.getsockname()[1])

    def start(self) -> None:
        for listener in (self._tcp, self._local):
            threading.Thread(target=self._accept, args=[listener], daemon=True).start()

    def stop(self) -> None:
        self.stopping.set()
        for sock in (self._tcp, self._local):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self.clients.close()
        self.table.free_all()

    def close(self) -> None:
        self.stop()
        self._tcp.close()
        self._local.close()
        with contextlib.suppress(OSError):
            os.close(self._spare)

    def _accept(self, listener: socket.socket) -> None:
        while not self.stopping.is_set():
            try:
                sock, _ = listener.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    self._accept_and_refuse(listener)
                if not self.stopping.wait(0.1):
                    continue
                return
            client = self.clients.came(sock)
            if client is None:
                sock.close()
                continue
            try:
                threading.Thread(target=self._serve, args=[client], daemon=True).start()
            except RuntimeError:  # no more threads
                self._refuse(sock)
                self.clients.went(client)

    def _accept_and_refuse(self, listener: socket.socket) -> None:
        """A server that is full is not one that is dead: it says who it is, and no more."""
        os.close(self._spare)
        try:
            with contextlib.suppress(OSError):
                self._refuse(listener.accept()[0])
        finally:
            self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _refuse(self, sock: socket.socket) -> None:
        with sock, contextlib.suppress(OSError):
            sock.send(greeting(self.incarnation, self._flags(sock)))

    def _flags(self, sock: socket.socket) -> int:
        return TLS if self._tls and sock.family != socket.AF_UNIX else 0

    def _serve(self, client: Client) -> None:
        sock, serving = client.sock, None
        try:
            tune(sock)
            set_limits(sock, HANDSHAKE_LIMIT_S)
            tls = self._tls if self._flags(sock) else None
            uid, sock = greet(sock, self.incarnation, self._key, client.number, tls)
            if not self.clients.proved(client, uid, sock):
                return
            set_limits(sock, STALL_LIMIT_S)
            serving = Serving(self, client, uid)
            while serving.one_request():
                pass
        except (GridError, OSError):
            pass  # a stranger, or one who hung up: the others go on
        except Exception:
            log.exception("a connection failed")
        finally:
            if serving is not None:
                serving.close()
            self.table.went(sock)
            self.clients.went(client)
            sock.close()

    # -- what the agent asks for ----------------------------------------------------------------------------------

    def admin(self, method: str, arguments: dict[str, Any]) -> dict[str, Any]:
        table = self.table
        if method == "allocate":
            shared = table.allocate(
                int(arguments["block"]), int(arguments["uid"]), int(arguments["generation"]),
                int(arguments["size_bytes"]),
                shared=bool(arguments.get("shared")), most_bytes=int(arguments["most_bytes"]),
                codec=packing.codec_of(str(arguments.get("at_rest", ""))),
            )  # fmt: skip
            return {"shared": shared}
        if method == "free":
            return {"freed": table.free(int(arguments["block"]))}
        if method == "list":
            found = table.describe(int(arguments.get("after", -1)), PAGE_BLOCKS)
            return {"blocks": found, "more": len(found) == PAGE_BLOCKS}
        if method == "stats":
            held = "block" in arguments and table.has(int(arguments["block"]))
            return {**table.stats(), "connections": len(self.clients), "held": held}
        if method == "set_growth":
            return {"packed_bytes": table.set_growth(int(arguments["growth_bytes"]), arguments.get("promised_bytes"))}
        if method == "freeze":
            table.freeze(int(arguments["block"]))
            return {}
        if method == "thaw":
            table.thaw(int(arguments["block"]), int(arguments["generation"]))
            return {}
        if method == "set_generation":
            table.set_generation(int(arguments["block"]), int(arguments["generation"]))
            return {}
        if method == "track":
            table.track(int(arguments["block"]))
            return {}
        if method == "changed":
            return {"pieces": table.changed(int(arguments["block"]))}
        if method == "torn":
            return {"blocks": table.torn()}
        if method == "mend":
            table.mend(int(arguments["block"]))
            return {}
        if method == "copy":
            self._copy(**arguments)
            return {}
        if method == "stop":
            threading.Timer(0.05, self.stop).start()
            return {}
        raise UsageError(f"there is no call named {method!r}", code="unknown-call")

    def _copy(
        self, *, block: int, generation: int, source_generation: int, host: str, port: int, pieces: list[list[int]]
    ) -> None:
        """Fill `(offset, length)`s of a block of ours from the same block on another server."""
        source = MemoryConnection.open(host, port, ADMIN_UID, user_key(self._key, ADMIN_UID))
        try:
            with self.table.use(block, ADMIN_UID, generation, source.sock, write=True) as mine:
                check_range(mine, [(offset, length) for offset, length in pieces])
                for offset, length in pieces:
                    if mine.packed is None:
                        source.read_into(block, source_generation, offset, mine.view[offset : offset + length])
                        continue
                    part = memoryview(bytearray(min(length, SLICE_BYTES)))
                    for start in range(offset, offset + length, SLICE_BYTES):
                        rest = part[: offset + length - start]
                        source.read_into(block, source_generation, start, rest)
                        mine.packed.write(start, rest)
        finally:
            source.close()


def _make_tls() -> ServerTls:
    from distributed_grid.agent.memory.tls import ServerTls

    return ServerTls()


def run(directory: Path, node: str, host: str, key: bytes, ready: Any, *, tls: bool = False) -> None:
    """Serve until the record in `directory` is gone or another's. `ready()` is called once it is written."""
    from distributed_grid.agent.memory.launch import is_mine, write_record

    server = MemoryServer(host, key, tls=tls)
    write_record(directory, node, host, server)
    server.start()
    ready()
    while not server.stopping.wait(1.0):
        if not is_mine(directory, server.incarnation):
            break
    server.close()
