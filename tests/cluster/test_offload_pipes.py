"""What a moved program's pipes are to those who stay: its reader, who feeds it, and who waits for their end."""

from __future__ import annotations

import os
import select
import signal
import subprocess

import pytest

from distributed_grid.core.process import tree_of
from tests.cluster.offloads import LIMIT_S, PROGRAMS, Started, check_chain, found, move, refused, until_over
from tests.lab.clusters import PYTHON, EmbeddedCluster
from tests.lab.waiting import wait_until

pytestmark = [pytest.mark.root, pytest.mark.criu]


@pytest.mark.parametrize("minds", [True, False], ids=["dies-of-it", "ignores-it"])
def test_a_reader_that_ends_does_not_keep_whoever_waits(
    embedded: EmbeddedCluster, started: Started, minds: bool
) -> None:
    """`program | head`: nobody reads its output any more. Python ignores SIGPIPE, a plain program dies of it."""
    if minds:
        who = started.spawn(["sh", "-c", "while :; do echo x; sleep 0.05; done"], stdout=subprocess.PIPE, wait=False)
    else:
        argv = [str(PYTHON), str(PROGRAMS / "chain.py"), str(started.end), "3"]
        who = started.spawn(argv, stdout=subprocess.PIPE, wait=False)
    [program] = started.processes
    assert program.stdout and program.stdout.readline()
    done = move(embedded, who.pid, "-t", "gpu1")
    assert program.stdout.readline()
    program.stdout.close()
    if not minds:
        started.end.touch()
    assert program.wait(LIMIT_S) == (-signal.SIGPIPE if minds else 3)
    assert until_over(embedded, done["id"])["state"] == "ENDED"


CLOSES_ON_EXEC = """
import fcntl, os, sys, time
for fd in (0, 1, 2):
    fcntl.fcntl(fd, fcntl.F_SETFD, fcntl.FD_CLOEXEC)
number = 0
while not os.path.exists(sys.argv[1]):
    number += 1
    print(number, flush=True)
    time.sleep(0.01)
"""


def test_streams_that_an_exec_would_close_go_on_at_home(embedded: EmbeddedCluster, started: Started) -> None:
    """As node's do: the stub is exec'd in the place of the program."""
    who = started.spawn([str(PYTHON), "-c", CLOSES_ON_EXEC, str(started.end)])
    done = move(embedded, who.pid, "-t", "gpu1")
    started.more("at home")
    started.end.touch()
    assert started.processes[0].wait(LIMIT_S) == 0 and until_over(embedded, done["id"])["exit_code"] == 0
    numbers = [int(line) for line in started.log.read_text().splitlines()]
    assert numbers == list(range(1, len(numbers) + 1))


READS = """
import os, sys
source = os.fdopen(int(sys.argv[1]))
for line in source:
    print(line, end="", flush=True)
print("end of input", flush=True)
"""


def test_another_pipe_from_who_stays_is_cut_only_with_consent(embedded: EmbeddedCluster, started: Started) -> None:
    reading, writing = os.pipe()
    who = started.spawn([str(PYTHON), "-c", READS, str(reading)], pass_fds=[reading], wait=False)
    os.close(reading)
    with open(writing, "wb") as feed:
        feed.write(b"one\n")
        feed.flush()
        wait_until(lambda: started.log.read_text() == "one\n", LIMIT_S, "the first line")
        refused(embedded, 4, "--cut-pipes", str(who.pid), "--strategy", "live")
        feed.write(b"two\n")
        feed.flush()
        wait_until(lambda: started.log.read_text() == "one\ntwo\n", LIMIT_S, "the second line")
        move(embedded, who.pid, "-t", "gpu1", "--cut-pipes")
        assert started.processes[-1].wait(LIMIT_S) == 0
    assert started.log.read_text() == "one\ntwo\nend of input\n"


def test_who_waits_for_the_end_of_a_pipe_that_was_left_open_waits_for_the_program(
    embedded: EmbeddedCluster, started: Started
) -> None:
    """As programs do that run shells: the pipe's end tells them that all is over."""
    reading, writing = os.pipe()
    script = 'eval "exec 250>&$1 $1>&-"; shift; "$@" 7; exit $?'
    argv = ["bash", "-c", script, "sh", str(writing), str(PYTHON), str(PROGRAMS / "chain.py"), str(started.end)]
    shell = started.spawn(argv, pass_fds=[writing])
    os.close(writing)
    pid = tree_of(shell.pid)[1]
    with open(reading, "rb") as waits:
        done = move(embedded, pid, "-t", "gpu1")
        second = move(embedded, f"gpu1:{found(embedded, done['id'])['target_pid']}", "-t", "gpu2")
        started.more("on gpu2")
        assert select.select([waits], [], [], 0.5)[0] == [], "its end was seen too early"
        started.end.touch()
        assert started.processes[-1].wait(LIMIT_S) == 7 and waits.read() == b""
    assert until_over(embedded, second["id"])["exit_code"] == 7
    check_chain(started.log.read_text(), 3)


def test_output_goes_home_although_its_root_turned_away(embedded: EmbeddedCluster, started: Started) -> None:
    """Between two moves it gave up the output that its child still has."""
    script = (
        '"$1" "$2" "$3" 7 & while [ ! -e "$3.quiet" ]; do sleep 0.05; done\n'
        'exec > /dev/null 2>&1; touch "$3.seen"; wait $!'
    )
    who = started.spawn(["sh", "-c", script, "sh", str(PYTHON), str(PROGRAMS / "chain.py"), str(started.end)])
    first = move(embedded, who.pid, "-t", "gpu1")
    started.directory.joinpath("end.quiet").touch()
    wait_until(started.directory.joinpath("end.seen").exists, LIMIT_S, "the script to turn away")
    move(embedded, f"gpu1:{found(embedded, first['id'])['target_pid']}", "-t", "gpu2")
    started.more("on gpu2")
    started.end.touch()
    assert started.processes[0].wait(LIMIT_S) == 7
    check_chain(started.log.read_text(), 3)


#: Waits by calls that the kernel goes on with by its own note when a program was stopped and runs on.
GIVES = """
import itertools, os, sys
for number in itertools.count(1):
    print(number)
    if number % 1000 == 0 and os.path.exists(sys.argv[1]): break
sys.stdout.flush()
print("gave", number, file=sys.stderr)
"""
TAKES = """
import sys, time
for number, line in enumerate(sys.stdin, 1):
    if int(line) != number: sys.exit(f"{line.strip()} instead of {number}")
    if number % 1000 == 0: print(number, flush=True); time.sleep(0.01)
print("took", number, flush=True)
"""


def test_a_pipe_from_who_stays_goes_on_wherever_it_runs(embedded: EmbeddedCluster, started: Started) -> None:
    """Moved, moved on and brought home, with the daemon killed meanwhile: each line once, in order."""
    started.spawn([str(PYTHON), "-c", GIVES, str(started.end)], log="gave", wait=False, stdout=subprocess.PIPE)
    giver = started.processes[-1]
    assert giver.stdout
    with giver.stdout as pipe:
        who = started.spawn([str(PYTHON), "-c", TAKES], stdin=pipe)
    first = move(embedded, who.pid, "-t", "gpu1")
    started.more("on gpu1")
    embedded.kill("daemon")
    there = found(embedded, first["id"])["target_pid"]
    started.more("with a new daemon")
    second = move(embedded, f"gpu1:{there}", "-t", "gpu2")
    started.more("on gpu2")
    embedded.grid("offload", "return", second["id"], timeout=LIMIT_S)
    started.more("at home")
    refused(embedded, 4, "its program is process", str(who.pid))
    assert giver.poll() is None
    started.end.touch()
    assert started.processes[-1].wait(LIMIT_S) == 0 and giver.wait(LIMIT_S) == 0
    gave, took = (started.directory / "gave").read_text().split()[-1], started.log.read_text().split()[-1]
    assert int(took) == int(gave) > 1000


def test_what_is_left_in_a_pipe_goes_along(embedded: EmbeddedCluster, started: Started) -> None:
    """Who wrote it has gone by then."""
    reading, writing = os.pipe()
    os.write(writing, b"one\ntwo\n" * 1000)
    os.close(writing)
    script = 'echo up; while [ ! -e "$1" ]; do sleep 0.05; done; exec cat'
    who = started.spawn(["sh", "-c", script, "sh", str(started.end)], stdin=reading)
    os.close(reading)
    move(embedded, who.pid, "-t", "gpu1")
    started.end.touch()
    assert started.processes[-1].wait(LIMIT_S) == 0
    assert started.log.read_text() == "up\n" + "one\ntwo\n" * 1000


def test_who_writes_sees_that_nobody_reads_any_more(embedded: EmbeddedCluster, started: Started) -> None:
    script = 'while [ ! -e "$1" ]; do read line; echo "$line"; sleep 0.05; done; exec <&-; sleep 600'
    started.spawn(["yes"], log="yes", wait=False, stdout=subprocess.PIPE)
    giver = started.processes[-1]
    assert giver.stdout
    with giver.stdout as pipe:
        who = started.spawn(["sh", "-c", script, "sh", str(started.end)], stdin=pipe)
    move(embedded, who.pid, "-t", "gpu1")
    started.more("on gpu1")
    assert giver.poll() is None
    started.end.touch()
    assert giver.wait(LIMIT_S) == -signal.SIGPIPE
    assert started.processes[-1].poll() is None
