"""States of a move: what may follow what, and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as some

from distributed_grid.core.errors import InternalError, UsageError
from distributed_grid.orchestration.offloading.model import (
    TRANSITIONS,
    MoveState,
    move_id,
    next_state,
    parse_process,
    process_name,
)

S = MoveState


def test_the_straight_way() -> None:
    state = S.PLANNED
    for following in (S.FROZEN, S.COPIED, S.STAGED, S.COMMITTED, S.RUNNING, S.CLEANED, S.ENDED):
        state = next_state(state, following)
    assert state.over


def test_an_illegal_step_tells_its_story() -> None:
    with pytest.raises(InternalError, match="from COMMITTED to ABORTED") as caught:
        next_state("COMMITTED", "ABORTED", move_id="offload_1_2", story=["frozen", "committed"])
    assert caught.value.cause == "frozen; committed" and caught.value.details["story"] == ["frozen", "committed"]


@given(some.lists(some.sampled_from(list(S)), max_size=12))
def test_the_source_is_let_go_before_the_commit_or_out_of_doubt_only(wishes: list[MoveState]) -> None:
    state, seen = S.PLANNED, [S.PLANNED]
    for wish in wishes:
        if wish in TRANSITIONS[state]:
            state = next_state(state, wish)
            seen.append(state)
    if S.ABORTED in seen:
        assert S.COMMITTED not in seen or seen[-2] is S.IN_DOUBT
    if S.RUNNING in seen:
        assert S.COMMITTED in seen and S.ABORTED not in seen
    if {S.ENDED, S.LOST, S.MOVED} & set(seen):
        assert S.CLEANED in seen


def test_every_state_can_come_to_an_end() -> None:
    for state in S:
        reached, new = {state}, {state}
        while new:
            new = {after for one in new for after in TRANSITIONS[one]} - reached
            reached |= new
        assert any(one.over for one in reached)
        assert state.active != state.over


def test_names() -> None:
    assert move_id(1701234567.9, 12345) == "offload_1701234567_12345"
    assert parse_process("12345", "gpu-master") == ("gpu-master", 12345)
    assert parse_process("gpu1:77", "gpu-master") == ("gpu1", 77)
    assert process_name("gpu-master", 5, "gpu-master") == 5 and process_name("gpu1", 5, "gpu-master") == "gpu1:5"
    for wrong in ("", "x", "0", "-4", "gpu1:", ":5", "1.5", "gpu1:abc"):
        with pytest.raises(UsageError):
            parse_process(wrong, "gpu-master")
