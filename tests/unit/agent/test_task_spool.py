"""What a task's files prove about it."""

from __future__ import annotations

import pytest

from distributed_grid.agent.spool import State, TaskSpec, decide_state, start_error
from distributed_grid.core.errors import NotFound

END = {"code": 0, "signal": None, "error": None}
FAILED = {"code": 127, "signal": None, "error": {"kind": "command-not-found", "message": "x"}}


@pytest.mark.parametrize(
    ("exit_record", "had_shim", "alive", "started", "staged", "same_boot", "state"),
    [
        (None, False, False, False, False, True, "prepared"),
        (None, True, True, False, False, True, "prepared"),
        (None, True, True, False, True, True, "staged"),
        (None, True, True, True, True, True, "running"),
        (END, True, True, True, True, True, "exited"),  # its children live on
        (END, True, False, True, True, False, "exited"),  # an exit outlives the machine's boot
        (FAILED, True, False, False, False, True, "failed"),
        (None, True, False, True, True, True, "lost"),
        (None, True, False, False, False, True, "lost"),  # it may have run: never again
        (None, False, False, False, False, False, "lost"),
    ],
)
def test_state(
    exit_record: dict[str, object] | None, had_shim: bool, alive: bool, started: bool, staged: bool, same_boot: bool,
    state: State,
) -> None:  # fmt: skip
    assert decide_state(exit_record, had_shim, alive, started, staged, same_boot) == state


def test_a_missing_command_is_not_found_and_says_what_to_do() -> None:
    error = start_error({"kind": "command-not-found", "message": "there is no command 'x'"}, "gpu1", ["x"])
    assert isinstance(error, NotFound) and error.code == "command-not-found" and "gpu1" in error.hint


def test_spec_over_the_wire() -> None:
    spec = TaskSpec(["a"], env={"B": "c"}, cores=[1], rlimits={"RLIMIT_NOFILE": [10, 20]}, hold=True)
    assert TaskSpec.from_wire(spec.to_wire()) == spec
