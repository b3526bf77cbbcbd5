"""Twenty histories, replayed: no move that did not help, no ping-pong, and the pressure that could go is gone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench._histories import Scene, history, scenes
from distributed_grid.core.errors import UsageError
from distributed_grid.orchestration.auto_offload.replay import read_history, replay, write_history
from distributed_grid.orchestration.auto_offload.signals import Settings


@pytest.mark.parametrize("scene", scenes(), ids=lambda scene: scene.name)
def test_no_harm(scene: Scene) -> None:
    outcome = replay(history(scene), Settings(), scene.name)
    told = [f"{at - history(scene)[0].at:.0f}s {one.reason}" for at, one in outcome.decisions]
    assert outcome.useless == 0 and outcome.ping_pong == 0, told
    assert scene.expected[0] <= len(outcome.moves) <= scene.expected[1], told
    if outcome.moves:
        assert outcome.over_with_s < outcome.over_s
    assert outcome.cannot_help <= 2


def test_there_are_twenty_two() -> None:
    assert len(scenes()) == 22 and len({scene.name for scene in scenes()}) == 22


def test_what_was_never_recorded_is_not_known() -> None:
    """Without pressure nobody looked at processes: that is no "can't help"."""
    made = [replace(record, candidates=None) for record in history(scenes()[8])]
    outcome = replay(made, Settings())
    assert outcome.cannot_help == 0 and outcome.moves == [] and outcome.unknown_s > 600
    assert "no processes are recorded" in outcome.decisions[-1][1].reason
    late = [*made[:100], *history(scenes()[8])[100:]]  # from the first look on it is known
    assert len(replay(late, Settings()).moves) == 1


def test_a_history_survives_its_file(tmp_path: Path) -> None:
    made = history(scenes()[8])
    file = tmp_path / "history.jsonl"
    write_history(file, [record.to_wire() for record in made])
    again = read_history(file)
    assert again == made
    assert [m.candidate.pid for m in replay(again, Settings()).moves] == [100]


@pytest.mark.parametrize("content", ["", "not json\n", json.dumps({"at": 1}) + "\n", "[1]\n"])
def test_rubbish_is_one_clear_error(tmp_path: Path, content: str) -> None:
    file = tmp_path / "history.jsonl"
    file.write_text(content)
    with pytest.raises(UsageError):
        read_history(file)
    with pytest.raises(UsageError):
        read_history(tmp_path / "missing")
