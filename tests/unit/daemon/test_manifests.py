"""What is the same for one moved process is the same for its siblings, and for nobody else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from distributed_grid.daemon.manifests import Manifests
from distributed_grid.store.journal import Journal
from distributed_grid.store.moves import MoveRow


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    made = Journal.open(tmp_path / "journal.sqlite3")
    yield made
    made.close()


def add(journal: Journal, move_id: str, target: str, home: str = "gpu-master", tree: str = "/w") -> None:
    journal.moves.start(MoveRow(move_id, "CLEANED", "gpu-master", 1, 1, target, 0, 1.0, 1.0), "")
    agreed = {"trees": [tree], "files": []}
    manifest: dict[str, Any] = {"agreement": {"home": agreed}, "home": home, "here": {}, "there": {}}
    Manifests(journal).put(move_id, manifest)


def test_siblings_are_moves_between_the_same_nodes(journal: Journal) -> None:
    for move_id, target, home in (("a", "gpu1", "gpu-master"), ("b", "gpu1", "gpu-master"), ("c", "gpu2", "gpu-master"),
                                  ("d", "gpu1", "gpu2")):  # fmt: skip
        add(journal, move_id, target, home)
    add(journal, "e", "gpu1", tree="/elsewhere")
    manifests = Manifests(journal)
    assert [other for other, _ in manifests.siblings("a", "gpu-master", "gpu1")] == ["b", "e"]
    mine: dict[str, Any] = {"home": "gpu-master", "here": {"/w/x": [1, 2], "/w/y": [9, 9]}, "there": {"/w/x": [1, 3]}}
    manifests.same("a", mine, "gpu1", ["/w/x", "/w/y", "/w/z"])
    assert manifests.known("a", "gpu-master", "gpu1") == {"/w/x": ([1, 2], [1, 3])}
    for other in "acde":
        assert manifests.get(other)["here"] == {}  # type: ignore[index]
    manifests.delete("b")
    assert manifests.get("b") is None and manifests.known("a", "gpu-master", "gpu1") == {}
