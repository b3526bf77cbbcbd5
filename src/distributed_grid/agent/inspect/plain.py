"""Frozen dataclasses to and from plain maps; fields that this version does not know are left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any, TypeVar

_T = TypeVar("_T")


def to_plain(value: Any) -> dict[str, Any]:
    return asdict(value)


def from_plain(kind: type[_T], data: Mapping[str, Any], **nested: type[Any]) -> _T:
    """`nested`: fields that are sequences of another such dataclass. Lists become tuples, as the wire has no tuples."""
    found: dict[str, Any] = {}
    for one in fields(kind):  # type: ignore[arg-type]
        if one.name not in data:
            continue
        value = data[one.name]
        if one.name in nested:
            value = tuple(nested[one.name].from_wire(item) for item in value)
        elif isinstance(value, list) and str(one.type).startswith("tuple"):
            value = tuple(value)
        found[one.name] = value
    return kind(**found)
