"""`grid status`: the cluster at a glance."""

from __future__ import annotations

import time
from typing import Any

import click

from distributed_grid.commands._common import config_option, emit, format_option, paint, print_table, with_daemon
from distributed_grid.commands._views import node_row


@click.command()
@config_option
@format_option
def command(config_path: str | None, output: str) -> None:
    """The cluster at a glance: nodes, use, what is lent and what runs.

    \b
    grid status
    grid status --format json | jq '.nodes[] | select(.online | not) | .name'
    """
    status = with_daemon(lambda client: client.call("status"), config_path)
    emit(status, output, lambda: _show(status))


def _show(status: dict[str, Any]) -> None:
    kind = "embedded, capacities declared" if status["embedded"] else "over SSH"
    online = sum(1 for node in status["nodes"] if node["online"])
    counted = f"{online} of {len(status['nodes'])} nodes online"
    click.echo(f"{paint(status['name'], 'bold')} ({kind}): {status['cluster']}, {counted}")
    headers = ("node", "role", "state", "cpu", "memory", "gpu", "lent", "age", "")
    print_table(headers, [node_row(node) for node in status["nodes"]])
    if status["cluster"] == "down":
        click.echo("no cluster is up: grid cluster start")
    for task in status["tasks"]:
        click.echo(f"running  {task['id']}  {task['node']}  {' '.join(task['argv'])}")
    for event in status["events"]:
        click.echo(f"{time.strftime('%H:%M:%S', time.localtime(event['at']))}  {event['text']}")
