"""Finds and reads the configuration: flag over environment over file over default, and where each value came from."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from distributed_grid.config import layers
from distributed_grid.config.faults import explain
from distributed_grid.config.find import find_config_file
from distributed_grid.config.models import ClusterConfig, embedded_nodes
from distributed_grid.config.yaml_source import Source, parse, read_bytes, scalar

ENV_PREFIX = "GRID__"


def load_cluster_config(
    path: str | Path | None = None,
    *,
    overrides: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> ClusterConfig:
    """The configuration in effect. `overrides` are the command's own flags, by dotted key."""
    variables = os.environ if env is None else env
    file = find_config_file(path, cwd=cwd, env=variables)
    source = parse(read_bytes(file), file) if file else None
    return load_source(source, overrides=overrides, env=variables)


def load_source(
    source: Source | None, *, overrides: Mapping[str, Any] | None = None, env: Mapping[str, str] | None = None
) -> ClusterConfig:
    """The same for a text that is already read."""
    stack = [layers.Layer()]
    if source is not None:
        leaves = ((at, value, source.where(at)) for at, value in layers.flatten(source.data))
        stack.append(layers.build(leaves, layers.lists_in(source.data)))
    stack.append(_environment(env or {}))
    stack.append(_flags(overrides or {}))
    if not any(("nodes",) in layer.lists or ("nodes",) in layer.entries for layer in stack) and any(
        at[0] == "nodes" for layer in stack for at in layer.entries
    ):
        stack[0] = _default_nodes()  # one key of a node that no file lists
    entries = layers.merge(stack)
    try:
        config = ClusterConfig.model_validate(
            layers.nest(entries), context={"base": source.file.parent if source else None}
        )
    except ValidationError as err:
        raise explain(err, entries, source) from None
    config._origins = {at: entry.where for at, entry in entries.items() if entry.where != "default"}
    if source is not None:
        config._path, config._digest = source.file, source.digest
    return config


def origins(config: ClusterConfig) -> dict[str, str]:
    """For every key in effect: the file and line, the variable, the flag, or `default`."""
    given = dict(config._origins)
    outer, nested = ("resource_sharing", "head_only_mode"), ("resource_sharing", "auto_offload", "head_only_mode")
    one_flag = given.get(nested) or given.get(outer)
    if one_flag:
        given[outer] = given[nested] = one_flag
    found = {}
    for at, _ in layers.flatten(config.model_dump(mode="json")):
        # `share: false` and a list are given at a key above the one in effect.
        sources = (given.get(at[:length]) for length in range(len(at), 0, -1))
        found[layers.dotted(at)] = next((where for where in sources if where), "default")
    return found


def _environment(env: Mapping[str, str]) -> layers.Layer:
    leaves: list[tuple[layers.Path, Any, str]] = []
    lists: list[layers.Path] = []
    for name in sorted(env):
        if not name.startswith(ENV_PREFIX) or name == ENV_PREFIX:
            continue
        at = layers.undotted(name.removeprefix(ENV_PREFIX).lower(), "__")
        value = scalar(env[name])
        leaves += [(leaf, item, name) for leaf, item in layers.flatten(value, at)]
        lists += layers.lists_in(value, at)
    return layers.build(leaves, lists)


def _flags(overrides: Mapping[str, Any]) -> layers.Layer:
    leaves: list[tuple[layers.Path, Any, str]] = []
    lists: list[layers.Path] = []
    for key, value in overrides.items():
        at = layers.undotted(key)
        leaves += [(leaf, item, "flag") for leaf, item in layers.flatten(value, at)]
        lists += layers.lists_in(value, at)
    return layers.build(leaves, lists)


def _default_nodes() -> layers.Layer:
    data = {"nodes": [node.model_dump(exclude_unset=True) for node in embedded_nodes()], "embedded": True}
    return layers.build(((at, value, "default") for at, value in layers.flatten(data)), layers.lists_in(data))

