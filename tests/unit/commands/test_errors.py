"""Errors on the command line: for people, and with `--format json` for scripts."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path


def grid(command: str, cwd: Path, *words: str) -> tuple[int, str]:
    done = subprocess.run([command, *words], capture_output=True, text=True, timeout=60, cwd=cwd)
    assert done.stdout == ""
    return done.returncode, done.stderr


def test_people_and_scripts(grid_command: str, tmp_path: Path) -> None:
    code, said = grid(grid_command, tmp_path, "status", "--config", "none.yaml")
    assert code == 2 and said.startswith("error: ") and "none.yaml" in said
    code, said = grid(grid_command, tmp_path, "status", "--config", "none.yaml", "--format", "json")
    told = json.loads(said)["error"]
    assert code == told["exit_code"] == 2 and "none.yaml" in told["message"] + told["cause"]
    assert set(told) == {"code", "message", "cause", "hint", "details", "exit_code"}


def test_wrong_options(grid_command: str, tmp_path: Path) -> None:
    for words in (["--bogus", "--format", "json"], ["--format=json", "--bogus"]):
        code, said = grid(grid_command, tmp_path, "jobs", "list", *words)
        told = json.loads(said)["error"]
        assert (code, told["code"], told["hint"]) == (2, "usage", "grid jobs list --help") and "--bogus" in said
    # What stands after a command is the command's own.
    code, said = grid(grid_command, tmp_path, "execute", "-e", "novalue", "program", "--format", "json")
    assert code == 2 and said.startswith("error: ")


def test_a_reader_that_has_enough(grid_command: str, tmp_path: Path) -> None:
    line = f"{grid_command} config show | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert (done.stdout, done.stderr) == ("0\n", "")
