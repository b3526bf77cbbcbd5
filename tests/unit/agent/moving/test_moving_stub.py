"""The stub in the source's place: its parent, its signals, its output."""

from __future__ import annotations

import base64
import errno
import json
import os
import pty
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from distributed_grid.agent.moving import held, stub
from distributed_grid.agent.moving.state import thread_states
from distributed_grid.core.process import ProcessId, process_id
from tests.lab.waiting import wait_until
from tests.unit.agent.moving.two_nodes import COUNTER, ENDING, LIMIT_S, Bench

pytestmark = [pytest.mark.root, pytest.mark.criu]


class Relay:
    """The agent's end of a stub."""

    def __init__(self, directory: Path) -> None:
        wait_until((directory / "stub.sock").exists, LIMIT_S, "the stub's socket")
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(LIMIT_S)
        wait_until(lambda: self.sock.connect_ex(str(directory / "stub.sock")) == 0, LIMIT_S, "the stub to listen")
        self.file = self.sock.makefile("rwb")

    def ask(self, **request: Any) -> dict[str, Any]:
        self.file.write(json.dumps(request).encode() + b"\n")
        self.file.flush()
        return self.hear()

    def hear(self) -> dict[str, Any]:
        return dict(json.loads(self.file.readline()))

    def write(self, offset: int, data: bytes) -> dict[str, Any]:
        return self.ask(op="write", fd=1, offset=offset, data=base64.b64encode(data).decode())

    def close(self) -> None:
        self.file.close()
        self.sock.close()


THREADED = "import threading, time\n[threading.Thread(target=time.sleep, args=(9e3,)).start() for _ in range(3)]\n"


@pytest.mark.parametrize("program", [COUNTER, THREADED + COUNTER], ids=["plain", "threads"])
def test_stub_writes_relays_and_ends_as_the_program_did(bench: Bench, program: str) -> None:
    child = bench.start(program)
    bench.wait_log(5)
    done = bench.move(child.pid, stub=True)
    assert done["stub"], done
    relay = Relay(bench.home / "stub")
    try:
        before = (bench.home / "log").read_bytes()
        assert relay.ask(op="hello")["pid"] == child.pid
        assert b"moved" in Path(f"/proc/{child.pid}/cmdline").read_bytes()
        assert relay.write(0, b"one\n")["offsets"]["1"] == 4
        assert relay.write(0, b"one\ntwo\n")["offsets"]["1"] == 8  # what was written is skipped
        assert relay.write(99, b"x")["error"] == "gap"
        assert (bench.home / "log").read_bytes() == before + b"one\ntwo\n"
        for count, number in enumerate((signal.SIGTERM, signal.SIGUSR1, signal.SIGINT), 1):
            os.kill(child.pid, number)
            assert relay.hear() == {"signal": number, "number": count}
        assert child.poll() is None
        assert relay.ask(op="exit", code=42)["ok"]
    finally:
        relay.close()
    assert child.wait(30) == 42


def test_signals_wait_for_a_relay_and_a_stub_dies_of_the_same_signal(bench: Bench) -> None:
    child = bench.start(COUNTER)
    bench.wait_log(5)
    bench.move(child.pid, stub=True)
    wait_until((bench.home / "stub/stub.sock").exists, LIMIT_S, "the stub to be up")
    os.kill(child.pid, signal.SIGTERM)
    relay = Relay(bench.home / "stub")
    try:
        relay.ask(op="hello")
        assert relay.hear() == {"signal": signal.SIGTERM, "number": 1}
        relay.ask(op="exit", code=None, signal=signal.SIGTERM)
    finally:
        relay.close()
    assert child.wait(30) == -signal.SIGTERM


# The stub by itself


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts a stub as it is after its exec, beside `tmp_path/stub.sock`."""
    started: list[subprocess.Popen[bytes]] = []

    def start(**streams: Any) -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-I", "-S", stub.__file__, str(tmp_path), "moved"]
        started.append(subprocess.Popen(argv, start_new_session=True, **streams))
        return started[-1]

    yield start
    for one in started:
        one.kill()
        one.wait(LIMIT_S)


def test_a_signal_is_told_until_it_is_heard(alone: Callable[..., subprocess.Popen[bytes]], tmp_path: Path) -> None:
    child = alone()
    first = Relay(tmp_path)
    first.ask(op="hello")
    told = []
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):
        os.kill(child.pid, number)
        told.append(first.hear())
    assert told == [{"signal": number, "number": n} for n, number in enumerate((10, 12, 15), 1)]
    first.close()  # it may have passed on any of them, or none
    second = Relay(tmp_path)
    second.ask(op="hello")
    assert [second.hear() for _ in told] == told
    assert second.ask(op="heard", upto=2)["ok"]
    os.kill(child.pid, signal.SIGINT)
    assert second.hear() == {"signal": signal.SIGINT, "number": 4}
    second.close()
    third = Relay(tmp_path)
    third.ask(op="hello")
    assert [third.hear()["number"] for _ in range(2)] == [3, 4]
    third.close()


def test_ctrl_z_is_told_before_it_stops(alone: Callable[..., subprocess.Popen[bytes]], tmp_path: Path) -> None:
    child = alone()
    relay = Relay(tmp_path)
    relay.ask(op="hello")
    os.kill(child.pid, signal.SIGTSTP)
    assert relay.hear() == {"signal": signal.SIGTSTP, "number": 1}
    wait_until(lambda: thread_states(child.pid) == {"T"}, LIMIT_S, "the stub to be stopped")
    os.kill(child.pid, signal.SIGCONT)
    assert relay.hear() == {"signal": signal.SIGCONT, "number": 2}
    assert thread_states(child.pid) != {"T"}
    relay.close()


def test_a_pipe_that_nobody_reads_does_not_keep_it(
    alone: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    child = alone(stdout=subprocess.PIPE)
    assert child.stdout
    relay = Relay(tmp_path)
    relay.write(0, b"one\n")
    assert child.stdout.readline() == b"one\n"
    child.stdout.close()  # as head does once it has enough
    assert relay.write(4, b"two\n")["offsets"]["1"] == 8
    assert relay.write(8, b"three\n")["offsets"]["1"] == 14
    relay.ask(op="hello")
    assert relay.hear() == {"signal": signal.SIGPIPE, "number": 1}  # once; as the kernel would have told it
    assert relay.ask(op="exit", signal=signal.SIGPIPE)["ok"]
    relay.close()
    assert child.wait(LIMIT_S) == -signal.SIGPIPE


def test_a_terminal_that_was_closed_does_not_keep_it(
    alone: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    ours, theirs = pty.openpty()
    child = alone(stdout=theirs)
    os.close(theirs)
    relay = Relay(tmp_path)
    os.close(ours)
    assert relay.write(0, b"last words\n")["offsets"]["1"] == 11
    assert relay.ask(op="exit", code=3)["ok"]
    relay.close()
    assert child.wait(LIMIT_S) == 3


def test_its_input_is_given_in_order_and_again(alone: Callable[..., subprocess.Popen[bytes]], tmp_path: Path) -> None:
    reading, writing = os.pipe()
    child = alone(stdin=reading)
    os.close(reading)

    def part(relay: Relay, at: int) -> tuple[bytes, bool]:
        answer = relay.ask(op="input", offset=at)
        return base64.b64decode(answer["data"]), answer["end"]

    relay = Relay(tmp_path)
    os.write(writing, b"one")
    assert part(relay, 0) == (b"one", False) and part(relay, 1) == (b"ne", False)
    assert relay.ask(op="input", offset=4) == {"error": "gap"}
    relay.file.write(b'{"op": "input", "offset": 3}\n')  # and it goes before there is an answer
    relay.file.flush()
    relay.close()
    other = Relay(tmp_path)
    assert other.ask(op="hello")["pid"] == child.pid
    os.write(writing, b"two")
    assert part(other, 3) == (b"two", False)
    os.close(writing)
    assert part(other, 6) == (b"", True) and part(other, 2) == (b"etwo", True)
    other.ask(op="exit", code=0)
    other.close()


def test_input_goes_on_while_nobody_takes_its_output(
    alone: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    """Whoever started it may write all of the input before it reads anything."""
    child = alone(stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin and child.stdout
    data = os.urandom(300_000)
    writer, other = Relay(tmp_path), Relay(tmp_path)
    line = json.dumps({"op": "write", "fd": 1, "offset": 0, "data": base64.b64encode(data).decode()})
    writer.file.write(line.encode() + b"\n")
    writer.file.flush()
    child.stdin.write(b"question")
    child.stdin.flush()
    assert base64.b64decode(other.ask(op="input", offset=0)["data"]) == b"question"
    assert other.ask(op="hello")["offsets"]["1"] < len(data)
    assert child.stdout.read(len(data)) == data
    assert writer.hear()["offsets"]["1"] == len(data)
    other.ask(op="exit", code=0)
    for one in (writer, other, child.stdin, child.stdout):
        one.close()


def test_a_write_that_was_given_up_is_not_done_twice(
    alone: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    child = alone(stdout=subprocess.PIPE)
    assert child.stdout
    data = os.urandom(300_000)
    line = json.dumps({"op": "write", "fd": 1, "offset": 0, "data": base64.b64encode(data).decode()})
    for _ in range(2):  # nobody waits for its answer
        relay = Relay(tmp_path)
        relay.file.write(line.encode() + b"\n")
        relay.file.flush()
        relay.close()
    last = Relay(tmp_path)
    last.file.write(line.encode() + b"\n")
    last.file.flush()
    assert child.stdout.read(len(data)) == data
    assert last.hear()["offsets"]["1"] == len(data)
    last.ask(op="exit", code=0)
    last.close()
    assert child.stdout.read() == b""
    child.stdout.close()


def test_who_writes_to_it_is_told_that_nobody_reads(
    alone: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    reading, writing = os.pipe()
    alone(stdin=reading)
    os.close(reading)
    relay = Relay(tmp_path)
    assert relay.ask(op="input_over")["ok"]
    with pytest.raises(BrokenPipeError):
        os.write(writing, b"x")
    os.close(writing)
    relay.ask(op="exit", code=0)
    relay.close()


def test_a_full_disk_is_told_and_tried_again(alone: Callable[..., subprocess.Popen[bytes]], tmp_path: Path) -> None:
    with open("/dev/full", "wb") as full:
        alone(stdout=full)
    relay = Relay(tmp_path)
    answer = relay.write(0, b"one\n")
    assert answer["errno"] == errno.ENOSPC and answer["offsets"]["1"] == 0
    relay.close()


def test_a_stub_that_is_slow_to_listen_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held, "STUB_LIMIT_S", 0.0)
    me = process_id(os.getpid())
    assert me and held._await_stub(me, tmp_path) == ""
    monkeypatch.setattr(held, "STUB_LIMIT_S", LIMIT_S)
    assert held._await_stub(ProcessId(me.pid, 1), tmp_path) == "the stub ended at once"


def test_a_source_that_was_killed_before_the_stub_is_told(bench: Bench) -> None:
    child = bench.start(ENDING, bench.end_file, "7")
    bench.wait_log(3)
    bench.stage(child.pid)
    bench.keepers["b"].in_go("m")
    child.kill()
    child.wait(LIMIT_S)
    out = bench.keepers["a"].out_finish("m", {"dir": str(bench.home / "stub"), "label": "moved to b"})
    assert (out["phase"], out["stub"], out["stub_reason"]) == ("finished", False, "it was gone")
    bench.end()
    assert bench.exit_of()["code"] == 7


def test_who_makes_the_stub_is_killed_and_the_next_one_does(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    child = bench.start(ENDING, bench.end_file, "7")
    bench.wait_log(3)
    bench.stage(child.pid)
    bench.keepers["b"].in_go("m")
    keeper = bench.keepers["a"]
    killed: list[bool] = []
    launch = keeper.launchers.launch

    def launch_and_kill(side: str, directory: Path, spec: dict[str, Any]) -> None:
        launch(side, directory, spec)
        if len(killed) < 2:
            maker = json.loads((directory / "out.json").read_text())["mover"]
            killed.append(ProcessId(maker["pid"], maker["start_ticks"]).signal(signal.SIGKILL))

    monkeypatch.setattr(keeper.launchers, "launch", launch_and_kill)
    out = keeper.out_finish("m", {"dir": str(bench.home / "stub"), "label": "moved to b"})
    assert len(killed) >= 1 and out["stub"], out
    assert b"stub.py" in Path(f"/proc/{child.pid}/cmdline").read_bytes()
