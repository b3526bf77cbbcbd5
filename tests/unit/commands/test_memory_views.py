"""What may be typed for blocks, and how far a transfer says it is."""

from __future__ import annotations

import os
from typing import Any

import pytest

from distributed_grid.agent.memory.errors import BlockNotFound
from distributed_grid.commands._progress import progress_line
from distributed_grid.commands.memory_views import as_object, check_key, parse_bytes, pick
from distributed_grid.core.errors import UsageError


def block(number: int, name: str = "", uid: int | None = None) -> dict[str, Any]:
    return {"id": f"block_{number:016x}", "name": name, "uid": os.geteuid() if uid is None else uid}


def test_bytes() -> None:
    typed = {"0": 0, "4096": 4096, " 7 ": 7, "512MiB": 512 * 1024**2, "1.5k": 1500, "2GB": 2 * 1024**3}
    assert {text: parse_bytes(text) for text in typed} == typed
    for text in ("", "-1", "1.5", "x", "4 furlongs", "9" * 30, "nan", "1e9", "²", "9" * 30 + "GB"):
        with pytest.raises(UsageError):
            parse_bytes(text)


def test_keys() -> None:
    for key in ("k", "run 1/model.pt", "größe", "block_x"):
        assert check_key(key) == key
    for key in ("", "a\nb", "x" * 501, "\udcff", "a\0b"):
        with pytest.raises(UsageError):
            check_key(key)


def test_a_word_means_one_block() -> None:
    blocks = [block(0x1F, "a"), block(0x1E), block(2, "theirs", uid=4711), block(3, "block_0")]
    assert pick(blocks, "a") is blocks[0]
    assert pick(blocks, "block_0") is blocks[3]  # a name comes before an id
    assert pick(blocks, "block_000000000000001e") is blocks[1]
    with pytest.raises(UsageError, match="2 ids"):
        pick(blocks, "block_000000000000001")
    assert pick(blocks, "block_0000000000000002", own=False) is blocks[2]
    for word in ("theirs", "block_0000000000000002", "block_f", "block_", "", "nothing"):
        with pytest.raises(BlockNotFound):
            pick(blocks, word)


def test_an_object_is_as_long_as_what_was_put_in() -> None:
    found = {**block(1, "k"), "size_bytes": 10, "copies": [{"node": "gpu1", "host": "h", "port": 1}], "state": "ready"}
    for meta, length in (({}, 10), ({"size_bytes": 0}, 0), ({"size_bytes": 11}, 10), ({"size_bytes": "x"}, 10)):
        told = as_object({**found, "meta": meta})
        assert (told["key"], told["size_bytes"], told["nodes"]) == ("k", length, ["gpu1"])
        assert "copies" not in told and "uid" not in told


def test_progress() -> None:
    gb = 1024**3
    assert progress_line("storing k", gb // 2, 2 * gb, 2.0) == "storing k: 512 MB of 2.0 GB, 25%, 256 MB/s, 6s left"
    assert progress_line("storing k", gb, None, 4.0) == "storing k: 1.0 GB, 256 MB/s"
    assert progress_line("storing k", 0, 0, 0.0) == "storing k: 0 B of 0 B, 100%, 0 B/s"
