"""`grid events`: what happened."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import click

from distributed_grid.commands._common import config_option, emit, format_option, with_daemon


@click.command()
@click.option("-f", "--follow", is_flag=True, help="Go on with what happens from now.")
@click.option("--limit", default=50, show_default=True, type=click.IntRange(1, 20000), help="How many past ones.")
@click.option("-n", "--node", default="", help="Only of this node.")
@click.option("--kind", default="", help="Only of this kind, such as node.offline.")
@config_option
@format_option
def command(follow: bool, limit: int, node: str, kind: str, config_path: str | None, output: str) -> None:
    """What happened, oldest first; live with -f (one JSON object per line with --format json).

    \b
    grid events -f
    grid events --kind node.offline --format json
    """

    def line(event: dict[str, Any]) -> str:
        at = time.strftime("%H:%M:%S", time.localtime(event["at"]))
        return f"{at}  {event['kind']:<18}  {event['text']}"

    async def work(client: Any) -> None:
        past = await client.call("events_recent", limit=limit, node=node, kind=kind)
        if not follow:
            emit(past, output, lambda: click.echo("".join(line(event) + "\n" for event in past), nl=False))
            return
        last = (await client.call("events_recent", limit=1))[-1:] or [{"seq": 0}]
        show = (lambda e: json.dumps(e)) if output == "json" else line
        for event in past:
            click.echo(show(event))
        async for event in client.stream("events_follow", since=last[0]["seq"]):
            if node in ("", event["node"]) and kind in ("", event["kind"]):
                click.echo(show(event))
                sys.stdout.flush()

    with_daemon(work, config_path)
