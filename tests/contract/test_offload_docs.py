"""The documents' promises about offloading (O1 to O25, O27, O28), each as written there."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from distributed_grid.config import ClusterConfig
from distributed_grid.orchestration.offloading.model import ProcessType
from tests.cluster.offloads import LIMIT_S, Started, check_chain, found, until_over
from tests.lab.clusters import GRID, EmbeddedCluster
from tests.lab.waiting import wait_until

#: For a machine without jq.
_PICK = 'import json, os, sys; [print(x["pid"]) for x in json.load(sys.stdin) if os.environ["ONLY"] in x["command"]]'
PICKER = f"{sys.executable} -c '{_PICK}'"

pytestmark = [pytest.mark.root, pytest.mark.criu]


@pytest.fixture
def low_thresholds(embedded: EmbeddedCluster) -> Iterator[None]:
    """Everything counts as heavy and old enough; the running daemon takes the change, and takes it back."""
    assert embedded.config
    text = embedded.config.read_text()
    lower = "offload:\n  detect: {min_cpu_cores: 0.0, min_memory_gb: 0.0, min_age_seconds: 0}\n"
    taken = reloads(embedded)
    embedded.config.write_text(text + lower)
    wait_until(lambda: reloads(embedded) - taken, LIMIT_S, "the change to be taken", every_s=0.3)
    try:
        yield
    finally:
        taken = reloads(embedded)
        embedded.config.write_text(text)
        wait_until(lambda: reloads(embedded) - taken, LIMIT_S, "it to be taken back", every_s=0.3)


def reloads(embedded: EmbeddedCluster) -> set[float]:
    """When the configuration was read again."""
    events = embedded.json("events", "--limit", "100", timeout=LIMIT_S)
    return {one["at"] for one in events if one["kind"] == "config.reloaded"}


def offered(embedded: EmbeddedCluster) -> list[dict[str, object]]:
    told = embedded.json("offload", "scan", timeout=LIMIT_S)
    return [one for one in told if "chain.py" in one["command"]]


def line(embedded: EmbeddedCluster, text: str, **more: str) -> subprocess.CompletedProcess[str]:
    """A line of the documents, typed in a shell on the head."""
    assert embedded.config
    path = f"{GRID.parent}:{os.environ['PATH']}"
    env = {**embedded.environment(), "PATH": path, "GRID_CONFIG": str(embedded.config), **more}
    return subprocess.run(
        ["bash", "-c", f"set -o pipefail; {text}"], env=env, cwd=embedded.cwd, capture_output=True, text=True,
        timeout=4 * LIMIT_S, stdin=subprocess.DEVNULL,
    )  # fmt: skip


@pytest.mark.timeout(600)
def test_o1_to_o4_o11_o24_scan_and_the_batch_line(
    embedded: EmbeddedCluster, started: Started, low_thresholds: None
) -> None:
    """Thresholds lowered; the batch is narrowed to the test's own programs, since other people's run here too."""
    names = [f"train{number}" for number in range(3)]
    pids = [started.run("chain.py", started.end, "0", "0.02", name, log=name).pid for name in names]

    def seen() -> bool:
        return {one["pid"] for one in offered(embedded)} >= set(pids)

    wait_until(seen, LIMIT_S, "the three to be offered", every_s=0.5)
    for text in ("grid offload scan", "grid offload scan -n gpu-master", "grid offload scan | grep train"):
        done = line(embedded, text)
        assert done.returncode == 0, done.stderr
        lines = [one for one in done.stdout.splitlines() if f"{started.end} " in one]
        assert sorted(int(one.split()[0]) for one in lines) == sorted(pids)
    only = json.loads(line(embedded, "grid offload scan -n gpu1 --format json").stdout)
    assert not {one["pid"] for one in only} & set(pids)

    jq = "jq -r '.[] | select(.command | contains(env.ONLY)) | .pid'" if shutil.which("jq") else PICKER
    batch = f"grid offload scan --format json | {jq} | xargs -I {{}} grid offload execute {{}}"
    done = line(embedded, batch, ONLY=str(started.directory))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("Monitor progress: grid offload status") == 3
    active = {one["pid"]: one for one in embedded.json("offload", "status")["active"]}
    assert all(active[pid]["target"] in ("gpu1", "gpu2") for pid in pids)
    started.end.touch()
    for process, name in zip(started.processes, names, strict=True):
        assert process.wait(LIMIT_S) == 0
        check_chain((started.directory / name).read_text(), 5)


def test_o5_o6_o9_o10_o18_to_o21_move_status_cancel(embedded: EmbeddedCluster, started: Started) -> None:
    who = started.run("chain.py", started.end, cwd=started.directory, env={**os.environ, "MY_WORD": "kept"})
    done = line(embedded, f"grid offload execute {who.pid} --target-node gpu1")
    assert done.returncode == 0, done.stderr
    assert "Monitor progress: grid offload status" in done.stdout
    [move_id] = re.findall(rf"\boffload_\d{{10}}_{who.pid}\b", done.stdout)
    status = line(embedded, "grid offload status").stdout
    assert move_id in status and "active" in status.splitlines()[0]
    moved = found(embedded, move_id)
    there = Path(f"/proc/{moved['target_pid']}")
    assert b"MY_WORD=kept" in (there / "environ").read_bytes()
    assert (there / "cwd").readlink() == started.directory
    assert "stub.py" in Path(f"/proc/{who.pid}/cmdline").read_text()  # the source has stopped
    cancelled = line(embedded, f"grid offload cancel {move_id}")
    assert cancelled.returncode == 0, cancelled.stderr
    assert until_over(embedded, move_id)["state"] == "ENDED"
    assert started.processes[0].wait(LIMIT_S) != 0


def test_o7_o8_runtime_env_and_no_state(embedded: EmbeddedCluster, started: Started) -> None:
    script = 'echo "${CUDA_VISIBLE_DEVICES-none} ${MINE-none}"; while [ ! -e "$1" ]; do sleep 0.05; done'
    argv, env = ["sh", "-c", script, "sh", str(started.end)], {**os.environ, "MINE": "mine"}
    with_env, without = (started.spawn(argv, log=name, env=env) for name in ("with", "without"))
    given = """--runtime-env '{"env_vars": {"CUDA_VISIBLE_DEVICES": "0"}}'"""
    first = line(embedded, f"grid offload execute {with_env.pid} --target-node gpu1 {given}")
    assert first.returncode == 0, first.stderr
    second = line(embedded, f"grid offload execute {without.pid} --capture-state=False")
    assert second.returncode == 0, second.stderr

    def lines(name: str) -> list[str]:
        return (started.directory / name).read_text().splitlines()

    wait_until(lambda: len(lines("with")) == 2 and len(lines("without")) == 2, LIMIT_S, "both to have begun again")
    assert lines("with") == ["none mine", "0 mine"]
    assert lines("without") == ["none mine", "none none"]
    started.end.touch()
    assert [process.wait(LIMIT_S) for process in started.processes] == [0, 0]


def test_o12_o13_o24_thresholds_are_the_documents_and_can_be_set() -> None:
    detect = ClusterConfig().offload.detect
    told = (detect.min_cpu_cores, detect.min_memory_gb, detect.min_gpu_memory_gb, detect.min_age_seconds)
    assert told == (1.0, 2.0, 1.0, 60.0)
    set_ = ClusterConfig.model_validate({"offload": {"detect": {"min_cpu_cores": 4, "min_age_seconds": 5}}})
    assert (set_.offload.detect.min_cpu_cores, set_.offload.detect.min_age_seconds) == (4.0, 5.0)


def test_o22_o23_types() -> None:
    names = ["Training", "Inference", "Data Processing", "Compute Intensive", "Batch Jobs", "Interactive", "Daemon"]
    assert [one.value for one in ProcessType] == names
    assert [one.value for one in ProcessType if not one.offered] == ["Interactive", "Daemon"]


def test_o14_system_processes_are_not_offered(embedded: EmbeddedCluster) -> None:
    told = embedded.json("offload", "scan", "-a", timeout=LIMIT_S)
    [first] = [one for one in told if one["pid"] == 1] or [None]
    assert first is None or not first["movable"]


def test_o16_o17_o25_the_plan_says_what_will_happen(embedded: EmbeddedCluster, started: Started) -> None:
    who = started.chain()
    plan = embedded.json("offload", "plan", str(who.pid), timeout=LIMIT_S)
    assert plan["target"] in ("gpu1", "gpu2") and plan["bytes"] > 0 and plan["why"]
    assert {"strategy", "expected_pause_s", "notices", "blocking"} <= set(plan)
    started.goes_on(who)


def test_o27_process_not_found(embedded: EmbeddedCluster) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait(LIMIT_S)
    done = line(embedded, f"grid offload execute {gone.pid}")
    assert done.returncode == 3
    assert "Process Not Found" in done.stderr and "ps aux" in done.stderr and "grid offload scan" in done.stderr


def test_o28_offloading_failed(embedded: EmbeddedCluster, started: Started) -> None:
    """The target's place for images cannot be used: tried, failed, said, and the process runs on."""
    who = started.chain()
    blocked = embedded.home / "nodes" / "gpu1" / "moves"
    kept = blocked.with_name("moves.kept")
    blocked.rename(kept)
    blocked.write_text("")
    try:
        done = line(embedded, f"grid offload execute {who.pid} -t gpu1")
    finally:
        blocked.unlink()
        kept.rename(blocked)
    assert done.returncode != 0 and done.stderr.count("error:") == 1 and "Traceback" not in done.stderr
    assert "Offloading Failed" in done.stderr and "grid logs" in done.stderr, done.stderr
    started.goes_on(who)
