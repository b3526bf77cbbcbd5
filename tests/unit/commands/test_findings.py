"""What the doctor makes of the facts."""

from __future__ import annotations

from typing import Any

import pytest

from distributed_grid.commands._findings import (
    judge_clock,
    judge_criu,
    judge_disk,
    judge_gpu,
    judge_node,
    judge_port,
    judge_python,
    judge_token,
    judge_versions,
)
from distributed_grid.core.resources import GB

HERE = {"python": "3.11.7", "ray": "2.60.0", "grid": "0.1.0"}
HEALTH: dict[str, Any] = {
    "python": "3.11.2", "ray_version": "2.60.0", "package_version": "0.1.0", "state_dir": "/home/u/.distributed_grid",
    "disk_free_bytes": 50 * GB, "tmp_free_bytes": 50 * GB,
    "criu_state": {"path": "/criu", "version": "4.2", "works": True, "why": ""},
    "gpu_driver": {"state": "works", "version": "570", "count": 1, "why": ""},
}  # fmt: skip


def test_python() -> None:
    assert judge_python((3, 11, 0), "/p").level == "ok"
    old = judge_python((3, 10, 9), "/p")
    assert old.level == "problem" and old.next


@pytest.mark.parametrize(
    ("exists", "mode", "ray_mode", "level"),
    [
        (True, 0o600, "token", "ok"),
        (True, 0o600, None, "ok"),
        (False, 0, None, "note"),
        (True, 0o644, "token", "problem"),
        (True, 0o600, "", "problem"),
    ],
)
def test_token(exists: bool, mode: int, ray_mode: str | None, level: str) -> None:
    assert judge_token(exists, mode, ray_mode).level == level


def test_ports() -> None:
    assert judge_port("head", 0, True, "", True).level == "ok"
    assert judge_port("head", 6379, True, "", False).level == "ok"
    assert judge_port("head", 6379, False, "redis (pid 7)", True).level == "note"
    held = judge_port("head", 6379, False, "redis (pid 7)", False)
    assert held.level == "problem" and "redis (pid 7)" in held.text


@pytest.mark.parametrize(("free", "level"), [(10 * GB, "ok"), (2 * GB, "note"), (GB // 4, "problem")])
def test_disk(free: int, level: str) -> None:
    assert judge_disk("/", free).level == level


def test_criu_says_why_not_and_what_to_do() -> None:
    missing = judge_criu({"path": "", "version": "", "works": False, "why": "there is no criu on this node"})
    assert missing.level == "note" and "make setup" in missing.next
    weak = judge_criu({"path": "/c", "version": "4.2", "works": False, "why": "needs CAP_CHECKPOINT_RESTORE"})
    assert weak.level == "note" and "setcap" in weak.next
    script = {"path": "/c", "version": "4.2", "works": False, "why": "needs CAP_CHECKPOINT_RESTORE", "is_script": True}
    assert judge_criu(script).next == "run the cluster as root"


def test_gpu() -> None:
    none = {"state": "none", "version": "", "count": 0, "why": ""}
    assert judge_gpu(none, None, False).level == "ok"
    assert judge_gpu(none, 1, True).level == "note"
    assert judge_gpu(none, 1, False).level == "problem"
    assert judge_gpu({**none, "state": "broken", "why": "mismatch"}, None, False).level == "problem"


@pytest.mark.parametrize(
    ("skew_s", "round_trip_s", "level"), [(0.01, 0.002, "ok"), (-1.0, 0.01, "note"), (60.0, 0.01, "problem")]
)
def test_clock(skew_s: float, round_trip_s: float, level: str) -> None:
    assert judge_clock("gpu1", skew_s, round_trip_s).level == level


def test_a_slow_answer_is_no_skew() -> None:
    assert judge_clock("gpu1", 0.9, 2.0).level == "ok"


def test_versions_name_the_node_and_the_step() -> None:
    found = judge_versions("gpu1", {**HEALTH, "ray_version": "2.40.0", "python": "3.12.1"}, HERE)
    assert [one.check for one in found if one.level == "problem"] == ["ray", "python"]
    assert all("grid cluster install --node gpu1" in one.next for one in found)


def test_a_node_that_is_well_and_one_that_is_away() -> None:
    facts = {"online": True, "skew_s": 0.0, "round_trip_s": 0.001, "shares_files": False, "health": HEALTH}
    found = judge_node("gpu1", facts, HERE, 1, False)
    assert {one.level for one in found} == {"ok"} and {one.node for one in found} == {"gpu1"}
    assert {one.check for one in found} == {"agent", "ray", "clock", "disk", "files", "criu", "gpu"}
    away = judge_node("gpu1", {"online": False, "reason": "no route"}, HERE, 1, False)
    assert [(one.level, one.text) for one in away] == [("problem", "no route")] and away[0].next
