"""Hosts, a cluster on them and programs to move, for the benches that need two machines."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.lab.clusters import PYTHON, LabCluster
from tests.lab.host import Host, HostPopen
from tests.lab.hosts import HostSpec, Lab

PROGRAMS = Path(__file__).resolve().parents[1] / "tests" / "programs"


@contextlib.contextmanager
def lab_cluster(*specs: str | HostSpec, more: str = "") -> Iterator[LabCluster]:
    with Lab(names=specs, run_mark="bench") as lab:
        cluster = LabCluster(lab, more=more)
        cluster.start(timeout=300)
        try:
            yield cluster
        finally:
            cluster.stop()


def wait_for(condition: Callable[[], Any], limit_s: float, what: str, every_s: float = 0.05) -> Any:
    deadline = time.monotonic() + limit_s
    while not (answer := condition()):
        if time.monotonic() > deadline:
            raise RuntimeError(f"waited {limit_s:g} s in vain for {what}")
        time.sleep(every_s)
    return answer


def on_disk(host: Host, path: str) -> Path:
    return Path(f"/proc/{host.init_pid}/root{path}")


class Program:
    """One run of tests/programs/matrix.py on a host: memory of a size, a share of which changes each second."""

    def __init__(self, host: Host, mib: int, share_per_s: float, number: int) -> None:
        self.host = host
        self.directory = f"/root/bench{number}"
        self.log, self.end = f"{self.directory}/log", f"{self.directory}/end"
        host.run(["mkdir", "-p", self.directory])
        command = f"setsid {PYTHON} {PROGRAMS}/matrix.py {mib} {self.end} {share_per_s} > {self.log} 2>&1; exit $?"
        self.process: HostPopen = host.popen(["setsid", "--wait", "sh", "-c", command])
        wait_for(lambda: self.rounds() > 5, 300, "the program to have filled its memory")
        found = [pid for pid, line in host.processes().items() if line.startswith(str(PYTHON)) and self.end in line]
        [self.pid] = found

    def text(self, host: Host | None = None) -> str:
        path = on_disk(host or self.host, self.log)
        return path.read_text() if path.exists() else ""

    def rounds(self, host: Host | None = None) -> int:
        words = [line for line in self.text(host).splitlines() if line.isdigit()]
        return int(words[-1]) if words else 0

    def finish(self, where: Host, log_at: Host | None = None) -> float:
        """Let it end on the host where it runs now; the longest time in which it did nothing."""
        where.write(self.end, "")
        wait_for(lambda: "sum " in self.text(log_at), 300, "the program's last words")
        text = self.text(log_at)
        if "sum right" not in text:
            raise RuntimeError(f"its memory is not what it was: {text[-200:]}")
        [longest] = [line.split()[1] for line in text.splitlines() if line.startswith("longest ")]
        return float(longest)
