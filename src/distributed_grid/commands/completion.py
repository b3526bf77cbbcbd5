"""`grid completion`: the script that makes TAB work."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click
from click.shell_completion import get_completion_class

from distributed_grid.core.errors import UsageError

SHELLS = ("bash", "zsh", "fish")


@click.command()
@click.argument("shell", required=False)
def command(shell: str | None) -> None:
    """Print the completion script for your shell (bash, zsh or fish).

    \b
    eval "$(grid completion bash)"
    grid completion fish > ~/.config/fish/completions/grid.fish
    """
    name = shell or Path(os.environ.get("SHELL", "bash")).name
    if name not in SHELLS:
        hint = "one of " + ", ".join(SHELLS)
        raise UsageError(f"there is no completion for {name!r}", hint=hint, code="unknown-shell")
    from distributed_grid.commands._root import grid

    kind = get_completion_class(name)
    assert kind is not None
    if name == "bash":
        kind._check_version = staticmethod(lambda: None)  # type: ignore[attr-defined]  # it would start a bash to ask
    sys.stdout.write(kind(grid, {}, "grid", "_GRID_COMPLETE").source() + "\n")
