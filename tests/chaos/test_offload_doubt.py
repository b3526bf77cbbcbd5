"""A move in doubt: a person decides it by `grid offload resolve`, or the cluster comes back; one runs, and no other.

The target's agent stands still from the moment the copy is staged, so that the word to go gets no answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from distributed_grid.core.process import process_id
from tests.chaos.test_offload_chaos import SETTLE_S, Watched, all_back
from tests.cluster.offloads import LIMIT_S, OVER, Started, check_chain, found, moves
from tests.lab.clusters import EmbeddedCluster
from tests.lab.striker import STATES
from tests.lab.waiting import wait_until

pytestmark = [pytest.mark.root, pytest.mark.criu, pytest.mark.timeout(600)]
STAGED_LIMIT_S = 4.0  # less than what counts as silence


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


@pytest.fixture
def started(embedded: EmbeddedCluster, tmp_path: Path) -> Iterator[Started]:
    made = Started(embedded, tmp_path)
    yield made
    all_back(embedded)
    made.close()


class Doubt:
    """A move of chain.py to gpu1 that is in doubt."""

    def __init__(self, cluster: EmbeddedCluster, started: Started) -> None:
        self.cluster, self.started = cluster, started
        self.journal = cluster.home / "journal.sqlite3"
        self.agent = 0
        for number in range(6):
            if self._begin(number):
                return
        pytest.fail("the moment between the copy and the commit was never met")

    def _begin(self, number: int) -> bool:
        self.watched = Watched(self.started, number)
        pid = self.watched.who.pid
        home, self.agent = (self.cluster.pid_of(f"agent:{node}") for node in ("gpu-master", "gpu1"))
        command = self.cluster.popen("offload", "execute", str(pid), "-t", "gpu1", stdout=-1, stderr=-1, text=True)
        self.command = command
        await_state(self.journal, pid, "COPIED", lambda: command.poll() is not None)
        # It is asked once more before the commit: so nothing is committed until it goes on.
        os.kill(home, signal.SIGSTOP)
        try:
            limit = time.monotonic() + STAGED_LIMIT_S
            while state_of(self.journal, pid) == "COPIED" and time.monotonic() < limit:
                time.sleep(0.002)
            met = state_of(self.journal, pid) == "STAGED"
            if met:
                os.kill(self.agent, signal.SIGSTOP)
        finally:
            os.kill(home, signal.SIGCONT)
        if met:
            wait_until(lambda: state_of(self.journal, pid) in ("IN_DOUBT", "ABORTED"), LIMIT_S, "the doubt")
        if state_of(self.journal, pid) == "IN_DOUBT":
            [self.id] = [one["id"] for one in moves(self.cluster) if one["pid"] == pid and one["state"] == "IN_DOUBT"]
            [self.task] = [path.parent for path in self.cluster.home.glob(f"**/{self.id}/staged.json")]
            assert self.watched.copies() == []
            return True
        if met:
            os.kill(self.agent, signal.SIGCONT)
        command.communicate(timeout=LIMIT_S)
        all_back(self.cluster)
        self.watched.end()  # the next one is looked for by the same words
        return False

    def deliver(self) -> None:
        """The word to go arrives after all, as the agent would have passed it on; nobody hears of it."""
        (self.task / "go").touch()
        shim = int(json.loads((self.task / "shim.json").read_text())["pid"])
        os.kill(shim, signal.SIGUSR1)
        wait_until(lambda: len(self.watched.copies()) == 1, LIMIT_S, "the copy to run")

    def agent_goes_on(self) -> None:
        os.kill(self.agent, signal.SIGCONT)

    def agent_is_replaced(self) -> None:
        """What was sent to it is lost with it."""
        os.kill(self.agent, signal.SIGKILL)

    def resolve(self, where: str) -> dict[str, Any]:
        told: dict[str, Any] = self.cluster.json("offload", "resolve", self.id, where, timeout=200)
        return told

    def events(self, kind: str) -> list[dict[str, Any]]:
        told = self.cluster.json("events", "--limit", "300", timeout=LIMIT_S)
        return [one for one in told if one["kind"] == kind and one["data"].get("move") == self.id]

    def ends_as_it_should(self) -> None:
        """One of it, its output whole, its code its own."""
        size = self.started.size(self.watched.log)
        wait_until(lambda: self.started.size(self.watched.log) > size, SETTLE_S, "more output at home")
        assert len(self.watched.copies()) == 1
        self.watched.end()
        check_chain((self.started.directory / self.watched.log).read_text(), 3)


@pytest.mark.parametrize("delivered", [True, False])
def test_here_the_source_runs_on_and_the_copy_is_ended(
    embedded: EmbeddedCluster, started: Started, delivered: bool
) -> None:
    doubt = Doubt(embedded, started)
    who = doubt.watched.who
    if delivered:
        doubt.deliver()
    done = embedded.grid("offload", "resolve", doubt.id, "--here", "--there", check=False, timeout=LIMIT_S)
    assert done.returncode == 2 and found(embedded, doubt.id)["state"] == "IN_DOUBT"
    assert doubt.resolve("--here")["state"] == "ABORTED"
    assert doubt.command.wait(LIMIT_S) == 1
    said = doubt.command.communicate()[1]
    assert "decided by hand" in said and f"grid offload resolve {doubt.id} --here|--there" in said
    started.goes_on(who, doubt.watched.log)
    if delivered:
        doubt.agent_goes_on()
    else:
        doubt.agent_is_replaced()
    all_back(embedded)
    wait_until(lambda: doubt.watched.copies() == [who.pid] and not doubt.task.exists(), SETTLE_S, "the copy to go")
    ended = wait_until(lambda: doubt.events("offload.copy_ended"), LIMIT_S, "its end to be told") if delivered else []
    assert len(ended) == len(doubt.events("offload.copy_ended")) == int(delivered)
    assert process_id(who.pid) == who and found(embedded, doubt.id)["state"] == "ABORTED"
    doubt.ends_as_it_should()


@pytest.mark.parametrize("delivered", [True, False])
def test_there_the_copy_runs_and_a_stub_takes_the_sources_place(
    embedded: EmbeddedCluster, started: Started, delivered: bool
) -> None:
    doubt = Doubt(embedded, started)
    who = doubt.watched.who
    if delivered:
        doubt.deliver()
    assert doubt.resolve("--there")["state"] in ("RUNNING", "CLEANED")
    assert doubt.command.wait(LIMIT_S) == 0
    doubt.command.communicate()
    wait_until(lambda: found(embedded, doubt.id)["state"] == "CLEANED", LIMIT_S, "the stub")
    if delivered:
        doubt.agent_goes_on()
    else:
        assert doubt.watched.copies() == []
        doubt.agent_is_replaced()
    all_back(embedded)
    [pid] = wait_until(doubt.watched.copies, SETTLE_S, "the copy to run")
    assert pid != who.pid and process_id(who.pid) == who  # which is the stub now
    wait_until(lambda: found(embedded, doubt.id)["target_pid"] == pid, LIMIT_S, "its pid to be known")
    doubt.ends_as_it_should()
    wait_until(lambda: found(embedded, doubt.id)["exit_code"] == 7, LIMIT_S, "its end to be known")


@pytest.mark.chaos  # the cluster of all tests goes and comes for it, with an agent that stands still
def test_a_cluster_that_is_stopped_and_started_settles_it_by_itself(
    embedded: EmbeddedCluster, started: Started
) -> None:
    doubt = Doubt(embedded, started)
    said = embedded.grid("cluster", "stop", timeout=SETTLE_S).stderr
    assert f"PID {doubt.watched.who.pid} is held, its move to gpu1 in doubt" in said
    assert state_of(doubt.journal, doubt.watched.who.pid) == "IN_DOUBT" and doubt.watched.copies() == []
    embedded.start()
    all_back(embedded)
    assert doubt.command.wait(SETTLE_S) == 0
    doubt.command.communicate()
    wait_until(lambda: found(embedded, doubt.id)["state"] == "CLEANED", SETTLE_S, "it to be finished")
    said = embedded.grid("cluster", "stop", timeout=SETTLE_S).stderr
    assert f"PID {doubt.watched.who.pid} runs on, on gpu1" in said
    embedded.start()
    all_back(embedded)
    doubt.ends_as_it_should()
