"""`grid shared-status`: what workers offer, what is lent, who waits."""

from __future__ import annotations

import click

from distributed_grid.commands._common import config_option, emit, format_option, with_daemon
from distributed_grid.commands._lending_views import show_lending


@click.command()
@config_option
@format_option
def command(config_path: str | None, output: str) -> None:
    """Current offers of the workers, active allocations, and who waits for what.

    \b
    grid shared-status
    grid shared-status --format json | jq '.offers[].node'
    """
    status = with_daemon(lambda client: client.call("lending_status"), config_path)
    emit(status, output, lambda: show_lending(status))
