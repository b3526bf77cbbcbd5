"""Writes keys into a configuration file, keeping its comments, layout and mode: whole or not at all."""

from __future__ import annotations

import io
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.nodes import MappingNode, ScalarNode, SequenceNode
from ruamel.yaml.representer import RoundTripRepresenter
from ruamel.yaml.util import load_yaml_guess_indent

from distributed_grid.config import layers
from distributed_grid.config.loader import load_source
from distributed_grid.config.yaml_source import load_round_trip, parse, read_bytes
from distributed_grid.core.errors import ConfigError


class _Representer(RoundTripRepresenter):
    """ruamel's own writes nothing for `null`."""

    def represent_null(self, _: Any) -> Any:
        return self.represent_scalar("tag:yaml.org,2002:null", "null")


_Representer.add_representer(type(None), _Representer.represent_null)


def set_values(path: str | Path, values: Mapping[str, Any]) -> None:
    """Set dotted keys where the file already has them, in either layout and spelling; the result must be valid."""
    file = Path(path).expanduser().resolve()  # a link stays a link, and its target is what changes
    content = changed = read_bytes(file)
    for key, value in values.items():
        written = [at for at, _ in layers.flatten(parse(changed, file).data)]
        root = load_round_trip(changed, file)
        for at in _homes(layers.undotted(key), written, {} if root is None else root):
            changed = _overwrite(changed, at, value) or _insert(changed, at, value, file)
    load_source(parse(changed, file))
    if changed != content:
        try:
            replace_file(file, changed)
        except OSError as err:
            raise ConfigError(
                f"cannot write the configuration {file}", cause=err.strerror or str(err), code="config-file"
            ) from None


def _overwrite(content: bytes, at: layers.Path, value: Any) -> bytes | None:
    """Put a value in the place of one that is there, and touch nothing else; None where that is not possible."""
    text = content.decode("utf-8")
    node = YAML(typ="rt").compose(text) if isinstance(value, bool | int | float) else None
    for part in at:
        if isinstance(node, MappingNode):
            node = next((item for key, item in node.value if key.value == str(part)), None)
        elif isinstance(node, SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
        else:
            return None
    if not isinstance(node, ScalarNode) or node.start_mark.index == node.end_mark.index:
        return None
    old, new = text[node.start_mark.index : node.end_mark.index], json.dumps(value)
    after = text[node.end_mark.index :]
    gap = len(after) - len(after.lstrip(" "))
    if after[gap : gap + 1] == "#":  # comments stay in their column
        after = " " * max(1, gap + len(old) - len(new)) + after[gap:]
    return (text[: node.start_mark.index] + new + after).encode("utf-8")


def _insert(content: bytes, at: layers.Path, value: Any, file: Path) -> bytes:
    root = load_round_trip(content, file)
    root = CommentedMap() if root is None else root
    _set(root, at, value, file)
    return _dump(root, content)


def _homes(wanted: layers.Path, written: list[layers.Path], root: Any) -> list[layers.Path]:
    """Where a key stands in the file (twice, if it is there in both layouts), else where it belongs."""
    same = [at for at in written if layers.canonical(at) == layers.canonical(wanted)]
    if same:
        return same
    home = layers.canonical(wanted)
    if home[:1] != ("resource_sharing",):
        return [home]
    execution = root.get("execution") if isinstance(root, Mapping) else None
    nested = isinstance(execution, Mapping) and "resource_sharing" in execution
    return [("execution", *home)] if nested or "resource_sharing" not in root else [home]


def _set(root: Any, at: layers.Path, value: Any, file: Path) -> None:
    here = root
    for depth, part in enumerate(at[:-1]):
        there = here[part] if _has(here, part) else None
        if there is None:
            there = CommentedMap()
            _put(here, part, there, at, file)
        elif not isinstance(there, CommentedMap | CommentedSeq):
            raise ConfigError(f"{file}: {layers.dotted(at[: depth + 1])} is not a section")
        here = there
    _put(here, at[-1], value, at, file)


def _has(holder: Any, key: str | int) -> bool:
    if isinstance(holder, CommentedSeq):
        return isinstance(key, int) and key < len(holder)
    return key in holder


def _put(holder: Any, key: str | int, value: Any, at: layers.Path, file: Path) -> None:
    if _has(holder, key):
        holder[key] = value
    elif isinstance(holder, CommentedMap):
        # First, not last: a comment above the next section hangs on the last key, and would be torn off it.
        holder.insert(0, key, value)
    else:
        raise ConfigError(f"{file}: there is no {layers.dotted(at)}")


def _dump(root: Any, content: bytes) -> bytes:
    _, indent, offset = load_yaml_guess_indent(content.decode("utf-8"))
    yaml = YAML(typ="rt")
    yaml.width = 4096
    yaml.Representer = _Representer
    yaml.indent(mapping=2, sequence=indent or 4, offset=2 if offset is None else offset)
    out = io.BytesIO()
    yaml.dump(root, out)
    return out.getvalue()


def create_file(file: Path, content: bytes, *, replace: bool = False) -> bool:
    """Write a new file, with its directory; False if something of that name is there and may not be replaced."""
    if not replace and os.path.lexists(file):
        return False
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, content, mode=0o644)
    except OSError as err:
        raise ConfigError(f"cannot write {file}", cause=err.strerror or str(err), code="config-file") from None
    return True


def replace_file(file: Path, content: bytes, mode: int | None = None) -> None:
    """Write beside, sync, rename: a reader sees the old file or the new one, also after a power cut."""
    mode = (file.stat().st_mode & 0o777) if mode is None else mode
    handle, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fchmod(stream.fileno(), mode)
            os.fsync(stream.fileno())
        Path(name).replace(file)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    directory = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
