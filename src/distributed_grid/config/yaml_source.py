"""A YAML file read with the line of every key, so that an error can point at it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq, TaggedScalar
from ruamel.yaml.constructor import ConstructorError, RoundTripConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.scalarbool import ScalarBoolean

from distributed_grid.config.layers import Path
from distributed_grid.core.errors import ConfigError

_MAX_BYTES = 1024 * 1024
_MAX_DEPTH = 20


@dataclass(frozen=True, slots=True)
class Source:
    """What a file says: plain data, the line of each key, and a digest of its bytes."""

    file: FilePath
    data: dict[str, Any]
    lines: Mapping[Path, int]
    digest: str

    def where(self, path: Path) -> str:
        """`file:line` of a key, or of the nearest section around it."""
        while path and path not in self.lines:
            path = path[:-1]
        return f"{self.file}:{self.lines.get(path, 1)}"


def read_bytes(file: FilePath) -> bytes:
    try:
        with file.open("rb") as stream:
            content = stream.read(_MAX_BYTES + 1)
    except OSError as err:
        raise ConfigError(
            f"cannot read the configuration {file}",
            cause=err.strerror or str(err),
            hint="check the path, or write a starter file with: grid init",
            code="config-file",
            file=str(file),
        ) from None
    if len(content) > _MAX_BYTES:
        raise ConfigError(f"{file}: larger than 1 MB, this is no configuration", code="config-file", file=str(file))
    return content


def parse(content: bytes, file: FilePath) -> Source:
    """The plain data of a YAML text; its faults become one error with file and line."""
    root = load_round_trip(content, file)
    lines: dict[Path, int] = {}
    if root is None:
        root = {}
    if not isinstance(root, dict):
        raise ConfigError(
            f"{file}:1: must be `key: value` lines, not a {'list' if isinstance(root, list) else 'single value'}",
            code="config-yaml",
            file=str(file),
            line=1,
        )
    data = _plain(root, (), lines, file)
    return Source(file, data, lines, digest_of(content))


class _Constructor(RoundTripConstructor):
    """ruamel lets what Python says of a value pass as it is (`2024-13-45` is a date to YAML): here it gets its line."""

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep=deep)
        except (ValueError, LookupError) as err:
            value = node.value if isinstance(node.value, str) else node.tag
            raise ConstructorError(None, None, f"{value!r} cannot be read: {err}", node.start_mark) from None


def digest_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def load_round_trip(content: bytes, file: FilePath) -> Any:
    """ruamel's own tree, which remembers comments and lines."""
    yaml = YAML(typ="rt")
    yaml.preserve_quotes = True
    yaml.Constructor = _Constructor
    try:
        return yaml.load(content.decode("utf-8"))
    except UnicodeDecodeError:
        raise ConfigError(f"{file}: is not text (UTF-8)", code="config-yaml", file=str(file)) from None
    except RecursionError:
        raise _too_deep(file) from None
    except YAMLError as err:
        line = _line_of(err)
        problem = getattr(err, "problem", None) or str(err).splitlines()[0]
        raise ConfigError(
            f"{file}:{line}: not valid YAML",
            cause=f"{problem}",
            hint="look at the indentation, the colons and the quotes around that line",
            code="config-yaml",
            file=str(file),
            line=line,
        ) from None


def scalar(text: str) -> Any:
    """A value typed outside a file (environment, flag), read as YAML would; what is not YAML is a string."""
    try:
        return YAML(typ="safe", pure=True).load(text) if text.strip() else text
    except (YAMLError, ValueError, LookupError, RecursionError):  # also what is YAML but no value: 2024-13-45
        return text


def _too_deep(file: FilePath) -> ConfigError:
    return ConfigError(f"{file}: nested too deeply", code="config-yaml", file=str(file))


def _line_of(err: YAMLError) -> int:
    if isinstance(err, MarkedYAMLError):
        mark = err.problem_mark or err.context_mark
        if mark is not None:
            return int(mark.line) + 1
    return 1


def _plain(value: Any, at: Path, lines: dict[Path, int], file: FilePath) -> Any:
    if len(at) > _MAX_DEPTH:  # also an anchor that contains itself
        raise _too_deep(file)
    if isinstance(value, CommentedMap):
        plain = {}
        for key, item in value.items():
            path = (*at, str(key))
            _note(value, key, path, lines)
            plain[str(key)] = _plain(item, path, lines, file)
        return plain
    if isinstance(value, CommentedSeq):
        items = []
        for index, item in enumerate(value):
            path = (*at, index)
            _note(value, index, path, lines)
            items.append(_plain(item, path, lines, file))
        return items
    if isinstance(value, TaggedScalar):
        return str(value.value)
    if isinstance(value, bool | ScalarBoolean):
        return bool(value)
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)  # ruamel's own subclasses, which remember how a number was written
    return value


def _note(holder: CommentedMap | CommentedSeq, key: Any, path: Path, lines: dict[Path, int]) -> None:
    position = (holder.lc.data or {}).get(key)  # a key that came by `<<` has none; its section's line serves
    if position is not None:
        lines[path] = int(position[0]) + 1
