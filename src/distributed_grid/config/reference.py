"""Every key of the configuration with its type, default and meaning: for the documentation and for the hints."""

from __future__ import annotations

import json
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from distributed_grid.config.layers import Path, spellings
from distributed_grid.config.models import ClusterConfig, Section
from distributed_grid.config.units import Kind


@dataclass(frozen=True, slots=True)
class Key:
    """One key; `nodes[].host` stands for the host of any node."""

    name: str
    type: str
    default: str
    meaning: str

    def row(self) -> str:
        cells = (f"`{self.name}`", self.type, f"`{self.default}`" if self.default else "", self.meaning)
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def describe(model: type[Section] = ClusterConfig, prefix: str = "") -> Iterator[Key]:
    """All keys, in the order of the model."""
    for name, info in model.model_fields.items():
        inner = _section_of(info.annotation)
        listed = get_origin(info.annotation) is list
        if inner is None or listed:
            yield Key(prefix + name, _type_of(info), _default_of(info), info.description or "")
        if inner is not None:
            yield from describe(inner, f"{prefix}{name}{'[]' if listed else ''}.")


def known_keys(section: Path) -> list[str]:
    """What may stand in a section, in all its spellings; nothing where there is no such section."""
    model: type[Section] = ClusterConfig
    for part in section:
        if isinstance(part, int):
            continue
        info = model.model_fields.get(part)
        inner = _section_of(info.annotation) if info else None
        if inner is None:
            return []
        model = inner
    return [*model.model_fields, *spellings(section)]


def table() -> str:
    """The documentation's table."""
    rows = ["| Key | Type | Default | Meaning |", "|---|---|---|---|", *(key.row() for key in describe())]
    return "\n".join(rows)


def _section_of(annotation: Any) -> type[Section] | None:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return _section_of(get_args(annotation)[0]) if get_origin(annotation) is list else None


def _type_of(info: FieldInfo) -> str:
    for note in info.metadata:
        if isinstance(note, Kind):
            return str(note)
    return _name(info.annotation)


def _name(annotation: Any) -> str:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return next((str(note) for note in args[1:] if isinstance(note, Kind)), _name(args[0]))
    if origin is Literal:
        return ", ".join(f"`{arg}`" for arg in args)
    if origin is list:
        return f"list of {_name(args[0])}"
    if origin in (Union, types.UnionType):
        return " or ".join(_name(arg) for arg in args)
    if annotation is type(None):
        return "none"
    names = {bool: "bool", int: "integer", float: "number", str: "text", FilePath: "path"}
    return names.get(annotation) or ("section" if _section_of(annotation) else str(annotation))


def _default_of(info: FieldInfo) -> str:
    if info.is_required():
        return ""
    if info.default_factory is not None:
        made = info.get_default(call_default_factory=True, validated_data={})
        return "see the meaning" if made and isinstance(made[0], Section) else json.dumps(made)
    value = info.default
    return f"{value:g}" if isinstance(value, float) else "none" if value is None else json.dumps(value).strip('"')
