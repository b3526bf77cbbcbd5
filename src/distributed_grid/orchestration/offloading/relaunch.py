"""The task that a relaunch starts: the process's own command and circumstances, as it was started. Pure."""

from __future__ import annotations

import posixpath
import resource
import signal
from collections.abc import Mapping
from typing import Any

from distributed_grid.agent.inspect.facts import ProcessFacts
from distributed_grid.core.errors import ConfigError, Refused


def relaunch_task(
    root: ProcessFacts,
    environment: Mapping[str, str],
    runtime_env: Mapping[str, Any],
    *,
    user: str,
    capture: bool = True,
    limits: bool = True,
) -> dict[str, Any]:
    """As `task_start` takes it. Without `capture` nothing but the command; `limits`: whether they can be set there.

    The program is the file that runs now and that the plan has looked for on the target: its own name for itself
    (argv[0]) may be bare, relative to another directory, or a title it gave itself.
    """
    _check_command(root)
    env = environment if capture else {}
    task: dict[str, Any] = {
        "argv": list(root.argv), "exe": root.exe, "env": {**env, **runtime_env.get("env_vars", {})}, "user": user,
        "cwd": runtime_env.get("working_dir") or (root.cwd if capture else ""),
    }  # fmt: skip
    if capture:
        task |= {"nice": root.nice, "umask": root.umask, "stdin": _stdin(root)}
        if limits:
            known = {name: pair for name, pair in root.limits.items() if hasattr(resource, name)}
            task["rlimits"] = {name: [soft, hard] for name, (soft, hard) in known.items()}
    return task


def _check_command(root: ProcessFacts) -> None:
    """A title that a program gave itself takes the place of its command line: that cannot be started again."""
    name, program = root.argv[0], posixpath.basename(root.exe)
    plain = "/" in name and " " not in name
    if len(root.argv) == 1 and root.exe and not plain and not program.startswith(posixpath.basename(name).lstrip("-")):
        raise Refused(
            f"its command line is gone: it calls itself {name!r}", cause=f"its program is {root.exe}",
            hint="start it anew by hand", code="no-command",
        )  # fmt: skip


def _stdin(root: ProcessFacts) -> str:
    """A file is read again from its beginning; a terminal or a pipe stays behind."""
    for one in root.files:
        if one.fd == 0 and one.kind == "regular" and not one.deleted:
            return one.path
    return ""


def save_signal(name: str | None) -> int:
    """The number of a signal by its name, with or without SIG; 0 for none."""
    if not name:
        return 0
    full = name.upper() if name.upper().startswith("SIG") else f"SIG{name.upper()}"
    try:
        return int(signal.Signals[full])
    except KeyError:
        hint = "offload.save_signal: SIGUSR1"
        raise ConfigError(f"there is no signal {name!r}", hint=hint, code="bad-signal") from None
