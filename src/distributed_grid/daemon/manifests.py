"""What the daemon knows of the files of each moved process: what was agreed, and how each stood on both sides when they
were last the same.

In the journal under `staging:MOVE`, until the files are home. Moves between the same two nodes are siblings: they share
the files there as they did at home, so what one brings or finds the same is so for the others as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from distributed_grid.agent.staging.names import Agreed
from distributed_grid.store.journal import Journal

_PREFIX = "staging:"

Mark = list[int]
Manifest = dict[str, Any]


class Manifests:
    def __init__(self, journal: Journal) -> None:
        self._kv = journal.kv
        self._moves = journal.moves

    def get(self, move_id: str) -> Manifest | None:
        found: Manifest | None = self._kv.get(_PREFIX + move_id)
        return found

    def put(self, move_id: str, manifest: Manifest) -> None:
        self._kv.put(_PREFIX + move_id, manifest)

    def delete(self, move_id: str) -> None:
        self._kv.delete(_PREFIX + move_id)

    def siblings(self, move_id: str, home: str, target: str) -> Iterator[tuple[str, Manifest]]:
        """The other moves from that home to that target whose files are not home yet."""
        for key, manifest in self._kv.list(_PREFIX).items():
            other = key.removeprefix(_PREFIX)
            row = self._moves.find(other)
            if other != move_id and row and row.target == target and manifest["home"] == home:
                yield other, manifest

    def known(self, move_id: str, home: str, target: str) -> dict[str, tuple[Mark, Mark]]:
        """Files that siblings have there: how each stood at home and there when both were the same."""
        found: dict[str, tuple[Mark, Mark]] = {}
        for _, manifest in self.siblings(move_id, home, target):
            there = manifest["there"]
            found |= {path: (mark, there[path]) for path, mark in manifest["here"].items() if path in there}
        return found

    def same(self, move_id: str, manifest: Manifest, target: str, paths: Iterable[str]) -> None:
        """These are the same on both sides now: true for every sibling that may bring them, too."""
        here, there = manifest["here"], manifest["there"]
        known = [path for path in paths if path in here and path in there]
        for other, theirs in self.siblings(move_id, manifest["home"], target):
            agreed = Agreed.from_wire(theirs["agreement"]["home"])
            common = [path for path in known if agreed.covers(path)]
            if common:
                theirs["here"] |= {path: here[path] for path in common}
                theirs["there"] |= {path: there[path] for path in common}
                self.put(other, theirs)
