"""Layers of settings as flat keys: the two layouts and all spellings become one, and a higher layer wins key by key."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from distributed_grid.core.errors import ConfigError

Path = tuple[str | int, ...]

_MAX_DEPTH = 20
_KINDS = ("cpu", "memory", "gpu")
_NODE_SPELLINGS = {"cpu": "cpu_count", "gpu": "gpu_count", "memory": "memory_gb"}
#: Keys of `resource_sharing` that have a second spelling, as written, and their one home.
_SHARING_SPELLINGS: dict[Path, Path] = {
    ("rebalance_interval",): ("rebalance_interval_seconds",),
    **{
        ("thresholds", f"{kind}_pressure_{level}"): ("pressure_thresholds", kind, level)
        for kind in _KINDS
        for level in ("high", "low")
    },
}


@dataclass(frozen=True, slots=True)
class Entry:
    """One value, the key as it was written, and where: `config/x.yaml:12`, `GRID__RAY__PORT`."""

    value: Any
    written: Path
    where: str


@dataclass(slots=True)
class Layer:
    """Values by canonical key. `lists` are keys given as whole lists, which replace a lower layer's."""

    entries: dict[Path, Entry] = field(default_factory=dict)
    lists: set[Path] = field(default_factory=set)


def dotted(path: Path) -> str:
    return ".".join(str(part) for part in path)


def undotted(key: str, separator: str = ".") -> Path:
    return tuple(int(part) if part.isdigit() else part for part in key.split(separator))


def canonical(path: Path) -> Path:
    """The one home of a key, however and wherever it was written."""
    if path[:2] == ("execution", "resource_sharing"):
        path = path[1:]
    if path[:1] == ("resource_sharing",):
        return path[:1] + _SHARING_SPELLINGS.get(path[1:], path[1:])
    if len(path) == 3 and path[0] == "nodes" and path[2] in _NODE_SPELLINGS:
        return (*path[:2], _NODE_SPELLINGS[str(path[2])])
    return path


def spellings(section: Path) -> list[str]:
    """Other names that a section's keys go by, for the nearest-name hint."""
    if section and section[0] == "nodes" and len(section) == 2:
        return list(_NODE_SPELLINGS)
    if section[:1] == ("resource_sharing",):
        return [str(written[-1]) for written in _SHARING_SPELLINGS if written[:-1] == section[1:]]
    return ["execution"] if not section else []


def flatten(data: Any, at: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Leaves of nested mappings; a list of mappings is entered, any other list is a leaf."""
    if len(at) > _MAX_DEPTH:
        raise ConfigError(f"{dotted(at[:3])}…: nested too deeply")
    if isinstance(data, Mapping) and data:
        for key, value in data.items():
            yield from flatten(value, (*at, str(key)))
    elif _is_table(data):
        for index, value in enumerate(data):
            yield from flatten(value, (*at, index))
    else:
        yield at, data


def lists_in(data: Any, at: Path = ()) -> Iterator[Path]:
    """Keys that hold a list of mappings."""
    if isinstance(data, Mapping):
        for key, value in data.items():
            yield from lists_in(value, (*at, str(key)))
    elif _is_table(data):
        yield at


def _is_table(data: Any) -> bool:
    return isinstance(data, list) and any(isinstance(item, Mapping) for item in data)


def build(leaves: Iterable[tuple[Path, Any, str]], lists: Iterable[Path] = ()) -> Layer:
    """A layer from (key as written, value, where). One key given twice must agree, or both places are named."""
    layer = Layer(lists={canonical(path) for path in lists})
    for written, value, where in leaves:
        path = canonical(written)
        if not path or (path == ("execution",) and not value):
            continue
        before = layer.entries.get(path)
        if before is not None and before.value != value and not _is_empty(before.value) and not _is_empty(value):
            raise ConfigError(
                f"{dotted(path)} is given twice, with different values",
                cause=f"{_say(before)}, and {_say(Entry(value, written, where))}",
                hint="keep one of the two",
                code="config-twice",
                key=dotted(path),
            )
        if before is None or _is_empty(before.value):
            layer.entries[path] = Entry(value, written, where)
    _drop_hollow(layer.entries)
    return layer


def merge(low_to_high: Iterable[Layer]) -> dict[Path, Entry]:
    """What is in effect: for each key the entry of the highest layer that has it."""
    merged: dict[Path, Entry] = {}
    for layer in low_to_high:
        for path in layer.lists:
            merged = {known: entry for known, entry in merged.items() if known[: len(path)] != path}
        for path, entry in layer.entries.items():
            if not _is_empty(entry.value):
                # A value in the place of a whole section, or the other way round: the higher layer's shape counts.
                for known in [known for known in merged if _inside(known, path) or _inside(path, known)]:
                    del merged[known]
            merged[path] = entry
    _drop_hollow(merged)
    return merged


def nest(entries: Mapping[Path, Entry]) -> dict[str, Any]:
    """The nested form again, with lists where the keys are numbers."""
    tree: dict[str | int, Any] = {}
    for path, entry in entries.items():
        here = tree
        for part in path[:-1]:
            here = here.setdefault(part, {})
        here[path[-1]] = entry.value
    return {str(key): _lists(value, (key,), entries) for key, value in tree.items()}


def _lists(value: Any, at: Path, entries: Mapping[Path, Entry]) -> Any:
    if not isinstance(value, dict) or at in entries:
        return value
    inner = {key: _lists(item, (*at, key), entries) for key, item in value.items()}
    if not any(isinstance(key, int) for key in inner):
        return inner
    for key in inner:
        if key not in range(len(inner)):
            entry = next(entry for path, entry in entries.items() if path[: len(at) + 1] == (*at, key))
            raise ConfigError(
                f"{entry.where}: there is no {dotted((*at, key))}",
                hint=f"{dotted(at)} are counted from 0",
                code="config",
            )
    return [inner[key] for key in sorted(inner)]


def canonical_tree(data: Mapping[Any, Any]) -> dict[str, Any]:
    """Plain settings in either layout, as the one tree that the model knows."""
    try:
        layer = build((path, value, "") for path, value in flatten(data))
    except ConfigError as err:
        raise ValueError(f"{err.message}: {err.cause}" if err.cause else err.message) from None
    return nest(layer.entries)


def _say(entry: Entry) -> str:
    return f"{entry.where + ' ' if entry.where else ''}{dotted(entry.written)}: {entry.value}"


def _is_empty(value: Any) -> bool:
    return value is None or value == {}


def _inside(path: Path, section: Path) -> bool:
    return len(path) > len(section) and path[: len(section)] == section


def _drop_hollow(entries: dict[Path, Entry]) -> None:
    """An empty section beside keys of the same section (the other layout, a lower layer) says nothing."""
    for path in [path for path, entry in entries.items() if _is_empty(entry.value)]:
        if any(_inside(other, path) for other in entries):
            del entries[path]
