"""`grid boost`: borrow a worker's resources for a time, run commands in them, give them back."""

from __future__ import annotations

from typing import Any

import click

from distributed_grid.commands._common import Seconds, config_option, emit, format_option, with_daemon
from distributed_grid.commands._lending_views import amount_text, asked, moment, priority_name, show_boosts
from distributed_grid.commands.resource_sharing import released
from distributed_grid.commands.run_shared import JobOptions, job_options, run_job
from distributed_grid.core.errors import UsageError


@click.group()
def command() -> None:
    """Borrow resources of a worker for a time. Any unique beginning of an id will do."""


@command.command()
@click.argument("target_node")
@click.argument("resource_type")
@click.argument("amount")
@click.option("-p", "--priority", default="normal", show_default=True, help="low, normal, high or critical.")
@click.option("-d", "--duration", "duration_s", default=3600.0, show_default=True, type=float, help="Seconds.")
@click.option("-s", "--source", default="", help="From this worker; default: whichever has it free.")
@click.option("--wait-time", "wait_s", default=0.0, type=Seconds(0, 86400 * 30), help="Seconds to wait.")
@config_option
@format_option
def request(
    target_node: str, resource_type: str, amount: str, priority: str, duration_s: float, source: str, wait_s: float,
    config_path: str | None, output: str,
) -> None:  # fmt: skip
    """Borrow AMOUNT of RESOURCE_TYPE (cpu, gpu, memory) for TARGET_NODE.

    \b
    grid boost request gpu-master cpu 2.0 --priority high
    grid boost request gpu-master memory 4.0 --source gpu2
    """
    from distributed_grid.orchestration.resource_sharing.amounts import check_duration
    from distributed_grid.orchestration.resource_sharing.protocol import request_lease

    arguments: dict[str, Any] = {
        "amounts": asked([(resource_type, amount)]), "kind": "boost", "target": target_node,
        "priority": priority_name(priority), "nodes": [source] if source else [], "wait_s": wait_s,
        "duration_s": check_duration(duration_s),
    }  # fmt: skip
    lease = with_daemon(lambda client: request_lease(client, **arguments), config_path)

    def show() -> None:
        what = amount_text(lease["resource_type"], lease["amount"])
        click.echo(f"Boosted {lease['target']} by {what} of {lease['node']}, until {moment(lease['expires'])}")
        click.echo(f"boost id: {lease['id']}")
        click.echo(f"use it:   grid boost run {lease['id'][:8]} -- CMD")

    emit(lease, output, show)


@command.command()
@click.option("-n", "--node", default="", help="Only boosts for this node, or from it.")
@config_option
@format_option
def status(node: str, config_path: str | None, output: str) -> None:
    """Active boosts: how many, sums by type, each with its times."""
    found = with_daemon(lambda client: client.call("boost_list", node=node), config_path)
    emit(found, output, lambda: show_boosts(found))


@command.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("boost_id")
@job_options
@click.argument("argv", nargs=-1, required=True, metavar="CMD [ARGS]...", type=click.UNPROCESSED)
def run(boost_id: str, argv: tuple[str, ...], **options: Any) -> None:
    """Run a command on the boost's source: on its cores and GPUs, within its memory, output here.

    \b
    grid boost run 3f2a91c0 -- python train_model.py
    """
    if argv[0].startswith("-") and argv[0] != "--":
        hint = f"grid boost run {argv[0]} … {boost_id} -- CMD"
        raise UsageError(f"{argv[0]} stands where the command should", hint=hint, code="usage")
    run_job(JobOptions.of(argv, options), lease=boost_id)


@command.command()
@click.argument("boost_id")
@click.option("--force", is_flag=True, help="Also end what runs under it.")
@config_option
@format_option
def release(boost_id: str, force: bool, config_path: str | None, output: str) -> None:
    """Give a boost back before its time."""
    done = with_daemon(
        lambda client: client.call("lease_release", timeout_s=120, lease_id=boost_id, force=force, boost=True),
        config_path,
    )
    emit(done, output, lambda: click.echo(released(done)))


@command.command()
@click.argument("boost_id")
@click.option("-d", "--duration", "duration_s", default=3600.0, show_default=True, type=float, help="Seconds from now.")
@config_option
@format_option
def renew(boost_id: str, duration_s: float, config_path: str | None, output: str) -> None:
    """Let a boost's time begin anew."""
    found = with_daemon(
        lambda client: client.call("boost_renew", boost_id=boost_id, duration_s=duration_s), config_path
    )
    emit(found, output, lambda: click.echo(f"{found['boost_id'][:8]} lasts until {moment(found['expires_at'])}"))
