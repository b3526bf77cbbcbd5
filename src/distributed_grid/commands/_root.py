"""The root command as click sees it: finds the command asked for without importing the others."""

from __future__ import annotations

import sys
from typing import Any

import click

from distributed_grid import __version__
from distributed_grid.cli import COMMANDS, INTRODUCTION


class ReaderGone(Exception):
    """Whoever reads our output has enough (`grid events | head`): no fault of anybody's."""


class LazyGroup(click.Group):
    """Lists commands without importing them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        from importlib import import_module

        command: click.Command = import_module(f"distributed_grid.commands.{COMMANDS[name][0]}").command
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            answer = super().invoke(ctx)
            sys.stdout.flush()
        except BrokenPipeError:  # which click would make a failure
            raise ReaderGone from None
        return answer

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_module, text) in COMMANDS.items()])

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            from difflib import get_close_matches

            from distributed_grid.core.errors import UsageError

            near = get_close_matches(args[0], COMMANDS, n=1)
            hint = f"grid {near[0]} --help" if near else "grid --help"
            raise UsageError(f"there is no command {args[0]!r}", hint=hint, code="unknown-command")
        return super().resolve_command(ctx, args)


class Settings:
    """What the root command hands to every other one."""

    def __init__(self) -> None:
        self.config_path: str | None = None
        self.json = False  # the answer, and so an error too, is for a script


@click.group(
    cls=LazyGroup,
    help=INTRODUCTION,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.option("--config", "config_path", metavar="PATH", help="Configuration file, else $GRID_CONFIG, else looked for.")
@click.version_option(__version__, prog_name="grid")
@click.pass_context
def grid(ctx: click.Context, config_path: str | None) -> None:
    ctx.ensure_object(Settings).config_path = config_path
