"""The stops of the tour, in order. A capability adds its own to the list."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass

from distributed_grid.cli import COMMANDS
from distributed_grid.demo import automatic, lending, moving
from distributed_grid.demo.tour import Tour, TourFailed

COUNT = """\
#!/bin/sh
# Counts until a file named enough appears, then ends with code 42.
echo "started as pid $$"
i=0
until [ -e enough ]; do i=$((i + 1)); echo "step $i"; sleep 0.5; done
echo "ended after $i steps"
exit 42
"""


@dataclass(frozen=True, slots=True)
class Stop:
    title: str
    run: Callable[[Tour], None]


def cluster_up(tour: Tour) -> None:
    tour.say("No configuration: the cluster is three nodes on this machine, each a Ray node with an agent of ours.")
    began = time.monotonic()
    tour.grid("cluster", "start")
    tour.figure("cluster ready with its agents", f"{time.monotonic() - began:.1f} s")
    began = time.monotonic()
    tour.grid("status")
    tour.figure("grid status, whole command", f"{(time.monotonic() - began) * 1000:.0f} ms")
    nodes = tour.json("status")["nodes"]
    online = [node["name"] for node in nodes if node["online"]]
    tour.check(online == ["gpu-master", "gpu1", "gpu2"], "gpu-master, gpu1 and gpu2 are online", ", ".join(online))


def run_command(tour: Tour) -> None:
    tour.say("A command on a worker: its output comes here, its exit code is ours.")
    began = time.monotonic()
    said = tour.grid("execute", "-n", "gpu1", "echo", "hello from gpu1")
    tour.figure("grid execute, whole command", f"{(time.monotonic() - began) * 1000:.0f} ms")
    tour.check(said == "hello from gpu1\n", "its output arrived byte for byte", repr(said))
    tour.grid("execute", "-n", "gpu1", "sh", "-c", "exit 7", expect=7)
    tour.check(True, "its exit code, 7, is the exit code of `grid execute`")
    tour.grid("distribute", "test")


def survive(tour: Tour) -> None:
    tour.say("What runs on a node belongs to a small shim there, not to us. So we may die; it goes on.")
    script = tour.work / "count.sh"
    script.write_text(COUNT)
    tour.show_command(["cat", "count.sh"])
    for line in COUNT.splitlines():
        tour.say(f"  {line}")
    daemon = int(tour.json("daemon", "status")["pid"])
    agent = tour.until(lambda: _agent(tour, "gpu1"), "gpu1's agent")
    with tour.start("execute", "-n", "gpu1", "sh", "count.sh") as run:
        tour.until(lambda: "step 2" in run.lines, "its second step")
        tour.kill(daemon, "the daemon, which had started the command")
        began = time.monotonic()
        tour.until(lambda: _daemon(tour) not in (0, daemon), "a new daemon")
        tour.figure("a new daemon answers after", f"{time.monotonic() - began:.1f} s")
        seen = len(run.lines)
        tour.until(lambda: len(run.lines) > seen, "more output through the new daemon")
        tour.kill(agent, "gpu1's agent, which had started the shim")
        began = time.monotonic()
        tour.until(lambda: _agent(tour, "gpu1") not in (0, agent), "a new agent on gpu1")
        tour.figure("a new agent on gpu1 answers after", f"{time.monotonic() - began:.1f} s")
        seen = len(run.lines)
        tour.until(lambda: len(run.lines) > seen, "more output through the new agent")
        tour.check(not run.ended(), "the command was running all the time", run.said()[-300:])
        tour.show_command(["touch", "enough"])
        (tour.work / "enough").touch()
        code = run.wait(120)
        lines = run.lines
    tour.check(code == 42, "it ended with its own exit code, 42", f"exit code {code}")
    steps = [int(found[1]) for line in lines if (found := re.fullmatch(r"step (\d+)", line))]
    tour.check(steps == list(range(1, len(steps) + 1)), f"all its {len(steps)} steps are here, none twice", str(steps))
    started = [line for line in lines if line.startswith("started as")]
    tour.check(len(started) == 1, "it was started once", str(started))
    tour.grid("jobs", "list", "--all")


def _daemon(tour: Tour) -> int:
    """The daemon's pid; 0 while there is none."""
    try:
        return int(tour.json("daemon", "status").get("pid") or 0)
    except TourFailed:  # it was killed while it answered
        return 0


def _agent(tour: Tour, name: str) -> int:
    try:
        nodes = tour.json("cluster", "status")["nodes"]
    except TourFailed:
        return 0
    return next(int(node["agent_pid"] or 0) for node in nodes if node["name"] == name)


def take_down(tour: Tour) -> None:
    tour.say("And everything down again: exactly what was started, never another Ray on this machine.")
    places = tour.ray_directories()
    tour.grid("cluster", "stop")
    tour.grid("daemon", "stop")
    tour.until(lambda: not tour.processes(), "the last process to end", 30)
    tour.check(not tour.processes(), "no process is left")
    left = [str(place) for place in places if place.exists()]
    tour.check(not left, "Ray's own directory is gone", ", ".join(left))
    shutil.rmtree(tour.root)
    tour.check(not tour.root.exists(), "the tour's own directory is gone")


STOPS = [
    Stop("A cluster", cluster_up),
    Stop("A command on a worker", run_command),
    Stop("Kill the daemon and the agent while a command runs", survive),
    Stop("A running process moves", moving.move),
    Stop("Borrowed cores and memory", lending.borrow),
    *([Stop("Bytes in a worker's memory", lending.remember)] if "memory" in COMMANDS else []),
    Stop("By itself", automatic.automatic),
    Stop("Nothing left behind", take_down),
]
