"""`grid init`: write a configuration to start from."""

from __future__ import annotations

from pathlib import Path

import click

from distributed_grid.commands._common import format_option


@click.command()
@click.argument("path", required=False, default="cluster_config.yaml")
@click.option("--real-hosts", is_flag=True, help="For hosts reached over SSH, to be filled in.")
@click.option("--force", is_flag=True, help="Replace a file that is there.")
@format_option
def command(path: str, real_hosts: bool, force: bool, output: str) -> None:
    """Write a configuration to start from (PATH, else cluster_config.yaml).

    \b
    grid init                           three nodes on this machine
    grid init --real-hosts my-lab.yaml  a head and workers over SSH
    """
    from importlib.resources import files

    from distributed_grid.commands._common import emit
    from distributed_grid.config.edit import create_file
    from distributed_grid.core.errors import Refused

    file = Path(path).expanduser().absolute()
    starter = files("distributed_grid.config") / "starters" / ("real-hosts.yaml" if real_hosts else "embedded.yaml")
    if not create_file(file, starter.read_bytes(), replace=force):
        raise Refused(f"{path} is there already; it was not changed", hint=f"grid init --force {path}, or another name")
    then = f"edit it, then: grid config {path}" if real_hosts else f"try: grid --config {path} cluster start"
    emit({"path": str(file)}, output, lambda: click.echo(f"✓ wrote {path}\n  {then}"))
