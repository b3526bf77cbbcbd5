"""Bytes that are kept packed: the same bytes, in less room, and no more of it than was allowed."""

from __future__ import annotations

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distributed_grid.agent.memory.at_rest import CHUNK_BYTES, PackedMemory
from distributed_grid.agent.memory.blocks import BlockTable
from distributed_grid.agent.memory.errors import PoolFull
from distributed_grid.agent.memory.packing import LZ4, ZSTD

SIZE = 3 * CHUNK_BYTES + 1000

piece = st.builds(
    lambda offset, length, seed: (offset, (seed * (length // len(seed) + 1))[: min(length, SIZE - offset)]),
    st.integers(0, SIZE - 1), st.integers(1, SIZE), st.binary(min_size=1, max_size=20),
)  # fmt: skip


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(pieces=st.lists(piece, max_size=8), codec=st.sampled_from([LZ4, ZSTD]))
def test_as_plain_memory(pieces: list[tuple[int, bytes]], codec: int) -> None:
    claimed: list[int] = []
    memory, model = PackedMemory(SIZE, codec, claimed.append), bytearray(SIZE)
    for offset, data in pieces:
        memory.write(offset, memoryview(data))
        model[offset : offset + len(data)] = data
        assert b"".join(memory.read(max(0, offset - 9), len(data))) == model[max(0, offset - 9) :][: len(data)]
    assert b"".join(memory.read(0, SIZE)) == model
    assert sum(claimed) >= 0
    memory.write(0, memoryview(bytes(SIZE)))
    assert sum(claimed) == 0  # zeros take nothing


def test_takes_what_it_packs_to_and_no_more_than_allowed() -> None:
    table = BlockTable()
    table.allocate(1, 7, 1, 100 * CHUNK_BYTES, shared=False, most_bytes=10, codec=ZSTD)
    block = table._find(1, 7, 1)
    assert block.packed and table.stats()["promised_bytes"] == 0
    with pytest.raises(PoolFull):
        block.packed.write(0, memoryview(b"x" * 100))
    table.set_growth(2 * CHUNK_BYTES)
    block.packed.write(0, memoryview(b"text " * (10 * CHUNK_BYTES // 5)))
    taken = table.stats()["promised_bytes"]
    assert 0 < taken < CHUNK_BYTES // 4 and block.taken_bytes == taken
    noise = os.urandom(4 * CHUNK_BYTES)
    with pytest.raises(PoolFull):
        block.packed.write(20 * CHUNK_BYTES, memoryview(noise))
    assert table.stats()["promised_bytes"] <= 2 * CHUNK_BYTES
    assert b"".join(block.packed.read(20 * CHUNK_BYTES, CHUNK_BYTES)) == noise[:CHUNK_BYTES]  # what there was room for
    assert not any(b"".join(block.packed.read(22 * CHUNK_BYTES, 2 * CHUNK_BYTES)))
    assert table.set_growth(0) == table.stats()["promised_bytes"]
    table.free(1)
    assert table.stats()["promised_bytes"] == 0
