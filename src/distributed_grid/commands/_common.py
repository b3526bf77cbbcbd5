"""What every command shares: options, the way to the daemon, tables and JSON."""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

import click

from distributed_grid.core.errors import GridError

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


def config_option(function: F) -> F:
    """`--config PATH`, the same on every command as on the root."""
    return click.option("--config", "config_path", metavar="PATH", default=None, help="Configuration file.")(function)


def format_option(function: F) -> F:
    return click.option(
        "--format", "output", type=click.Choice(["table", "json"]), default="table", show_default=True, help="Output.",
        callback=_remember_format, is_eager=True,
    )(function)  # fmt: skip


def _remember_format(ctx: click.Context, param: click.Parameter, output: str) -> str:
    """Errors are told in the same format, also those of the arguments after it."""
    settings = ctx.find_root().obj
    if settings is not None:
        settings.json = output == "json"
    return output


class Seconds(click.FloatRange):
    """A time in a range; `nan`, which is in none, is not."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        seconds = float(super().convert(value, param, ctx))
        if not math.isfinite(seconds):
            self.fail(f"{value!r} is not a time in seconds", param, ctx)
        return seconds


def chosen_config(config_path: str | None) -> str | None:
    """The file named on this command or on the root; None leaves the choice to the usual places."""
    settings = click.get_current_context().find_root().obj
    return config_path or getattr(settings, "config_path", None)


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a command's coroutine; Ctrl-C cancels it so that its clean-up runs."""
    return asyncio.run(work)


def with_daemon(work: Callable[[Any], Awaitable[T]], config_path: str | None, *, autostart: bool = True) -> T:
    """Connect to the daemon (starting it if need be), do `work(client)`, hang up."""

    async def go() -> T:
        from distributed_grid.daemon.client import connect

        path, named = chosen_file(config_path)
        async with await connect(autostart=autostart, config_path=path, insist=named) as client:
            return await work(client)

    return run(go())


def chosen_file(config_path: str | None) -> tuple[str | None, bool]:
    """The configuration file, absolute, and whether the user named it (then a running daemon must agree to it)."""
    from distributed_grid.config.find import find_config_file

    named = chosen_config(config_path)
    found = find_config_file(named)
    return (str(found) if found else None), bool(named or os.environ.get("GRID_CONFIG"))


def print_json(data: Any) -> None:
    json.dump(data, sys.stdout, indent=2, default=str)
    sys.stdout.write("\n")


def emit(data: Any, output: str, render: Callable[[], None]) -> None:
    """JSON on stdout, or whatever `render` prints."""
    if output == "json":
        print_json(data)
    else:
        render()


def colours(stream: Any = None) -> bool:
    return "NO_COLOR" not in os.environ and (stream or sys.stdout).isatty()


def paint(text: str, colour: str) -> str:
    codes = {"red": 31, "green": 32, "yellow": 33, "blue": 34, "bold": 1, "dim": 2}
    return f"\x1b[{codes[colour]}m{text}\x1b[0m" if colours() else text


#: A command line may hold whole programs.
_ONE_LINE = str.maketrans("\n\r\t", "   ")


def _plain(text: str) -> str:
    """Names of files and commands may hold bytes that are no text."""
    return text.encode(errors="surrogateescape").decode(errors="replace")


def print_table(headers: Sequence[str], rows: Iterable[Sequence[Any]], *, right: Sequence[int] = ()) -> None:
    """Aligned columns, one greppable line per row, nothing drawn around them."""
    cells = [[_plain(str(value)).translate(_ONE_LINE) for value in row] for row in rows]
    widths = [max([len(header), *(len(row[i]) for row in cells)]) for i, header in enumerate(headers)]

    def line(row: Sequence[str]) -> str:
        cells = enumerate(zip(row, widths, strict=True))
        return "  ".join(cell.rjust(w) if i in right else cell.ljust(w) for i, (cell, w) in cells).rstrip()

    click.echo(paint(line([header.upper() for header in headers]), "bold"))
    for row in cells:
        click.echo(line(row))


def note(text: str) -> None:
    """A word for the person, on stderr, so that stdout stays what was asked for."""
    print(text, file=sys.stderr, flush=True)


def percent(fraction: float | None) -> str:
    return "-" if fraction is None else f"{fraction * 100:.0f}%"


def fail_together(errors: dict[str, GridError]) -> None:
    """Several nodes failed: one line each, then one error."""
    for name, error in errors.items():
        note(f"  {name}: {error.message}{': ' + error.cause if error.cause else ''}")
