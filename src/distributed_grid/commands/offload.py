"""`grid offload`: find heavy processes, move running ones to a worker, follow them, bring them back."""

from __future__ import annotations

import asyncio
import json
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
from distributed_grid.core.errors import ExitCode, GridError, TimedOut, UsageError
from distributed_grid.core.resources import format_bytes, format_duration

_UNDER_WAY = ("PLANNED", "FROZEN", "COPIED", "STAGED", "COMMITTED")
AFTER_LIMIT_S = 120.0


class OffloadGroup(click.Group):
    """Loads the automatic offload and the dashboard only when they are asked for."""

    LATER = {"auto": "offload_auto", "watch": "offload_watch"}  # noqa: RUF012

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*super().list_commands(ctx), *self.LATER]

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name in self.LATER:
            from importlib import import_module

            found: click.Command = import_module(f"distributed_grid.commands.{self.LATER[name]}").command
            return found
        return super().get_command(ctx, name)


@click.group(cls=OffloadGroup)
def command() -> None:
    """Find heavy processes and move running ones to a worker, memory and all.

    \b
    grid offload scan                      what could be moved
    grid offload plan 12345                what would happen, and why
    grid offload execute 12345             move it; its shell, its log and its parent notice nothing
    grid offload status                    where everything is
    grid offload return offload_17…        bring it home
    """


@command.command()
@click.option("-n", "--node", default=None, help="Only this node.")
@click.option("-a", "--all", "everything", is_flag=True, help="Also what may not be moved, with the reason.")
@config_option
@format_option
def scan(node: str | None, everything: bool, config_path: str | None, output: str) -> None:
    """Heavy processes, one line each.

    \b
    grid offload scan | grep train
    grid offload scan --format json | jq -r '.[].pid' | xargs -I {} grid offload execute {}
    """
    found = with_daemon(lambda client: client.call("offload_scan", node=node, everything=everything), config_path)

    def show() -> None:
        rows = [
            (one["pid"], one["node"], one["user"], one["type"], f"{one['cpu_cores']:.1f}",
             format_bytes(one["memory_bytes"]),
             format_bytes(one["gpu_memory_bytes"]) if one["gpu_memory_bytes"] else "-", format_duration(one["age_s"]),
             "" if one["movable"] else one["why_not"], one["command"])
            for one in found
        ]  # fmt: skip
        headers = ["pid", "node", "user", "type", "cores", "memory", "gpu", "age", "stays because", "command"]
        shown = range(10) if everything else [0, 1, 2, 3, 4, 5, 6, 7, 9]
        print_table([headers[i] for i in shown], [[row[i] for i in shown] for row in rows])
        if not found:
            note("nothing heavy enough runs; -a shows what else there is")

    emit(found, output, show)


def move_options(function: Any) -> Any:
    for option in (
        click.option("--target-node", "-t", default=None, help="Where to; default: the worker that fits best."),
        click.option("--strategy", type=click.Choice(["auto", "live", "relaunch"]), default=None, help="How."),
        click.option("--runtime-env", default=None, metavar="JSON", help='For a relaunch: {"env_vars": {…}}.'),
        click.option("--capture-state", type=bool, default=True, show_default=True,
                     help="False: start it again with a fresh environment instead of carrying anything."),
        click.option("--tcp-close", is_flag=True, help="Move it although its connections will be closed."),
        click.option("--cut-pipes", is_flag=True, help="Move it although pipes to what stays here will be cut."),
        click.option("--stage-large/--leave-large", default=None,
                     help="Files beyond the limit: copy them, or go without them; default: ask."),
        click.option("--strict", is_flag=True, help="Have every page there before it resumes (a longer pause)."),
        click.option("--force", is_flag=True, help="Also an interactive program."),
    ):  # fmt: skip
        function = option(function)
    return function


def gather(
    strategy: str | None, runtime_env: str | None, capture_state: bool, tcp_close: bool, cut_pipes: bool, strict: bool,
    force: bool, stage_large: bool | None,
) -> dict[str, Any]:  # fmt: skip
    options: dict[str, Any] = {
        "tcp_close": tcp_close, "cut_pipes": cut_pipes, "strict": strict, "force": force,
        "capture_state": capture_state,
    }  # fmt: skip
    if stage_large is not None:
        options["stage_large"] = stage_large
    if strategy:
        options["strategy"] = strategy
    if runtime_env is not None:
        try:
            parsed = json.loads(runtime_env)
        except json.JSONDecodeError as error:
            raise UsageError("--runtime-env is not JSON", cause=str(error), hint=_EXAMPLE, code="runtime-env") from None
        variables = parsed.get("env_vars", {}) if isinstance(parsed, dict) else None
        known = isinstance(parsed, dict) and not set(parsed) - {"env_vars", "working_dir"}
        if not known or not isinstance(variables, dict) or not all(isinstance(v, str) for v in variables.values()):
            raise UsageError("--runtime-env must be {\"env_vars\": {NAME: TEXT}}", hint=_EXAMPLE, code="runtime-env")
        options["runtime_env"] = parsed
    return options


_EXAMPLE = """--runtime-env '{"env_vars": {"CUDA_VISIBLE_DEVICES": "0"}}'"""


def show_plan(plan: dict[str, Any]) -> None:
    click.echo(f"PID {plan['pid']} on {plan['node']} ({plan['user']}): {plan['command']}")
    if plan["strategy"] == "refuse":
        click.echo(paint("it stays: " + plan["why"], "yellow"))
    else:
        pause = f"{plan['expected_pause_s']:.1f} s" if plan.get("expected_pause_s") is not None else "not known yet"
        click.echo(f"{plan['strategy']} to {plan['target']}: {plan['why']}")
        click.echo(f"{format_bytes(plan['bytes'])} to carry, expected pause {pause}")
    for line in plan.get("blocking", []):
        click.echo(f"  can't: {line}")
    for line in plan.get("notices", []):
        click.echo(f"  note: {line}")


@command.command()
@click.argument("pid")
@move_options
@config_option
@format_option
def plan(
    pid: str, target_node: str | None, config_path: str | None, output: str, **options: Any
) -> None:
    """What a move would do, and why; nothing is touched. Exit code 4 if it would be refused."""
    asked = gather(**options)
    try:
        found = with_daemon(
            lambda client: client.call("offload_plan", pid=pid, target_node=target_node, options=asked), config_path
        )
    except GridError as error:
        raise _not_found(error, pid) from None
    emit(found, output, lambda: show_plan(found))
    if found["strategy"] == "refuse":
        click.get_current_context().exit(int(ExitCode.REFUSED))


@command.command()
@click.argument("pid")
@move_options
@click.option("--dry-run", is_flag=True, help="Only print the plan.")
@config_option
@format_option
@click.pass_context
def execute(
    ctx: click.Context, /, pid: str, target_node: str | None, dry_run: bool, config_path: str | None, output: str,
    **options: Any,
) -> None:  # fmt: skip
    """Move a running process. If anything goes wrong it simply runs on where it was.

    PID is a process of the head; NODE:PID one of another node.

    \b
    grid offload execute 12345
    grid offload execute 12345 --target-node gpu1
    """
    if dry_run:
        ctx.invoke(plan, pid=pid, target_node=target_node, config_path=config_path, output=output, **options)
        return
    asked = gather(**options)

    async def work(client: Any) -> dict[str, Any]:
        return await follow_move(
            client.stream("offload_execute", pid=pid, target_node=target_node, options=asked), quiet=output == "json"
        )

    begun = time.time()
    try:
        done = with_daemon(work, config_path)
    except GridError as error:
        if error.code != "connection-lost":
            raise _failed(error, pid) from None
        done = _after_the_daemon(error, pid, begun, config_path)
    emit(done, output, lambda: _show_done(done))


def _after_the_daemon(lost: GridError, pid: str, begun: float, config_path: str | None) -> dict[str, Any]:
    """The daemon died under the move: the next one, which this starts, leads it back or on. How it ended."""
    note(f"{lost.message}: another daemon is started, which leads the move back or on")

    async def work(client: Any) -> dict[str, Any] | None:
        while True:
            told = await client.call("offload_status", brief=True)
            mine = [one for one in [*told["active"], *told["finished"]]
                    if str(one["pid"]) == pid.rpartition(":")[2] and one["created"] >= begun]  # fmt: skip
            if not mine or mine[0]["state"] not in _UNDER_WAY:
                return mine[0] if mine else None
            if time.time() - begun > AFTER_LIMIT_S:
                text = f"{mine[0]['id']} is still {mine[0]['state']}"
                raise TimedOut(text, hint="grid offload status", code="stalled")
            await asyncio.sleep(0.3)

    done = with_daemon(work, config_path)
    if done is None:
        raise _failed(GridError("the daemon died before the move began", code="not-moved"), pid)
    if done["state"] == "ABORTED":
        raise _failed(GridError("the daemon died, so it was led back", cause=done["reason"], code="not-moved"), pid)
    return done


def _failed(error: GridError, pid: str) -> GridError:
    """The documents' names for the two kinds of failure, with their hints."""
    if error.code == "node-lost" or error.exit_code in (ExitCode.FAILED, ExitCode.TIMEOUT, ExitCode.INTERNAL):
        error.hint = error.hint or "the process runs on where it was; grid logs daemon has the details"
        error.message = f"Offloading Failed: {error.message}"
    return _not_found(error, pid)


def _not_found(error: GridError, pid: str) -> GridError:
    if error.code != "process-not-found":
        return error
    hint = error.hint or "ps aux | grep NAME, or grid offload scan"
    return type(error)(f"Process Not Found: {pid}", cause=error.message, hint=hint, code=error.code)


async def follow_move(steps: Any, *, quiet: bool) -> dict[str, Any]:
    done: dict[str, Any] = {}
    last = ""
    async for step in steps:
        if "done" in step:
            done = step["done"]
        elif "plan" in step:
            if not quiet:
                note(f"{step['plan']['strategy']} to {step['plan']['target']}: {step['plan']['why']}")
        else:
            text = step["step"]
            if text != last and not quiet:
                size = f", {format_bytes(step['bytes'])}" if step.get("bytes") else ""
                note(f"{step['state'].lower()}: {text}{size}")
            last = text
    return done


def _show_done(done: dict[str, Any]) -> None:
    if done["state"] in ("RUNNING", "CLEANED", "ENDED"):
        pause = f" after a pause of {done['pause_s']:.2f} s" if done.get("pause_s") is not None else ""
        click.echo(f"{done['id']}: PID {done['pid']} runs on {done['target']}{pause}")
        click.echo("Monitor progress: grid offload status")
    else:
        click.echo(f"{done['id']}: {done['state'].lower()} {done.get('reason', '')}".rstrip())


@command.command()
@click.option("--limit", default=20, show_default=True, type=click.IntRange(0, 10000), help="How many finished ones.")
@config_option
@format_option
def status(limit: int, config_path: str | None, output: str) -> None:
    """Statistics, what is away, what has ended."""
    found = with_daemon(lambda client: client.call("offload_status", limit=limit), config_path)

    def show() -> None:
        numbers = found["statistics"]
        click.echo(
            f"{numbers['moves']} moves: {numbers['active']} active, {numbers['ended']} ended, "
            f"{numbers['aborted']} aborted, {numbers['lost']} lost; {format_bytes(numbers['bytes'])} carried"
        )
        rows = [_row(one) for one in [*found["active"], *found["finished"]]]
        headers = ("id", "pid", "from", "to", "state", "how", "bytes", "pause", "exit", "age", "command")
        print_table(headers, rows)

    emit(found, output, show)


def _row(one: dict[str, Any]) -> tuple[Any, ...]:
    state = "TARGET LOST" if one["target_lost"] else one["state"]
    return (
        one["id"], one["pid"], one["node"], one["target"], state, one["strategy"] or "-",
        format_bytes(one["bytes"]) if one["bytes"] else "-",
        f"{one['pause_s']:.2f}s" if one["pause_s"] is not None else "-",
        "-" if one["exit_code"] is None else one["exit_code"], format_duration(time.time() - one["created"]),
        one["command"],
    )  # fmt: skip


@command.command()
@click.argument("move_id")
@click.option("-f", "--follow", is_flag=True, help="Go on until it ends.")
@config_option
def logs(move_id: str, follow: bool, config_path: str | None) -> None:
    """What a moved process has written since it was moved."""
    from distributed_grid.commands.execute import Output, follow_task
    from distributed_grid.daemon.client import LastingClient

    path, named = chosen_file(config_path)
    client = LastingClient(config_path=path, insist=named)

    async def go() -> None:
        try:
            await follow_task(client, move_id, Output(), wait=follow, call="offload_follow")
        finally:
            await client.close()

    run(go())


@command.command()
@click.argument("move_id")
@click.option("--grace", "grace_s", default=10.0, show_default=True, type=click.FloatRange(0, 3600))
@click.option("--return", "bring_home", is_flag=True, help="Bring it home instead of ending it.")
@config_option
@format_option
@click.pass_context
def cancel(
    ctx: click.Context, /, move_id: str, grace_s: float, bring_home: bool, config_path: str | None, output: str
) -> None:
    """End a moved process (SIGTERM, then SIGKILL); a move under way is called off and the process stays."""
    if bring_home:
        ctx.invoke(bring_back, move_id=move_id, config_path=config_path, output=output)
        return
    done = with_daemon(
        lambda client: client.call("offload_cancel", move_id=move_id, grace_s=grace_s, timeout_s=grace_s + 180),
        config_path,
    )
    emit(done, output, lambda: click.echo(f"{done['id']} is {done['state'].lower()}"))


@command.command("return")
@click.argument("move_id")
@config_option
@format_option
def bring_back(move_id: str, config_path: str | None, output: str) -> None:
    """Bring a moved process home, memory and all."""

    async def work(client: Any) -> dict[str, Any]:
        return await follow_move(client.stream("offload_return", move_id=move_id), quiet=output == "json")

    done = with_daemon(work, config_path)
    emit(done, output, lambda: _show_done(done))


@command.command()
@click.argument("move_id")
@config_option
@format_option
def sync(move_id: str, config_path: str | None, output: str) -> None:
    """Bring the files that a moved process has changed home now."""
    done = with_daemon(lambda client: client.call("offload_sync", move_id=move_id, timeout_s=600), config_path)

    def show() -> None:
        for path in done["files"]:
            click.echo(path)
        for path in done["conflicts"]:
            click.echo(paint(f"{path} was changed on both sides: both are kept", "yellow"))
        click.echo(done["text"])

    emit(done, output, show)


@command.command()
@click.argument("move_id")
@click.option("--here", is_flag=True, help="It runs on at home; the copy is given up.")
@click.option("--there", is_flag=True, help="It runs on the target; the source is given up.")
@config_option
@format_option
def resolve(move_id: str, here: bool, there: bool, config_path: str | None, output: str) -> None:
    """Decide a move in doubt by hand, when its target can't be asked any more."""
    if here == there:
        text = "only one of the two counts" if here else "say which one counts"
        raise UsageError(text, hint=f"grid offload resolve {move_id} --here|--there", code="usage")
    done = with_daemon(
        lambda client: client.call("offload_resolve", move_id=move_id, here=here, timeout_s=180), config_path
    )
    emit(done, output, lambda: _show_done(done))
