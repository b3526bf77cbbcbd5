"""`grid env`: what a plain Ray program needs to reach this cluster."""

from __future__ import annotations

import shlex

import click

from distributed_grid.commands._common import config_option, emit, format_option, with_daemon


@click.command()
@config_option
@format_option
def command(config_path: str | None, output: str) -> None:
    """Print the variables with which plain Ray programs reach this cluster.

    \b
    eval "$(grid env)"
    python my_ray_script.py      # ray.init() connects here
    ray status
    """
    variables = with_daemon(lambda client: client.call("cluster_env"), config_path, autostart=False)

    def show() -> None:
        for name, value in variables.items():
            click.echo(f"export {name}={shlex.quote(value)}")

    emit(variables, output, show)
