"""The console script: hands over to the root command, and is the one place where errors become exit codes.

Nothing heavy is imported here: `grid --help` answers at once.
"""

from __future__ import annotations

import os
import sys
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from click import ClickException

    from distributed_grid.core.errors import GridError

INTRODUCTION = """Lend idle workers to a full head node, and move running processes there.

\b
grid cluster start              bring the cluster up (on this machine, if nothing is configured)
grid status                     see it
grid execute -n gpu1 hostname   run something on a worker
"""

#: name -> (module, one line of help). The module is imported only when its command is used.
COMMANDS = {
    "status": ("status", "The cluster at a glance: nodes, use, what is lent and what runs."),
    "cluster": ("cluster", "Bring the cluster up and down, install nodes, measure links."),
    "distribute": ("distribute", "Ray's own view: nodes and tasks; a quick test of every node."),
    "execute": ("execute", "Run a command on a node, or on all of them."),
    "offload": ("offload", "Find heavy processes and move running ones to a worker."),
    "jobs": ("jobs", "Commands started on nodes: list, logs, attach, cancel."),
    "run-shared": ("run_shared", "Run a command on a worker with borrowed cores, memory or GPUs."),
    "shared-status": ("shared_status", "What workers offer, what is lent, who waits."),
    "resource-sharing": ("resource_sharing", "Ask workers for resources, see and give back what is lent."),
    "boost": ("boost", "Borrow a worker's resources for a time."),
    "memory": ("memory", "Files and blocks in the memory of other nodes."),
    "events": ("events", "What happened, live with -f."),
    "logs": ("logs", "The logs of the daemon and of the agents."),
    "config": ("config", "Show and check the configuration, with the origin of each value."),
    "init": ("init", "Write a configuration to start from."),
    "doctor": ("doctor", "Check everything that one stumbles on, each with its next step."),
    "daemon": ("daemon", "Start, stop, look at the daemon; install it as a service."),
    "env": ("env", "Print the variables with which plain Ray programs reach this cluster."),
    "demo": ("demo", "A guided tour on this machine that leaves nothing behind."),
    "completion": ("completion", "Print the completion script for your shell."),
    "version": ("version", "Print the version."),
}


def print_help() -> None:
    """What click would print for the root command, without loading it."""
    print("Usage: grid [OPTIONS] COMMAND [ARGS]...\n")
    print("\n".join(f"  {line}".rstrip() for line in INTRODUCTION.replace("\b\n", "").splitlines()))
    print("\nOptions:\n  --config PATH  Configuration file, else $GRID_CONFIG, else looked for.")
    print("  --version      Show the version and exit.\n  -h, --help     Show this message and exit.\n\nCommands:")
    width = max(map(len, COMMANDS))
    for name, (_module, text) in COMMANDS.items():
        print(f"  {name.ljust(width)}  {text}")


def show_error(error: GridError, *, as_json: bool = False) -> None:
    if as_json:
        import json

        told = error.to_wire()
        told["exit_code"] = int(error.exit_code)
        del told["kind"]
        print(json.dumps({"error": told}, default=str), file=sys.stderr)
        return
    red, plain = ("\x1b[31m", "\x1b[0m") if _colours(sys.stderr) else ("", "")
    print(f"{red}error:{plain} {error.message}", file=sys.stderr)
    if error.cause:
        print(f"cause: {error.cause}", file=sys.stderr)
    if error.hint:
        print(f"try: {error.hint}", file=sys.stderr)


def _colours(stream: Any) -> bool:
    return "NO_COLOR" not in os.environ and stream.isatty()


def main(argv: list[str] | None = None) -> None:
    """The console script: never a traceback for what a user can do wrong."""
    words = sys.argv[1:] if argv is None else argv
    _prepare_output()
    if words in ([], ["--help"], ["-h"]) and "_GRID_COMPLETE" not in os.environ:
        try:
            print_help()
            sys.stdout.flush()
        except BrokenPipeError:
            _drop_output()
        sys.exit(0)
    import click

    from distributed_grid.commands._root import ReaderGone, Settings, grid
    from distributed_grid.core.errors import ExitCode, GridError

    status, settings = 0, Settings()
    try:
        code = grid.main(args=words, prog_name="grid", standalone_mode=False, obj=settings)
        status = code if isinstance(code, int) else 0
    except GridError as error:
        show_error(error, as_json=settings.json)
        status = int(error.exit_code)
    except click.exceptions.Exit as stop:
        status = stop.exit_code
    except (click.Abort, KeyboardInterrupt):
        print("stopped", file=sys.stderr)
        status = int(ExitCode.INTERRUPTED)
    except click.ClickException as error:
        asked = "--format=json" in words or ("--format", "json") in pairwise(words)
        _show_usage(error, settings.json or asked)  # what is wrong may stand before it was read
        status = int(ExitCode.USAGE)
    except ReaderGone:
        _drop_output()
    except Exception as error:  # noqa: BLE001
        status = _show_fault(error, settings.json)
    sys.exit(status)


def _prepare_output() -> None:
    """Whatever our output goes to, a sign that it can't take must not end a command that has done its work."""
    for name, fd in (("stdout", 1), ("stderr", 2)):
        stream: Any = getattr(sys, name)
        if stream is None:  # closed by whoever started us (`>&-`); a socket of ours must not get its number
            spare = os.open(os.devnull, os.O_WRONLY)
            if spare != fd:
                os.dup2(spare, fd)
                os.close(spare)
            setattr(sys, name, open(fd, "w", closefd=False))  # noqa: SIM115
        elif getattr(stream, "errors", "") == "strict":
            stream.reconfigure(errors="replace")


def _drop_output() -> None:
    """Nobody reads it any more; else Python would complain at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _show_usage(error: ClickException, as_json: bool) -> None:
    from distributed_grid.core.errors import UsageError

    hint = "grid --help"
    context = getattr(error, "ctx", None)
    if context is not None:
        hint = f"{context.command_path} --help"
    show_error(UsageError(error.format_message(), hint=hint), as_json=as_json)


def _show_fault(error: Exception, as_json: bool) -> int:
    """A fault of ours: one line for the user, the whole story in a file of theirs."""
    import traceback

    from distributed_grid.config.paths import GridPaths
    from distributed_grid.core.errors import ExitCode, InternalError

    story = GridPaths.default().home / "fault.log"
    hint = "please report it"
    try:
        with open(story, "a", opener=lambda path, flags: os.open(path, flags, 0o600)) as out:
            traceback.print_exception(error, file=out)
        hint = f"please report it with {story}"
    except OSError:
        pass
    cause = f"{type(error).__name__}: {error}"
    show_error(InternalError("something went wrong in grid itself", cause=cause, hint=hint), as_json=as_json)
    return int(ExitCode.INTERNAL)


if __name__ == "__main__":
    main()
