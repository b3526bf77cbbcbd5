"""The memory pool for long: ten thousand steps against a model in memory, minutes of frames that are almost right."""

from __future__ import annotations

import os
import random
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from distributed_grid.daemon import memory_care
from tests.unit.agent.memory import fuzz
from tests.unit.orchestration.distributed_memory_pool.test_model import PoolModel
from tests.unit.orchestration.distributed_memory_pool.world import World

pytestmark = pytest.mark.chaos
STEPS = int(os.environ.get("CHAOS_STEPS", "10000"))
#: GRID_FUZZ_S shortens both kinds.
FUZZ_S = float(os.environ.get("GRID_FUZZ_S") or os.environ.get("CHAOS_FUZZ_S", "600"))
MIB = 1024**2


@pytest.fixture(params=["shared", "wire"])
def world(request: pytest.FixtureRequest, grid_home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(memory_care, "ROUND_S", 0.2)
    made = World(grid_home, shared=request.param == "shared")
    yield made
    made.close()


@pytest.mark.timeout(7200)
def test_no_wrong_byte_in_ten_thousand_steps(world: World) -> None:
    """Half of them as on one host, half as over a network."""
    PoolModel.steps = 0
    while PoolModel.steps < STEPS // 2:
        run_state_machine_as_test(
            lambda: PoolModel(world),
            settings=settings(
                max_examples=10, stateful_step_count=50, deadline=None, database=None,
                suppress_health_check=list(HealthCheck), print_blob=True, phases=[Phase.generate],
            ),
        )  # fmt: skip
        print(f"{PoolModel.steps} steps", flush=True)


@pytest.mark.timeout(FUZZ_S + 600)
def test_frames_for_ten_minutes() -> None:
    seed = int(os.environ.get("CHAOS_SEED", time.time_ns() % 2**32))
    print(f"CHAOS_SEED={seed}", flush=True)
    rng, rounds, deadline = random.Random(seed), 0, time.monotonic() + FUZZ_S
    with fuzz.watched_server() as (server, complaints):
        while time.monotonic() < deadline:
            for _ in range(50):
                fuzz.attack_server(rng, server)
                fuzz.attack_client(rng)
                rounds += 1
            fuzz.check_server(server, complaints)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"{rounds} rounds, at most {most / MIB:.0f} MiB", flush=True)
    assert most < 1024 * MIB


@pytest.mark.timeout(FUZZ_S + 600)
def test_frames_that_coverage_leads_to(tmp_path: Path) -> None:
    """atheris changes frames so that they reach more of the parsers; anything but a typed error is a find."""
    pytest.importorskip("atheris", reason="atheris has wheels for Python 3.11 on x86_64 only")
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    done = subprocess.run(
        [
            sys.executable, "-m", "tests.chaos.fuzz_frames", str(corpus), f"-max_total_time={FUZZ_S:.0f}",
            "-rss_limit_mb=1024", "-timeout=60", f"-artifact_prefix={tmp_path}/", "-print_final_stats=1",
        ],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, errors="replace",
    )  # fmt: skip
    print(done.stderr[-1500:], flush=True)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "DONE" in done.stderr
