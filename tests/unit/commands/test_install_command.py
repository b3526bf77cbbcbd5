"""`grid cluster install` before any node is asked."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path


def test_the_embedded_cluster_needs_none(grid_command: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [grid_command, "cluster", "install"], capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    assert done.returncode == 4
    assert done.stderr.startswith("error:") and "try: grid init --real-hosts" in done.stderr


def test_each_node_has_its_own_outcome(grid_command: str, tmp_path: Path) -> None:
    config = tmp_path / "lab.yaml"
    config.write_text(
        "nodes:\n  - {name: head, host: 127.0.0.1, role: head}\n  - {name: gone, host: 127.0.0.1, port: 1}\n"
    )
    done = subprocess.run(
        [grid_command, "cluster", "install", "--config", str(config), "--format", "json"],
        capture_output=True, text=True, timeout=60, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    results = json.loads(done.stdout)
    assert "done" in results["head"] and "127.0.0.1:1" in results["gone"]["error"]
