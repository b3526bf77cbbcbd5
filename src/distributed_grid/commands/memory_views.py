"""What people and scripts see of blocks, and what they may type for them."""

from __future__ import annotations

import os
import re
import time
from typing import Any

from distributed_grid.agent.memory.errors import BlockNotFound
from distributed_grid.core.errors import UsageError
from distributed_grid.core.resources import format_bytes, format_duration, parse_memory

MOST_BYTES = 2**62
LONGEST_KEY = 500


def check_key(key: str) -> str:
    if not key or not key.isprintable() or len(key) > LONGEST_KEY:
        what = f"1 to {LONGEST_KEY} printable characters"
        raise UsageError(f"{key[:40]!r} can't be the name of an object", cause=f"a name has {what}", code="bad-key")
    return key


def parse_bytes(text: str) -> int:
    """A number of bytes, or with a unit: `4096`, `512MiB`."""
    word = text.strip()
    if not re.fullmatch(r"[0-9]+", word) and not re.search(r"[a-zA-Z]$", word):
        raise UsageError(f"{text!r} is not a number of bytes", hint="4096, 512MiB, 2GB", code="amount")
    return checked(int(word) if word.isdigit() else parse_memory(word), text)


def checked(size: int, text: str) -> int:
    if size > MOST_BYTES:
        raise UsageError(f"{text!r} is more than any machine has", code="amount")
    return size


def pick(blocks: list[dict[str, Any]], word: str, *, own: bool = True) -> dict[str, Any]:
    """The block that a word means: the name of an own one, or any unique beginning of an id."""
    uid = os.geteuid()
    for block in blocks:
        if word and block["name"] == word and block["uid"] == uid:
            return block
    if not re.fullmatch(r"block_[0-9a-f]+", word):
        raise BlockNotFound(f"nothing is stored under {word!r}", hint="grid memory list-objects", code="no-object")
    found = [block for block in blocks if block["id"].startswith(word) and (block["uid"] == uid or not own)]
    if not found:
        hint = "grid memory list-blocks"
        raise BlockNotFound(f"there is no block {word}", cause="it was freed, or never was", hint=hint)
    if len(found) > 1:
        ids = ", ".join(block["id"] for block in found[:8])
        raise UsageError(f"{word} is the beginning of {len(found)} ids", cause=ids, code="ambiguous-id")
    return found[0]


def length_of(found: dict[str, Any]) -> int:
    """An object's own length: what was put into its block."""
    length, whole = found["meta"].get("size_bytes"), int(found["size_bytes"])
    return length if isinstance(length, int) and 0 <= length <= whole else whole


def as_block(found: dict[str, Any]) -> dict[str, Any]:
    """A block as scripts see it: without what only the pool's clients need."""
    kept = ("id", "name", "size_bytes", "state", "replicas", "at_rest", "owned", "created", "meta", "user", "reason")
    nodes = [copy["node"] for copy in found["copies"]]
    return {**{name: found[name] for name in kept if name in found}, "nodes": nodes}


def as_object(found: dict[str, Any]) -> dict[str, Any]:
    told = as_block(found)
    return {"key": told.pop("name"), **told, "size_bytes": length_of(found)}


def where(block: dict[str, Any]) -> str:
    return ", ".join(block["nodes"]) or "-"


def state(block: dict[str, Any]) -> str:
    return f"{block['state']}: {block['reason']}" if block.get("reason") else str(block["state"])


def age(block: dict[str, Any]) -> str:
    return format_duration(time.time() - block["created"])


def rate(size: int, seconds: float) -> str:
    return f"{format_bytes(size)} in {seconds:.1f} s ({format_bytes(size / max(seconds, 1e-3))}/s)"
