"""Programs to be moved, started beside the cluster as a user's shell would, and what they must have written."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

from distributed_grid.core.process import ProcessId, process_id, read_stat, tree_of
from tests.lab.clusters import PYTHON, Cluster, EmbeddedCluster
from tests.lab.waiting import wait_until

PROGRAMS = Path(__file__).resolve().parents[1] / "programs"
LIMIT_S = 120.0
OVER = ("ENDED", "LOST", "MOVED", "ABORTED")


class Started:
    """Programs on this machine, each in a session of its own with its output in `log`; all gone after `close`."""

    def __init__(self, cluster: EmbeddedCluster, directory: Path) -> None:
        self.cluster = cluster
        self.directory = directory
        self.end = directory / "end"
        self.log = directory / "log"
        self.processes: list[subprocess.Popen[bytes]] = []
        self._pids: set[ProcessId] = set()

    def run(self, program: str, *args: str | Path, log: str = "log", **options: Any) -> ProcessId:
        """Start one of tests/programs; who it is, once it has written something."""
        return self.spawn([str(PYTHON), str(PROGRAMS / program), *map(str, args)], log=log, **options)

    def chain(self, code: int = 0, **options: Any) -> ProcessId:
        return self.run("chain.py", self.end, str(code), **options)

    def spawn(self, argv: list[str], *, log: str = "log", wait: bool = True, **options: Any) -> ProcessId:
        path = self.directory / log
        with path.open("ab") as file:
            settings = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file, "start_new_session": True}
            process = subprocess.Popen(argv, **{**settings, **options})
        self.processes.append(process)
        who = process_id(process.pid)
        assert who
        self._pids.add(who)
        if wait:
            wait_until(lambda: self.size(log) or process.poll() is not None, LIMIT_S, f"{argv} to write something")
        return who

    def shell(self, script: str, *args: str | Path, **options: Any) -> tuple[subprocess.Popen[bytes], ProcessId]:
        """`sh -c SCRIPT`; itself and its first child."""
        shell = self.spawn(["sh", "-c", script, "sh", *map(str, args)], log="shell", wait=False, **options)
        [child] = wait_until(lambda: tree_of(shell.pid)[1:2], LIMIT_S, "the shell's child")
        wait_until(lambda: self.size(), LIMIT_S, "the program to write something")
        who = process_id(child)
        assert who
        self._pids.add(who)
        return self.processes[-1], who

    def size(self, log: str = "log") -> int:
        path = self.directory / log
        return path.stat().st_size if path.exists() else 0

    def more(self, where: str, log: str = "log") -> None:
        """Wait until it has written more."""
        size = self.size(log)
        wait_until(lambda: self.size(log) > size, LIMIT_S, f"more output {where}")

    def goes_on(self, who: ProcessId, log: str = "log") -> None:
        """Fail unless the very process runs and writes."""
        self.more("of the very process", log)
        stat = read_stat(who.pid)
        assert who.is_alive() and stat and stat.state not in "TtZX"

    def close(self) -> None:
        for one in self.cluster.json("offload", "status", timeout=LIMIT_S)["active"]:
            if one["pid"] in {who.pid for who in self._pids}:
                self.cluster.grid("offload", "cancel", one["id"], "--grace", "0", check=False, timeout=LIMIT_S)
        for process in self.processes:
            if process.poll() is None:
                for pid in [*tree_of(process.pid)[1:], process.pid]:
                    try:
                        os.kill(pid, signal.SIGKILL)
                    except ProcessLookupError:
                        pass
            process.wait(LIMIT_S)


def move(cluster: Cluster, pid: int | str, *options: str, timeout: float = LIMIT_S) -> dict[str, Any]:
    """Move it by the command; what the command says of the move, which must run on its target."""
    done: dict[str, Any] = cluster.json("offload", "execute", str(pid), *options, timeout=timeout)
    assert done["state"] in ("RUNNING", "CLEANED", "ENDED"), done
    return done


def moves(cluster: Cluster, limit: int = 100) -> list[dict[str, Any]]:
    told = cluster.json("offload", "status", "--limit", str(limit), timeout=LIMIT_S)
    return [*told["active"], *told["finished"]]


def found(cluster: Cluster, move_id: str) -> dict[str, Any]:
    return next(one for one in moves(cluster) if one["id"] == move_id)


def until_over(cluster: Cluster, move_id: str) -> dict[str, Any]:
    return wait_until(
        lambda: one if (one := found(cluster, move_id))["state"] in OVER else None, LIMIT_S, f"{move_id} to be over"
    )  # type: ignore[return-value]


def refused(cluster: EmbeddedCluster, code: int, text: str, *args: str) -> None:
    done = cluster.grid("offload", "execute", *args, check=False, timeout=LIMIT_S)
    assert done.returncode == code, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(lines) == 1 and text in done.stderr and "Traceback" not in done.stderr, done.stderr


def chain_line(number: int, before: str) -> str:
    digest = hashlib.sha256(f"{before.split(' ')[1] if before else ''}{number}".encode()).hexdigest()[:12]
    return f"{number} {digest}"


def check_chain(text: str, least: int = 1) -> int:
    """Whether it is, to the byte, what chain.py writes when nothing happens to it; how many lines."""
    lines = text.splitlines()
    before = ""
    for number, line in enumerate(lines, 1):
        before = chain_line(number, before)
        assert line == before, f"line {number} is {line!r} and not {before!r}"
    assert text.endswith("\n") and len(lines) >= least
    return len(lines)


def check_threads(text: str) -> None:
    """What threads.py says at its end: each thread's chain as it must be after so many steps."""
    told = [line.split() for line in text.splitlines() if line.startswith("thread ")]
    assert len(told) == 8
    for _, count, digest in told:
        line = ""
        for number in range(1, int(count) + 1):
            line = chain_line(number, line)
        assert line == f"{count} {digest}"


def check_pool(text: str) -> None:
    lines = text.splitlines()
    assert lines == [f"{n} {sum(m * m for m in range(n * 10, n * 10 + 10))}" for n in range(len(lines))]
