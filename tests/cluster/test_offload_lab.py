"""Running processes moved between hosts over SSH, each with its own disk and processes: nothing lost or doubled."""

from __future__ import annotations

import json
import secrets
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.offloads import (
    LIMIT_S,
    PROGRAMS,
    chain_line,
    check_chain,
    check_pool,
    check_threads,
    found,
    move,
    until_over,
)
from tests.lab.clusters import PYTHON, LabCluster
from tests.lab.host import Host, HostPopen
from tests.lab.waiting import wait_until

pytestmark = [pytest.mark.root, pytest.mark.criu]


class Jobs:
    """Programs on the head, each in a directory of its own there, its output in `log`."""

    def __init__(self, cluster: LabCluster) -> None:
        self.cluster, self.head = cluster, cluster.head
        self.directory = f"/root/job-{secrets.token_hex(4)}"
        self.end, self.log = f"{self.directory}/end", f"{self.directory}/log"
        self.head.run(["mkdir", "-p", self.directory])
        self.started: list[HostPopen] = []
        self.moved: list[str] = []

    def start(self, line: str) -> HostPopen:
        """A line for the shell, `$py` and `$programs` known to it; once it has written something."""
        script = f"py={PYTHON} programs={PROGRAMS} end={self.end}; cd {self.directory}; {line}"
        # A session that begins on the host, as a login there does; with a shell above whatever is moved, because
        # `nsenter` stops itself when its child is stopped, and wakes the child when it is woken.
        process = self.head.popen(["setsid", "--wait", "sh", "-c", script])
        self.started.append(process)
        wait_until(lambda: self.size() or process.poll() is not None, LIMIT_S, f"{line} to write something")
        assert process.poll() is None, f"{line} ended at once: {self.text()}"
        return process

    def pid(self, *words: str) -> int:
        """Of the first process on the head that has these words in its command line."""
        return wait_until(lambda: (self.head.pids(self.directory, *words) or [0])[0], LIMIT_S, f"{words} on the head")

    def program(self, name: str) -> int:
        """The pid of one of tests/programs, not of the shell above it."""

        def pids() -> list[int]:
            lines = self.head.processes().items()
            return [pid for pid, line in lines
                    if line.startswith(f"{PYTHON} {PROGRAMS}/{name} ") and self.directory in line]  # fmt: skip

        return min(wait_until(pids, LIMIT_S, f"{name} on the head"))

    def move(self, pid: int | str, target: str, *options: str) -> dict[str, Any]:
        done = move(self.cluster, pid, "-t", target, *options, timeout=200)
        self.moved.append(done["id"])
        return done

    def text(self) -> str:
        return self.path(self.head, self.log).read_text()

    @staticmethod
    def path(host: Host, path: str) -> Path:
        return Path(f"/proc/{host.init_pid}/root{path}")

    def size(self) -> int:
        path = self.path(self.head, self.log)
        return path.stat().st_size if path.exists() else 0

    def more(self) -> None:
        size = self.size()
        wait_until(lambda: self.size() > size, LIMIT_S, "more output at home")

    def finish(self, *hosts: str) -> None:
        """Tell the programs to end, wherever they are now."""
        for host in hosts:
            self.cluster.lab[host].write(self.end, "")

    def close(self) -> None:
        for move_id in self.moved:
            if found(self.cluster, move_id)["state"] in ("RUNNING", "CLEANED"):
                self.cluster.grid("offload", "cancel", move_id, "--grace", "0", check=False, timeout=LIMIT_S)
        for process in self.started:
            if process.poll() is None:
                for pid in self.head.pids(self.directory):
                    self.head.run(["kill", "-9", str(pid)], check=False)
                process.kill_tree()
            process.wait(LIMIT_S)
            for pipe in (process.stdin, process.stdout):
                if pipe:
                    pipe.close()


@pytest.fixture
def jobs(lab_cluster: LabCluster) -> Iterator[Jobs]:
    made = Jobs(lab_cluster)
    yield made
    made.close()


def test_a_program_its_shell_and_its_log(jobs: Jobs) -> None:
    process = jobs.start('"$py" "$programs/chain.py" "$end" 5 > log 2>&1; echo rc $? > rc')
    done = jobs.move(jobs.program("chain.py"), "gpu1")
    assert [line for line in jobs.cluster.lab["gpu1"].processes().values() if "chain.py" in line]
    jobs.more()
    jobs.finish("gpu1")
    assert process.wait(LIMIT_S) == 0
    assert jobs.head.read(f"{jobs.directory}/rc") == "rc 5\n"
    check_chain(jobs.text(), 10)
    assert until_over(jobs.cluster, done["id"])["exit_code"] == 5


#: As PyTorch's loader workers do: a socket in a directory of its own below /tmp, which no other host has.
LISTENS = """
import os, socket, sys, tempfile, time
place = tempfile.mkdtemp()
server = socket.socket(socket.AF_UNIX)
server.bind(place + "/s")
server.listen()
number = 0
while not os.path.exists(sys.argv[1]):
    client = socket.socket(socket.AF_UNIX)
    client.connect(place + "/s")
    server.accept()[0].close()
    client.close()
    number += 1
    print(number, flush=True)
    time.sleep(0.01)
"""


def test_a_script_whose_child_has_a_file_of_its_own(jobs: Jobs) -> None:
    line = '"$py" "$programs/chain.py" "$end" 5 > log; echo rc $? > rc; true'
    process = jobs.start(f'export py programs end; sh -c {shlex.quote(line)} > script.log 2>&1')
    child = jobs.program("chain.py")
    shell = int(jobs.head.run(["ps", "-o", "ppid=", "-p", str(child)]).stdout)
    jobs.move(shell, "gpu1")
    jobs.finish("gpu1")
    assert process.wait(LIMIT_S) == 0
    assert jobs.head.read(f"{jobs.directory}/rc") == "rc 5\n"
    assert jobs.head.read(f"{jobs.directory}/script.log") == ""
    check_chain(jobs.text())


def test_a_pipe_from_a_program_that_stays(jobs: Jobs) -> None:
    writes = 'n=0; while [ ! -e "$end" ]; do n=$((n + 1)); echo $n; done'
    reads = "import sys\nfor line in sys.stdin: print(line, end='', flush=True)\nprint('end', flush=True)"
    process = jobs.start(f'{{ {writes}; }} | "$py" -c {shlex.quote(reads)} {jobs.end} > log 2>&1')
    done = jobs.move(next(pid for pid, line in jobs.head.processes().items() if line.startswith(f"{PYTHON} -c import")
                          and jobs.end in line), "gpu1")  # fmt: skip
    jobs.more()
    second = jobs.move(f"gpu1:{found(jobs.cluster, done['id'])['target_pid']}", "gpu2")
    jobs.more()
    jobs.cluster.grid("offload", "return", second["id"], timeout=LIMIT_S)
    jobs.more()
    jobs.finish("gpu-master")
    assert process.wait(LIMIT_S) == 0
    *numbers, last = jobs.text().splitlines()
    assert last == "end" and numbers == [str(n) for n in range(1, len(numbers) + 1)]


def test_a_socket_in_a_directory_of_its_own(jobs: Jobs) -> None:
    jobs.head.write(f"{jobs.directory}/listens.py", LISTENS)
    process = jobs.start('"$py" listens.py "$end" > log 2>&1; echo rc $? > rc')
    [pid] = [pid for pid, line in jobs.head.processes().items() if line.startswith(f"{PYTHON} listens.py ")]
    jobs.move(pid, "gpu1")
    jobs.more()
    jobs.finish("gpu1")
    assert process.wait(LIMIT_S) == 0
    numbers = [int(line) for line in jobs.text().splitlines()]
    assert numbers == list(range(1, len(numbers) + 1))


def test_threads_pool_and_pipeline_and_a_second_host(jobs: Jobs) -> None:
    lines = {
        "threads.py": '"$py" "$programs/threads.py" "$end"', "pool.py": '"$py" "$programs/pool.py" "$end"',
        "chain.py": 'sh -c "$py $programs/chain.py $end | cat"',
    }  # fmt: skip
    jobs.start(" & ".join(f"{line} > {name}.out 2>&1" for name, line in lines.items()) + " & echo here > log; wait")
    outputs = {name: f"{jobs.directory}/{name}.out" for name in lines}

    def size(name: str) -> int:
        return Jobs.path(jobs.head, outputs[name]).stat().st_size

    for name in lines:
        wait_until(lambda name=name: size(name), LIMIT_S, f"{name} to write")  # type: ignore[misc]
    shell = [pid for pid in jobs.head.pids(jobs.end, "| cat") if "py=" not in jobs.head.processes()[pid]]
    pids = {"threads.py": jobs.program("threads.py"), "pool.py": jobs.program("pool.py"), "chain.py": shell[0]}
    done: dict[str, dict[str, Any]] = {}
    for name, pid in pids.items():
        before = size(name)
        done[name] = jobs.move(pid, "gpu1")
        wait_until(lambda name=name, before=before: size(name) > before, LIMIT_S, f"more of {name}")  # type: ignore[misc]
    second = jobs.move(f"gpu1:{done['pool.py']['target_pid']}", "gpu2")
    assert (second["node"], second["target"]) == ("gpu1", "gpu2")
    jobs.finish("gpu1", "gpu2")
    assert jobs.started[0].wait(LIMIT_S) == 0
    check_threads(jobs.head.read(outputs["threads.py"]))
    check_pool(jobs.head.read(outputs["pool.py"]))
    check_chain(jobs.head.read(outputs["chain.py"]), 5)


def test_a_large_array_arrives_whole(jobs: Jobs) -> None:
    large_array(jobs, 200)


@pytest.mark.chaos
@pytest.mark.timeout(900)
def test_two_gigabytes_arrive_whole(jobs: Jobs) -> None:
    large_array(jobs, 2048)


def large_array(jobs: Jobs, mib: int) -> None:
    process = jobs.start(f'"$py" "$programs/matrix.py" {mib} "$end" 0.05 > log 2>&1; exit $?')
    wait_until(lambda: "\n5\n" in jobs.text(), LIMIT_S, "its first rounds")
    done = jobs.move(jobs.program("matrix.py"), "gpu2")
    assert done["bytes"] > mib << 19 and done["pause_s"] > 0
    jobs.more()
    jobs.finish("gpu2")
    assert process.wait(LIMIT_S) == 0
    *rounds, _longest, checked = jobs.text().splitlines()
    assert checked == "sum right"
    assert rounds == ["filled", *(str(n) for n in range(1, len(rounds)))]


def test_a_training_run_has_the_losses_of_one_that_was_not_moved(jobs: Jobs) -> None:
    steps = 1500
    process = jobs.start(f'"$py" "$programs/train.py" {steps} 0.01 3 "$end" > log 2>&1; echo rc $? > rc')
    done = jobs.move(jobs.program("train.py"), "gpu1")
    assert jobs.text().count("\n") < steps
    assert process.wait(LIMIT_S) == 0
    assert jobs.head.read(f"{jobs.directory}/rc") == "rc 3\n"
    unmoved = jobs.head.run([str(PYTHON), str(PROGRAMS / "train.py"), str(steps), "0", "0", "-"], timeout=LIMIT_S)
    assert jobs.text() == unmoved.stdout
    assert until_over(jobs.cluster, done["id"])["exit_code"] == 3


def test_a_program_in_tmux_goes_on_in_it_and_ctrl_c_reaches_it(jobs: Jobs) -> None:
    """Its shell has job control: it must not see that its job was stopped."""

    def tmux(*words: str) -> str:
        return str(jobs.head.run(["tmux", "-S", f"{jobs.directory}/tmux", *words], cwd="/root").stdout)

    def shown() -> str:
        return tmux("capture-pane", "-p", "-S", "-")

    def lines() -> list[str]:
        return [line.strip() for line in shown().splitlines() if line[:1].isdigit()]

    # Wide enough for the command in one line, whatever the checkout is called; and no line is forgotten meanwhile.
    settings = ["start-server", ";", "set-option", "-g", "history-limit", "50000", ";"]
    tmux("-f", "/dev/null", *settings, "new-session", "-d", "-x", "400", "-y", "40", "bash --norc -i")
    try:
        tmux("send-keys", f"{PYTHON} {PROGRAMS}/chain.py {jobs.end} 3 0.1; echo not yet", "Enter")
        wait_until(lambda: len(lines()) > 2, LIMIT_S, "its first lines")
        jobs.move(jobs.program("chain.py"), "gpu1", "--force")
        count = len(lines())
        wait_until(lambda: len(lines()) > count + 2, LIMIT_S, "it to go on in the terminal")
        assert "Stopped" not in shown() and "\nnot yet" not in shown()
        # Before Ctrl-C: on that the terminal writes `^C` into a line, and may throw away what is not read yet.
        before = ""
        for number, line in enumerate(lines(), 1):
            before = chain_line(number, before)
            assert line == before, shown()
        tmux("send-keys", "C-c")
        wait_until(lambda: "KeyboardInterrupt" in shown(), LIMIT_S, "Ctrl-C to reach it")
        tmux("send-keys", "echo rc $?", "Enter")
        wait_until(lambda: "\nrc 130" in shown(), LIMIT_S, "the shell to have its code")
    finally:
        tmux("kill-server")


def test_a_target_that_is_switched_off_is_told_as_lost_by_name(jobs: Jobs) -> None:
    cluster, gpu2 = jobs.cluster, jobs.cluster.lab["gpu2"]
    process = jobs.start('"$py" "$programs/chain.py" "$end" > log 2>&1; echo rc $? > rc')
    done = jobs.move(jobs.program("chain.py"), "gpu2")
    jobs.more()
    gpu2.power_off()
    try:
        wait_until(lambda: found(cluster, done["id"])["target_lost"] or None, LIMIT_S, "the loss to be told")
        table = cluster.grid("offload", "status", timeout=LIMIT_S).stdout
        [line] = [line for line in table.splitlines() if line.startswith(done["id"])]
        assert "LOST" in line and "gpu2" in line
        events = wait_until(lambda: lost_events(cluster, done["id"]), LIMIT_S, "the event")
        assert events[0]["node"] == "gpu2"
    finally:
        gpu2.power_on()
    wait_until(lambda: cluster.node("gpu2")["online"], 200, "gpu2 to be brought back", every_s=2)
    assert until_over(cluster, done["id"])["state"] == "LOST"
    assert process.wait(LIMIT_S) == 0
    assert jobs.head.read(f"{jobs.directory}/rc") == "rc 137\n"
    check_chain(jobs.text().removesuffix("Killed\n"))  # the shell's own word, where its child's output goes


def lost_events(cluster: LabCluster, move_id: str) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = cluster.json("events", "--limit", "100")
    return [one for one in events if one["kind"] == "offload.lost" and move_id in json.dumps(one)]
