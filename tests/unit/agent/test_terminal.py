"""A command on a terminal of its own: size, colours, input, signals and its end."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from distributed_grid.agent import terminal
from tests.lab.waiting import wait_until


def argv(place: Path, *command: str, stdin: str = "none") -> list[str]:
    return [sys.executable, "-I", "-S", terminal.__file__, "40x132", str(place / "size"), stdin, *command]


def run(place: Path, script: str, typed: str = "", stdin: str = "none") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        argv(place, "sh", "-c", script, stdin=stdin), input=typed, capture_output=True, text=True, timeout=60
    )


def test_it_is_a_terminal_of_that_size(tmp_path: Path) -> None:
    done = run(tmp_path, "test -t 1 && test -t 2 && stty size <&1; test -t 0 || echo no input; echo err >&2; exit 7")
    assert (done.stdout, done.stderr, done.returncode) == ("40 132\nno input\nerr\n", "", 7)


def test_what_is_typed_arrives_once_and_ends(tmp_path: Path) -> None:
    done = run(tmp_path, "test -t 0; echo $?; cat", typed="one\ntwo\n", stdin="stdin")
    assert (done.stdout, done.returncode) == ("0\none\ntwo\n", 0)


def test_all_of_a_long_output_comes(tmp_path: Path) -> None:
    done = run(tmp_path, "seq 100000")
    assert done.stdout.split() == [str(number) for number in range(1, 100001)]


def test_a_command_that_is_not_there(tmp_path: Path) -> None:
    done = subprocess.run(argv(tmp_path, "no-such-command"), capture_output=True, text=True, timeout=60)
    assert done.returncode == 127 and "no-such-command" in done.stdout


def test_signals_and_a_new_size(tmp_path: Path) -> None:
    out = tmp_path / "out"
    script = "trap 'stty size <&1' WINCH; trap 'echo asked; exit 3' TERM; echo up; while :; do sleep 0.05; done"
    with out.open("wb") as file, subprocess.Popen(argv(tmp_path, "sh", "-c", script), stdout=file) as running:
        wait_until(lambda: "up" in out.read_text(), 60, "it to be up")
        (tmp_path / "size").write_text("20x30")
        running.send_signal(signal.SIGWINCH)
        wait_until(lambda: "20 30" in out.read_text(), 60, "the new size")
        running.send_signal(signal.SIGTERM)
        assert running.wait(60) == 3
    assert "asked" in out.read_text()
    with subprocess.Popen(argv(tmp_path, "sh", "-c", "kill -9 $$"), stdout=subprocess.DEVNULL) as killed:
        assert killed.wait(60) == -signal.SIGKILL
