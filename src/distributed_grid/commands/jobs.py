"""`grid jobs`: commands that were started on nodes."""

from __future__ import annotations

import time
from typing import Any

import click

from distributed_grid.commands._common import (
    Seconds,
    chosen_file,
    config_option,
    emit,
    format_option,
    print_table,
    run,
    with_daemon,
)  # fmt: skip
from distributed_grid.commands.execute import Output, follow_task
from distributed_grid.core.resources import format_duration


@click.group()
def command() -> None:
    """Commands started on nodes: list, logs, attach, cancel. Any unique beginning of an id will do."""


@command.command("list")
@click.option("-n", "--node", default=None, help="Only of this node.")
@click.option("-a", "--all", "everything", is_flag=True, help="Ended ones too.")
@config_option
@format_option
def list_jobs(node: str | None, everything: bool, config_path: str | None, output: str) -> None:
    """What runs (with -a also what has ended)."""
    tasks = with_daemon(lambda client: client.call("task_list", node=node, active=not everything), config_path)

    def show() -> None:
        rows = [(t["id"], t["node"], t["state"], _code(t), _age(t), " ".join(t["argv"])) for t in tasks]
        print_table(("id", "node", "state", "exit", "age", "command"), rows)

    emit(tasks, output, show)


def _code(task: dict[str, Any]) -> str:
    return "-" if task["exit_code"] is None else str(task["exit_code"])


def _age(task: dict[str, Any]) -> str:
    return format_duration((task["ended"] or time.time()) - task["created"])


def _follow(task_id: str, config_path: str | None, wait: bool) -> dict[str, Any]:
    from distributed_grid.daemon.client import LastingClient

    path, named = chosen_file(config_path)
    client = LastingClient(config_path=path, insist=named)

    async def go() -> dict[str, Any]:
        try:
            return await follow_task(client, task_id, Output(), wait=wait)
        finally:
            await client.close()

    return run(go())


@command.command()
@click.argument("task_id")
@click.option("-f", "--follow", is_flag=True, help="Go on until it ends.")
@config_option
def logs(task_id: str, follow: bool, config_path: str | None) -> None:
    """A command's output so far."""
    _follow(task_id, config_path, follow)


@command.command()
@click.argument("task_id")
@config_option
def attach(task_id: str, config_path: str | None) -> None:
    """Its whole output, live, until it ends; the exit code is its own. Ctrl-C leaves it running."""
    ended = _follow(task_id, config_path, True)
    code = ended.get("exit_code")
    click.get_current_context().exit(1 if code is None else int(code))


@command.command()
@click.argument("task_id")
@click.option(
    "--grace", "grace_s", default=5.0, show_default=True, type=Seconds(0, 3600), help="Seconds before SIGKILL."
)
@config_option
@format_option
def cancel(task_id: str, grace_s: float, config_path: str | None, output: str) -> None:
    """End a command: SIGTERM, then SIGKILL after the grace."""
    ended = with_daemon(
        lambda client: client.call("task_cancel", task_id=task_id, grace_s=grace_s, timeout_s=grace_s + 60), config_path
    )
    emit(ended, output, lambda: click.echo(f"{ended['task_id']} has ended"))


@command.command()
@click.argument("task_id")
@config_option
def remove(task_id: str, config_path: str | None) -> None:
    """Forget an ended command and its output."""
    with_daemon(lambda client: client.call("task_remove", task_id=task_id), config_path)
    click.echo(f"{task_id} is forgotten")
