"""A command outlives whatever of ours is killed beside it: started once, its whole output, its own exit code."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.lab.clusters import EmbeddedCluster
from tests.lab.waiting import wait_until

LINES = 60
#: Counts for some 15 s, and leaves a line in a file each time it is started.
PROGRAM = 'echo started >> "$1"; for i in $(seq {n}); do echo $i; echo e$i >&2; sleep 0.25; done; exit 7'


def begin(cluster: EmbeddedCluster, starts: Path) -> subprocess.Popen[bytes]:
    argv = ["execute", "-n", "gpu1", "--", "sh", "-c", PROGRAM.format(n=LINES), "sh", str(starts)]
    process = cluster.popen(*argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    wait_until(starts.exists, 90, "the command to start")
    return process


def check(process: subprocess.Popen[bytes], starts: Path) -> None:
    out, err = process.communicate(timeout=200)
    assert process.returncode == 7, err.decode()
    assert out == b"".join(b"%d\n" % i for i in range(1, LINES + 1))
    written = [line for line in err.splitlines() if line.startswith(b"e")]
    assert written == [b"e%d" % i for i in range(1, LINES + 1)]
    assert starts.read_text() == "started\n"


@pytest.mark.parametrize("victim", ["daemon", "agent:gpu1", "raylet:gpu1", "gcs"])
def test_a_command_outlives(victim: str, embedded: EmbeddedCluster, tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    process = begin(embedded, starts)
    pid = embedded.pid_of(victim)
    assert pid
    embedded.kill(victim)
    check(process, starts)

    def all_back() -> bool:
        nodes = embedded.json("cluster", "status")["nodes"]
        return all(node["online"] and node["agent_pid"] for node in nodes) and embedded.pid_of(victim) != pid

    wait_until(all_back, 150, "all nodes to be online again", every_s=1)
    assert embedded.grid("execute", "-n", "gpu1", "echo", "again").stdout == "again\n"


def test_a_detached_command_is_found_again(embedded: EmbeddedCluster) -> None:
    program = ["sh", "-c", "sleep 1; echo done; exit 5"]
    task = embedded.grid("execute", "-n", "gpu2", "--detach", "--", *program).stdout.strip()
    embedded.kill("daemon")
    done = embedded.grid("jobs", "attach", task, check=False)
    assert (done.returncode, done.stdout) == (5, "done\n")
    listed = [job for job in embedded.json("jobs", "list", "-a") if job["id"] == task]
    assert [job["exit_code"] for job in listed] == [5]


def test_a_deleted_journal_is_rebuilt_from_the_agents(embedded: EmbeddedCluster) -> None:
    task = embedded.grid("execute", "-n", "gpu1", "--detach", "--", "sh", "-c", "sleep 600").stdout.strip()
    embedded.kill("daemon")
    for file in embedded.home.glob("journal.sqlite3*"):
        file.unlink()
    wait_until(
        lambda: [job["state"] for job in embedded.json("jobs", "list") if job["id"] == task] == ["running"],
        90, "the task to be known again", every_s=1,
    )  # fmt: skip
    kinds = {event["kind"] for event in embedded.json("events", "--limit", "200")}
    assert {"journal.recovered", "task.adopted"} <= kinds
    embedded.grid("jobs", "cancel", task)
