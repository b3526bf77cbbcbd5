"""What processes are taken for, which of them a scan offers, and which may never be moved."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from offload_facts import process, sample, tree

from distributed_grid.agent.inspect.facts import TreeFacts
from distributed_grid.config.models import OffloadConfig
from distributed_grid.core.process import ProcessId
from distributed_grid.core.resources import GB
from distributed_grid.orchestration.offloading.classifier import classify
from distributed_grid.orchestration.offloading.detector import detect, why_not
from distributed_grid.orchestration.offloading.model import Classification, ProcessType

T = ProcessType


@pytest.mark.parametrize(
    ("command", "facts", "kind"),
    [
        ("python train.py", {"libraries": ("torch",)}, T.TRAINING),
        ("torchrun --nproc 2 main.py", {}, T.TRAINING),
        # In tmux, with a terminal that nobody has read since: decision 13.
        ("python train.py", {"tty": "/dev/pts/3", "stdin_tty": True, "foreground": True, "parents": ("bash", "tmux")},
         T.TRAINING),
        ("python -m ipykernel_launcher -f k", {"libraries": ("torch", "numpy"), "gpu_memory_bytes": GB}, T.TRAINING),
        ("python -m vllm.entrypoints.api_server", {"libraries": ("torch", "vllm"), "listens": True}, T.INFERENCE),
        ("python app.py", {"libraries": ("torch",), "listens": True}, T.INFERENCE),
        ("python report.py", {"libraries": ("pandas", "pyarrow"), "cpu_cores_1m": 0.2, "cpu_cores": 0.2},
         T.DATA_PROCESSING),
        ("java -cp x org.apache.spark.deploy.SparkSubmit", {"libraries": ("jvm",)}, T.DATA_PROCESSING),
        ("./simulate --n 5", {"cpu_cores_1m": 7.9}, T.COMPUTE_INTENSIVE),
        ("/data/training/simulate", {"cpu_cores_1m": 3.0}, T.COMPUTE_INTENSIVE),
        ("bash nightly.sh", {"cpu_cores_1m": 0.1, "cpu_cores": 0.0, "parents": ("cron",)}, T.BATCH),
        ("python job.py", {"cpu_cores_1m": 0.1, "cpu_cores": 0.0}, T.BATCH),
        ("-bash", {"tty": "/dev/pts/1"}, T.INTERACTIVE),
        ("vim train.py", {"tty": "/dev/pts/1"}, T.INTERACTIVE),
        ("python", {"tty": "/dev/pts/1", "libraries": ("torch",)}, T.INTERACTIVE),
        ("ipython", {"tty": "/dev/pts/1", "stdin_tty": True}, T.INTERACTIVE),
        ("sqlite3 numbers.db analyze", {"tty": "/dev/pts/1"}, T.COMPUTE_INTENSIVE),
        ("ssh gpu1", {"tty": "/dev/pts/1"}, T.INTERACTIVE),
        ("python menu.py", {"tty": "/dev/pts/1", "stdin_tty": True, "foreground": True, "tty_read_age_s": 20.0},
         T.INTERACTIVE),
        ("dockerd", {"comm": "dockerd"}, T.DAEMON),
        ("python worker.py", {"service": "worker.service"}, T.DAEMON),
        ("python wait.py", {"listens": True, "cpu_cores_1m": 0.0, "cpu_cores": 0.0}, T.DAEMON),
    ],
)  # fmt: skip
def test_types(command: str, facts: dict[str, Any], kind: ProcessType) -> None:
    found = classify(sample(command, **facts))
    assert found.type is kind, found
    assert 0 < found.confidence < 1 and found.reasons


def offered(tree_sample: Any, asked_by: int = 0, **config: Any) -> str:
    """Empty if it is offered, else why not."""
    good, passed = detect("gpu-master", [tree_sample], OffloadConfig(**config), asked_by=asked_by)
    assert len(good) + len(passed) == 1
    return "" if good else passed[0].reason


def test_one_of_the_amounts_is_enough() -> None:
    small = {"cpu_cores": 0.1, "cpu_cores_1m": 0.1, "memory_bytes": GB, "peak_memory_bytes": GB}
    assert "0.1 cores" in offered(sample(**small))
    assert not offered(sample(**{**small, "cpu_cores_1m": 0.99}))
    assert not offered(sample(**{**small, "cpu_wait_1m": 0.85}))  # on a full node nobody gets a whole core
    assert "0.0 cores" in offered(sample(**{**small, "cpu_cores_1m": 0.01, "cpu_cores": 0.01, "cpu_wait_1m": 3.0}))
    assert not offered(sample(**{**small, "memory_bytes": 2 * GB}))
    assert not offered(sample(**{**small, "gpu_memory_bytes": GB}))
    assert not offered(sample(**small), detect={"min_memory_gb": 1})
    assert "59s only" in offered(sample(age_s=59))
    assert not offered(sample(age_s=59), detect={"min_age_seconds": 10})


def test_what_is_not_offered() -> None:
    assert offered(sample(origin="ray")) == "it is Ray's"
    assert offered(sample(origin="grid")) == "it is the grid's own"
    assert offered(sample("dockerd", comm="dockerd")) == "it is a part of the system"
    assert offered(sample(), asked_by=1001) == "it belongs to ann"
    assert offered(sample(uids=(0, 1000)), asked_by=1000) == "it belongs to ann"
    assert not offered(sample(), asked_by=1000)
    assert "never" in offered(sample(), never=["*train*"])
    assert "interactive" in offered(sample("vim x"))


def test_json_names_a_process_so_that_execute_takes_it() -> None:
    [found], _ = detect("gpu1", [sample("python train.py --lr 0.1")], OffloadConfig())
    wire = found.to_wire("gpu-master")
    assert wire["pid"] == "gpu1:500" and wire["command"] == "python train.py --lr 0.1" and wire["type"] == "Training"
    assert found.to_wire("gpu1")["pid"] == 500
    assert wire["need"]["memory_bytes"] > 4 * GB


def refusal(facts: TreeFacts, **options: Any) -> str:
    found = why_not(facts, **{"node": "gpu-master", "asked_by": 1000, **options})
    return found.code if found else ""


def test_safety_rules() -> None:
    small = tree(rss_bytes=1)
    assert refusal(small) == "" and refusal(small, asked_by=0) == ""
    assert refusal(small, asked_by=1001) == "not-owner"
    assert refusal(tree(euid=0)) == "not-owner"
    assert refusal(tree(pid=1), asked_by=0) == "init"
    assert refusal(tree(origin="kernel"), asked_by=0) == "kernel-thread"
    assert refusal(tree(origin="grid"), asked_by=0) == "ours"
    assert refusal(tree(origin="ray"), asked_by=0) == "rays"
    below = replace(small, processes=(*small.processes, process(pid=501, origin="ray", comm="raylet")))
    assert refusal(below) == "rays"
    assert refusal(tree(comm="dockerd"), asked_by=0) == "critical"
    assert refusal(small, moving=[ProcessId(500, 77)]) == "already-moving"
    assert refusal(small, moving=[ProcessId(500, 78)]) == ""
    assert refusal(small, agent_uid=1001, asked_by=0) == "agent-rights"
    assert refusal(small, never=["*train.py"]) == "never"


def test_interactive_by_hand_with_force_only() -> None:
    kind = Classification(T.INTERACTIVE, 0.9, ("it is an editor",))
    assert refusal(tree(), kind=kind) == "interactive"
    assert refusal(tree(), kind=kind, force=True) == ""
    assert refusal(tree(), kind=kind, force=True, by_hand=False) == "interactive"


def test_head_only_binds_the_automatic_and_not_the_hand() -> None:
    elsewhere = {"node": "gpu1", "head": "gpu-master", "head_only": True}
    assert refusal(tree(), **elsewhere) == ""
    assert refusal(tree(), **elsewhere, by_hand=False) == "head-only"
