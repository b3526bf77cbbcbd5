"""When the head asks for memory by itself, how much, and when it gives it back."""

from __future__ import annotations

import pytest

from distributed_grid.core.resources import GB
from distributed_grid.orchestration.resource_sharing.rebalance import MemoryWish

TOTAL, HIGH, LOW = 100 * GB, 0.7, 0.3


def seen(*uses: float, policy: str = "balanced") -> MemoryWish:
    wish = MemoryWish()
    for use in uses:
        wish = wish.seen(use, TOTAL, policy, HIGH, LOW)
    return wish


@pytest.mark.parametrize(("policy", "wanted_gb"), [("conservative", 11), ("balanced", 31), ("aggressive", 51)])
def test_each_policy_has_its_goal(policy: str, wanted_gb: int) -> None:
    assert seen(0.805, policy=policy) == MemoryWish(True, wanted_gb * GB)


def test_asks_above_high_keeps_between_and_gives_back_below_low() -> None:
    assert seen(0.7) == MemoryWish()
    assert seen(0.805, 0.5).wanted_bytes == 31 * GB
    assert seen(0.905, 0.805).wanted_bytes == 41 * GB, "it does not shrink while the pressure lasts"
    assert seen(0.8, 0.29) == MemoryWish()
    assert seen(0.8, 0.29, 0.5) == MemoryWish()
    assert MemoryWish().seen(0.701, GB, "conservative", HIGH, LOW).wanted_bytes == GB, "at least a gigabyte"
