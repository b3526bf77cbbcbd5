"""`grid logs`: the logs of the daemon and of the agents, and the audit log."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import Any

import click

from distributed_grid.commands._common import chosen_file, config_option, note, run
from distributed_grid.config.paths import GridPaths
from distributed_grid.core.errors import GridError, NotFound, UsageError


@click.command()
@click.argument("which", type=click.Choice(["daemon", "audit", "agent"]), default="daemon")
@click.option("-n", "--node", "nodes", multiple=True, help="Of `agent`: only this node's (repeatable); default: all.")
@click.option("-f", "--follow", is_flag=True, help="Go on with what is written from now.")
@click.option("--lines", default=50, show_default=True, type=click.IntRange(0, 1_000_000))
@click.option("--path", "path_only", is_flag=True, help="Only say where the file is.")
@config_option
def command(
    which: str, nodes: tuple[str, ...], follow: bool, lines: int, path_only: bool, config_path: str | None
) -> None:
    """The log of the daemon, of the agents on the nodes, or the audit log of every request.

    \b
    grid logs -f
    grid logs agent -n gpu1
    grid logs audit --lines 5
    """
    if which == "agent":
        run(_agents(list(nodes), follow, lines, path_only, config_path))
        return
    if nodes:
        raise UsageError("-n is for the agents' logs", hint=f"grid logs agent -n {nodes[0]}", code="usage")
    paths = GridPaths.default()
    file = paths.daemon_log if which == "daemon" else paths.audit_log
    if path_only:
        click.echo(str(file))
        return
    if not file.exists():
        cause = f"{file} is not there"
        raise NotFound(f"there is no {which} log yet", cause=cause, hint="grid daemon start", code="no-log")
    _tail(file, lines, follow)


def _tail(file: Path, lines: int, follow: bool) -> None:
    with file.open(errors="replace") as log:
        for line in log.readlines()[-lines:] if lines else []:
            click.echo(line, nl=False)
        log.seek(0, 2)
        while follow:
            chunk = log.read()
            if chunk:
                sys.stdout.write(chunk)
                sys.stdout.flush()
            else:
                time.sleep(0.2)


async def _agents(nodes: list[str], follow: bool, lines: int, path_only: bool, config_path: str | None) -> None:
    """All at once, from the nodes themselves; one that does not answer does not hide the others."""
    from distributed_grid.daemon.client import connect

    path, named = chosen_file(config_path)
    async with await connect(autostart=True, config_path=path, insist=named) as client:
        names = nodes or [node["name"] for node in (await client.call("cluster_status"))["nodes"]]
        asked = [_agent(client, name, len(names) > 1, follow, lines, path_only) for name in names]
        failed = [error for error in await asyncio.gather(*asked) if error]
    if failed:
        raise failed[0]


async def _agent(
    client: Any, node: str, many: bool, follow: bool, lines: int, path_only: bool
) -> GridError | None:
    from distributed_grid.commands.execute import Output

    show = Output(f"[{node}] " if many else "")
    try:
        async for item in client.stream("agent_log", node=node, lines=lines, wait=follow):
            if "data" in item:
                show.write("stdout", 0, item["data"])
            elif path_only:
                click.echo(f"{node}:{item['path']}")
                return None
    except GridError as error:
        if many:
            note(f"[{node}] error: {error.message}")
        return error
    finally:
        show.close()
    return None
