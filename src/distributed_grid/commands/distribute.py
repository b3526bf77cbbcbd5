"""`grid distribute`: Ray's own view of the cluster, and a quick test of every node."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import click

from distributed_grid.commands._common import (
    chosen_file,
    config_option,
    emit,
    format_option,
    note,
    paint,
    print_table,
    run,
    with_daemon,
)  # fmt: skip
from distributed_grid.core.errors import ExitCode, GridError
from distributed_grid.core.resources import format_bytes

TEST_COMMAND = ["uname", "-nr"]
TEST_LIMIT_S = 60.0


@click.group()
def command() -> None:
    """Ray's own view: nodes and what runs on them; a quick test of every node.

    \b
    grid distribute status
    grid distribute test
    """


@command.command()
@config_option
@format_option
def status(config_path: str | None, output: str) -> None:
    """The nodes as Ray itself knows them, what Ray may place there, and its tasks and actors of now.

    Commands that the grid started are no Ray tasks: `grid jobs list`.
    """

    async def work(client: Any) -> dict[str, Any]:
        cluster = await client.call("cluster_status")
        order = [node["name"] for node in cluster["nodes"]]
        nodes = sorted(await client.call("nodes"), key=lambda node: (not node["alive"], _place(order, node["node"])))
        work = await _work(client, {node["ray_node_id"]: node["node"] for node in nodes})
        return {"ray_address": cluster["ray_address"], "dashboard_url": cluster["dashboard_url"],
                "nodes": nodes, **work}  # fmt: skip

    found = with_daemon(work, config_path)

    def show() -> None:
        alive = sum(1 for node in found["nodes"] if node["alive"])
        click.echo(f"Ray at {found['ray_address']}, dashboard {found['dashboard_url']}: {alive} nodes alive")
        print_table(
            ("node", "ray", "address", "cpu", "memory", "gpu", "object store", "running", "ray id"),
            [_row(node, found["tasks"]) for node in found["nodes"]],
            right=(3, 5, 7),
        )
        if found["tasks"]:
            click.echo()
            headers = ("task", "state", "node", "pid", "type", "ray id")
            print_table(headers, [(t["name"], t["state"].lower(), t["node"] or "-", t["pid"] or "-",
                                   t["type"].lower(), t["id"]) for t in found["tasks"]])  # fmt: skip
        if found["actors"]:
            click.echo()
            headers = ("actor", "state", "node", "pid", "name", "ray id")
            print_table(headers, [(a["class"], a["state"].lower(), a["node"] or "-", a["pid"] or "-",
                                   a["name"] or "-", a["id"]) for a in found["actors"]])  # fmt: skip

    emit(found, output, show)


def _place(order: list[str], name: str) -> int:
    return order.index(name) if name in order else len(order)


async def _work(client: Any, names: dict[str, str]) -> dict[str, Any]:
    """Ray's tasks and actors with our names of the nodes; null where Ray's dashboard does not tell them now."""
    try:
        found = await client.call("ray_tasks")
    except GridError as error:
        note(f"Ray does not tell its tasks: {error.cause or error.message}")
        return {"tasks": None, "actors": None}
    return {
        kind: [{**one, "node": names.get(one["ray_node_id"], "")} for one in found[kind]]
        for kind in ("tasks", "actors")
    }  # fmt: skip


def _row(node: dict[str, Any], tasks: list[dict[str, Any]] | None) -> tuple[Any, ...]:
    amounts = node["resources"]
    running: Any = "-"
    if node["alive"] and tasks is not None:
        running = sum(1 for task in tasks if task["node"] == node["node"])
    return (
        node["node"] or "?", "alive" if node["alive"] else "dead", node["address"], f"{amounts.get('CPU', 0):g}",
        format_bytes(amounts.get("memory", 0)), f"{amounts.get('GPU', 0):g}",
        format_bytes(amounts.get("object_store_memory", 0)), running, node["ray_node_id"][:8],
    )  # fmt: skip


@command.command()
@config_option
@format_option
def test(config_path: str | None, output: str) -> None:
    """Run a small command on every node, all at once; shows its answer and the time it took."""
    results = run(_test_all(config_path))
    bad = [result for result in results if not result["ok"]]

    def show() -> None:
        rows = [
            (result["node"], paint("ok", "green") if result["ok"] else paint("failed", "red"),
             f"{result['seconds'] * 1000:.0f} ms" if result["seconds"] is not None else "-", result["said"])
            for result in results
        ]  # fmt: skip
        print_table(("node", "test", "time", "answer"), rows)

    emit(results, output, show)
    if bad:
        away = all(result["offline"] for result in bad)
        click.get_current_context().exit(int(ExitCode.UNAVAILABLE if away else ExitCode.FAILED))


async def _test_all(config_path: str | None) -> list[dict[str, Any]]:
    from distributed_grid.core.errors import Unavailable
    from distributed_grid.daemon.client import LastingClient

    path, named = chosen_file(config_path)
    client = LastingClient(config_path=path, insist=named)
    try:
        found = await client.call("cluster_status")
        if not any(node["online"] for node in found["nodes"]):
            raise Unavailable("no node is online", hint="grid cluster start", code="no-cluster")
        return list(await asyncio.gather(*(_test(client, node) for node in found["nodes"])))
    finally:
        await client.close()


async def _test(client: Any, node: dict[str, Any]) -> dict[str, Any]:
    from distributed_grid.commands.execute import Output, follow_task
    from distributed_grid.daemon.tasks import new_task_id

    result: dict[str, Any] = {
        "node": node["name"], "ok": False, "offline": not node["online"], "seconds": None, "exit_code": None,
        "said": node["reason"],
    }  # fmt: skip
    if not node["online"]:
        return result
    task_id, output = new_task_id(), Output(keep=True)
    began = time.monotonic()
    try:
        await client.call("task_start", node=node["name"], argv=TEST_COMMAND, task_id=task_id)
        async with asyncio.timeout(TEST_LIMIT_S):
            ended = await follow_task(client, task_id, output)
        result["seconds"] = round(time.monotonic() - began, 4)
        await client.call("task_remove", task_id=task_id)
    except GridError as error:
        return {**result, "said": f"{error.message}: {error.cause}" if error.cause else error.message}
    except TimeoutError:
        return {**result, "said": f"no end within {TEST_LIMIT_S:.0f} s: grid jobs attach {task_id}"}
    said = output.kept()
    return {
        **result, "ok": ended.get("exit_code") == 0, "exit_code": ended.get("exit_code"),
        "said": (said["stdout"] or said["stderr"]).strip(),
    }  # fmt: skip
