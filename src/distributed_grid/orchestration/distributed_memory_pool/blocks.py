"""A block as its user holds it, and where its bytes lie at the moment."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from distributed_grid.agent.memory.accounting import show_bytes
from distributed_grid.agent.memory.errors import BlockNotFound
from distributed_grid.core.errors import UsageError

PREFIX = "block_"
#: In one answer of the directory to a list.
PAGE_BLOCKS = 5000


def new_block_id() -> str:
    return f"{PREFIX}{secrets.token_hex(8)}"


def wire_id(block_id: str) -> int:
    """The number that servers know it by."""
    digits = block_id.removeprefix(PREFIX)
    try:
        if len(digits) == 16 and block_id.startswith(PREFIX):
            return int(digits, 16)
    except ValueError:
        pass
    raise BlockNotFound(f"{block_id!r} is not the id of a block")


def is_block_id(name: str) -> bool:
    try:
        wire_id(name)
    except BlockNotFound:
        return False
    return True


def block_name(number: int) -> str:
    return f"{PREFIX}{number:016x}"


class Block(str):
    """The id of a block, with what was true of it when it was made; any process of the user can use the bare id."""

    size_bytes: int
    node: str

    def __new__(cls, block_id: str, size_bytes: int = 0, node: str = "") -> Block:
        made = super().__new__(cls, block_id)
        made.size_bytes = size_bytes
        made.node = node
        return made

    def __repr__(self) -> str:
        return f"<Block {self!s} of {show_bytes(self.size_bytes)} on {self.node or '?'}>"

    def __getnewargs__(self) -> tuple[str, int, str]:  # type: ignore[override]
        return str(self), self.size_bytes, self.node


@dataclass(frozen=True, slots=True)
class Copy:
    """One place where a block lies."""

    node: str
    host: str
    port: int
    local_name: str
    shared: bool
    incarnation: int = 0


@dataclass(frozen=True, slots=True)
class Location:
    """A block as the directory has it."""

    id: str
    number: int
    generation: int
    size_bytes: int
    copies: tuple[Copy, ...]
    replicas: int = 1
    name: str = ""
    meta: dict[str, Any] = field(default_factory=dict)
    created: float = 0.0
    at_rest: str = ""

    @classmethod
    def from_wire(cls, data: Mapping[str, Any]) -> Location:
        copies = tuple(
            Copy(
                str(one["node"]), str(one["host"]), int(one["port"]), str(one["local_name"]), bool(one["shared"]),
                int(one["incarnation"]),
            )
            for one in data["copies"]
        )  # fmt: skip
        return cls(
            str(data["id"]), wire_id(str(data["id"])), int(data["generation"]), int(data["size_bytes"]), copies,
            int(data["replicas"]), str(data["name"]), dict(data["meta"]), float(data["created"]),
            str(data.get("at_rest", "")),
        )  # fmt: skip

    def handle(self) -> Block:
        return Block(self.id, self.size_bytes, self.copies[0].node if self.copies else "")


def check_size(size: Any) -> int:
    if isinstance(size, bool) or not isinstance(size, int):
        raise UsageError(f"a size is a whole number of bytes, not {size!r}", code="bad-size")
    if size <= 0:
        raise UsageError(f"a block has at least one byte; {size} were asked for", code="bad-size")
    return size


def check_meta(meta: dict[str, Any] | None) -> dict[str, Any]:
    """It is kept as JSON, so it must be."""
    try:
        json.dumps(meta, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError("meta is not JSON", cause=str(error), hint="text, numbers, lists", code="bad-meta") from None
    return meta or {}


def bytes_of(data: Any) -> memoryview:
    """The bytes of anything with the buffer protocol, where they lie."""
    try:
        view = memoryview(data)
    except TypeError:
        raise UsageError(
            f"{type(data).__name__} has no bytes to write",
            hint="text.encode()" if isinstance(data, str) else "give bytes, a bytearray, a memoryview or an array",
            code="not-bytes",
        ) from None
    if not view.c_contiguous:
        hint = "numpy.ascontiguousarray(data)"
        raise UsageError("the data does not lie in one piece", hint=hint, code="not-contiguous")
    return view.cast("B") if view.nbytes else memoryview(b"")
