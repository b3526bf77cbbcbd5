"""`grid version`."""

from __future__ import annotations

import click

from distributed_grid import __version__
from distributed_grid.commands._common import emit, format_option


@click.command()
@format_option
def command(output: str) -> None:
    """Print the version."""
    emit({"version": __version__}, output, lambda: click.echo(f"grid {__version__}"))
