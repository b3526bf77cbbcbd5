"""The stop at which a process goes to another node by itself: the tour's own, and no other on this machine."""

from __future__ import annotations

import time
from typing import Any

from distributed_grid.core.process import tree_of
from distributed_grid.demo.moving import numbers_in, plan_of, why_left_out
from distributed_grid.demo.tour import Running, Terminal, Tour

HOG = """\
# Holds 150 MB and counts in memory until a file named enough-held appears, then ends with code 6.
import os, sys, time
held = bytearray(b"x") * (150 << 20)
number = 0
while not os.path.exists("enough-held"):
    number += 1
    print("number", number, flush=True)
    time.sleep(0.2)
sys.exit(6)
"""
CONFIG = """\
embedded: true
resource_sharing:
  auto_offload:
    check_interval_seconds: 1
    cooldown_seconds: 5
offload:
  only: ["python {hog}"]      # nothing else on this machine may be moved by itself
  prefer: ["python {hog}"]    # however small it is
  detect:
    min_age_seconds: 0
"""


def automatic(tour: Tour) -> None:
    hog = tour.work / "hog.py"
    hog.write_text(HOG)
    config = CONFIG.format(hog=hog)
    (tour.work / "cluster_config.yaml").write_text(config)
    tour.say("The same by itself, when the head is under pressure. This machine has other work to do too, so the")
    tour.say("configuration lets nothing be moved but one program of the tour's own:")
    for name, text in (("hog.py", HOG), ("cluster_config.yaml", config)):
        tour.show_command(["cat", name])
        for line in text.splitlines():
            tour.say(f"  {line}")
    with tour.shell(f'python {hog} > hog.log 2>&1; echo "the shell saw exit code $?"') as shell:
        pid = tour.until(lambda: next(iter(tree_of(shell.pid)[1:]), 0), "the shell to start it")
        tour.own(pid)
        tour.until(lambda: len(numbers_in(tour, "hog.log")) > 2, "it to count")
        _pressure(tour, shell, pid)
    said = shell.stdout().strip()
    tour.check(said == "the shell saw exit code 6", "its own shell saw its own exit code, 6", said)
    found = numbers_in(tour, "hog.log")
    tour.check(found == list(range(1, len(found) + 1)), f"it counted from 1 to {len(found)} without a gap", str(found))
    tour.grid("offload", "auto", "--disable")
    tour.check(not tour.json("offload", "auto", "--status")["enabled"], "and it is off again")


def _pressure(tour: Tour, shell: Running, pid: int) -> None:
    plan = plan_of(tour, pid)
    tour.say("The head is under pressure as soon as we say so: 2 % of its memory are always in use.")
    if plan.get("strategy") == "live":
        with tour.terminal("offload", "watch") as screen:
            tour.until(lambda: screen.showed("HEAD NODE: gpu-master"), "the dashboard")
            _moves_by_itself(tour, pid, screen)
    else:
        tour.say(f"  Left out here, so only as a dry run: {why_left_out(plan)}")
        tour.grid("offload", "auto", "--enable", "--threshold", "2", "--dry-run")
        tour.until(lambda: tour.json("offload", "auto", "--status")["decision"], "its first decision")
        tour.grid("offload", "auto", "--status")
        status = tour.json("offload", "auto", "--status")
        tour.check(status["enabled"] and status["dry_run"], "it watches, decides and says why", str(status["decision"]))
    tour.show_command(["touch", "enough-held"])
    (tour.work / "enough-held").touch()
    shell.wait(60)


def _moves_by_itself(tour: Tour, pid: int, screen: Terminal) -> None:
    tour.grid("offload", "auto", "--enable", "--threshold", "2")
    began = time.monotonic()
    moved = tour.until(lambda: _away(tour, pid), "it to be moved by itself")
    tour.figure("enabled, and a process away by itself, after", f"{time.monotonic() - began:.1f} s")
    tour.check(moved["automatic"], f"process {pid} went to {moved['target']}, and nobody asked for it", str(moved))
    tour.say(f"  why: {moved['reason']}")
    tour.until(lambda: screen.showed(f"PID {pid} → {moved['target']}"), "the dashboard to show it")
    screen.press("q")
    tour.check(screen.wait(30) == 0, "the dashboard, open all the while, showed it")
    others = [one for one in tour.json("offload", "status")["active"] if one["pid"] != pid]
    tour.check(not others, "nothing else was moved", str(others))
    tour.grid("offload", "watch", "--once")


def _away(tour: Tour, pid: int) -> dict[str, Any]:
    found = tour.json("offload", "status")["active"]
    return next((one for one in found if one["pid"] == pid and one["state"] in ("RUNNING", "CLEANED")), {})
