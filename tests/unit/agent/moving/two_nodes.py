"""Two nodes' ends of a move on one machine, and the programs that are moved, for the tests here."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from distributed_grid.agent.moving.keeper import MoveKeeper
from distributed_grid.core.process import ProcessId, children_of, process_id, read_stat, tree_of
from tests.lab.waiting import wait_until

LIMIT_S = 120.0
# Counts until the file named by its first argument is there; then its second argument is its exit code.
ENDING = (
    "import os, time, sys\n"
    "n = 0\n"
    "while not os.path.exists(sys.argv[1]): n += 1; print(n, flush=True); time.sleep(0.005)\n"
    "sys.exit(int(sys.argv[2]))\n"
)
COUNTER = "import time, sys\nn = 0\nwhile True:\n n += 1; print(n, flush=True); time.sleep(0.005)\n"


class Bench:
    """Keepers `a` and `b`, and what was started from here; all of it is gone after `close`."""

    def __init__(self, home: Path, memory: Path) -> None:
        self.home = home
        self.keepers = {name: MoveKeeper(home / name / "m", home / name / "s", name, memory) for name in "abc"}
        self.end_file = str(home / "end")
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, program: str, *args: str, **popen: Any) -> subprocess.Popen[bytes]:
        """A Python program, its output in `log`, in a session of its own as a plain shell's job would be."""
        with (self.home / "log").open("ab") as log:
            settings = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, "start_new_session": True} | popen
            child = subprocess.Popen([sys.executable, "-I", "-S", "-c", program, *args], **settings)
        self.started.append(child)
        return child

    def log(self) -> list[str]:
        return (self.home / "log").read_text().split()

    def spool(self, node: str = "b", stream: str = "stdout", task: str = "m") -> list[str]:
        return (self.home / node / "s" / task / stream).read_text().split()

    def wait_log(self, lines: int) -> None:
        wait_until(lambda: len(self.log()) >= lines, LIMIT_S, f"{lines} lines in the log")

    def begin(self, pid: int, source: str = "a", target: str = "b", move: str = "m", **options: Any) -> None:
        who = process_id(pid)
        assert who
        inward = {"strict": options.pop("strict", False), "encrypt": options.get("encrypt", True)}
        at = self.keepers[target].in_prepare(move, "127.0.0.1", inward | {"file_roots": [str(self.home)]})
        self.keepers[source].out_begin(move, pid, who.start_ticks, at["host"], at["port"], at["key"], options)

    def stage(self, pid: int, source: str = "a", target: str = "b", move: str = "m", **options: Any) -> dict[str, Any]:
        self.begin(pid, source, target, move, **options)
        out = self.keepers[source].out_wait(move, timeout_s=LIMIT_S)
        assert out["phase"] == "copied", out
        status = self.keepers[target].in_wait(move, timeout_s=LIMIT_S)
        assert status["phase"] == "staged", status
        return status

    def move(self, pid: int, *, stub: bool = False, **options: Any) -> dict[str, Any]:
        self.stage(pid, **options)
        assert self.keepers["b"].in_go("m")["phase"] in ("running", "exited")
        spec = {"dir": str(self.home / "stub"), "label": "moved to b"} if stub else None
        return self.keepers["a"].out_finish("m", spec)

    def end(self, node: str = "b", task: str = "m") -> None:
        """Let a program that waits for it end, once it printed something on its new node."""
        wait_until(lambda: len(self.spool(node, task=task)) > 5, LIMIT_S, f"output on {node}")
        Path(self.end_file).touch()

    def exit_of(self, node: str = "b", move: str = "m") -> dict[str, Any]:
        status = self.keepers[node].in_wait(move, ("exited",), LIMIT_S)
        assert status["phase"] == "exited", status
        return dict(status["exit"])

    def cancel(self, number: int = signal.SIGKILL, node: str = "b", move: str = "m") -> None:
        status = self.keepers[node].in_status(move)
        assert ProcessId(status["pid"], status["start_ticks"]).signal(number)

    def pagers(self, node: str = "b", task: str = "m") -> list[int]:
        shim = json.loads((self.home / node / "s" / task / "shim.json").read_text())["pid"]
        return [pid for pid in children_of(shim) if b"pager.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]

    def runs(self, pid: int) -> None:
        """Fail unless the program goes on printing."""
        before = len(self.log())
        wait_until(lambda: len(self.log()) > before + 5, LIMIT_S, "the source to run on")
        stat = read_stat(pid)
        assert stat and stat.state not in "TtZ"

    def close(self) -> None:
        for keeper in self.keepers.values():
            for one in keeper.list():
                if one["side"] == "in":
                    shim_file = keeper.spool / one["task_id"] / "shim.json"
                    if one["going"] and shim_file.exists():
                        shim = json.loads(shim_file.read_text())
                        who = ProcessId(shim["pid"], shim["start_ticks"])
                        who.signal(signal.SIGKILL)
                        wait_until(lambda: not who.is_alive(), LIMIT_S, "the shim to end")  # noqa: B023
                    elif one["phase"] != "dropped":
                        keeper.in_drop(one["move_id"])
                elif one["phase"] not in ("aborted", "finished"):
                    keeper.out_abort(one["move_id"])
            for one in keeper.list():
                keeper.forget(one["move_id"])
        for child in self.started:
            for pid in [*tree_of(child.pid)[1:], child.pid]:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            child.wait(30)
            for pipe in (child.stdin, child.stdout):
                if pipe:
                    pipe.close()


def contiguous(words: list[str]) -> None:
    numbers = [int(word) for word in words]
    assert numbers == list(range(1, len(numbers) + 1))
