"""The stop at which a running process goes to another node by hand."""

from __future__ import annotations

import os
import re
import subprocess
import time
from typing import Any

from distributed_grid.core.process import tree_of
from distributed_grid.demo.tour import Running, Tour, TourFailed

COUNTER = """\
# Counts in memory until a file named enough-counted appears, then ends with code 5.
import os, sys, time
number = 0
while not os.path.exists("enough-counted"):
    number += 1
    print("number", number, flush=True)
    time.sleep(0.2)
sys.exit(5)
"""
SCRIPT = 'python counter.py > counter.log 2>&1; echo "the shell saw exit code $?"'


def move(tour: Tour) -> None:
    tour.say("A plain program, started by a plain shell: nothing about it is the grid's. It counts in memory.")
    (tour.work / "counter.py").write_text(COUNTER)
    tour.show_command(["cat", "counter.py"])
    for line in COUNTER.splitlines():
        tour.say(f"  {line}")
    with tour.shell(SCRIPT) as shell:
        pid = tour.until(lambda: _counter(shell), "the shell to start it")
        tour.own(pid)
        tour.until(lambda: len(numbers_in(tour, "counter.log")) > 4, "it to count")
        plan = plan_of(tour, pid)
        if plan.get("strategy") == "live":
            _carry(tour, pid)
        else:
            tour.say(f"  Left out here: {why_left_out(plan)}")
            tour.say("  A live move needs root and CRIU 4.2 on both nodes: see `grid doctor`.")
        tour.show_command(["touch", "enough-counted"])
        (tour.work / "enough-counted").touch()
        shell.wait(60)
    said = shell.stdout().strip()
    tour.check(said == "the shell saw exit code 5", "its own shell saw its own exit code, 5", said)
    numbers = numbers_in(tour, "counter.log")
    tour.check(
        numbers == list(range(1, len(numbers) + 1)), f"its log has every number from 1 to {len(numbers)} once",
        str(numbers),
    )  # fmt: skip


def _carry(tour: Tour, pid: int) -> None:
    tour.grid("offload", "plan", str(pid))
    began = time.monotonic()
    tour.grid("offload", "execute", str(pid))
    tour.figure("grid offload execute, whole command", f"{time.monotonic() - began:.1f} s")
    found = tour.json("offload", "status")["active"]
    moved = next((one for one in found if one["pid"] == pid), None)
    tour.check(moved, f"process {pid} is away", str(found))
    assert moved is not None
    tour.figure("the counter stood still for", f"{moved['pause_s'] * 1000:.0f} ms")
    seen = len(numbers_in(tour, "counter.log"))
    tour.until(lambda: len(numbers_in(tour, "counter.log")) > seen + 2, f"more numbers from {moved['target']}")
    there = [int(number) for number in re.findall(r"number (\d+)", tour.grid("offload", "logs", moved["id"]))]
    numbers = numbers_in(tour, "counter.log")
    tour.check(
        there and there == numbers[there[0] - 1 :][: len(there)],
        f"number {there[0] if there else '?'}, the next one, was written on {moved['target']}, and all after it",
        f"there {there}, here {numbers}",
    )
    show = ["ps", "-o", "pid,ppid,rss,args", "-p", str(pid)]
    tour.show_command(show)
    listed = subprocess.run(show, capture_output=True, text=True, timeout=30, check=False).stdout
    for line in listed.splitlines():
        tour.say(f"  {line}")
    tour.check(f"moved to {moved['target']}" in listed, "its pid here is a stub, which says where it went", listed)


def _counter(shell: Running) -> int:
    return next(iter(tree_of(shell.pid)[1:]), 0)


def numbers_in(tour: Tour, name: str) -> list[int]:
    """What a counter has written so far, whole lines only."""
    try:
        text = (tour.work / name).read_text()
    except FileNotFoundError:
        return []
    return [int(line.split()[1]) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def plan_of(tour: Tour, pid: int) -> dict[str, Any]:
    try:
        plan: dict[str, Any] = tour.json("offload", "plan", str(pid))
        return plan
    except TourFailed as error:
        return {"why": error.cause}


def why_left_out(plan: dict[str, Any]) -> str:
    if os.geteuid() != 0:
        return "this is not run as root, and only root may freeze and restore processes"
    return str(plan.get("why") or "the plan gave no reason")
