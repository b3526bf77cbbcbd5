"""The doctor where there is no daemon, no cluster, or a configuration that does not hold."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any


def doctor(grid_command: str, cwd: Path, *args: str) -> tuple[int, dict[str, Any]]:
    argv = [grid_command, "doctor", "--format", "json", *args]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, cwd=cwd, stdin=subprocess.DEVNULL)
    assert "Traceback" not in done.stderr
    return done.returncode, json.loads(done.stdout)


def by_check(found: dict[str, Any], check: str) -> list[dict[str, str]]:
    return [one for one in found["findings"] if one["check"] == check]


def test_without_a_daemon(grid_command: str, grid_home: Path, tmp_path: Path) -> None:
    _code, found = doctor(grid_command, tmp_path)
    checks = {one["check"] for one in found["findings"]}
    assert checks >= {"python", "ray", "config", "daemon", "token", "ports", "disk", "criu", "gpu", "nodes"}
    assert by_check(found, "daemon")[0]["level"] == "note"
    assert by_check(found, "nodes")[0]["next"] == "grid cluster start"
    assert not (grid_home / "daemon.lock").exists(), "the doctor must start no daemon"


def test_a_wrong_configuration_is_a_problem(grid_command: str, tmp_path: Path) -> None:
    config = tmp_path / "bad.yaml"
    config.write_text("embeded: true\n")
    code, found = doctor(grid_command, tmp_path, "--config", str(config))
    assert code == 1
    problem = by_check(found, "config")[0]
    assert problem["level"] == "problem" and "embeded" in problem["text"] and "bad.yaml" in problem["text"]


def test_a_host_that_does_not_answer_and_a_key_that_others_may_read(grid_command: str, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("no key\n")
    key.chmod(0o644)
    config = tmp_path / "lab.yaml"
    config.write_text(
        "nodes:\n  - {name: head, host: 127.0.0.1, role: head}\n"
        f"  - {{name: gone, host: 127.0.0.1, port: 1, user: nobody, key: {key}}}\n"
    )
    code, found = doctor(grid_command, tmp_path, "--config", str(config))
    assert code == 1
    problems = [one for one in by_check(found, "ssh") if one["level"] == "problem"]
    assert len(problems) == 2 and all(one["node"] == "gone" and one["next"] for one in problems)


def test_an_unknown_node(grid_command: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [grid_command, "doctor", "-n", "gpu9"], capture_output=True, text=True, timeout=120, cwd=tmp_path,
        env=dict(os.environ),
    )  # fmt: skip
    assert done.returncode == 3
    assert done.stderr.startswith("error:") and "try:" in done.stderr
