"""`grid cluster`: bring the cluster up and down, install nodes, measure links."""

from __future__ import annotations

import time
from typing import Any

import click

from distributed_grid.commands._common import config_option, emit, format_option, note, paint, print_table, with_daemon
from distributed_grid.commands._views import node_row
from distributed_grid.core.errors import ExitCode, GridError, Unavailable
from distributed_grid.core.resources import format_bytes


@click.group()
def command() -> None:
    """Bring the cluster up and down, install nodes, measure links.

    \b
    grid cluster start        with no configuration: three nodes on this machine
    grid cluster status
    grid cluster stop
    """


@command.command()
@config_option
@format_option
def start(config_path: str | None, output: str) -> None:
    """Bring up what is not up. A node that fails is named with its reason (exit code 5), the others stay up."""

    async def work(client: Any) -> dict[str, Any]:
        began = time.monotonic()
        result: dict[str, Any] = {}
        async for step in client.stream("cluster_start"):
            if "step" in step:
                note(f"{time.monotonic() - began:5.1f} s  {step['node']}: {step['step']}")
            else:
                result = step
        result["seconds"] = round(time.monotonic() - began, 2)
        return result

    result = with_daemon(work, config_path)
    failed = {name: GridError.from_wire(error) for name, error in result["failed"].items()}
    for node in result["done"]:
        if not node["online"] and node["name"] not in failed:  # Ray is up there, but its agent does not answer
            failed[node["name"]] = Unavailable(
                "its agent does not answer", cause=node["reason"], hint=f"grid doctor --node {node['name']}"
            )

    def show() -> None:
        up = [node["name"] for node in result["done"] if node["online"]]
        click.echo(f"up after {result['seconds']:.1f} s: {', '.join(up)}")
        for name, error in failed.items():
            reason = f"{error.message}: {error.cause}" if error.cause else error.message
            click.echo(paint(f"{name} is not up: {reason}", "red"))
            if error.hint:
                click.echo(f"  try: {error.hint}")

    told = {name: error.to_wire() for name, error in failed.items()}
    emit({"nodes": result["done"], "failed": told, "seconds": result["seconds"]}, output, show)
    if failed:
        click.get_current_context().exit(int(ExitCode.UNAVAILABLE))


@command.command()
@config_option
@format_option
def stop(config_path: str | None, output: str) -> None:
    """Take the cluster down: exactly what was started, never another Ray. Running commands are left running."""

    async def work(client: Any) -> dict[str, str]:
        last: dict[str, str] = {}
        moved = (await client.call("offload_status", limit=0, brief=True))["active"]
        async for step in client.stream("cluster_stop"):
            last[step["node"]] = step["step"]
            if step["step"] != "stopping":
                note(f"{step['node']}: {step['step']}")
        for one in moved:
            if one["state"] in ("RUNNING", "CLEANED"):
                note(f"PID {one['pid']} runs on, on {one['target']}; its output waits there for grid cluster start")
            elif one["state"] in ("COMMITTED", "IN_DOUBT"):
                note(f"PID {one['pid']} is held, its move to {one['target']} in doubt until grid cluster start")
        return last

    result = with_daemon(work, config_path)
    bad = {name: step for name, step in result.items() if step != "stopped"}
    emit(result, output, lambda: click.echo("the cluster is down" if not bad else "the cluster is down in part"))
    if bad:
        click.get_current_context().exit(int(ExitCode.UNAVAILABLE))


@command.command()
@config_option
@format_option
def status(config_path: str | None, output: str) -> None:
    """Resources by node: used, lent, declared or measured, with the age of the figures."""
    found = with_daemon(lambda client: client.call("cluster_status"), config_path)

    def show() -> None:
        click.echo(f"cluster {found['state']}" + (f", Ray at {found['ray_address']}" if found["ray_address"] else ""))
        headers = ("node", "role", "state", "cpu", "memory", "gpu", "lent", "age", "")
        print_table(headers, [node_row(node) for node in found["nodes"]])
        if any((node.get("use") or {}).get("declared") for node in found["nodes"]):
            click.echo("capacities are declared, not measured")

    emit(found, output, show)


@command.command()
@click.option("-n", "--node", "nodes", multiple=True, help="Only these nodes (repeatable).")
@config_option
@format_option
def install(nodes: tuple[str, ...], config_path: str | None, output: str) -> None:
    """Put a matching Python environment, Ray and grid itself on the nodes; they need no internet."""
    from distributed_grid.commands._install import install_nodes

    results = install_nodes(nodes, config_path)
    bad = {name: result for name, result in results.items() if result.get("error")}

    def show() -> None:
        for name, result in results.items():
            click.echo(f"{name}: {result.get('error') or result.get('done')}")

    emit(results, output, show)
    if bad:
        click.get_current_context().exit(int(ExitCode.FAILED))


@command.command()
@click.option("--seconds", default=1.0, show_default=True, type=click.FloatRange(0.1, 60), help="For each pair.")
@click.option("--last", is_flag=True, help="Only show what was measured before.")
@config_option
@format_option
def bandwidth(seconds: float, last: bool, config_path: str | None, output: str) -> None:
    """Measure the links between the head and each worker, and remember the rates for later plans."""

    async def work(client: Any) -> list[dict[str, Any]]:
        if not last:
            found = await client.call("cluster_status")
            online = [node for node in found["nodes"] if node["online"]]
            head = [node["name"] for node in online if node["role"] == "head"]
            for worker in [node["name"] for node in online if node["role"] != "head"]:
                for source, target in ((head[0], worker), (worker, head[0])) if head else ():
                    note(f"measuring {source} to {target}")
                    await client.call("bandwidth_measure", source=source, target=target, seconds=seconds)
        rows: list[dict[str, Any]] = await client.call("bandwidth_list")
        return rows

    rows = with_daemon(work, config_path)

    def show() -> None:
        table = [
            (row["source"], row["target"], f"{format_bytes(row['bytes_per_s'])}/s",
             f"{row['bytes_per_s'] * 8 / 1e9:.2f}",
             time.strftime("%Y-%m-%d %H:%M", time.localtime(row["at"])))
            for row in rows
        ]  # fmt: skip
        print_table(("from", "to", "rate", "Gbit/s", "measured"), table)

    emit(rows, output, show)
