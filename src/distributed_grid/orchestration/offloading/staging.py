"""Which files go along with a process, which may come home, and what is done where both sides changed one. Pure."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from distributed_grid.agent.inspect.facts import ProcessFacts, TreeFacts
from distributed_grid.agent.staging.beneath import Entry
from distributed_grid.agent.staging.names import Agreed, beneath, is_plain
from distributed_grid.core.resources import format_bytes
from distributed_grid.orchestration.offloading.model import Strategy
from distributed_grid.orchestration.offloading.preflight_files import _is_system as is_system
from distributed_grid.orchestration.offloading.preflight_files import output_files

#: Everybody's directories: in these only the files count that the process itself has open or names.
WIDE = frozenset(
    {
        "/", "/root", "/tmp", "/var/tmp", "/var", "/dev", "/dev/shm", "/home", "/run", "/mnt", "/media", "/srv",
        "/proc", "/sys",
    }
)  # fmt: skip
#: A directory with more files than this is not copied; what the process changes in it still comes home.
MAX_FILES = 5000
#: Looked through on the way home: more than this beneath one directory is not what one process made.
MAX_FILES_HOME = 50_000
#: An open file of this size that nobody writes to is sent before the freeze.
LARGE_BYTES = 1 << 20
_ARGUMENTS_LIMIT = 64


@dataclass(frozen=True, slots=True)
class Agreement:
    """What a move carries besides memory, fixed before it begins."""

    #: What may come home.
    home: Agreed = field(default_factory=Agreed)
    #: What is sent before the freeze; what changed of it until then, after it.
    sent: Agreed = field(default_factory=Agreed)
    #: Open files that travel with the memory, while it stands still.
    frozen: tuple[str, ...] = ()
    #: Directories that must be there.
    directories: tuple[str, ...] = ()
    #: Where its output goes: written at home, never sent.
    output: tuple[str, ...] = ()
    uid: int = 0
    gid: int = 0
    #: A directory with more than this is not sent.
    max_files: int = MAX_FILES

    def __bool__(self) -> bool:
        return bool(self.home.trees or self.home.files or self.sent.trees or self.sent.files or self.directories)

    def to_wire(self) -> dict[str, Any]:
        return {
            "home": self.home.to_wire(), "sent": self.sent.to_wire(), "frozen": list(self.frozen),
            "directories": list(self.directories), "output": list(self.output), "uid": self.uid, "gid": self.gid,
            "max_files": self.max_files,
        }  # fmt: skip

    @staticmethod
    def from_wire(data: Mapping[str, Any]) -> Agreement:
        return Agreement(
            Agreed.from_wire(data["home"]), Agreed.from_wire(data["sent"]), tuple(data["frozen"]),
            tuple(data["directories"]), tuple(data["output"]), data["uid"], data["gid"],
            data.get("max_files", MAX_FILES),
        )  # fmt: skip


def is_tree(path: str) -> bool:
    """Whether a directory is a process's own to work in."""
    return bool(path) and is_plain(path) and path not in WIDE and not is_system(path + "/")


def named_files(root: ProcessFacts) -> list[str]:
    """Arguments that may be files, as whole names; the program itself must be on the target anyway."""
    found: dict[str, None] = {}
    for word in root.argv[1 : 1 + _ARGUMENTS_LIMIT]:
        text = word.partition("=")[2] if word.startswith("-") else word
        if not text or "\0" in text or "\n" in text or len(text) > 1000:
            continue
        path = os.path.normpath(os.path.join(root.cwd or "/", text))  # noqa: PTH118
        if is_tree(os.path.dirname(path)) or os.path.dirname(path) in WIDE - {"/proc", "/sys", "/dev"}:  # noqa: PTH120
            found[path] = None
    return list(found)


def script_directory(root: ProcessFacts) -> str:
    """Where a Python script has its own modules beside it; empty where there is no script."""
    for word in root.argv[1:]:
        if word.endswith(".py") and not word.startswith("-"):
            return os.path.dirname(os.path.normpath(os.path.join(root.cwd or "/", word)))  # noqa: PTH118, PTH120
    return ""


def more_directories(facts: TreeFacts) -> list[str]:
    """Directories of what the command line names: whether they are shared is worth asking, too."""
    found = {os.path.dirname(path): None for path in named_files(facts.root)}  # noqa: PTH120
    if script := script_directory(facts.root):
        found[script] = None
    return [one for one in found if is_tree(one)][:8]


def agree(
    facts: TreeFacts, *, strategy: Strategy, files: Sequence[str], shared: Callable[[str], bool]
) -> Agreement:
    """`files`: what pre-flight found to be sent; `shared`: whether both nodes see a path alike."""
    root = facts.root
    output = output_files(facts)
    written = {
        one.path for process in facts.processes for one in process.files
        if one.kind == "regular" and one.writes and not one.deleted
    }  # fmt: skip
    written |= {one.path for process in facts.processes for one in process.mapped if one.shared_write}
    sizes = {one.path: one.size_bytes for process in facts.processes for one in process.files}
    carried = [path for path in files if path not in output and not shared(path)]
    works_in = [one.cwd for one in facts.processes if one.cwd and not one.cwd_deleted and not shared(one.cwd)]
    writes_in = [os.path.dirname(path) for path in carried if path in written]  # noqa: PTH120
    watched = _outermost(one for one in [*works_in, *writes_in] if is_tree(one) and not shared(one))
    script = script_directory(root)
    sent_trees = [one for one in [*works_in, script] if is_tree(one) and not shared(one)]
    named = [path for path in named_files(root) if not shared(path) and path not in output]
    if strategy == "live":
        early = [path for path in carried if path not in written and sizes.get(path, 0) >= LARGE_BYTES]
        frozen = [path for path in carried if path not in early]
    else:
        early, frozen = carried, []
    home = Agreed(watched, tuple(path for path in carried if path in written and not _covered(path, watched)))
    sent = Agreed(_outermost(sent_trees), tuple(dict.fromkeys([*early, *named])))
    bound = [
        one.path for process in facts.processes for one in process.files
        if one.kind == "unix" and one.path.startswith("/") and not shared(one.path)
    ]  # fmt: skip
    directories = dict.fromkeys([*works_in, *(os.path.dirname(path) for path in [*carried, *bound])])  # noqa: PTH120
    return Agreement(home, sent, tuple(frozen), tuple(directories), tuple(sorted(output)), root.uid, root.gid)


def _covered(path: str, trees: Iterable[str]) -> bool:
    return any(beneath(path, tree) for tree in trees)


def _outermost(paths: Iterable[str]) -> tuple[str, ...]:
    names = sorted(set(paths))
    return tuple(one for one in names if not _covered(one, names))


def fit(
    agreement: Agreement, entries: Sequence[Entry], many: Sequence[str], limit_bytes: int, large: bool | None = None
) -> tuple[Agreement, list[str], str]:
    """The agreement within the limits, what is to be said of it, and why it cannot be.

    `many`: trees with too many files to list. `large`: whether to copy what is beyond the limits (None: it asks).
    """
    trees = tuple(one for one in agreement.sent.trees if one not in many)
    wanted = [one for one in entries if one.path not in agreement.frozen and one.path not in agreement.output]
    total = sum(one.size for one in wanted if not one.link)
    over = [f"{one} holds more than {MAX_FILES_HOME if large else MAX_FILES} files"
            for one in agreement.sent.trees if one in many]  # fmt: skip
    if total > limit_bytes and not large:
        over.append(f"{format_bytes(total)} of files would have to be copied, more than {format_bytes(limit_bytes)}")
        trees = ()
    notices, refusal = [], ""
    if over and large is None:
        refusal = "; ".join(over)
    elif over:
        left = ", ".join(one for one in agreement.sent.trees if one not in trees) or "what it names"
        notices.append(f"{'; '.join(over)}: of {left} only files that it has open or names are copied")
    if wanted and not refusal and (trees or total <= limit_bytes):
        where = ", ".join(trees) or "its own"
        notices.append(f"{len(wanted)} files ({format_bytes(total)}) of {where} are copied along")
    if agreement.home.trees:
        notices.append(f"files that it changes in {', '.join(agreement.home.trees)} come home when it ends")
    fitted = replace(agreement, sent=Agreed(trees, agreement.sent.files),
                     max_files=MAX_FILES_HOME if large else MAX_FILES)  # fmt: skip
    return fitted, notices, refusal


# -- the way home -----------------------------------------------------------------------------------------------------

Mark = list[int]


def changed_there(
    entries: Iterable[Mapping[str, Any]], known: Mapping[str, Mark], home: Agreed, uid: int
) -> tuple[list[str], list[str]]:
    """Files that the process changed or made, and names that the other side should not have sent."""
    found, outside = [], []
    for one in entries:
        path = str(one["path"])
        if not home.covers(path):
            outside.append(path)
        elif one.get("link") or [one["size"], one["mtime_ns"]] == known.get(path):
            continue
        elif path in known or uid in (0, one["uid"]):
            found.append(path)
    return found, outside


def decide_home(base: Mark | None, here: Entry | None, digest: str) -> Literal["write", "same", "both"]:
    """`base`: how the file at home stood when it was last the same as the other; `here`: how it stands now."""
    if here is None:
        return "write"
    if here.digest and here.digest == digest:
        return "same"
    return "write" if not here.link and here.mark == base else "both"


def other_name(path: str, node: str, number: int = 1) -> str:
    return f"{path}.from-{node}" + (f".{number}" if number > 1 else "")
