"""Automatic offload on three hosts, the head with 2 GiB: what grows is moved before the kernel would end it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster.offloads import LIMIT_S, PROGRAMS, check_chain, moves
from tests.conftest import need_lab
from tests.lab.clusters import PYTHON, LabCluster
from tests.lab.host import HostPopen
from tests.lab.hosts import HostSpec, Lab
from tests.lab.waiting import wait_until

pytestmark = [pytest.mark.root, pytest.mark.criu]
HEAD_MIB = 2048
CONFIG = """
execution:
  resource_sharing:
    auto_offload:
      thresholds: {cpu: 100, memory: 95, gpu: 100}
      check_interval_seconds: 1  # so that a test need not wait for long
      cooldown_seconds: 2
offload:
  detect:
    min_age_seconds: 60
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[LabCluster]:
    need_lab()
    with Lab(names=(HostSpec("gpu-master", memory_mb=HEAD_MIB), "gpu1", "gpu2")) as lab:
        made = LabCluster(lab, more=CONFIG)
        made.start()
        yield made
        made.stop()


class Grown:
    """tests/programs/grow.py on the head; `line` of its log is that of chain.py."""

    def __init__(self, cluster: LabCluster, name: str, most_mib: int, mib_per_s: float = 40.0) -> None:
        self.cluster, self.head = cluster, cluster.head
        self.directory = f"/root/{name}"
        self.end, self.log = f"{self.directory}/end", f"{self.directory}/log"
        self.head.run(["mkdir", "-p", self.directory])
        command = f"{PYTHON} {PROGRAMS}/grow.py {self.end} {most_mib} {mib_per_s}"
        self.process: HostPopen = self.head.popen(
            ["setsid", "--wait", "sh", "-c", f"{command} > {self.log} 2>&1; echo rc $? > {self.directory}/rc"]
        )
        self.pid = wait_until(self._pid, LIMIT_S, "the program on the head")

    def _pid(self) -> int:
        return next((pid for pid, line in self.head.processes().items()
                     if line.startswith(f"{PYTHON} ") and self.end in line), 0)  # fmt: skip

    def move(self) -> dict[str, Any]:
        """Its automatic move, once it runs on a worker; empty before."""
        for one in moves(self.cluster):
            if one["pid"] == self.pid and one["automatic"] and one["state"] in ("RUNNING", "CLEANED"):
                return one
        return {}

    def finish(self) -> str:
        """Let it end wherever it is; its exit code as its shell saw it."""
        for host in self.cluster.lab.hosts.values():
            host.write(self.end, "")
        self.process.wait(LIMIT_S)
        return self.head.read(f"{self.directory}/rc").strip()


def events(cluster: LabCluster, kind: str) -> list[dict[str, Any]]:
    """Those whose kind begins so, oldest first."""
    return [one for one in cluster.json("events", "--limit", "200") if one["kind"].startswith(kind)]


def test_what_grows_is_moved_live_before_it_is_killed(cluster: LabCluster) -> None:
    said = cluster.grid("offload", "auto", "--enable", "--threshold", "memory=70").stdout
    assert said == "✓ Auto-offload enabled for gpu-master (memory: 70%, cpu: 100%)\n"
    grown = Grown(cluster, "grown", HEAD_MIB)  # more than the head has beside Ray
    move = wait_until(grown.move, LIMIT_S, "it to be moved by itself")
    assert move["strategy"] == "live" and move["target"] in ("gpu1", "gpu2")
    assert "memory" in move["reason"] and "threshold 70%" in move["reason"]
    told = wait_until(lambda: events(cluster, "auto.moved"), LIMIT_S, "its end to be told")  # after the row's last step
    assert [one["data"]["pid"] for one in told] == [grown.pid]
    assert events(cluster, "pressure.high")
    assert grown.finish() == "rc 0"  # its memory is what it was
    check_chain(grown.head.read(grown.log), 10)
    assert not re.search("Killed|Traceback", grown.head.read(grown.log))


def checks(cluster: LabCluster) -> list[dict[str, Any]]:
    """What it has looked at, check by check."""
    cluster.grid("offload", "auto", "--record", "/root/checks.jsonl")
    return [json.loads(line) for line in cluster.head.read("/root/checks.jsonl").splitlines()]


def see_checks(cluster: LabCluster, memory_above: float) -> None:
    """Until it has looked three times more at that much use of the head."""
    since = checks(cluster)[-1]["at"]
    wait_until(
        lambda: sum(one["at"] > since and one["head"]["memory"] > memory_above for one in checks(cluster)) >= 3,
        LIMIT_S, f"three checks above {memory_above}", every_s=0.5,
    )  # fmt: skip


def test_off_too_high_then_edited_by_hand(cluster: LabCluster) -> None:
    """Off: pressure moves nothing. On, with a threshold that is not reached: nothing. Edited in the file: at once."""
    assert cluster.grid("offload", "auto", "--disable").stdout == "✓ Auto-offload disabled\n"
    free = 0.8 - cluster.node("gpu-master")["use"]["memory_used_bytes"] / (HEAD_MIB << 20)
    grown = Grown(cluster, "held", int(free * HEAD_MIB), mib_per_s=100)
    see_checks(cluster, 0.7)
    assert not [one for one in moves(cluster) if one["pid"] == grown.pid]
    cluster.grid("offload", "auto", "--enable", "--threshold", "95")
    see_checks(cluster, 0.7)
    assert not [one for one in moves(cluster) if one["pid"] == grown.pid]
    text = cluster.head.read(cluster.config)
    assert "memory: 95" in text and "check_interval_seconds: 1  # so that a test need not wait for long" in text
    edited_text = text.replace("memory: 95", "memory: 65").replace("min_age_seconds: 60", "min_age_seconds: 1")
    cluster.head.write(cluster.config, edited_text, mode=0o600)
    wait_until(grown.move, LIMIT_S, "it to be moved by itself")
    [edited] = events(cluster, "config.reloaded")[-1:]
    after = [one for one in events(cluster, "auto.") if one["at"] > edited["at"]]
    # A check that was under way may still tell of what it saw; the next one is by the new threshold.
    held = [one["data"]["thresholds"]["memory"] for one in after if "thresholds" in one["data"]]
    assert 0.65 in held[:2]
    assert grown.finish() == "rc 0"
    check_chain(grown.head.read(grown.log), 10)
