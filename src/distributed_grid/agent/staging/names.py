"""Which names a move has agreed on: a file beneath one of its directories, or one that was named. Pure."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from distributed_grid.core.errors import Refused

#: Never sent, never brought home: made anew by whoever needs it, or not of this machine's making.
SKIPPED = frozenset(
    {
        ".git", ".hg", ".svn", ".venv", "venv", "__pycache__", "node_modules", ".tox", ".nox", ".mypy_cache",
        ".ruff_cache", ".pytest_cache", ".ipynb_checkpoints", "lost+found",
    }
)  # fmt: skip
#: What we write beside a file until it is whole.
TEMPORARY = ".grid-part-"
NONCE = ".grid-nonce-"


@dataclass(frozen=True, slots=True)
class Place:
    """A file's name and the agreed directory that it lies beneath."""

    path: str
    tree: str

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    @property
    def inside(self) -> list[str]:
        """The directories on the way from the tree to the file."""
        return [part for part in self.path[len(self.tree.rstrip("/")) :].split("/")[:-1] if part]


@dataclass(frozen=True, slots=True)
class Agreed:
    """What may be read and written for one move, on either side."""

    trees: tuple[str, ...] = ()
    files: tuple[str, ...] = ()

    def to_wire(self) -> dict[str, Any]:
        return {"trees": list(self.trees), "files": list(self.files)}

    @staticmethod
    def from_wire(data: Mapping[str, Any]) -> Agreed:
        return Agreed(tuple(data.get("trees", ())), tuple(data.get("files", ())))

    def covers(self, path: str) -> bool:
        return is_plain(path) and (path in self.files or any(beneath(path, tree) for tree in self.trees))

    def place(self, path: str) -> Place:
        """Where it lies, or Refused."""
        if not self.covers(path):
            raise Refused(f"{path!r} is outside of the agreed directories", code="file-outside")
        tree = next((tree for tree in self.trees if beneath(path, tree)), "")
        return Place(path, tree or path.rpartition("/")[0] or "/")


def is_plain(path: str) -> bool:
    """An absolute name without detours, so that its text alone says where it leads."""
    return path.startswith("/") and not path.startswith("//") and "\0" not in path and os.path.normpath(path) == path


def beneath(path: str, tree: str) -> bool:
    return path.startswith(tree.rstrip("/") + "/")


def is_skipped(name: str, *, hidden: bool) -> bool:
    """`hidden`: in a home, what begins with a dot is the account's own."""
    return name in SKIPPED or name.startswith((TEMPORARY, NONCE)) or (hidden and name.startswith("."))


def is_home(tree: str) -> bool:
    return os.path.dirname(tree) == "/home"  # noqa: PTH120
