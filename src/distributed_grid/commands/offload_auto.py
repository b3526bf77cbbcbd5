"""`grid offload auto`: automatic offload on, off, its state, what it would do, what it would have done."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from distributed_grid.commands._common import (
    chosen_config,
    config_option,
    emit,
    format_option,
    note,
    paint,
    percent,
    print_table,
    run,
    with_daemon,
)  # fmt: skip
from distributed_grid.core.errors import ConfigError, Unavailable, UsageError

RESOURCES = ("cpu", "memory", "gpu")
_HINT = "a percentage of the memory (70), or cpu=80 memory=65 gpu=90"


@click.command("auto")
@click.option("--enable", "enable", is_flag=True, help="Move work off the head by itself from now on.")
@click.option("--disable", "disable", is_flag=True, help="Stop that; a move in flight is finished.")
@click.option("--status", "show_status", is_flag=True, help="What is set, what is seen, what was decided last.")
@click.option("--threshold", multiple=True, metavar="VALUE...", help="When it acts: 70 (memory), or cpu=80 memory=65.")
@click.option("--dry-run", is_flag=True, help="With --enable: decide and say, move nothing. Alone: what would be now.")
@click.option("--replay", "replay_path", metavar="FILE", help="Run the policy over a recorded history.")
@click.option("--record", "record_path", metavar="FILE", help="Write the last hour's checks to a file, for --replay.")
@click.argument("more", nargs=-1, metavar="")
@config_option
@format_option
def command(
    enable: bool, disable: bool, show_status: bool, threshold: tuple[str, ...], dry_run: bool, replay_path: str | None,
    record_path: str | None, more: tuple[str, ...], config_path: str | None, output: str,
) -> None:  # fmt: skip
    """Keep the head free by itself: when it is under pressure, running work is moved to a worker.

    \b
    grid offload auto --enable
    grid offload auto --enable --threshold 70
    grid offload auto --enable --threshold cpu=80 memory=65 gpu=90
    grid offload auto --status
    grid offload auto --disable
    """
    if more and not threshold:
        raise UsageError(f"{more[0]!r} is not an option", hint="grid offload auto --help", code="usage")
    wanted = parse_thresholds([*threshold, *more])
    asked = [flag for flag, given in (("--enable", enable), ("--disable", disable), ("--status", show_status),
                                      ("--replay", replay_path), ("--record", record_path)) if given]  # fmt: skip
    if len(asked) > 1:
        raise UsageError(f"{' and '.join(asked)} do not go together", hint="one of them at a time", code="usage")
    if disable and (wanted or dry_run):
        raise UsageError("--disable takes neither thresholds nor --dry-run", code="usage")
    if replay_path:
        _replay(replay_path, wanted, config_path, output)
    elif record_path:
        _record(record_path, config_path)
    elif enable or disable or (wanted and not show_status):
        _change(True if enable else False if disable else None, wanted, dry_run, config_path, output)
    elif dry_run:
        _preview(config_path, output)
    else:
        status = with_daemon(lambda client: client.call("auto_status"), config_path)
        emit(status, output, lambda: _show_status(status))


def parse_thresholds(words: list[str]) -> dict[str, float]:
    """Fractions by resource, from `70`, `70%`, `cpu=80`, `memory=65,gpu=90`."""
    found: dict[str, float] = {}
    for word in ",".join(words).split(","):
        if not word.strip():
            continue
        name, equals, text = word.partition("=")
        if not equals:
            name, text = "memory", name
        name = name.strip().lower()
        if name not in RESOURCES:
            raise UsageError(f"there is no threshold for {name!r}", hint=_HINT, code="threshold")
        try:
            value = float(text.strip().removesuffix("%"))
        except ValueError:
            raise UsageError(f"{text!r} is not a threshold", hint=_HINT, code="threshold") from None
        # As in the configuration: above 1 it is a percentage, up to 1 a fraction.
        value = value / 100 if value > 1 or text.strip().endswith("%") else value
        if not 0 < value <= 1:
            raise UsageError(f"a threshold of {text} is out of range", hint="above 0, up to 100", code="threshold")
        if found.get(name, value) != value:
            raise UsageError(f"two thresholds for {name}", hint=_HINT, code="threshold")
        found[name] = value
    return found


# -- on and off -------------------------------------------------------------------------------------------------------


def _change(
    enabled: bool | None, wanted: dict[str, float], dry_run: bool, config_path: str | None, output: str
) -> None:
    from distributed_grid.config.edit import set_values

    path, fresh = _home_of_settings(config_path, enabled)
    if path is None:  # nothing was ever set, and it is off by default
        emit({"enabled": False}, output, lambda: click.echo("✓ Auto-offload disabled"))
        return
    if not fresh:
        _check_it_may_be_served(path)
        # Last to first: a new key is put at the top of its section.
        values: dict[str, Any] = {
            f"resource_sharing.auto_offload.thresholds.{name}": _as_written(wanted[name])
            for name in reversed(RESOURCES) if name in wanted
        }  # fmt: skip
        if enabled:
            values["resource_sharing.auto_offload.head_only_mode"] = True
        if enabled is not None:
            values["resource_sharing.auto_offload.enabled"] = enabled
        set_values(path, values)
    else:
        _write_fresh(path, wanted)
    status = _apply(path, dry_run if enabled else None, start=enabled is not False)

    def show() -> None:
        levels = _levels(status["thresholds"], wanted)
        if enabled is False:
            click.echo("✓ Auto-offload disabled")
        elif enabled:
            click.echo(f"✓ Auto-offload enabled for {status['head']} ({levels})")
            if dry_run:
                click.echo("  dry run: it decides and says so in `grid events`, and moves nothing")
        else:
            state = "enabled" if status["enabled"] else "disabled"
            click.echo(f"✓ Thresholds set for {status['head']} ({levels}); auto-offload is {state}")

    emit(status, output, show)


def _check_it_may_be_served(path: Path) -> None:
    """A daemon that serves another cluster refuses this file; then it must not have been changed."""
    from distributed_grid.daemon.client import connect

    async def ask() -> None:
        async with await connect() as client:
            await client.call("config_use", path=str(path))

    try:
        run(ask())
    except Unavailable:
        pass  # none runs: one is started with this file


def _levels(thresholds: dict[str, float], wanted: dict[str, float]) -> str:
    names = ["memory", "cpu", *(["gpu"] if "gpu" in wanted else [])]
    return ", ".join(f"{name}: {_number(thresholds[name])}%" for name in names)


def _number(fraction: float) -> str:
    return f"{round(fraction * 100, 2):g}"


def _as_written(fraction: float) -> int | float:
    """Percentages, as in the documents; the least of them would read as a fraction, and is written as one."""
    value = round(fraction * 100, 4)
    if value <= 1:
        return fraction
    return int(value) if value == int(value) else value


def _home_of_settings(config_path: str | None, enabled: bool | None) -> tuple[Path | None, bool]:
    """The configuration file to change, and whether it must be made first: in the user's own directory."""
    from distributed_grid.config.find import USER_NAME, find_config_file
    from distributed_grid.config.loader import load_cluster_config
    from distributed_grid.config.paths import GridPaths

    named = chosen_config(config_path) or os.environ.get("GRID_CONFIG")
    try:
        served, up = run(_daemon_now())
    except Unavailable:
        served, up = None, False
    # A running daemon's own file is what counts, wherever the command is typed, unless another one is named.
    found = Path(served) if served and not named else find_config_file(chosen_config(config_path))
    if found is not None:
        load_cluster_config(found)  # a file with a fault in it is refused before anything is changed
        return found, False
    if enabled is False:
        return None, False
    if not up:
        raise ConfigError(
            "there is no configuration and no cluster to enable auto-offload for",
            hint="grid cluster start (a cluster on this machine), or grid init for a configuration of your own",
            code="config-missing",
        )
    return GridPaths.default().ensure().home / USER_NAME, True


async def _daemon_now() -> tuple[str | None, bool]:
    """The file that the running daemon serves, and whether a cluster is up."""
    from distributed_grid.daemon.client import connect

    async with await connect() as client:
        up = (await client.call("cluster_status"))["state"] != "down"
        return client.hello.get("config_path"), bool(up)


def _write_fresh(path: Path, wanted: dict[str, float]) -> None:
    from distributed_grid.config.edit import create_file
    from distributed_grid.config.models import TriggerThresholds

    levels = {**TriggerThresholds().model_dump(), **wanted}
    lines = [
        "# Written by `grid offload auto`. Everything that is not here has its default: docs/configuration.md",
        "execution:",
        "  resource_sharing:",
        "    auto_offload:",
        "      enabled: true",
        "      head_only_mode: true",
        "      thresholds:",
        *(f"        {name}: {_as_written(levels[name])}" for name in RESOURCES),
    ]
    create_file(path, ("\n".join(lines) + "\n").encode())


def _apply(path: Path, dry_run: bool | None, *, start: bool) -> dict[str, Any]:
    """Have the daemon read the file now; without one, `--disable` is done already."""
    from distributed_grid.config.loader import load_cluster_config
    from distributed_grid.daemon.client import connect

    async def go() -> dict[str, Any]:
        async with await connect(autostart=start, config_path=str(path)) as client:
            await client.call("config_use", path=str(path))
            if dry_run is None:
                dry = bool((await client.call("auto_status"))["dry_run"])
            else:
                dry = dry_run
            status: dict[str, Any] = await client.call("auto_apply", dry_run=dry)
            return status

    try:
        return run(go())
    except Unavailable:
        if start:
            raise
    config = load_cluster_config(path)
    auto = config.resource_sharing.auto_offload
    return {"enabled": auto.enabled, "head": config.head.name, "thresholds": auto.thresholds.model_dump()}


# -- looking ----------------------------------------------------------------------------------------------------------


def _show_status(status: dict[str, Any]) -> None:
    state = "enabled" if status["enabled"] else "disabled"
    colour = "green" if status["enabled"] else "dim"
    mode = ", dry run: nothing is moved" if status["dry_run"] and status["enabled"] else ""
    click.echo(f"Auto-offload: {paint(state, colour)} for {status['head']}{mode}")
    rows = []
    for name in ("memory", "cpu", "gpu"):
        level = status["levels"].get(name)
        pressed = "hard pressure" if name in status["hard"] else "pressure" if name in status["pressure"] else "ok"
        rows.append((name, percent(level), percent(status["thresholds"][name]), "-" if level is None else pressed,
                     status["forecasts"].get(name, "")))  # fmt: skip
    print_table(("resource", "now", "threshold", "state", "forecast"), rows, right=(1, 2))
    every_s, pause_s = status["check_interval_seconds"], status["cooldown_seconds"]
    click.echo(f"checked every {every_s:g}s, {pause_s:g}s between two moves")
    if status["busy"]:
        click.echo(f"moving: {status['busy']}")
    elif status["cooldown_left_s"]:
        click.echo(f"next move in {status['cooldown_left_s']:.0f}s at the earliest")
    if status["decision"]:
        click.echo(f"last decision: {status['decision']['reason']}")
    elif not status["levels"]:
        click.echo("no figures of the head yet: grid cluster start")
    for key, left in status["left_alone"].items():
        click.echo(f"left alone for {left['left_s']}s: {key} ({left['why']})")


def _preview(config_path: str | None, output: str) -> None:
    found = with_daemon(lambda client: client.call("auto_preview", timeout_s=60), config_path)

    def show() -> None:
        click.echo(f"would {'move' if found['action'] == 'move' else 'do nothing'}: {found['reason']}")
        for remedy in found["remedies"]:
            click.echo(f"  would help: {remedy}")

    emit(found, output, show)


def _record(path: str, config_path: str | None) -> None:
    from distributed_grid.orchestration.auto_offload.replay import write_history

    async def work(client: Any) -> list[dict[str, Any]]:
        return [record async for record in client.stream("auto_record")]

    records = with_daemon(work, config_path)
    try:
        write_history(path, records)
    except OSError as error:
        raise UsageError(f"{path} can't be written", cause=str(error), code="history") from None
    note(f"{len(records)} checks written to {path}")


def _replay(path: str, wanted: dict[str, float], config_path: str | None, output: str) -> None:
    import time
    from dataclasses import replace

    from distributed_grid.config.loader import load_cluster_config
    from distributed_grid.orchestration.auto_offload.replay import read_history, replay
    from distributed_grid.orchestration.auto_offload.signals import Settings

    history = read_history(path)
    settings = Settings.of(load_cluster_config(chosen_config(config_path)))
    settings = replace(settings, enabled=True, thresholds={**settings.thresholds, **wanted})
    outcome = replay(history, settings, Path(path).name)
    row = outcome.row()
    told: list[dict[str, Any]] = [{"at": at, "action": d.action, "reason": d.reason} for at, d in outcome.decisions]

    def show() -> None:
        for one in told:
            click.echo(f"{time.strftime('%H:%M:%S', time.localtime(one['at']))}  {one['action']:<11}  {one['reason']}")
        print_table(list(row), [list(row.values())])

    emit({**row, "decisions": told}, output, show)
