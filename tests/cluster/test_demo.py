"""`grid demo`, which `make demo` runs: the whole tour, and one that is broken off."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lab.clusters import GRID

LIMIT_S = 300
CAN_MOVE = os.geteuid() == 0 and (Path(sys.prefix) / "criu" / "criu").exists()


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONUNBUFFERED": "1"}


@pytest.mark.timeout(LIMIT_S + 20)
def test_the_tour_comes_true_and_leaves_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [GRID, "demo"], env=environment(), cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    for claim in (
        "gpu-master, gpu1 and gpu2 are online",
        "it ended with its own exit code, 42",
        "it was started once",
        "its own shell saw its own exit code, 5",
        "one GB of gpu2 is held for gpu-master",
        "its own shell saw its own exit code, 6",
        "nothing else was moved" if CAN_MOVE else "it watches, decides and says why",
        "and it is off again",
        "no process is left",
    ):
        assert f"✓ {claim}" in done.stdout
    assert "$ grid execute -n gpu1 echo 'hello from gpu1'" in done.stdout
    moved = "the next one, was written on gpu" in done.stdout and "its pid here is a stub" in done.stdout
    assert moved == CAN_MOVE and ("Left out here" in done.stdout) != CAN_MOVE, done.stdout
    assert "\x1b" not in done.stdout


def break_off(cwd: Path, moment: str, number: signal.Signals) -> None:
    """The check for leaks after this module finds whatever would be left."""
    with subprocess.Popen(
        [GRID, "demo"], env=environment(), cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        stdin=subprocess.DEVNULL,
    ) as tour:  # fmt: skip
        assert tour.stdout is not None
        said = []
        for line in tour.stdout:
            said.append(line)
            if moment in line:
                break
        tour.send_signal(number)
        rest, _ = tour.communicate(timeout=LIMIT_S)
    assert tour.returncode == 130, "".join(said) + rest
    assert "Traceback" not in rest


@pytest.mark.timeout(LIMIT_S + 20)
def test_broken_off_while_the_cluster_comes_up(tmp_path: Path) -> None:
    break_off(tmp_path, "gpu-master: starting Ray", signal.SIGINT)


@pytest.mark.chaos
@pytest.mark.timeout(LIMIT_S + 20)
def test_broken_off_while_a_command_runs(tmp_path: Path) -> None:
    break_off(tmp_path, "  step 2", signal.SIGTERM)


@pytest.mark.chaos
@pytest.mark.root
@pytest.mark.criu
@pytest.mark.timeout(LIMIT_S + 20)
def test_broken_off_while_one_is_away_by_itself(tmp_path: Path) -> None:
    break_off(tmp_path, "and nobody asked for it", signal.SIGTERM)


@pytest.mark.chaos
@pytest.mark.root
@pytest.mark.criu
@pytest.mark.timeout(LIMIT_S + 20)
def test_broken_off_while_a_process_is_away(tmp_path: Path) -> None:
    break_off(tmp_path, "is away", signal.SIGINT)
