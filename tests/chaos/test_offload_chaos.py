"""Moves with something killed under them, at any moment: the program runs in one place, always, and never twice.

Its output tells: a chain of hashes has no gap, no repeat and no fork, whoever wrote its parts. What is still held or in
doubt when the killed part is back settles by itself.
"""

from __future__ import annotations

import json
import os
import random
import select
import subprocess
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from distributed_grid.agent.moving.state import read_json, tracer_of
from distributed_grid.core.process import read_stat
from tests.cluster.offloads import LIMIT_S, OVER, Started, check_chain, found, move, until_over
from tests.cluster.test_offload_lab import Jobs
from tests.lab import striker
from tests.lab.clusters import PYTHON, Cluster, EmbeddedCluster, LabCluster
from tests.lab.striker import STATES, kill, strike_in
from tests.lab.waiting import wait_until

pytestmark = [pytest.mark.root, pytest.mark.criu, pytest.mark.timeout(600)]
ROUNDS = int(os.environ.get("CHAOS_ROUNDS", "20"))
SETTLE_S = 240.0
#: How long CRIU works in a process, about.
A_MOMENT_S = 0.008
BLOW_S = 0.005
#: Of the time that a state lasted in a quiet move: some are over sooner.
EARLY = 0.7
STRIKER = striker.__file__


# Whom to kill


def marked(word: str, text: str) -> list[int]:
    """Pids of processes with both in their command line."""
    found = []
    for name in os.listdir("/proc"):  # noqa: PTH208
        if name.isdigit():
            try:
                line = Path(f"/proc/{name}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if word in line and text in line:
                found.append(int(name))
    return found


#: Of a move's own processes, found by its id, which ends with the pid of what is moved: words of their command lines.
PARTS = {
    "source mover": "moving.mover out", "target mover": "moving.mover in", "criu dump": " dump ",
    "criu restore": " restore -D ", "pager": "moving/pager.py",
}  # fmt: skip
#: In which states; CRIU's runs are short, and are struck whenever they are there.
LIVES_IN = {
    "source mover": ("PLANNED", "FROZEN", "COPIED", "STAGED", "COMMITTED"), "target mover": ("PLANNED", "FROZEN"),
    "criu dump": ("",), "criu restore": ("",), "pager": ("PLANNED", "FROZEN", "COPIED"),
}  # fmt: skip
#: What a part must have made before it counts as being in the middle of its work.
AT_WORK = {"criu restore": "restore.log"}


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if (stat := read_stat(pid)) and stat.state not in "ZX"]


def parts(what: str, moved: int) -> list[int]:
    """The pids of that part of the move of a pid, once it is at work."""
    if what == "criu dump":
        tracer = tracer_of(moved)
        return [tracer] if tracer and PARTS[what] in command_of(tracer) else []
    found = marked(PARTS[what], f"_{moved}{'' if 'mover' in what else '-'}")
    if "mover" in what:  # not the process that starts it, which has the same command line
        directories = {words[-1] for pid in found if (words := command_of(pid).split())}
        files = [Path(directory) / f"{PARTS[what].split()[-1]}.json" for directory in directories]
        return [int(((read_json(file) or {}).get("mover") or {}).get("pid") or 0) for file in files]
    if what not in AT_WORK:
        return found
    words = {pid: command_of(pid).split() for pid in found}
    return [pid for pid in found if "-D" in words[pid]
            and any(Path(words[pid][words[pid].index("-D") + 1]).glob(AT_WORK[what]))]  # fmt: skip


def lasts_s(move: dict[str, Any], state: str) -> float:
    """How long a move that nothing disturbed was in that state, less what the blow itself takes; in any: a moment."""
    steps = move["steps"]
    lasted = [after["at"] - step["at"] for step, after in pairwise(steps) if step["state"] == state]
    return max(0.0, float(lasted[0]) - BLOW_S) if lasted else A_MOMENT_S


# What must hold


class Watched:
    """One program that is to be moved while things are killed."""

    def __init__(self, started: Started, number: int) -> None:
        self.started = started
        self.log = f"log{number}"
        self.who = started.run("chain.py", started.end, "7", log=self.log)
        self.process = started.processes[-1]

    def copies(self) -> list[int]:
        """Those of it that run, not stopped: at home and away."""
        running = []
        for pid in marked("chain.py", str(self.started.end)):
            stat = read_stat(pid)
            if stat and stat.state not in "TtZX" and "stub.py" not in command_of(pid):
                running.append(pid)
        return running

    def end(self) -> None:
        """It is done with, wherever it runs."""
        self.started.end.touch()
        assert self.process.wait(SETTLE_S) == 7
        self.started.end.unlink()


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def settled(cluster: Cluster, pid: int, begun: float) -> dict[str, Any] | None:
    """The move of that pid once it is one way or the other; None while it is not. No move at all is settled too."""
    done = cluster.grid("offload", "status", "--limit", "500", "--format", "json", check=False, timeout=LIMIT_S)
    if done.returncode != 0:
        return None
    told = json.loads(done.stdout)
    found = [one for one in [*told["active"], *told["finished"]] if one["pid"] == pid and one["created"] >= begun]
    if not found:
        return {"state": "NONE", "target": "", "id": "", "node": "gpu-master"}
    last = max(found, key=lambda one: one["created"])
    return last if last["state"] in ("CLEANED", *OVER) else None


class Round:
    """One move, with one thing killed in the middle of it: `end` is how it ended, `struck` in which state it was."""

    def __init__(
        self, cluster: EmbeddedCluster, started: Started, number: int, what: str, state: str, after_s: float = 0.0
    ) -> None:
        watched = Watched(started, number)
        pid = watched.who.pid
        victims = [] if what in PARTS else [cluster.pid_of(what)]
        begun = time.time() - 1

        def find() -> bool:
            if what in PARTS:
                victims[:] = alive(parts(what, pid))
            return bool(victims)

        command = cluster.popen("offload", "execute", str(pid), "-t", "gpu1", stdout=-3, stderr=-3)
        blow = strike_in(
            str(cluster.home / "journal.sqlite3"), pid, begun, state, after_s, lambda: kill(alive(victims)), find,
            lambda: command.poll() is not None,
        )  # fmt: skip
        self.hit = blow["hit"] and (not state or blow["before"] == state)
        command.wait(SETTLE_S)
        move = wait_until(lambda: settled(cluster, pid, begun), SETTLE_S, "the move to settle", every_s=0.5)
        self.struck, self.end = blow["before"], str(move["state"])
        # It goes on writing in the file at home, wherever it runs, and there is exactly one of it.
        size = started.size(watched.log)
        wait_until(lambda: started.size(watched.log) > size, SETTLE_S, f"output after {what} ({move['state']})")
        wait_until(lambda: len(watched.copies()) == 1, LIMIT_S, f"one copy after {what}; {watched.copies()}")
        at_home = pid in watched.copies()
        assert at_home == (move["state"] in ("ABORTED", "NONE")), (what, move, watched.copies())
        watched.end()
        check_chain((started.directory / watched.log).read_text(), 3)
        all_back(cluster)


def told(what: str, rounds: list[tuple[str, str]], late: list[tuple[str, str]]) -> None:
    for kind, pairs in (("in time", rounds), ("too late", late)):
        counts = {pair: pairs.count(pair) for pair in sorted(set(pairs))}
        said = ", ".join(f"struck in {state}, then {end}: {n}" for (state, end), n in counts.items())
        print(f"{what}, {kind}: {said or 'none'}")


def all_back(cluster: Cluster) -> None:
    def ready() -> bool:
        nodes = cluster.json("cluster", "status", timeout=LIMIT_S)["nodes"]
        return all(node["online"] and node["agent_pid"] for node in nodes)

    wait_until(ready, SETTLE_S, "all nodes to be online again", every_s=1)


@pytest.fixture
def started(embedded: EmbeddedCluster, tmp_path: Path) -> Iterator[Started]:
    made = Started(embedded, tmp_path)
    yield made
    all_back(embedded)
    made.close()


#: What, and the state in which it is killed: one of each kind for the suite. (CRIU in its dump, which is over in a
#: moment, is killed in tests/unit/agent/moving/test_moving_cure.py.)
QUICK = [
    ("source mover", "PLANNED"), ("source mover", "FROZEN"), ("target mover", "PLANNED"), ("criu restore", ""),
    ("pager", "PLANNED"), ("daemon", "FROZEN"), ("daemon", "COMMITTED"),
    ("agent:gpu-master", "COPIED"), ("agent:gpu1", "STAGED"), ("raylet:gpu1", "COPIED"),
]  # fmt: skip


@pytest.mark.parametrize(("what", "state"), QUICK)
def test_a_kill_in_mid_move(embedded: EmbeddedCluster, started: Started, what: str, state: str) -> None:
    """Where the moment is short it may be missed; then once more."""
    for number in range(6):
        done = Round(embedded, started, number, what, state)
        if done.hit:
            return
    pytest.fail(f"{what} was never hit in {state}")


@pytest.mark.chaos
@pytest.mark.timeout(300 * ROUNDS)
@pytest.mark.parametrize(("what", "state"), [
    (what, state)
    for what in (*PARTS, "daemon", "agent:gpu-master", "agent:gpu1", "raylet:gpu1")
    for state in LIVES_IN.get(what, STATES)
])  # fmt: skip
def test_many_kills_at_each_step(embedded: EmbeddedCluster, started: Started, what: str, state: str) -> None:
    """At any moment of the state; what struck too late is held to the same rule, and not counted."""
    moments, longest_s = random.Random(what + state), lasts_s(calm(embedded, started), state)
    rounds: list[tuple[str, str]] = []
    late: list[tuple[str, str]] = []
    for number in range(3 * ROUNDS):
        done = Round(embedded, started, number, what, state, moments.uniform(0.0, longest_s) * EARLY)
        (rounds if done.hit else late).append((done.struck, done.end))
        if len(rounds) == ROUNDS:
            break
    told(f"{what} in {state or 'any state'}", rounds, late)
    assert len(rounds) == ROUNDS


def calm(cluster: EmbeddedCluster, started: Started) -> dict[str, Any]:
    """A move that nothing disturbs, once it is followed."""
    watched = Watched(started, -1)
    done = move(cluster, watched.who.pid, "-t", "gpu1")
    followed = wait_until(
        lambda: one if (one := found(cluster, done["id"]))["state"] == "CLEANED" else None, LIMIT_S, "the stub"
    )
    watched.end()
    return followed  # type: ignore[return-value]


# Between hosts

JOURNAL = "/root/.distributed_grid/journal.sqlite3"
#: A target goes in every state but these: in the first nothing is there yet, in the last all of it is.
CUT_IN = ("PLANNED", "FROZEN", "COPIED", "STAGED", "COMMITTED", "RUNNING")


@pytest.mark.chaos
@pytest.mark.timeout(400 * ROUNDS)
@pytest.mark.parametrize("state", CUT_IN)
@pytest.mark.parametrize("what", ["cut", "power-off"])
def test_a_target_that_goes_in_mid_move(lab_cluster: LabCluster, what: str, state: str) -> None:
    moments, longest_s = random.Random(what + state), lasts_s(calm_between_hosts(lab_cluster), state)
    rounds: list[tuple[str, str]] = []
    late: list[tuple[str, str]] = []
    for _ in range(3 * ROUNDS):
        after_s = moments.uniform(0.0, longest_s) * EARLY
        blow, end = host_round(lab_cluster, what, state, after_s, moments.uniform(1.0, 7.0))
        (rounds if blow["before"] == state else late).append((blow["before"], end))
        if len(rounds) == ROUNDS:
            break
    told(f"{what} in {state}", rounds, late)
    assert len(rounds) == ROUNDS


def calm_between_hosts(cluster: LabCluster) -> dict[str, Any]:
    jobs = Jobs(cluster)
    try:
        process = jobs.start('"$py" "$programs/chain.py" "$end" > log 2>&1')
        done = jobs.move(jobs.program("chain.py"), "gpu1")
        jobs.finish("gpu1")
        process.wait(LIMIT_S)
        return until_over(cluster, done["id"])
    finally:
        jobs.close()


def host_round(
    cluster: LabCluster, what: str, state: str, after_s: float, cut_s: float
) -> tuple[dict[str, Any], str]:
    """What the striker told of the target's being cut off or switched off, and how the move ended."""
    jobs, gpu1 = Jobs(cluster), cluster.lab["gpu1"]
    try:
        process = jobs.start('"$py" "$programs/chain.py" "$end" 7 > log 2>&1; echo rc $? > rc')
        pid = jobs.program("chain.py")
        begun = time.time() - 1
        orders = {
            "root": f"/proc/{jobs.head.init_pid}/root", "journal": JOURNAL, "pid": pid, "since": begun, "state": state,
            "after_s": after_s, **({"down": gpu1.link} if what == "cut" else {"kill": [gpu1.init_pid]}),
        }  # fmt: skip
        striking = [*cluster.lab.enter("--net"), str(PYTHON), "-IS", str(STRIKER), json.dumps(orders)]
        with subprocess.Popen(striking, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True) as striker:
            assert striker.stdout and striker.stdout.readline() == "ready\n"
            command = cluster.popen("offload", "execute", str(pid), "-t", "gpu1", stdout=-3, stderr=subprocess.PIPE)
            blow = told_by(striker, command)
        if not blow["hit"]:
            pass
        elif what == "cut":
            time.sleep(cut_s)  # shorter and longer than what counts as silence
            cluster.lab.heal("gpu1")
        else:
            gpu1.power_off()
            gpu1.power_on()
        said = command.communicate(timeout=SETTLE_S)[1].decode()
        if not blow["hit"]:
            print(f"not moved at all: {said}")
        all_back(cluster)

        def decided() -> dict[str, Any] | None:
            move = settled(cluster, pid, begun)
            # Away, on a host that was switched off: not known to be lost before that host was asked.
            return None if move and what == "power-off" and move["state"] == "CLEANED" and not copies(jobs) else move

        move = wait_until(decided, SETTLE_S, "the move to settle", every_s=0.5)
        if move["state"] == "LOST":
            assert what == "power-off" and not copies(jobs)
            process.wait(SETTLE_S)
            check_chain(jobs.text().removesuffix("Killed\n"))
            return blow, "LOST"
        jobs.more()
        home = "gpu-master" if move["state"] in ("ABORTED", "NONE") else "gpu1"
        wait_until(lambda: copies(jobs) == [home], LIMIT_S, f"one copy on {home} after {move}; {copies(jobs)}")
        jobs.finish("gpu-master", "gpu1")
        process.wait(SETTLE_S)
        assert jobs.head.read(f"{jobs.directory}/rc") == "rc 7\n"
        check_chain(jobs.text(), 3)
        return blow, str(move["state"])
    finally:
        jobs.close()


def told_by(striker: subprocess.Popen[str], command: subprocess.Popen[Any]) -> dict[str, Any]:
    """What it told of its blow; none, if the command ended and there is nothing to strike."""
    assert striker.stdout
    while not select.select([striker.stdout], [], [], 5.0)[0]:
        if command.poll() is not None and not select.select([striker.stdout], [], [], 5.0)[0]:
            striker.kill()
            return {"hit": False, "before": ""}
    told: dict[str, Any] = json.loads(striker.stdout.readline())
    return told


def copies(jobs: Jobs) -> list[str]:
    """The hosts on which the program runs, not stopped, one entry each time."""
    found = []
    for name, host in jobs.cluster.lab.hosts.items():
        for pid, line in host.processes().items():
            if line.startswith(str(PYTHON)) and "chain.py" in line and jobs.end in line and "stub.py" not in line:
                try:
                    stat = Jobs.path(host, f"/proc/{pid}/stat").read_text()
                except OSError:
                    continue
                if stat.rpartition(")")[2].split()[0] not in "TtZX":
                    found.append(name)
    return found
