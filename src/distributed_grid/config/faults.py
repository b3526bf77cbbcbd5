"""What the model refuses, told as file, line, key, and the nearest key that exists."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError

from distributed_grid.config.layers import Entry, Path, dotted
from distributed_grid.config.models import Misfit
from distributed_grid.config.reference import known_keys
from distributed_grid.config.yaml_source import Source
from distributed_grid.core.errors import ConfigError


def explain(err: ValidationError, entries: Mapping[Path, Entry], source: Source | None) -> ConfigError:
    """One error for the user out of all that pydantic found; the first in the file leads."""
    faults = [_fault(dict(found), entries, source) for found in err.errors(include_url=False)]
    faults.sort(key=lambda fault: (fault.details["line"] or 0, fault.details["key"]))
    first, rest = faults[0], faults[1:]
    if rest:
        first.cause = "also wrong: " + "; ".join(fault.message for fault in rest[:5])
    return first


def _fault(found: Mapping[str, Any], entries: Mapping[Path, Entry], source: Source | None) -> ConfigError:
    raised = (found.get("ctx") or {}).get("error")
    path = _known_part(tuple(found["loc"]), entries, found["type"])
    if isinstance(raised, Misfit):
        path += raised.path
    where, written = _place(path, entries, source)
    line = int(where.rpartition(":")[2]) if source and where.startswith(f"{source.file}:") else None
    message, hint = _words(found, path, raised)
    return ConfigError(
        f"{where + ': ' if where else ''}{dotted(written)}: {message}",
        hint=hint,
        file=str(source.file) if source else "",
        line=line,
        key=dotted(written),
    )


def _known_part(loc: Path, entries: Mapping[Path, Entry], kind: str) -> Path:
    """pydantic ends the place with names of its own (`bool`, `list[str]`) inside a union; those are no keys."""
    if kind in ("missing", "extra_forbidden"):
        return loc
    path = loc
    while path and not any(known[: len(path)] == path for known in entries):
        path = path[:-1]
    return path or loc


def _place(path: Path, entries: Mapping[Path, Entry], source: Source | None) -> tuple[str, Path]:
    """Where to look (`file:line`, a variable) and the key as it is written there."""
    if path in entries:
        return entries[path].where, entries[path].written
    for known, entry in entries.items():
        if known[: len(path)] == path:  # a section: its place is that of its first key, cut to the section
            written = entry.written[: len(entry.written) - (len(known) - len(path))]
            return (source.where(written) if _in_file(entry, source) and source else entry.where), written
    if source is None:
        return "", path
    return source.where(_written_section(path, entries)), path


def _written_section(path: Path, entries: Mapping[Path, Entry]) -> Path:
    """A key that is not there: the section that should hold it, as written."""
    while path := path[:-1]:
        for known, entry in entries.items():
            if known[: len(path)] == path:
                return entry.written[: len(entry.written) - (len(known) - len(path))]
    return ()


def _in_file(entry: Entry, source: Source | None) -> bool:
    return source is not None and entry.where.startswith(f"{source.file}:")


def _words(found: Mapping[str, Any], path: Path, raised: BaseException | None) -> tuple[str, str]:
    if found["type"] == "extra_forbidden":
        known = known_keys(path[:-1])
        near = get_close_matches(str(path[-1]), known, 1)
        if near:
            return "unknown key", f"did you mean `{near[0]}`?"
        return "unknown key", f"known here: {', '.join(known)}" if known else "remove it"
    if found["type"] == "missing":
        return "is missing", "add it"
    if raised is not None:
        return str(raised), ""
    message = str(found["msg"])
    given = found.get("input")
    shown = f" (found {given!r})" if isinstance(given, str | int | float | bool) or given is None else ""
    return message[:1].lower() + message[1:] + shown, ""
