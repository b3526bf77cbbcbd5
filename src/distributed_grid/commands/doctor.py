"""`grid doctor`: checks everything that one stumbles on, each finding with its next step."""

from __future__ import annotations

import asyncio
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from distributed_grid import __version__
from distributed_grid.commands._common import chosen_config, config_option, emit, format_option, paint, run
from distributed_grid.commands._findings import (
    Finding,
    judge_criu,
    judge_disk,
    judge_gpu,
    judge_node,
    judge_port,
    judge_python,
    judge_token,
    judge_versions,
)  # fmt: skip
from distributed_grid.config.paths import GridPaths
from distributed_grid.core.errors import ExitCode, GridError, NotFound

if TYPE_CHECKING:
    from distributed_grid.config.models import ClusterConfig

SSH_LIMIT_S = 40.0
COLOURS = {"ok": "green", "note": "yellow", "problem": "red"}


@click.command()
@click.option("-n", "--node", default="", help="Of the nodes only this one.")
@config_option
@format_option
def command(node: str, config_path: str | None, output: str) -> None:
    """Check everything that one stumbles on; each finding comes with its next step. Exit code 1 if there is a problem.

    \b
    grid doctor
    grid doctor --format json | jq '.findings[] | select(.level == "problem")'
    """
    findings = run(Doctor(GridPaths.default(), chosen_config(config_path), node).examine())
    problems = [one for one in findings if one.level == "problem"]
    notes = sum(1 for one in findings if one.level == "note")

    def show() -> None:
        for one in findings:
            where = f"{one.check} ({one.node})" if one.node else one.check
            click.echo(f"{paint(one.level.ljust(7), COLOURS[one.level])}  {where.ljust(20)}  {one.text}")
            if one.next:
                click.echo(f"{' ' * 31}try: {one.next}")
        click.echo(f"{len(findings)} findings, {notes} notes, {len(problems)} problems")

    wire = [one.to_wire() for one in findings]
    emit({"findings": wire, "notes": notes, "problems": len(problems)}, output, show)
    click.get_current_context().exit(int(ExitCode.FAILED) if problems else 0)


class Doctor:
    def __init__(self, paths: GridPaths, config_path: str | None, node: str) -> None:
        self._paths = paths
        self._config_path = config_path
        self._node = node
        self._found: list[Finding] = []
        from distributed_grid.cluster.probe import version_of

        self._here = {"python": sys.version.split()[0], "ray": version_of("ray"), "grid": __version__}

    async def examine(self) -> list[Finding]:
        self._found.append(judge_python(sys.version_info[:3], sys.executable))
        ray = self._here["ray"]
        self._found.append(Finding("ray", "ok", f"{ray} here") if ray else
                           Finding("ray", "problem", "Ray is not installed", "make setup"))  # fmt: skip
        config = self._check_config()
        if self._node and config:
            config.node(self._node)
        facts, cluster = await self._ask_daemon(config)
        self._check_token(facts)
        up = bool(facts and cluster and cluster["ray_address"])
        if config:
            await self._check_ports(config, cluster if up else None)
        if up and facts and config:
            self._check_nodes(config, facts)
        else:
            await asyncio.to_thread(self._check_machine)
            self._found.append(Finding("nodes", "note", "no cluster is up, so its nodes were not asked",
                                       "grid cluster start"))  # fmt: skip
        if config and not config.embedded:
            await self._check_ssh(config, facts)
        return self._found

    def _check_config(self) -> ClusterConfig | None:
        from distributed_grid.config.loader import load_cluster_config

        try:
            config = load_cluster_config(self._config_path)
        except GridError as error:
            self._found.append(_from_error("config", error))
            return None
        where = str(config.path) if config.path else "built in"
        kind = "embedded" if config.embedded else "over SSH"
        self._found.append(Finding("config", "ok", f"{where}: {len(config.nodes)} nodes, {kind}"))
        return config

    async def _ask_daemon(self, config: ClusterConfig | None) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        """What the daemon knows, if one runs; the doctor starts none."""
        from distributed_grid.daemon.client import connect, daemon_holds_lock

        if self._paths.home.exists() and self._paths.home.stat().st_uid != _uid():
            self._found.append(Finding("daemon", "problem", f"{self._paths.home} belongs to another user",
                                       "set GRID_HOME to a directory of your own"))  # fmt: skip
            return None, None
        try:
            async with await connect(self._paths) as client:
                status = await client.call("daemon_status")
                self._judge_daemon(status, config)
                cluster = await client.call("cluster_status")
                return await client.call("doctor", node=self._node, timeout_s=120), cluster
        except NotFound:
            raise
        except GridError as error:
            if error.code != "no-daemon":
                self._found.append(_from_error("daemon", error))
            elif daemon_holds_lock(self._paths):
                self._found.append(Finding("daemon", "problem", "one holds the state directory but does not answer",
                                           f"see {self._paths.daemon_log}"))  # fmt: skip
            else:
                left = "; a dead one's socket is left, and does no harm" if self._paths.socket.exists() else ""
                self._found.append(Finding("daemon", "note", f"none is running{left}", "grid daemon start"))
            return None, None

    def _judge_daemon(self, status: dict[str, Any], config: ClusterConfig | None) -> None:
        text = f"pid {status['pid']}, version {status['version']}, cluster {status['cluster']}"
        ours = str(config.path) if config and config.path else None
        if status["version"] != __version__:
            self._found.append(Finding("daemon", "problem", f"{text}, but this command is {__version__}",
                                       "grid daemon stop; grid daemon start"))  # fmt: skip
        elif config and status["config_path"] != ours:
            served = status["config_path"] or "the built-in configuration"
            self._found.append(Finding("daemon", "note", f"{text}; it serves {served}"))
        else:
            self._found.append(Finding("daemon", "ok", text))

    def _check_token(self, facts: dict[str, Any] | None) -> None:
        token = self._paths.token
        mode = stat.S_IMODE(token.stat().st_mode) if token.exists() else 0
        self._found.append(judge_token(token.exists(), mode, facts["token_mode"] if facts else None))

    async def _check_ports(self, config: ClusterConfig, cluster: dict[str, Any] | None) -> None:
        from distributed_grid.cluster.ports import port_holder, port_is_free

        if cluster is None:
            for what, port in (("Ray's head", config.ray.port), ("Ray's dashboard", config.ray.dashboard_port)):
                free = not port or port_is_free(port)
                holder = "" if free else await asyncio.to_thread(port_holder, port)
                self._found.append(judge_port(what, port, free, holder, config.embedded))
            return
        dashboard = cluster["dashboard_url"].removeprefix("http://")
        for what, address in (("Ray's head", cluster["ray_address"]), ("Ray's dashboard", dashboard)):
            if await _answers(address):
                self._found.append(Finding("ports", "ok", f"{what} answers at {address}"))
            else:
                self._found.append(Finding("ports", "problem", f"{what} does not answer at {address}",
                                           "grid events; a firewall must let this port through"))  # fmt: skip

    def _check_nodes(self, config: ClusterConfig, facts: dict[str, Any]) -> None:
        wanted = {node.name: node.gpu_count for node in config.nodes}
        for name, about in facts["nodes"].items():
            self._found += judge_node(name, about, self._here, wanted.get(name), config.embedded)

    def _check_machine(self) -> None:
        """Without agents: what can be said of this machine alone."""
        from distributed_grid.agent.health import health_of_machine

        health = health_of_machine()
        self._found.append(judge_disk(health["state_dir"], health["disk_free_bytes"]))
        self._found.append(judge_disk("/tmp", health["tmp_free_bytes"]))
        self._found.append(judge_criu(health["criu_state"]))
        self._found.append(judge_gpu(health["gpu_driver"], None, True))

    async def _check_ssh(self, config: ClusterConfig, facts: dict[str, Any] | None) -> None:
        """Nodes that no agent speaks for: does SSH get there, and what is there."""
        from distributed_grid.cluster.plan import make_launchers, plan_cluster

        try:
            launchers = make_launchers(plan_cluster(config, self._paths))
        except GridError as error:
            self._found.append(_from_error("ssh", error))
            return
        online = {name for name, about in (facts or {"nodes": {}})["nodes"].items() if about["online"]}
        names = [node.name for node in config.workers if self._node in ("", node.name)]
        for node in config.workers:
            if node.name in names and node.key and (bad := _key_fault(Path(node.key).expanduser())):
                self._found.append(Finding("ssh", "problem", bad, f"chmod 600 {node.key}", node.name))
        asked = [name for name in names if name not in online]
        for found in await asyncio.gather(*(self._ask_over_ssh(name, launchers[name]) for name in asked)):
            self._found += found

    async def _ask_over_ssh(self, name: str, launcher: Any) -> list[Finding]:
        try:
            probe = await launcher.run("probe", {"state_dir": getattr(launcher, "state_dir", "")}, SSH_LIMIT_S)
        except GridError as error:
            return [_from_error("ssh", error, name)]
        finally:
            await launcher.close()
        return [Finding("ssh", "ok", f"reaches {probe['hostname']} as uid {probe['uid']}", node=name),
                *judge_versions(name, probe, self._here)]  # fmt: skip


def _uid() -> int:
    import os

    return os.geteuid()


def _key_fault(key: Path) -> str:
    if not key.is_file():
        return ""  # the connection itself says so, with its own hint
    mode = stat.S_IMODE(key.stat().st_mode)
    return f"the key {key} has mode {mode:03o}, others may read it" if mode & 0o077 else ""


async def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(5):
            _reader, writer = await asyncio.open_connection(host, int(port))
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


def _from_error(check: str, error: GridError, node: str = "") -> Finding:
    text = f"{error.message}: {error.cause}" if error.cause else error.message
    return Finding(check, "problem", text, error.hint, node)
