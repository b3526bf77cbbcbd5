"""The pool against a model in memory: whatever is done and killed, no wrong byte, and no error but the right one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule, run_state_machine_as_test

from distributed_grid.orchestration.distributed_memory_pool import BlockLost, BlockNotFound
from tests.lab.waiting import wait_until
from tests.unit.orchestration.distributed_memory_pool.world import World

#: Ten thousand steps are taken in tests/chaos.
EXAMPLES = 4
LARGEST = 300_000
WORKERS = ("gpu1", "gpu2")


class PoolModel(RuleBasedStateMachine):
    blocks = Bundle("blocks")
    steps = 0

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world
        self.pools = [
            world.pool(compression="auto"), world.pool(compression="lz4", busy_poll_s=5e-5),
            world.pool(compression="off"),
        ]  # fmt: skip
        self.bytes: dict[str, bytearray] = {}
        self.lost: set[str] = set()
        self.sizes: dict[str, int] = {}

    def teardown(self) -> None:
        for block in [*self.bytes, *self.lost]:
            self.pools[0].deallocate(block)
        assert self.pools[0].list_blocks() == []
        for pool in self.pools:
            pool.shutdown()

    def check(self, block: str, work: Callable[[bytearray], None]) -> None:
        if block in self.lost:
            with pytest.raises(BlockLost):
                work(bytearray(self.sizes[block]))
        elif block not in self.bytes:
            with pytest.raises(BlockNotFound):
                work(bytearray(self.sizes[block]))
        else:
            work(self.bytes[block])

    @rule(target=blocks, size=st.integers(1, LARGEST), node=st.sampled_from(WORKERS), replicas=st.integers(1, 2),
          at_rest=st.sampled_from(["", "", "lz4", "zstd"]))  # fmt: skip
    def allocate(self, size: int, node: str, replicas: int, at_rest: str) -> str:
        block = self.pools[0].allocate(size, node, strict=True, replicas=replicas, at_rest=at_rest)
        self.bytes[block] = bytearray(size)
        self.sizes[block] = size
        return block

    @rule(block=blocks, data=st.data(), pool=st.integers(0, 2))
    def write(self, block: str, data: Any, pool: int) -> None:
        def work(model: bytearray) -> None:
            offset = data.draw(st.integers(0, len(model) - 1))
            length = data.draw(st.integers(0, len(model) - offset))
            seed = data.draw(st.binary(min_size=1, max_size=50))
            piece = (seed * (length // len(seed) + 1))[:length] or b"\1"
            self.pools[pool].write(block, piece, offset=offset)
            model[offset : offset + len(piece)] = piece

        self.check(block, work)

    @rule(block=blocks, data=st.data(), pool=st.integers(0, 2))
    def write_pieces(self, block: str, data: Any, pool: int) -> None:
        def work(model: bytearray) -> None:
            places = data.draw(st.lists(st.integers(0, len(model) - 1), min_size=1, max_size=20))
            self.pools[pool].writev(block, [(place, bytes([place % 251])) for place in places])
            for place in places:
                model[place] = place % 251

        self.check(block, work)

    @rule(block=blocks, data=st.data(), pool=st.integers(0, 2))
    def read(self, block: str, data: Any, pool: int) -> None:
        def work(model: bytearray) -> None:
            offset = data.draw(st.integers(0, len(model) - 1))
            length = data.draw(st.integers(1, len(model) - offset))
            assert self.pools[pool].read(block, length, offset=offset) == model[offset : offset + length]
            pieces = [(offset, length), (0, 1), (len(model) - 1, 1)]
            assert self.pools[pool].readv(block, pieces) == [model[at : at + size] for at, size in pieces]

        self.check(block, work)

    @rule(block=consumes(blocks))
    def free(self, block: str) -> None:
        self.pools[1].deallocate(block)
        self.bytes.pop(block, None)
        self.lost.discard(block)

    @rule(node=st.sampled_from(WORKERS))
    def kill(self, node: str) -> None:
        for worker in WORKERS:  # an earlier kill has been seen
            self.world.run(lambda worker=worker: self.world.directory.care.check_node(worker))
        for block in self.bytes:  # as many copies as promised: only then two kills in a row are no loss
            info = self.pools[0].info(block)
            wanted = info["replicas"]
            wait_until(lambda one=block, wanted=wanted: len(self.pools[0].info(one)["copies"]) == wanted, 90, "copies")
        held = {block: [copy["node"] for copy in self.pools[0].info(block)["copies"]] for block in self.bytes}
        self.world.kill(node)
        for block, nodes in held.items():
            if nodes == [node]:
                del self.bytes[block]
                self.lost.add(block)

    @rule()
    def restart_the_daemon(self) -> None:
        self.world.stop()
        self.world.start()

    @invariant()
    def all_is_as_written(self) -> None:
        PoolModel.steps += 1
        for block, model in list(self.bytes.items())[-1:]:
            assert self.pools[2].read(block) == model


@pytest.mark.parametrize("shared", [True, False])
def test_no_wrong_byte(shared: bool, make_world: Callable[..., World]) -> None:
    world = make_world(shared=shared)
    run_state_machine_as_test(
        lambda: PoolModel(world),
        settings=settings(
            max_examples=EXAMPLES, stateful_step_count=25, deadline=None, derandomize=True, database=None,
            suppress_health_check=list(HealthCheck), print_blob=False, phases=[Phase.generate],
        ),
    )  # fmt: skip
