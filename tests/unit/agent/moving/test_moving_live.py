"""Real processes moved between two directories of this machine, each copy in a pid namespace of its own."""

from __future__ import annotations

import os
import pty
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from distributed_grid.agent.moving import criu
from distributed_grid.agent.spool import read_status
from distributed_grid.core.errors import Refused
from distributed_grid.core.process import children_of
from tests.lab.waiting import wait_until
from tests.unit.agent.moving.two_nodes import COUNTER, ENDING, LIMIT_S, Bench, contiguous

pytestmark = [pytest.mark.root, pytest.mark.criu]

@pytest.mark.parametrize("options", [{}, {"precopy": False, "encrypt": False}], ids=["precopy", "plain"])
def test_a_counter_goes_on_where_it_was(bench: Bench, options: dict[str, bool]) -> None:
    child = bench.start(COUNTER)
    bench.wait_log(10)
    done = bench.move(child.pid, **options)
    assert done["phase"] == "finished" and not done["stub"]
    assert child.wait(30) == -signal.SIGKILL
    wait_until(lambda: len(bench.spool()) > 10, LIMIT_S, "output on the target")
    bench.cancel(signal.SIGTERM)
    assert bench.exit_of()["signal"] == signal.SIGTERM
    contiguous(bench.log() + bench.spool())
    assert read_status(bench.home / "b/s/m").exit_code == 128 + signal.SIGTERM
    assert done["figures"]["passes"] == [] if options else len(done["figures"]["passes"]) > 0


PINNED = """
import ctypes, os, sys, threading, time
def state(): return f"{sorted(os.sched_getaffinity(0))} {ctypes.CDLL(None).syscall(252, 1, 0)}"
ctypes.CDLL(None).syscall(251, 1, 0, 2 << 13 | 6)  # best effort, 6
def run(core):
    os.sched_setaffinity(0, {core})
    while not os.path.exists(sys.argv[1]):
        print(core, state(), flush=True); time.sleep(0.01)
threading.Thread(target=run, args=(0,)).start()
run(1)
"""


def test_its_cores_and_its_priority_at_the_disks_stay(bench: Bench) -> None:
    child = bench.start(PINNED, bench.end_file)
    bench.wait_log(6)
    bench.move(child.pid)
    bench.end()
    assert bench.exit_of()["code"] == 0
    lines = {line.strip() for line in Path(bench.home / "log").read_text().splitlines()}
    there = set((bench.keepers["b"].spool / "m" / "stdout").read_text().splitlines())
    priority = 2 << 13 | 6
    assert {f"1 [1] {priority}"} <= there <= {f"1 [1] {priority}", f"0 [0] {priority}", "0 [0] 0", "0 [0] 4"}, there
    assert there <= lines


def test_exit_code_is_the_programs_own(bench: Bench) -> None:
    child = bench.start(ENDING, bench.end_file, "7")
    bench.wait_log(5)
    bench.move(child.pid)
    bench.end()
    assert bench.exit_of()["code"] == 7
    contiguous(bench.log() + bench.spool())


def test_threads(bench: Bench) -> None:
    program = (
        "import threading, time\n"
        "counts = [0] * 6\n"
        "def work(k):\n"
        " while True: counts[k] += 1; time.sleep(0.001)\n"
        "for k in range(6): threading.Thread(target=work, args=(k,), daemon=True).start()\n"
        "for n in range(1, 10**9):\n"
        " time.sleep(0.02)\n"
        " print(n if all(counts) else 'stuck', flush=True)\n"
    )
    child = bench.start(program)
    bench.wait_log(3)
    bench.move(child.pid)
    wait_until(lambda: len(bench.spool()) > 5, LIMIT_S, "output on the target")
    contiguous(bench.log() + bench.spool())


def test_a_tree_with_a_pipe_inside(bench: Bench) -> None:
    program = (
        "import os, time, sys\n"
        "r, w = os.pipe()\n"
        "if os.fork() == 0:\n"
        " os.close(r)\n"
        " n = 0\n"
        " while not os.path.exists(sys.argv[1]): n += 1; os.write(w, b'%d\\n' % n); time.sleep(0.002)\n"
        " os._exit(3)\n"
        "os.close(w)\n"
        "for line in open(r): print(line.strip(), flush=True)\n"
        "sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))\n"
    )
    child = bench.start(program, bench.end_file)
    bench.wait_log(10)
    bench.move(child.pid)
    bench.end()
    assert bench.exit_of()["code"] == 3
    contiguous(bench.log() + bench.spool())


# Writes into its memory until the file is there (or for so many steps, without a word), then prints its digest.
BIG = (
    "import hashlib, os, sys, time\n"
    "size = int(sys.argv[1]) << 20\n"
    "memory = bytearray(size)\n"
    "for at in range(0, size, 4096): memory[at:at+8] = at.to_bytes(8, 'little')\n"
    "pages, end, n = size // 4096, sys.argv[2], 0\n"
    "while n != int(end) if end.isdigit() else not os.path.exists(end):\n"
    " n += 1\n"
    " for k in range(20): memory[(n * 7919 + k * 104729) % pages * 4096 + 8 + k] = n % 251\n"
    " if not end.isdigit(): print(n, flush=True); time.sleep(0.003)\n"
    "print(hashlib.blake2b(memory, digest_size=8).hexdigest(), flush=True)\n"
)


def check_memory(bench: Bench, size_mb: str) -> None:
    """What BIG printed must be what it prints when it never moved."""
    assert bench.exit_of()["code"] == 0
    *numbers, digest = bench.log() + bench.spool()
    contiguous(numbers)
    bench.home.joinpath("log").write_text("")
    assert bench.start(BIG, size_mb, numbers[-1]).wait(LIMIT_S) == 0
    assert bench.log() == [digest]


# Slower to read its timer than that is to expire: frozen, it has always expired unread.
TIMER = """
import ctypes, os, struct, sys, time
libc = ctypes.CDLL(None, use_errno=True)
timer = libc.timerfd_create(1, 0)
assert libc.timerfd_settime(timer, 0, struct.pack("qqqq", 0, 50_000_000, 0, 50_000_000), None) == 0
while not os.path.exists(sys.argv[1]):
    time.sleep(0.2)
    print(struct.unpack("Q", os.read(timer, 8))[0], flush=True)
"""


def test_a_timer_that_expired_unread_goes_on(bench: Bench) -> None:
    child = bench.start(TIMER, bench.end_file)
    bench.wait_log(3)
    bench.move(child.pid)
    bench.end()  # once it has printed more, which a timer that is switched off would keep it from
    assert bench.exit_of()["code"] == 0
    assert all(int(ticks) >= 1 for ticks in bench.spool())


def test_children_that_come_and_go_and_an_exec_while_it_moves(bench: Bench) -> None:
    program = (
        "import os, subprocess, sys, time\n"
        "n = int(sys.argv[2])\n"
        "keep = bytearray(os.urandom(1 << 20)); digest = hash(bytes(keep))\n"
        "while not os.path.exists(sys.argv[1]):\n"
        " n += 1\n"
        " pid = os.fork()\n"
        " if pid == 0: os._exit(hash(bytes(keep)) != digest)\n"
        " print(n if os.wait()[1] == 0 else 'wrong', flush=True)\n"
        " if n % 50 == 0: os.execv(sys.executable, [sys.executable, '-I', '-S', '-c', sys.argv[3], sys.argv[1], str(n),"
        " sys.argv[3]])\n"
        "sys.exit(6)\n"
    )
    child = bench.start(program, bench.end_file, "0", program)
    bench.wait_log(60)
    bench.move(child.pid)
    bench.end()
    assert bench.exit_of()["code"] == 6
    contiguous(bench.log() + bench.spool())


def test_200_mb_written_while_it_moves(bench: Bench) -> None:
    child = bench.start(BIG, "200", bench.end_file)
    bench.wait_log(5)
    done = bench.move(child.pid)
    first = done["figures"]["passes"][0]["bytes"]
    assert first > 200 << 20 and done["figures"]["late_bytes"] < first
    bench.end()
    check_memory(bench, "200")


def test_a_dead_pager_is_replaced_and_no_page_is_lost(bench: Bench) -> None:
    child = bench.start(BIG, "64", bench.end_file)
    bench.wait_log(5)
    bench.begin(child.pid, precopy=False)
    shim_file = bench.home / "b/s/m/shim.json"
    (first,) = wait_until(lambda: shim_file.exists() and bench.pagers(), LIMIT_S, "the pager")
    os.kill(first, signal.SIGSTOP)  # so that it has served nothing when it dies
    assert bench.keepers["a"].out_wait("m", timeout_s=LIMIT_S)["phase"] == "copied"
    os.kill(first, signal.SIGKILL)
    assert bench.keepers["b"].in_wait("m", timeout_s=LIMIT_S)["phase"] == "staged"
    for _ in range(5):
        for pid in bench.pagers():
            os.kill(pid, signal.SIGKILL)
    bench.keepers["b"].in_go("m")
    bench.keepers["a"].out_finish("m")
    bench.end()
    check_memory(bench, "64")


def test_strict_has_every_page_before_it_counts_as_staged(bench: Bench) -> None:
    child = bench.start(BIG, "32", bench.end_file)
    bench.wait_log(5)
    bench.stage(child.pid, strict=True)
    wait_until(lambda: not bench.pagers(), LIMIT_S, "the pager to end")  # it has nothing left to do
    assert bench.keepers["b"].in_go("m")["phase"] == "running"
    bench.keepers["a"].out_finish("m")
    wait_until(lambda: len(bench.spool()) > 5, LIMIT_S, "output on the target")


def test_a_second_hop_and_the_first_task_says_moved(bench: Bench) -> None:
    child = bench.start(ENDING, bench.end_file, "9")
    bench.wait_log(5)
    bench.move(child.pid)
    wait_until(lambda: len(bench.spool()) > 5, LIMIT_S, "output on the first target")
    there = bench.keepers["b"].in_status("m")
    bench.stage(there["pid"], "b", "c", "m2")
    bench.keepers["c"].in_go("m2")
    bench.keepers["b"].out_finish("m2", {"moved_marker": str(bench.home / "b/s/m/moved")})
    assert bench.exit_of()["error"]["kind"] == "moved"
    bench.end("c", "m2")
    assert bench.exit_of("c", "m2")["code"] == 9
    contiguous(bench.log() + bench.spool() + bench.spool("c", task="m2"))


def test_output_into_a_pipe_of_somebody_who_stays(bench: Bench) -> None:
    child = bench.start(ENDING, bench.end_file, "4", stdout=subprocess.PIPE)
    assert child.stdout
    first = [child.stdout.readline() for _ in range(5)]
    bench.move(child.pid)
    first += child.stdout.readlines()
    bench.end()
    assert bench.exit_of()["code"] == 4
    contiguous([line.decode().strip() for line in first] + bench.spool())


def test_a_terminal_is_replaced_by_one_of_the_shims(bench: Bench) -> None:
    ours, theirs = pty.openpty()
    try:
        child = bench.start(ENDING, bench.end_file, "5", stdin=theirs, stdout=theirs, stderr=theirs)
        os.close(theirs)
        seen = os.read(ours, 64)
        bench.move(child.pid)
        while True:
            try:
                seen += os.read(ours, 4096)
            except OSError:
                break  # nobody has it open any more
    finally:
        os.close(ours)
    bench.end()
    assert bench.exit_of()["code"] == 5
    contiguous(seen.decode().split() + bench.spool())


def test_a_shell_with_job_control_does_not_see_its_job_stopped(bench: Bench) -> None:
    ours, theirs = pty.openpty()
    command = ["setsid", "--ctty", "bash", "--norc", "-i"]
    shell = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=bench.home)
    bench.started.append(shell)
    os.close(theirs)
    try:
        (bench.home / "count.py").write_text(COUNTER)
        os.write(ours, f"{sys.executable} -I -S count.py > log; echo over > over\n".encode())
        wait_until((bench.home / "log").exists, LIMIT_S, "the program to start")
        bench.wait_log(3)
        [job] = children_of(shell.pid)
        for number in range(2):
            bench.stage(job, move=f"m{number}")
            bench.keepers["a"].out_abort(f"m{number}")
            bench.keepers["b"].in_drop(f"m{number}")
            bench.runs(job)
        fields = Path(f"/proc/{job}/stat").read_text().rpartition(")")[2].split()
        assert fields[2] == fields[5]  # its group has the terminal
        assert not (bench.home / "over").exists()
        os.write(ours, b"\x03")
        wait_until(lambda: not children_of(shell.pid), LIMIT_S, "Ctrl-C to end it")
        os.write(ours, b"exit\n")
        shell.wait(LIMIT_S)
    finally:
        os.close(ours)
    contiguous(bench.log())


def test_a_child_of_a_shell_needs_no_session_of_its_own(bench: Bench) -> None:
    script = f"{COUNTER!r}"
    shell = (
        "import subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-I', '-S', '-c', {script}])\n"
        "open(sys.argv[1], 'w').write(str(child.pid))\n"
        "sys.exit(child.wait())\n"
    )
    bench.start(shell, str(bench.home / "pid"))
    bench.wait_log(5)
    bench.move(int((bench.home / "pid").read_text()))
    wait_until(lambda: len(bench.spool()) > 5, LIMIT_S, "output on the target")
    contiguous(bench.log() + bench.spool())


def test_files_come_along_but_only_beneath_the_agreed_directories(bench: Bench) -> None:
    child = bench.start(COUNTER)
    bench.wait_log(3)
    data = bench.home / "data"
    data.write_bytes(os.urandom(3 << 20))
    before = data.read_bytes()
    inode = data.stat().st_ino
    bench.stage(child.pid, files=[str(data)])
    assert data.read_bytes() == before and data.stat().st_ino != inode
    bench.keepers["b"].in_drop("m")
    bench.keepers["a"].out_abort("m")
    bench.runs(child.pid)
    bench.begin(child.pid, move="m2", files=["/etc/hostname"])
    out = bench.keepers["a"].out_wait("m2", timeout_s=LIMIT_S)
    assert out["phase"] == "aborted" and out["error"]["code"] == "file-outside"
    bench.runs(child.pid)


def test_an_open_connection_is_refused_and_the_program_runs_on(bench: Bench) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        program = "import socket, sys\ns = socket.create_connection(('127.0.0.1', int(sys.argv[1])))\n" + COUNTER
        child = bench.start(program, str(server.getsockname()[1]))
        bench.wait_log(5)
        bench.begin(child.pid)
        out = bench.keepers["a"].out_wait("m", timeout_s=LIMIT_S)
        assert out["phase"] == "aborted" and out["error"]["code"] == "criu-tcp", out
        bench.runs(child.pid)
        contiguous(bench.log())


def test_a_failed_restore_says_why_and_leaves_no_copy(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper = bench.home / "criu"
    wrapper.write_text(
        f"#!/bin/sh\n[ $1 != restore ] && exec {criu.find()} \"$@\"\n"
        "echo '(00.1) Error (files-reg.c:1): File data has bad size 3 (expect 4)' > $3/restore.log\nexit 1\n"
    )
    wrapper.chmod(0o755)
    child = bench.start(COUNTER)
    bench.wait_log(3)
    monkeypatch.setenv("GRID_CRIU", str(wrapper))
    bench.begin(child.pid)
    assert bench.keepers["a"].out_wait("m", timeout_s=LIMIT_S)["phase"] == "copied"
    status = bench.keepers["b"].in_wait("m", timeout_s=LIMIT_S)
    assert status["phase"] == "failed" and status["error"]["code"] == "criu-file-differs", status
    bench.keepers["b"].in_drop("m")
    bench.keepers["a"].out_abort("m")
    bench.runs(child.pid)
    contiguous(bench.log())


def test_go_is_refused_before_it_is_staged_and_drop_after_go(bench: Bench) -> None:
    child = bench.start(COUNTER)
    bench.wait_log(3)
    bench.begin(child.pid, halt_at="frozen")
    bench.keepers["a"].out_wait("m", ("frozen",), LIMIT_S)
    with pytest.raises(Refused):
        bench.keepers["b"].in_go("m")
    bench.keepers["a"].out_abort("m")
    bench.keepers["b"].in_drop("m")
    bench.stage(child.pid, move="m2")
    bench.keepers["b"].in_go("m2")
    assert bench.keepers["b"].in_go("m2")["phase"] == "running"
    with pytest.raises(Refused):
        bench.keepers["b"].in_drop("m2")
    bench.keepers["a"].out_finish("m2")
    with pytest.raises(Refused):
        bench.keepers["a"].out_abort("m2")
