"""Files that a process has mapped: its program, its libraries, its data; and a program file's build id."""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distributed_grid.agent.inspect.plain import from_plain, to_plain

_DELETED = " (deleted)"
_PT_NOTE = 4
_NT_GNU_BUILD_ID = 3
_NOTES_LIMIT = 1 << 20


@dataclass(frozen=True, slots=True)
class MappedFile:
    path: str
    deleted: bool = False
    executable: bool = False
    shared_write: bool = False  # what it writes there, others see
    size_bytes: int = 0  # of what is mapped
    links: int = 1  # names the file still has; 0: none, it lives only as long as it is open

    def to_wire(self) -> dict[str, Any]:
        return to_plain(self)

    @staticmethod
    def from_wire(data: Mapping[str, Any]) -> MappedFile:
        return from_plain(MappedFile, data)


def mapped_files(pid: int) -> tuple[MappedFile, ...]:
    """Each file once, its mappings added up; anonymous memory is not a file."""
    found: dict[str, MappedFile] = {}
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
    except OSError:
        return ()
    for line in lines:
        words = line.split(None, 5)
        if len(words) < 6 or not words[5].startswith("/"):
            continue
        span, modes, name = words[0], words[1], words[5]
        low, _, high = span.partition("-")
        size = int(high, 16) - int(low, 16)
        before = found.get(name)
        found[name] = MappedFile(
            path=name.removesuffix(_DELETED), deleted=name.endswith(_DELETED),
            executable="x" in modes or (before is not None and before.executable),
            shared_write=(modes.endswith("s") and "w" in modes) or (before is not None and before.shared_write),
            size_bytes=size + (before.size_bytes if before else 0),
            links=before.links if before else _links(pid, span, name),
        )  # fmt: skip
    return tuple(found.values())


def _links(pid: int, span: str, name: str) -> int:
    if not name.endswith(_DELETED):
        return 1
    try:
        return os.stat(f"/proc/{pid}/map_files/{span}").st_nlink  # noqa: PTH116 - never resolve the link by hand
    except OSError:
        return 0


def build_id(path: str) -> str:
    """The id that the linker gave an ELF file, as hex; empty where it has none or is no such file."""
    try:
        with open(path, "rb") as file:
            head = file.read(64)
            if len(head) < 64 or head[:4] != b"\x7fELF" or head[4] != 2 or head[5] != 1:
                return ""
            offset, size, count = struct.unpack_from("<Q", head, 32)[0], *struct.unpack_from("<HH", head, 54)
            file.seek(offset)
            table = file.read(size * count)
            for at in range(0, len(table) - 55, size):
                kind, _, where, _, _, length = struct.unpack_from("<IIQQQQ", table, at)
                if kind == _PT_NOTE and length <= _NOTES_LIMIT:
                    file.seek(where)
                    if found := _build_id_in(file.read(length)):
                        return found
    except (OSError, struct.error, ValueError):
        pass
    return ""


def _build_id_in(notes: bytes) -> str:
    at = 0
    while at + 12 <= len(notes):
        name_size, size, kind = struct.unpack_from("<III", notes, at)
        name_at = at + 12
        value_at = name_at + ((name_size + 3) & ~3)
        if kind == _NT_GNU_BUILD_ID and notes[name_at : name_at + 4] == b"GNU\0":
            return notes[value_at : value_at + size].hex()
        at = value_at + ((size + 3) & ~3)
    return ""
