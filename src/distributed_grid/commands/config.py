"""`grid config`: show the configuration in effect, check a file, say which file it is."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import click

from distributed_grid.commands._common import chosen_config, config_option, emit, format_option, print_table

if TYPE_CHECKING:
    from distributed_grid.config.models import ClusterConfig


class PathGroup(click.Group):
    """`grid config FILE` is short for `grid config validate FILE`."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args and args[0] not in self.commands and _looks_like_path(args[0]):
            args = ["validate", *args]
        return super().resolve_command(ctx, args)


def _looks_like_path(word: str) -> bool:
    return "/" in word or word.endswith((".yaml", ".yml")) or Path(word).is_file()


@click.group(cls=PathGroup)
def command() -> None:
    """Show and check the configuration.

    \b
    grid config show --origin           every value, and where it came from
    grid config config/my-lab.yaml      check a file, and list its nodes
    """


def _load(config_path: str | None) -> ClusterConfig:
    from distributed_grid.config.loader import load_cluster_config

    return load_cluster_config(chosen_config(config_path))


@command.command()
@click.option("--origin", is_flag=True, help="Say where each value came from.")
@config_option
@format_option
def show(origin: bool, config_path: str | None, output: str) -> None:
    """The configuration in effect, key by key."""
    from distributed_grid.config.layers import dotted, flatten
    from distributed_grid.config.loader import origins

    config = _load(config_path)
    data = config.model_dump(mode="json")
    if config.alerts.webhook:
        # The path of a webhook is its password.
        data["alerts"]["webhook"] = f"{urlsplit(config.alerts.webhook).scheme}://{urlsplit(config.alerts.webhook).hostname}/…"
    values = {dotted(at): value for at, value in flatten(data)}
    came_from = {key: _short(where) for key, where in origins(config).items()}

    def table() -> None:
        if origin:
            rows = [(key, _text(value), came_from.get(key, "default")) for key, value in values.items()]
            print_table(("key", "value", "origin"), rows)
        else:
            print_table(("key", "value"), [(key, _text(value)) for key, value in values.items()])

    listing = {key: {"value": value, "origin": came_from.get(key, "default")} for key, value in values.items()}
    emit(listing if origin else data, output, table)


@command.command()
@click.argument("path", required=False)
@config_option
@format_option
def validate(path: str | None, config_path: str | None, output: str) -> None:
    """Check a file (else the one in effect) and list its nodes."""
    config = _load(path or config_path)
    shown = {"name", "role", "host", "cpu_count", "gpu_count", "memory_gb", "tags"}
    nodes = [node.model_dump(mode="json", include=shown) for node in config.nodes]
    name = _short(str(config.path)) if config.path else "no file: the embedded cluster"
    file = str(config.path) if config.path else None
    data = {"valid": True, "path": file, "name": config.name, "embedded": config.embedded, "nodes": nodes}

    def table() -> None:
        click.echo(f"✓ {name}: valid, {len(nodes)} nodes{', embedded' if config.embedded else ''}")
        headers = ("node", "role", "host", "cores", "gpus", "memory", "tags")
        print_table(headers, [_row(node, config.embedded) for node in nodes])

    emit(data, output, table)


@command.command()
@config_option
@format_option
def path(config_path: str | None, output: str) -> None:
    """The file in effect."""
    from distributed_grid.config.find import find_config_file

    found = find_config_file(chosen_config(config_path))
    text = str(found) if found else "none: the embedded cluster on this machine (grid init writes a file)"
    emit({"path": str(found) if found else None}, output, lambda: click.echo(text))


def _row(node: dict[str, Any], embedded: bool) -> list[str]:
    host = "this machine" if embedded else node["host"]
    counts = ["measured" if node[key] is None else _text(node[key]) for key in ("cpu_count", "gpu_count", "memory_gb")]
    counts[2] += "" if node["memory_gb"] is None else " GB"
    return [node["name"], node["role"], host, *counts, _text(node["tags"])]


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(str(item) for item in value) or "-"
    if isinstance(value, bool):
        return "true" if value else "false"
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _short(where: str) -> str:
    """Paths beneath the directory we are in, as one would type them."""
    return where.removeprefix(f"{Path.cwd()}/")
