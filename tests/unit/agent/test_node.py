"""Which processes belong to a node of an embedded cluster, without reading what has ended again and again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from distributed_grid.agent import node as node_module
from distributed_grid.agent.node import SPOOL, AgentNode


def agent(nodes: Path, name: str, role: str = "worker") -> AgentNode:
    return AgentNode(name, role, "127.0.0.1", nodes / name, embedded=True, declared=None)


def begin(nodes: Path, name: str, task: str, pid: int) -> Path:
    task_dir = nodes / name / SPOOL / task
    task_dir.mkdir(parents=True)
    (task_dir / "shim.json").write_text(json.dumps({"pid": pid}))
    return task_dir


def test_what_runs_is_found_and_what_ended_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []
    real = node_module.read_json

    def noting(path: Path) -> dict[str, object] | None:
        read.append(path)
        return real(path)

    monkeypatch.setattr(node_module, "read_json", noting)
    worker, head = agent(tmp_path, "gpu1"), agent(tmp_path, "gpu-master", "head")
    (tmp_path / "gpu2").mkdir()  # has not begun
    ended = begin(tmp_path, "gpu1", "task_1", 11)
    begin(tmp_path, "gpu1", "task_2", 12)
    begin(tmp_path, "gpu-master", "task_3", 13)
    assert worker._shims() == {11, 12} == head._shims()

    (ended / "exit.json").write_text("{}")
    assert worker._shims() == {12} == head._shims()
    read.clear()

    def exists(path: Path) -> bool:
        assert path.parent != ended, "looked at again"
        return path.is_file()

    monkeypatch.setattr(Path, "exists", exists)
    assert worker._shims() == {12}
    assert [path.parent.name for path in read] == ["task_2"]
    monkeypatch.undo()

    shutil.rmtree(ended)
    assert worker._shims() == {12}
    begin(tmp_path, "gpu1", "task_1", 14)  # its id, asked for once more
    assert worker._shims() == {12, 14}
