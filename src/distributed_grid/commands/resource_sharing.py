"""`grid resource-sharing`: ask workers for resources by hand, see and give back what is lent."""

from __future__ import annotations

from typing import Any

import click

from distributed_grid.commands._common import Seconds, config_option, emit, format_option, with_daemon
from distributed_grid.commands._lending_views import amounts_text, asked, priority_name, show_lending


@click.group()
def command() -> None:
    """Ask workers for resources, see and give back what is lent. Any unique beginning of an id will do."""


@command.command()
@click.option("-n", "--node", "target", required=True, help="The node that it is for.")
@click.option("-t", "--type", "kind", required=True, help="cpu, gpu or memory.")
@click.option("-a", "--amount", required=True, help="Cores, GPUs, or GB (512MiB, 4GB).")
@click.option("-p", "--priority", default="normal", show_default=True, help="low, normal, high or critical.")
@click.option("-s", "--source", "sources", multiple=True, help="From this worker (repeatable); default: any.")
@click.option("--wait-time", "wait_s", default=0.0, type=Seconds(0, 86400 * 30), help="Seconds to wait.")
@config_option
@format_option
def request(
    target: str, kind: str, amount: str, priority: str, sources: tuple[str, ...], wait_s: float,
    config_path: str | None, output: str,
) -> None:  # fmt: skip
    """Borrow from the workers for a node, until it is released.

    \b
    grid resource-sharing request --node gpu-master --type memory --amount 10.0 --priority high
    """
    from distributed_grid.orchestration.resource_sharing.protocol import request_lease

    arguments: dict[str, Any] = {
        "amounts": asked([(kind, amount)]), "target": target, "priority": priority_name(priority),
        "nodes": list(sources), "wait_s": wait_s,
    }  # fmt: skip
    lease = with_daemon(lambda client: request_lease(client, **arguments), config_path)

    def show() -> None:
        click.echo(f"Allocated {amounts_text(lease['amounts'])}: {lease['node']} -> {lease['target']}")
        click.echo(f"allocation id: {lease['id']}")

    emit(lease, output, show)


@command.command()
@config_option
@format_option
def status(config_path: str | None, output: str) -> None:
    """Offers, allocations and who waits."""
    found = with_daemon(lambda client: client.call("lending_status"), config_path)
    emit(found, output, lambda: show_lending(found))


@command.command()
@click.argument("allocation_id")
@click.option("--force", is_flag=True, help="Also end what runs under it.")
@config_option
@format_option
def release(allocation_id: str, force: bool, config_path: str | None, output: str) -> None:
    """Give an allocation back."""
    done = with_daemon(
        lambda client: client.call("lease_release", timeout_s=120, lease_id=allocation_id, force=force), config_path
    )
    emit(done, output, lambda: click.echo(released(done)))


def released(done: dict[str, Any]) -> str:
    if done["state"] == "released":
        return f"Released {done['id'][:8]}: {amounts_text(done['amounts'])} back to {done['node']}"
    return f"{done['id'][:8]} is given back as soon as {done['node']} answers"


@command.command()
@click.option("-n", "--node", default="", help="Only this node; default: all workers.")
@click.option("--end", is_flag=True, help="Lend again.")
@config_option
@format_option
def cooldown(node: str, end: bool, config_path: str | None, output: str) -> None:
    """Let a node rest: it lends nothing new until `--end`. What is lent stays until it is released."""
    done = with_daemon(lambda client: client.call("lending_cooldown", node=node, end=end), config_path)

    def show() -> None:
        word = "lends again" if end else "lends nothing new"
        for name in done["nodes"]:
            click.echo(f"{name} {word}")
        for lease in done["leases"]:
            click.echo(f"still lent by {lease['node']}: {lease['id'][:8]} {amounts_text(lease['amounts'])}")

    emit(done, output, show)
