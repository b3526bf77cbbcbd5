"""A process whose tracer died with foreign code in it is put right again; one that somebody woke is left alone."""

from __future__ import annotations

import ctypes
import json
import os
import signal
from pathlib import Path

import pytest

from distributed_grid.agent.moving import criu, cure, images
from distributed_grid.agent.moving.ptrace import (
    GETREGS,
    INTERRUPT,
    SEIZE,
    SETREGS,
    SETSIGMASK,
    TRAP,
    WALL,
    Regs,
    maps,
    ptrace,
)
from distributed_grid.agent.moving.ptrace import stopped as held_by_us
from distributed_grid.agent.moving.state import thread_states, tracer_of
from tests.lab.waiting import wait_until
from tests.unit.agent.moving.two_nodes import LIMIT_S, Bench, contiguous

pytestmark = [pytest.mark.root, pytest.mark.criu]
THREADED = """
import threading, time
def idle():
    while True: time.sleep(0.01)
for _ in range(2): threading.Thread(target=idle, daemon=True).start()
n = 0
while True:
    n += 1; print(n, flush=True); time.sleep(0.005)
"""

#: Kills CRIU at its work, once there is what is named; says so only if it was not done yet.
WRAPPER = """#!/bin/sh
[ "$1" = dump ] || exec {criu} "$@"
{criu} "$@" &
while [ $# -gt 0 ]; do
    [ "$1" = -D ] && dir=$2
    [ "$1" = -t ] && pid=$2
    shift
done
while kill -0 $! 2> /dev/null && ! {made} > /dev/null 2>&1; do :; done
kill -9 $! 2> /dev/null
wait $!
[ $? = 137 ] && kill -9 $$
exit 1
"""


#: Counts in registers and waits by `poll`, again and again.
POLLS = """
import ctypes
libc, n = ctypes.CDLL(None), 0
while True:
    n += 1; print(n, flush=True); libc.poll(None, 0, 50)
"""


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: thread_states(pid) == {"T"}, LIMIT_S, "it to stop")


def threads(pid: int) -> list[int]:
    return sorted(int(one.name) for one in Path(f"/proc/{pid}/task").iterdir())


def mask_of(tid: int) -> int:
    return int(Path(f"/proc/{tid}/status").read_text().split("SigBlk:")[1].split()[0], 16)


def die_in_it(pid: int, tids: list[int], code_at: int, trapped: str) -> None:
    """As a killed CRIU leaves them: foreign registers and code, all blocked; `trapped`: also at a SIGTRAP of its.

    Which is blocked, or `let through`.
    """
    child = os.fork()
    if child:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        wait_until(lambda: not any(map(tracer_of, tids)) and thread_states(pid) == {"T"}, LIMIT_S, "it to be left")
        return
    try:
        leave_a_mess(pid, tids, code_at, trapped)
    finally:
        os._exit(1)


def leave_a_mess(pid: int, tids: list[int], code_at: int, trapped: str) -> None:
    with open(f"/proc/{pid}/mem", "r+b", 0) as memory:
        memory.seek(code_at)
        memory.write(b"\x0f\x05\xcc\xcc\xcc\xcc\xcc\xcc")
    for tid in tids:
        ptrace(SEIZE, tid)
        ptrace(INTERRUPT, tid)
        os.waitpid(tid, WALL)
        if trapped == "blocked":
            no_trap = ctypes.c_uint64(~TRAP)
            ptrace(SETSIGMASK, tid, 8, ctypes.addressof(no_trap))
            ctypes.CDLL(None).syscall(234, pid, tid, signal.SIGTRAP)
            status = 0
            while status != signal.SIGTRAP << 8 | 0x7F:
                ptrace(7, tid)  # PTRACE_CONT
                _, status = os.waitpid(tid, WALL)
        regs = Regs()
        ptrace(GETREGS, tid, 0, ctypes.addressof(regs))
        regs.rip, regs.rax, regs.rbx, regs.orig_rax = code_at + 2, 77, 0, 2**64 - 1
        ptrace(SETREGS, tid, 0, ctypes.addressof(regs))
        everything = ctypes.c_uint64(2**64 - 1 if trapped != "let through" else ~TRAP)
        ptrace(SETSIGMASK, tid, 8, ctypes.addressof(everything))
        if trapped == "let through":
            ptrace(7, tid)
            # The trap is left unanswered, so that it is delivered; a group stop may come before.
            while (seen := os.waitid(os.P_PID, tid, os.WSTOPPED | os.WNOWAIT | WALL)) and seen.si_status >> 8:
                os.waitpid(tid, WALL)
                ptrace(7, tid)
            assert seen and seen.si_status == signal.SIGTRAP
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("trapped", ["", "blocked", "let through"])
def test_a_process_that_a_tracer_died_in(bench: Bench, trapped: str) -> None:
    child = bench.start(THREADED)
    bench.wait_log(3)
    stop(child.pid)
    note, tids = bench.home / cure.NAME, threads(child.pid)
    masks = [mask_of(tid) for tid in tids]
    code_at = next(start for start, _, permissions, _, _ in maps(child.pid) if "x" in permissions)
    cure.save([child.pid], note)
    assert note.stat().st_mode & 0o777 == 0o600
    assert [mask_of(tid) for tid in tids] == [mask | TRAP for mask in masks]
    with held_by_us(child.pid) as held:
        left = held.call(9, 0, 1 << 16, 5, 0x22, -1, 0)  # mmap: of no name we know, so it stays
        assert left > 0
    descriptors = os.listdir(f"/proc/{child.pid}/fd")  # noqa: PTH208
    with held_by_us(child.pid) as held:
        assert held.call(32, 1) >= 0  # dup: a descriptor that it did not have
    die_in_it(child.pid, tids, code_at, trapped)
    told = cure.cure(note)
    assert f"registers of 3 threads of process {child.pid}" in told and f"code of process {child.pid}" in told
    assert not note.exists() and cure.cure(note) == []
    assert os.listdir(f"/proc/{child.pid}/fd") == descriptors  # noqa: PTH208
    assert [mask_of(tid) for tid in tids] == masks
    os.kill(child.pid, signal.SIGCONT)
    bench.runs(child.pid)
    contiguous(bench.log())


def test_a_process_that_was_woken_keeps_its_place(bench: Bench) -> None:
    child = bench.start(THREADED)
    bench.wait_log(3)
    stop(child.pid)
    cure.save([child.pid], bench.home / cure.NAME)
    assert len(cure.unblocked(bench.home / cure.NAME)) == 3
    os.kill(child.pid, signal.SIGCONT)
    bench.runs(child.pid)
    assert cure.cure(bench.home / cure.NAME) == []
    bench.runs(child.pid)
    contiguous(bench.log())
    assert not any(mask_of(tid) & TRAP for tid in threads(child.pid))


def test_what_was_blocked_for_the_dump_is_not_blocked_at_the_target(bench: Bench) -> None:
    child = bench.start(THREADED)
    bench.wait_log(3)
    masks = [mask_of(tid) for tid in threads(child.pid)]
    bench.move(child.pid)
    wait_until(lambda: len(bench.spool()) > 5, LIMIT_S, "output on the target")
    there = bench.keepers["b"].in_status("m")["pid"]
    assert [mask_of(tid) for tid in threads(there)] == masks
    contiguous(bench.log() + bench.spool())


@pytest.mark.parametrize("made", ['grep CRIUMFD "/proc/$pid/maps"', 'ls "$dir"/inventory.img'], ids=["inside", "image"])
def test_criu_is_killed_in_the_middle_of_its_dump(bench: Bench, monkeypatch: pytest.MonkeyPatch, made: str) -> None:
    """Once its code is in the process; once it writes images."""
    wrapper = bench.home / "criu"
    wrapper.write_text(WRAPPER.format(criu=criu.find(), made=made))
    wrapper.chmod(0o755)
    monkeypatch.setenv("GRID_CRIU", str(wrapper))
    killed = 0
    for number in range(30):
        (bench.home / "log").unlink(missing_ok=True)
        child = bench.start(THREADED)
        bench.wait_log(3)
        bench.begin(child.pid, move=f"m{number}")
        out = bench.keepers["a"].out_wait(f"m{number}", timeout_s=LIMIT_S)
        assert out["phase"] == "aborted", out
        killed += out["error"]["code"] == "criu-killed"
        bench.keepers["b"].in_drop(f"m{number}")
        bench.runs(child.pid)
        contiguous(bench.log())
        assert "CRIUMFD" not in Path(f"/proc/{child.pid}/maps").read_text()
        assert not any(mask_of(tid) for tid in threads(child.pid))
        assert not handles_traps(child.pid)
        child.kill()
        child.wait(LIMIT_S)
        if killed == 3:
            return
    pytest.fail(f"it was killed in time {killed} times only")


def test_one_that_is_killed_while_it_puts_things_right(bench: Bench, tmp_path: Path) -> None:
    """In a call that it makes in the process: the next one puts that right as well."""
    child = bench.start(THREADED)
    bench.wait_log(3)
    stop(child.pid)
    note = tmp_path / cure.NAME
    cure.save([child.pid], note)
    killer = os.fork()
    if killer == 0:
        with held_by_us(child.pid) as held:
            held.call(39)  # getpid
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(killer, 0)[1]) == -signal.SIGKILL
    assert cure.cure(note) == [f"registers of 1 threads of process {child.pid}"]
    os.kill(child.pid, signal.SIGCONT)
    bench.runs(child.pid)
    contiguous(bench.log())
    assert not any(mask_of(tid) for tid in threads(child.pid)) and not handles_traps(child.pid)


def handles_traps(pid: int) -> bool:
    return bool(int(Path(f"/proc/{pid}/status").read_text().split("SigCgt:")[1].split()[0], 16) & TRAP)


IGNORES = """
import signal, time
signal.signal(signal.SIGTRAP, signal.SIG_IGN)
n = 0
while True:
    n += 1; print(n, flush=True); time.sleep(0.01)
"""


def test_who_ignores_sigtrap_goes_on_doing_so(bench: Bench) -> None:
    """At home. (CRIU's restore makes a call in it by a trap, for which the kernel forgets that it is ignored.)"""
    child = bench.start(IGNORES)
    bench.wait_log(3)
    bench.stage(child.pid)
    bench.keepers["b"].in_drop("m")
    bench.keepers["a"].out_abort("m")
    os.kill(child.pid, signal.SIGTRAP)
    bench.runs(child.pid)


#: Only what it needs, and neither rt_sigaction nor userfaultfd: who makes those is killed.
FILTERED = """
import ctypes, struct, time
libc = ctypes.CDLL(None, use_errno=True)
numbers = (13, 323)
code = b"".join([struct.pack("HBBI", 0x20, 0, 0, 0),
    *(struct.pack("HBBI", 0x15, len(numbers) - n, 0, one) for n, one in enumerate(numbers)),
    struct.pack("HBBI", 0x06, 0, 0, 0x7FFF0000), struct.pack("HBBI", 0x06, 0, 0, 0x80000000)])
space = ctypes.create_string_buffer(code)
program = struct.pack("HxxxxxxQ", len(code) // 8, ctypes.addressof(space))
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, program, 0, 0) == 0
n = 0
while True:
    n += 1; print(n, flush=True); time.sleep(0.01)
"""


def test_a_filter_of_system_calls_is_not_in_the_way(bench: Bench) -> None:
    child = bench.start(FILTERED)
    bench.wait_log(3)
    bench.stage(child.pid)
    bench.keepers["b"].in_drop("m")
    bench.keepers["a"].out_abort("m")
    bench.runs(child.pid)
    bench.stage(child.pid, move="second")
    bench.keepers["b"].in_go("second")
    wait_until(lambda: len(bench.spool(task="second")) > 5, LIMIT_S, "output on the target")
    bench.keepers["a"].out_finish("second", {})
    contiguous(bench.log() + bench.spool(task="second"))


HANDLES = """
import signal, time
signal.signal(signal.SIGTRAP, lambda *_: print("trap", flush=True))
n = 0
while True:
    n += 1; print(n, flush=True); time.sleep(0.01)
"""


def test_what_a_program_does_at_sigtrap_stays_its_own(bench: Bench) -> None:
    child = bench.start(HANDLES)
    bench.wait_log(3)
    bench.stage(child.pid)
    bench.keepers["b"].in_drop("m")
    bench.keepers["a"].out_abort("m")
    os.kill(child.pid, signal.SIGTRAP)
    wait_until(lambda: "trap" in bench.log(), LIMIT_S, "its own handler at home")
    bench.stage(child.pid, move="second")
    there = bench.keepers["b"].in_go("second")
    os.kill(there["pid"], signal.SIGTRAP)
    wait_until(lambda: "trap" in bench.spool(task="second"), LIMIT_S, "its own handler on the target")
    bench.keepers["a"].out_finish("second", {})


def test_a_mask_in_an_image_is_changed_in_place(tmp_path: Path) -> None:
    masks = (0x8010, 0x10)
    body = b"\x08\x01" + b"\x1a\x06\x08\x01\x28\x90\x80\x02" + b"\x2a\x04\x08\x00\x30\x10"
    path = tmp_path / "core-7.img"
    path.write_bytes(b"magicmag" + len(body).to_bytes(4, "little") + body)

    def masks_in() -> tuple[object, ...]:
        outer = images.fields(images.messages(path)[0])
        inner = [images.fields(bytes(outer[3][0])), images.fields(bytes(outer[5][0]))]
        return inner[0][5][0], inner[1][6][0]

    assert masks_in() == masks
    images.unblock(tmp_path, [7], 0x10)
    assert masks_in() == (0x8000, 0)


def test_one_that_was_woken_is_not_taken_back(bench: Bench, tmp_path: Path) -> None:
    child = bench.start(POLLS)
    bench.wait_log(5)
    stop(child.pid)
    cure.save([child.pid], tmp_path / cure.NAME)
    os.kill(child.pid, signal.SIGCONT)
    bench.wait_log(len(bench.log()) + 20)
    cure.cure(tmp_path / cure.NAME)
    bench.wait_log(len(bench.log()) + 5)
    contiguous(bench.log())


SIGNALLED = """
import ctypes, signal
signal.signal(signal.SIGUSR1, lambda *_: print("signal", flush=True))
libc = ctypes.CDLL(None, use_errno=True)
print("waits", flush=True)
print(libc.poll(None, 0, 60000), ctypes.get_errno(), flush=True)
"""


def test_a_signal_still_breaks_a_wait_off(bench: Bench) -> None:
    child = bench.start(SIGNALLED)
    bench.wait_log(1)
    bench.stage(child.pid)
    os.kill(child.pid, signal.SIGUSR1)
    bench.keepers["b"].in_drop("m")
    bench.keepers["a"].out_abort("m")
    assert child.wait(LIMIT_S) == 0
    assert sorted(bench.log()) == ["-1", "4", "signal", "waits"]


def test_what_an_older_version_wrote_down_is_put_right_too(bench: Bench, tmp_path: Path) -> None:
    child = bench.start(POLLS)
    bench.wait_log(5)
    stop(child.pid)
    path = tmp_path / cure.NAME
    cure.save([child.pid], path)
    data = json.loads(path.read_text())
    for process in data["processes"]:
        for thread in process["threads"].values():
            thread.pop("call")
    path.write_text(json.dumps(data))
    assert cure.cure(path) == []
    os.kill(child.pid, signal.SIGCONT)
    bench.runs(child.pid)
