"""Moves with something killed under them, at any moment: the program runs in one place, always, and never twice.

Its output tells: a chain of hashes has no gap, no repeat and no fork, whoever wrote its parts. What is still held or in
doubt when the killed part is back settles by itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from distributed_grid.agent.moving.state import tracer_of
from distributed_grid.core.process import read_stat
from tests.cluster.offloads import LIMIT_S, OVER, Started, check_chain
from tests.cluster.test_offload_lab import Jobs
from tests.lab.clusters import PYTHON, Cluster, EmbeddedCluster, LabCluster
from tests.lab.waiting import wait_until

pytestmark = [pytest.mark.root, pytest.mark.criu, pytest.mark.timeout(600)]
ROUNDS = int(os.environ.get("CHAOS_ROUNDS", "20"))
SETTLE_S = 240.0


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


def kill_now(*pids: int) -> bool:
    """Whether one of them was still there."""
    done = False
    for pid in pids:
        stat = read_stat(pid)
        if stat and stat.state not in "ZX":
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                done = True
    return done


#: Of a move's own processes, found by its id, which ends with the pid of what is moved: words of their command lines.
PARTS = {
    "source mover": "moving.mover out", "target mover": "moving.mover in", "criu dump": " dump ",
    "criu restore": " restore -D ", "pager": "moving/pager.py",
}  # fmt: skip
#: When they are there; what of them is not there in time is tried again.
LIVES_IN = {
    "source mover": ("PLANNED", "FROZEN", "COPIED", "STAGED", "COMMITTED"), "target mover": ("PLANNED", "FROZEN"),
    "criu dump": ("PLANNED",), "criu restore": ("COPIED",), "pager": ("PLANNED", "FROZEN", "COPIED"),
}  # fmt: skip
#: What a part must have made before it counts as being in the middle of its work.
AT_WORK = {"criu restore": "restore.log"}
#: Over within milliseconds.
SHORT = ("STAGED", "COMMITTED")
STATES = ("PLANNED", "FROZEN", "COPIED", "STAGED", "COMMITTED", "RUNNING", "CLEANED")


def parts(what: str, moved: int) -> list[int]:
    """The pids of that part of the move of a pid, once it is at work."""
    if what == "criu dump":
        tracer = tracer_of(moved)
        return [tracer] if tracer and PARTS[what] in command_of(tracer) else []
    found = marked(PARTS[what], f"_{moved}{'' if 'mover' in what else '-'}")
    if what not in AT_WORK:
        return found
    words = {pid: command_of(pid).split() for pid in found}
    return [pid for pid in found if "-D" in words[pid]
            and any(Path(words[pid][words[pid].index("-D") + 1]).glob(AT_WORK[what]))]  # fmt: skip


def kill_when_there(find: Callable[[], list[int]], over: Callable[[], bool], delay_s: float) -> bool:
    """Kill what appears, a moment later; whether there was something before the move was over."""
    while not (found := find()):
        if over():
            return False
        time.sleep(0.001)
    time.sleep(delay_s)
    return kill_now(*found)


def state_of(journal: Path, pid: int) -> str:
    """The state of the newest move of that pid, read past the daemon, which may be dead; empty if there is none."""
    try:
        with contextlib.closing(sqlite3.connect(f"file:{journal}?mode=ro", uri=True, timeout=5)) as database:
            row = database.execute("SELECT state FROM moves WHERE pid = ? ORDER BY created DESC", (pid,)).fetchone()
    except sqlite3.OperationalError:
        return ""
    return str(row[0]) if row else ""


def await_state(journal: Path, pid: int, state: str, over: Callable[[], bool]) -> None:
    """Until the move is in that state or past it; empty: at once."""
    wanted = (*STATES[STATES.index(state) :], *OVER) if state else ()
    while wanted and state_of(journal, pid) not in wanted and not over():
        time.sleep(0.002)


#: Run on the head of a lab: JOURNAL PID STATES. Says the first of these states that the newest move of that pid is in.
WATCH = """
import sqlite3, sys, time
journal, pid, wanted = sys.argv[1], int(sys.argv[2]), sys.argv[3].split(",")
base = sqlite3.connect(f"file:{journal}?mode=ro", uri=True, timeout=5)
print("ready", flush=True)
until = time.monotonic() + 120
while time.monotonic() < until:
    row = base.execute("SELECT state FROM moves WHERE pid = ? ORDER BY created DESC", (pid,)).fetchone()
    if row and row[0] in wanted:
        break
    time.sleep(0.0003)
print(row, flush=True)
"""


def state_at(move: dict[str, Any], at: float) -> str:
    """In which state a settled move was at that moment."""
    return ([step["state"] for step in move.get("steps", []) if step["at"] <= at] or ["-"])[-1]


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
        self, cluster: EmbeddedCluster, started: Started, number: int, what: str, state: str, delay_s: float = 0.0
    ) -> None:
        watched = Watched(started, number)
        pid = watched.who.pid
        victim = 0 if what in PARTS else cluster.pid_of(what)
        begun = time.time() - 1
        command = cluster.popen("offload", "execute", str(pid), "-t", "gpu1", stdout=-3, stderr=-3)

        def over() -> bool:
            return command.poll() is not None

        await_state(cluster.home / "journal.sqlite3", pid, state, over)
        if what in PARTS:
            self.hit = kill_when_there(lambda: parts(what, pid), over, delay_s)
        else:
            time.sleep(delay_s)
            self.hit = kill_now(victim)
        at = time.time()
        command.wait(SETTLE_S)
        if what == "criu dump" and watched.process.poll() == -signal.SIGTRAP:
            self.struck, self.end = "FROZEN", "DIED"  # rarely, as docs/moving.md says: nothing can help then
            all_back(cluster)
            return
        move = wait_until(lambda: settled(cluster, pid, begun), SETTLE_S, "the move to settle", every_s=0.5)
        self.struck, self.end = state_at(move, at), str(move["state"])
        # It goes on writing in the file at home, wherever it runs, and there is exactly one of it.
        size = started.size(watched.log)
        wait_until(lambda: started.size(watched.log) > size, SETTLE_S, f"output after {what} ({move['state']})")
        wait_until(lambda: len(watched.copies()) == 1, LIMIT_S, f"one copy after {what}; {watched.copies()}")
        at_home = pid in watched.copies()
        assert at_home == (move["state"] in ("ABORTED", "NONE")), (what, move, watched.copies())
        watched.end()
        check_chain((started.directory / watched.log).read_text(), 3)
        all_back(cluster)


def told(what: str, rounds: list[tuple[str, str]]) -> None:
    counts = {pair: rounds.count(pair) for pair in sorted(set(rounds))}
    print(f"{what}: " + ", ".join(f"struck in {state}, then {end}: {n}" for (state, end), n in counts.items()))


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
    ("source mover", "PLANNED"), ("source mover", "FROZEN"), ("target mover", "PLANNED"), ("criu restore", "COPIED"),
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
    for state in LIVES_IN.get(what, ("", *STATES))
])  # fmt: skip
def test_many_kills_at_each_step(embedded: EmbeddedCluster, started: Started, what: str, state: str) -> None:
    """Killed a moment after the journal says the state, so some strike in the next one: told, with how it ended."""
    moments = random.Random(what + state)
    rounds: list[tuple[str, str]] = []
    for number in range(3 * ROUNDS):
        late = 0.0 if state in SHORT else moments.uniform(0.0, 0.03)
        done = Round(embedded, started, number, what, state, late)
        if done.hit:
            rounds.append((done.struck, done.end))
        if len(rounds) == ROUNDS:
            break
    told(f"{what} in {state or 'any state'}", rounds)
    # CRIU's moments are short, and the source's mover is done soon after the commit.
    assert len(rounds) == ROUNDS or (rounds and (what.startswith("criu") or state in SHORT))
    assert [end for _, end in rounds].count("DIED") <= (1 if what == "criu dump" else 0)


# Between hosts

JOURNAL = "/root/.distributed_grid/journal.sqlite3"
#: A target goes in every state but these: in the first nothing is there yet, in the last all of it is.
CUT_IN = ("PLANNED", "FROZEN", "COPIED", "STAGED", "COMMITTED", "RUNNING")


@pytest.mark.chaos
@pytest.mark.timeout(400 * ROUNDS)
@pytest.mark.parametrize("state", CUT_IN)
@pytest.mark.parametrize("what", ["cut", "power-off"])
def test_a_target_that_goes_in_mid_move(lab_cluster: LabCluster, what: str, state: str) -> None:
    moments = random.Random(what + state)
    rounds = []
    for _ in range(ROUNDS):
        after_s = 0.0 if state in SHORT else moments.uniform(0.0, 0.03)
        rounds.append(host_round(lab_cluster, what, state, after_s, moments.uniform(1.0, 7.0)))
    told(f"{what} in {state}", rounds)


def host_round(cluster: LabCluster, what: str, state: str, after_s: float, cut_s: float) -> tuple[str, str]:
    """In which state the target was cut off or switched off, and how the move ended."""
    jobs, gpu1 = Jobs(cluster), cluster.lab["gpu1"]
    try:
        process = jobs.start('"$py" "$programs/chain.py" "$end" 7 > log 2>&1; echo rc $? > rc')
        pid = jobs.program("chain.py")
        begun = time.time() - 1
        wanted = ",".join((*STATES[STATES.index(state) :], *OVER))
        watching = [str(PYTHON), "-c", WATCH, JOURNAL, str(pid), wanted]
        with jobs.head.popen(watching, stdout=subprocess.PIPE) as watch:
            assert watch.stdout and watch.stdout.readline() == b"ready\n"
            command = cluster.popen("offload", "execute", str(pid), "-t", "gpu1", stdout=-3, stderr=-3)
            watch.stdout.readline()
            time.sleep(after_s)
            if what == "cut":
                cluster.lab.cut("gpu1")
                at = time.time()
                time.sleep(cut_s)  # shorter and longer than what counts as silence
                cluster.lab.heal("gpu1")
            else:
                at = time.time()
                gpu1.power_off()
                gpu1.power_on()
        command.wait(SETTLE_S)
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
            return state_at(move, at), "LOST"
        jobs.more()
        home = "gpu-master" if move["state"] in ("ABORTED", "NONE") else "gpu1"
        wait_until(lambda: copies(jobs) == [home], LIMIT_S, f"one copy on {home} after {move}; {copies(jobs)}")
        jobs.finish("gpu-master", "gpu1")
        process.wait(SETTLE_S)
        assert jobs.head.read(f"{jobs.directory}/rc") == "rc 7\n"
        check_chain(jobs.text(), 3)
        return state_at(move, at), str(move["state"])
    finally:
        jobs.close()


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
