"""One client of a memory server: its requests, one after another, each done and answered."""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from xxhash import xxh3_64_intdigest

from distributed_grid.agent.memory import packing
from distributed_grid.agent.memory.at_rest import PackedMemory
from distributed_grid.agent.memory.blocks import Block, check_range
from distributed_grid.agent.memory.errors import BlockNotFound, ChecksumMismatch, PoolFull, ServerLost
from distributed_grid.agent.memory.protocol import (
    ADMIN,
    ADMIN_UID,
    END,
    FAILED,
    LITTLE_BYTES,
    MAGIC,
    MARKED,
    MAX_JSON_BYTES,
    MAX_LENGTH,
    MAX_PIECES,
    OK,
    PACKED,
    PIECE,
    PING,
    POLLED,
    READ,
    READV,
    REPLY,
    REQUEST,
    SERVER_POLL_S,
    SETTLE,
    SHARE,
    SLICE_BYTES,
    SUM,
    WRITE,
    WRITEV,
    Scratch,
    Stalled,
    compare_sum,
    drain,
    pack_json,
    receive,
    receive_data,
    receive_exactly,
    receive_parts,
    send_all,
    send_data,
    spin,
    unpack_json,
)  # fmt: skip
from distributed_grid.core.errors import GridError, Refused, UsageError

if TYPE_CHECKING:
    from distributed_grid.agent.memory.clients import Client
    from distributed_grid.agent.memory.server import MemoryServer

#: Reads up to here are copied first and go out in one piece.
COPIED_BYTES = 256 * 1024


class Serving:
    """One client: reads a request, does it, answers."""

    def __init__(self, server: MemoryServer, client: Client, uid: int) -> None:
        self._server = server
        self._client = client
        self._sock = client.sock
        self._uid = uid
        self._header = memoryview(bytearray(REQUEST.size))
        self._polled = False
        self._marked: Block | None = None

    def close(self) -> None:
        """Broken off between the copies of a block, it leaves them different."""
        if self._marked is not None:
            self._server.table.unmark(self._marked, self._sock, torn=True)

    def one_request(self) -> bool:
        got = spin(self._sock, self._header, SERVER_POLL_S) if self._polled else 0
        try:
            if got < REQUEST.size:
                receive_exactly(self._sock, self._header[got:])
        except Stalled as error:
            if got or error.got:
                raise
            return not self._server.stopping.is_set()  # idle: that is allowed
        magic, operation, flags, pieces, block, generation, offset, length = REQUEST.unpack(self._header)
        if magic != MAGIC or length > MAX_LENGTH:
            raise ServerLost("a request that can't be read")
        self._polled = bool(flags & POLLED)
        self._client.busy = True
        try:
            if length <= LITTLE_BYTES and not flags & ~POLLED and operation in (READ, WRITE):
                if operation == READ:
                    self._read_little(block, generation, offset, length)
                else:
                    self._write_little(block, generation, offset, length)
            elif operation == READ:
                self._read(block, generation, [(offset, length)], length, pieces if flags & PACKED else 0)
            elif operation == WRITE:
                self._write(block, generation, [(offset, length)], length, flags)
            elif operation in (READV, WRITEV):
                table = self._table(pieces, length)
                if operation == READV:
                    self._read(block, generation, table, length, 0)
                else:
                    self._write(block, generation, table, length, flags & ~PACKED)
            elif operation == PING:
                self._reply()
            elif operation == SETTLE:
                self._settle()
            elif operation == END:
                self._end(block)
            elif operation == SHARE:
                self._share(block, generation)
            elif operation == ADMIN:
                self._admin(length)
            else:
                raise ServerLost("an unknown request")
        except _Refusal as refusal:
            body = pack_json(refusal.error.to_wire())
            send_all(self._sock, REPLY.pack(MAGIC, FAILED, 0, 0, len(body)) + body)
        self._client.used_at = time.monotonic()
        self._client.busy = False
        return True

    def _reply(self, body: bytes = b"") -> None:
        send_all(self._sock, REPLY.pack(MAGIC, OK, 0, 0, len(body)) + body)

    def _table(self, count: int, length: int) -> list[tuple[int, int]]:
        if not 0 < count <= MAX_PIECES:
            raise ServerLost("too many pieces")
        numbers = struct.unpack(f"!{2 * count}Q", receive(self._sock, count * PIECE.size))
        if sum(numbers[1::2]) != length:
            raise ServerLost("pieces that do not add up")
        return list(zip(numbers[::2], numbers[1::2], strict=True))

    def _read_little(self, block_id: int, generation: int, offset: int, length: int) -> None:
        """In one piece, and few steps: of a small request's time most is ours."""
        try:
            data = self._server.table.copy_out(block_id, self._uid, generation, offset, length)
        except GridError as error:
            raise _Refusal(error) from None
        if data is None:
            self._read(block_id, generation, [(offset, length)], length, 0)
        else:
            total = SUM.pack(xxh3_64_intdigest(data))
            send_all(self._sock, b"".join((REPLY.pack(MAGIC, OK, 0, 0, length), data, total)))

    def _write_little(self, block_id: int, generation: int, offset: int, length: int) -> None:
        """Nothing of it is in the block before all of it came and was found right."""
        whole = receive(self._sock, length + SUM.size)
        data = memoryview(whole)[:length]
        try:
            compare_sum(SUM.unpack_from(whole, length)[0], xxh3_64_intdigest(data))
            table = self._server.table
            if not table.copy_in(block_id, self._uid, generation, self._sock, offset, data):
                with table.use(
                    block_id, self._uid, generation, self._sock, write=True, pieces=[(offset, length)]
                ) as block:
                    if block.packed is not None and length:
                        block.packed.write(offset, data)
        except GridError as error:
            raise _Refusal(error) from None
        send_all(self._sock, REPLY.pack(MAGIC, OK, 0, 0, 0))

    def _read(self, block_id: int, generation: int, pieces: list[tuple[int, int]], length: int, codec: int) -> None:
        if length <= COPIED_BYTES:
            try:
                data = self._server.table.copy_out_pieces(block_id, self._uid, generation, pieces)
            except GridError as error:
                raise _Refusal(error) from None
            if data is not None:
                head, view = REPLY.pack(MAGIC, OK, 0, 0, length), memoryview(data)
                if length > LITTLE_BYTES:  # the other end takes one half while we sum up
                    send_all(self._sock, head, view[: length // 2])
                    head, view = b"", view[length // 2 :]
                send_all(self._sock, head, view, SUM.pack(xxh3_64_intdigest(data)))
                return
        with contextlib.ExitStack() as stack:
            try:
                block = stack.enter_context(
                    self._server.table.use(block_id, self._uid, generation, self._sock, write=False)
                )
                check_range(block, pieces)
            except GridError as error:
                raise _Refusal(error) from None
            if block.packed:
                parts = (part for offset, size in pieces for part in block.packed.read(offset, size))
                send_data(self._sock, REPLY.pack(MAGIC, OK, 0, 0, length), parts)
                return
            views, is_crowded = _places(block, pieces), block.has_writers
            used = packing.choose(views[0], codec) if codec and length else 0
            if used:
                head = REPLY.pack(MAGIC, OK, PACKED, 0, length)
                packing.send_packed(self._sock, head, views[0], used, is_crowded)
            else:
                send_data(self._sock, REPLY.pack(MAGIC, OK, 0, 0, length), views, Scratch(is_crowded))
            for view in views:
                view.release()

    def _write(
        self, block_id: int, generation: int, pieces: list[tuple[int, int]], length: int, flags: int
    ) -> None:
        table, packed = self._server.table, bool(flags & PACKED)
        with contextlib.ExitStack() as stack:
            try:
                block = stack.enter_context(
                    table.use(block_id, self._uid, generation, self._sock, write=True, pieces=pieces)
                )
                check_range(block, pieces)
                if flags & MARKED:
                    self._settle()
                    table.mark(block, self._sock, pieces)
                    self._marked = block
            except GridError as error:
                if packed:
                    packing.drain_packed(self._sock, length)
                else:
                    drain(self._sock, length + SUM.size)
                raise _Refusal(error) from None
            if block.packed:
                self._write_at_rest(block.packed, pieces, length, packed)
                self._reply()
                return
            views = _places(block, pieces)
            try:
                if packed:
                    packing.receive_packed(self._sock, views[0], block.has_other_writers)
                else:
                    receive_data(self._sock, views, Scratch(block.has_other_writers))
            except GridError as error:
                if error.code == "checksum":
                    raise _Refusal(error) from None
                raise
            finally:
                for view in views:
                    view.release()
        self._reply()

    def _write_at_rest(
        self, memory: PackedMemory, pieces: list[tuple[int, int]], length: int, packed: bool
    ) -> None:
        """All that was sent is taken off the line, whether or not there is room for it."""
        parts: Iterator[tuple[int, memoryview]]
        if packed:
            scratch, first = memoryview(bytearray(min(length, packing.CHUNK_BYTES))), pieces[0][0]
            found = packing.receive_parts(self._sock, length, lambda _, size: scratch[:size])
            parts = ((first + start, part) for start, part in found)
        else:
            parts = receive_parts(self._sock, pieces, SLICE_BYTES)
        refused: GridError | None = None
        try:
            for offset, part in parts:
                try:
                    if refused is None:
                        memory.write(offset, part)
                except (PoolFull, BlockNotFound) as error:
                    refused = error
        except ChecksumMismatch as error:
            refused = error
        if refused is not None:
            raise _Refusal(refused)

    def _settle(self) -> None:
        if self._marked is not None:
            self._server.table.unmark(self._marked, self._sock, torn=False)
            self._marked = None

    def _end(self, number: int) -> None:
        if number == self._client.number:
            raise ServerLost("a connection that ends itself")
        try:
            self._server.clients.end(number, self._uid, self._server.table)
        except GridError as error:
            raise _Refusal(error) from None
        self._reply()

    def _share(self, block_id: int, generation: int) -> None:
        if self._sock.family != socket.AF_UNIX:
            raise _Refusal(Refused("only a client on this host can share memory", code="not-local"))
        with contextlib.ExitStack() as stack:
            try:
                block = stack.enter_context(
                    self._server.table.use(block_id, self._uid, generation, self._sock, write=False)
                )
            except GridError as error:
                raise _Refusal(error) from None
            if not block.shared:
                raise _Refusal(Refused("this block can't be shared", code="not-shared"))
            self._reply()
            socket.send_fds(self._sock, [b"\0"], [block.fd])

    def _admin(self, length: int) -> None:
        if length > MAX_JSON_BYTES:
            raise ServerLost("a request that is too long")
        request = unpack_json(receive(self._sock, length))
        if self._uid != ADMIN_UID:
            raise _Refusal(Refused("only the agent may do that", code="not-allowed"))
        try:
            answer = self._server.admin(str(request.pop("method", "")), request)
        except GridError as error:
            raise _Refusal(error) from None
        except (KeyError, TypeError, ValueError) as error:
            raise _Refusal(UsageError("a request that makes no sense", cause=str(error))) from None
        self._reply(pack_json(answer))


class _Refusal(Exception):
    """The request was read to its end and is refused: the connection goes on."""

    def __init__(self, error: GridError) -> None:
        self.error = error


def _places(block: Block, pieces: list[tuple[int, int]]) -> list[memoryview]:
    return [block.view[offset : offset + length] for offset, length in pieces]
