"""`grid offload watch`: the dashboard."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from distributed_grid.commands._common import chosen_config, config_option, print_json, run
from distributed_grid.core.errors import UsageError


@click.command("watch")
@click.option("--interval", default="1", show_default=True, metavar="SECONDS", help="How often it is drawn anew.")
@click.option("--readonly", is_flag=True, help="Look only: nothing can be moved or cancelled from it.")
@click.option("--once", is_flag=True, help="Print it once and leave; needs no terminal.")
@click.option("--format", "output", type=click.Choice(["table", "json"]), default="table", help="For --once.")
@config_option
def command(interval: str, readonly: bool, once: bool, output: str, config_path: str | None) -> None:
    """Pressure, workers, offloads and events, live. `?` shows the keys.

    \b
    grid offload watch
    grid offload watch --interval 2
    grid offload watch --once --format json
    """
    interval_s = parse_interval(interval)
    if output == "json" and not once:
        raise UsageError("--format json is for --once", hint="grid offload watch --once --format json", code="usage")
    from distributed_grid.tui.feed import Feed

    head, state_path = _from_config(config_path)
    feed = Feed(interval_s, head_name=head, state_path=state_path)
    if once:
        _print_once(feed, output)
        return
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError("the dashboard needs a terminal", hint="grid offload watch --once", code="no-terminal")
    from distributed_grid.tui.offload_dashboard import OffloadDashboard

    app = OffloadDashboard(feed, readonly=readonly)
    app.run()
    if app.return_code:
        click.get_current_context().exit(app.return_code)


def parse_interval(text: str) -> float:
    try:
        value = float(text.strip().removesuffix("s"))
    except ValueError:
        value = 0.0
    if not 0.1 <= value <= 3600:
        raise UsageError(f"{text!r} is not an interval", hint="seconds, from 0.1 to 3600", code="interval")
    return value


def _print_once(feed: object, output: str) -> None:
    from distributed_grid.tui.feed import Feed
    from distributed_grid.tui.offload_dashboard import plain_text

    assert isinstance(feed, Feed)
    view = run(feed.once())
    if output == "json":
        print_json(view.to_wire())
    else:
        click.echo(plain_text(view, 100))


def _from_config(config_path: str | None) -> tuple[str | None, Path | None]:
    """The head's name and where the offload state is, for the time without a daemon."""
    from distributed_grid.config.loader import load_cluster_config

    config = load_cluster_config(chosen_config(config_path))
    return config.head.name, config.daemon.offload_state_path
