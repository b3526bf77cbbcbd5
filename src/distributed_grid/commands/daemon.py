"""`grid daemon`: start, stop, look at gridd; install it as a service."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click

from distributed_grid.commands._common import chosen_file, config_option, emit, format_option, note, run
from distributed_grid.config.paths import GridPaths
from distributed_grid.core.errors import ExitCode, GridError, TimedOut, Unavailable
from distributed_grid.core.process import process_id
from distributed_grid.core.resources import format_duration

UNIT = """[Unit]
Description=Distributed Grid daemon
After=network-online.target

[Service]
Type=exec
ExecStart="{python}" -m distributed_grid.daemon{config}
Environment="GRID_HOME={home}"
Restart=on-failure
RestartSec=2
# Users' commands and Ray live on when the daemon is stopped or started again.
KillMode=process

[Install]
WantedBy=default.target
"""


#: A program that hosts the control plane does not end with it; a daemon does, this soon.
HOST_PATIENCE_S = 2.0


def _unit_text(path: object) -> str:
    """As systemd reads it between double quotes."""
    return str(path).replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")


@click.group()
def command() -> None:
    """Start, stop, look at the daemon; install it as a service. Commands that need it start it by themselves."""


async def _status(paths: GridPaths) -> dict[str, Any]:
    from distributed_grid.daemon.client import connect

    async with await connect(paths) as client:
        answer: dict[str, Any] = await client.call("daemon_status")
        return answer


@command.command()
@config_option
@format_option
def start(config_path: str | None, output: str) -> None:
    """Start the daemon, or say that it runs."""
    from distributed_grid.daemon.client import connect

    path, named = chosen_file(config_path)

    async def go() -> dict[str, Any]:
        async with await connect(autostart=True, config_path=path, insist=named) as client:
            answer: dict[str, Any] = await client.call("daemon_status")
            return answer

    status = run(go())
    emit(status, output, lambda: click.echo(f"the daemon runs, pid {status['pid']}"))


@command.command()
@click.option("--timeout", "limit_s", default=30.0, show_default=True, help="How long to wait for it to end.")
@format_option
def stop(limit_s: float, output: str) -> None:
    """Stop the daemon. Nodes, tasks and Ray stay as they are; the next daemon finds them again."""
    paths = GridPaths.default()

    async def go() -> int | None:
        from distributed_grid.daemon.client import connect, daemon_holds_lock

        try:
            async with await connect(paths, any_protocol=True) as client:
                pid = int((await client.call("daemon_stop"))["pid"])
        except Unavailable as error:
            if error.code == "no-daemon":
                return None
            raise
        process = process_id(pid)
        deadline = time.monotonic() + limit_s
        held_at = time.monotonic()
        while process and process.is_alive():
            if daemon_holds_lock(paths):
                held_at = time.monotonic()
            elif time.monotonic() - held_at > HOST_PATIENCE_S:
                break  # a program that hosted the control plane goes on without it
            if time.monotonic() > deadline:
                raise TimedOut(f"the daemon (pid {pid}) did not end within {limit_s:g} s", hint=f"kill {pid}")
            await asyncio.sleep(0.02)
        return pid

    pid = run(go())
    text = f"the daemon (pid {pid}) has stopped" if pid else "no daemon was running"
    emit({"stopped": pid}, output, lambda: click.echo(text))


@command.command()
@format_option
def status(output: str) -> None:
    """Whether the daemon runs (exit code 5 if not), its pid, uptime, protocol."""
    paths = GridPaths.default()
    try:
        found = run(_status(paths))
    except GridError as error:
        if output != "json" or error.code != "no-daemon":
            raise
        emit({"running": False, "pid": None}, output, lambda: None)
        click.get_current_context().exit(int(ExitCode.UNAVAILABLE))
    found["running"] = True

    def show() -> None:
        click.echo(
            f"pid {found['pid']}, up {format_duration(found['uptime_s'])}, version {found['version']}, "
            f"protocol {found['protocol']}"
        )
        click.echo(f"cluster {found['cluster']}, {found['nodes_online']} of {found['nodes']} nodes online")
        click.echo(f"configuration {found['config_path'] or 'built in (embedded cluster)'}")
        click.echo(f"metrics {found['metrics_url'] or 'off'}")

    emit(found, output, show)


@command.command()
@click.option("--now", is_flag=True, help="Also enable and start it with systemctl --user.")
@click.option("--print", "only_print", is_flag=True, help="Print the unit instead of writing it.")
@config_option
def install(now: bool, only_print: bool, config_path: str | None) -> None:
    """Write a systemd user unit, so that the daemon is there after a reboot."""
    path, _named = chosen_file(config_path)
    config = f' --config "{_unit_text(Path(path).absolute())}"' if path else ""
    home = _unit_text(GridPaths.default().home)
    text = UNIT.format(python=_unit_text(sys.executable), config=config, home=home)
    if only_print:
        click.echo(text, nl=False)
        return
    base = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    unit = base / "systemd" / "user" / "gridd.service"
    unit.parent.mkdir(parents=True, exist_ok=True)
    unit.write_text(text)
    click.echo(f"wrote {unit}")
    if not now:
        note("next: systemctl --user enable --now gridd; loginctl enable-linger")
        return
    for argv in (["systemctl", "--user", "daemon-reload"], ["systemctl", "--user", "enable", "--now", "gridd"]):
        try:
            done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
        except (OSError, subprocess.TimeoutExpired) as error:
            cause = str(error)
            raise Unavailable("systemd can't be asked", cause=cause, hint="grid daemon start", code="systemd") from None
        if done.returncode:
            raise Unavailable("systemd refused", cause=done.stderr.strip(), hint="grid daemon start", code="systemd")
