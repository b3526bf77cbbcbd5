"""How people write amounts in the YAML, as types: fractions or percentages, sizes, seconds, names, paths."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo

from distributed_grid.core.errors import UsageError
from distributed_grid.core.resources import GB, parse_memory


class Kind(str):
    """The name that the documentation gives a type; pydantic passes it by."""


def _fraction(value: Any) -> Any:
    percent = False
    if isinstance(value, str):
        text = value.strip()
        percent = text.endswith("%")
        try:
            value = float(text.removesuffix("%"))
        except ValueError:
            raise ValueError("must be a fraction (0.7) or a percentage (70)") from None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("must be a fraction (0.7) or a percentage (70)")
    return value / 100 if percent or value > 1 else value


def _gigabytes(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return parse_memory(value) / GB
    except UsageError as err:
        raise ValueError(f"must be a number of GB, or a size such as 512MiB: {err.message}") from None


def _bytes(value: Any) -> Any:
    if not isinstance(value, str) or value.strip().isdigit():
        return value
    try:
        return parse_memory(value)
    except UsageError as err:
        raise ValueError(f"must be a number of bytes, or a size such as 512MiB: {err.message}") from None


def _share(value: Any) -> Any:
    """A switch stays one, and a number stays a number: 1 is one core, not `true`."""
    if isinstance(value, str) and value.strip().lower() in ("yes", "no", "on", "off", "true", "false"):
        return value.strip().lower() in ("yes", "on", "true")
    return value if isinstance(value, bool) else _gigabytes(value)


def _path(value: Path, info: ValidationInfo) -> Path:
    """`~` is the user's home; a relative path starts at the file it is written in, not where `grid` runs."""
    path = value.expanduser()
    base = (info.context or {}).get("base")
    return base / path if base is not None else path


def _label(value: str) -> str:
    # Names become file names, Ray labels and the "gpu1:4521" of a remote process.
    if not re.fullmatch(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?", value):
        raise ValueError("must be letters, digits, '.', '_' or '-' (at most 63), with a letter or digit at both ends")
    return value


def _word(value: str) -> str:
    # These become arguments of ssh: one that begins with a dash would be read as an option.
    if not value or value.startswith("-") or re.search(r"[\s\x00-\x1f]", value):
        raise ValueError("must be one word that does not begin with '-'")
    return value


Fraction = Annotated[float, BeforeValidator(_fraction), Field(ge=0, le=1), Kind("fraction or %")]
Gigabytes = Annotated[float, BeforeValidator(_gigabytes), Field(ge=0), Kind("GB or size")]
Bytes = Annotated[int, BeforeValidator(_bytes), Field(ge=0), Kind("bytes or size")]
Seconds = Annotated[float, Field(gt=0), Kind("seconds")]
Cores = Annotated[float, Field(ge=0), Kind("cores")]
Port = Annotated[int, Field(ge=0, le=65535), Kind("port")]
FilePath = Annotated[Path, AfterValidator(_path), Kind("path")]
Label = Annotated[str, AfterValidator(_label), Kind("name")]
Word = Annotated[str, AfterValidator(_word), Kind("word")]
Share = Annotated[bool | float, BeforeValidator(_share), Kind("bool or limit")]
