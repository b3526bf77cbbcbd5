"""nodectl over a real SSH connection to a server in this process, and each way it can fail."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import asyncssh
import pytest
import pytest_asyncio

from distributed_grid.cluster import ssh
from distributed_grid.cluster.install import environment_stamp, install_node
from distributed_grid.cluster.ssh import SshLauncher
from distributed_grid.core.errors import GridError


@dataclass
class Server:
    """Runs what it is asked for in a real shell, with a home of its own."""

    home: Path
    port: int = 0
    connections: int = 0
    commands: list[str] = field(default_factory=list)

    async def run(self, process: Any) -> None:
        self.commands.append(process.command)
        if process.command == "gone":  # ends before it reads
            process.exit(127)
            return
        given = await process.stdin.read()
        child = await asyncio.create_subprocess_exec(
            "sh", "-c", process.command, env={"HOME": str(self.home), "PATH": "/usr/bin:/bin"},
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out, err = await child.communicate(given)
        process.stdout.write(out)
        process.stderr.write(err)
        process.exit(child.returncode or 0)

    def launcher(self, **changes: Any) -> SshLauncher:
        settings: dict[str, Any] = {
            "port": self.port, "user": "me", "key": str(self.home / "key"), "known_hosts": str(self.home / "known"),
            "state_dir": str(self.home / "state"),
        }  # fmt: skip
        return SshLauncher("gpu1", "127.0.0.1", **{**settings, **changes})


@pytest_asyncio.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    found = Server(tmp_path)
    host_key, user_key = (asyncssh.generate_private_key("ssh-ed25519") for _ in range(2))
    user_key.write_private_key(str(tmp_path / "key"))
    user_key.write_public_key(str(tmp_path / "authorized"))

    class Counted(asyncssh.SSHServer):  # type: ignore[misc]
        def connection_made(self, conn: Any) -> None:
            found.connections += 1

    listener = await asyncssh.create_server(
        Counted, "127.0.0.1", 0, server_host_keys=[host_key], authorized_client_keys=str(tmp_path / "authorized"),
        process_factory=found.run, encoding=None,
    )  # fmt: skip
    found.port = listener.get_port()
    public = host_key.export_public_key().decode().strip()
    (tmp_path / "known").write_text(f"[127.0.0.1]:{found.port} {public}\n")
    yield found
    listener.close()
    await listener.wait_closed()


async def failing(launcher: SshLauncher) -> GridError:
    with pytest.raises(GridError) as caught:
        await launcher.run("probe", {}, 60.0)
    await launcher.close()
    assert "gpu1" in caught.value.message
    return caught.value


async def test_probe_and_token_over_one_connection(server: Server) -> None:
    launcher = server.launcher()
    try:
        probe = await launcher.run("probe", {}, 60.0)
        assert probe["ray_version"]
        secret = base64.b64encode(b"the secret").decode()
        await launcher.run("put-token", {"state_dir": str(server.home / "state"), "token": secret}, 60.0)
        token = server.home / "state" / "ray_token"
        assert token.read_bytes() == b"the secret"
        assert token.stat().st_mode & 0o777 == 0o600
        assert not any(secret in command or "the secret" in command for command in server.commands)
        assert server.connections == 1
        with pytest.raises(GridError) as caught:  # an error of nodectl itself comes through as it is
            await launcher.run("start", {}, 60.0)
        assert caught.value.code == "usage"
    finally:
        await launcher.close()


async def test_a_lost_connection_is_opened_again(server: Server) -> None:
    launcher = server.launcher()
    try:
        assert await launcher.run("probe", {}, 60.0)
        launcher._connection.abort()
        await launcher._connection.wait_closed()
        assert await launcher.run("probe", {}, 60.0)
        assert server.connections == 2
    finally:
        await launcher.close()


async def test_a_command_that_ends_before_it_reads_keeps_its_exit_code(server: Server) -> None:
    launcher = server.launcher()
    try:
        for size_bytes in (1, 1 << 22) * 10:
            assert (await launcher.execute("gone", b"x" * size_bytes, 60.0))[2] == 127
        assert server.connections == 1
    finally:
        await launcher.close()


async def test_install_finds_a_node_that_matches(server: Server) -> None:
    env = server.home / "state" / "env"
    (env / "bin").mkdir(parents=True)
    python = env / "bin" / "python3"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    (env / "grid-env.json").write_text(json.dumps(environment_stamp()))
    launcher = server.launcher()
    steps: list[str] = []
    try:
        assert not (await install_node(launcher, steps.append))["changed"]
        assert steps == ["looking", "checking", "the same as here"]
        (env / "grid-env.json").write_text('{"python": "2.7"}')
        (server.home / "state" / "nodes" / "gpu1").mkdir(parents=True)
        (server.home / "state" / "nodes" / "gpu1" / "ray.json").write_text("{}")
        with pytest.raises(GridError) as caught:  # never from under a running Ray
            await install_node(launcher)
        assert caught.value.code == "install-running"
    finally:
        await launcher.close()


async def test_wrong_key(server: Server, tmp_path: Path) -> None:
    asyncssh.generate_private_key("ssh-ed25519").write_private_key(str(tmp_path / "other"))
    assert (await failing(server.launcher(key=str(tmp_path / "other")))).code == "ssh-auth"


async def test_missing_or_broken_key(server: Server, tmp_path: Path) -> None:
    assert (await failing(server.launcher(key=str(tmp_path / "none")))).code == "ssh-key"
    (tmp_path / "broken").write_text("no key\n")
    assert (await failing(server.launcher(key=str(tmp_path / "broken")))).code == "ssh-key"


async def test_unknown_host_key(server: Server, tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("")
    error = await failing(server.launcher(known_hosts=str(tmp_path / "empty")))
    assert error.code == "ssh-host-key"
    assert "ssh-keyscan" in error.hint


async def test_nobody_listens(server: Server) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening: connections are refused
        assert (await failing(server.launcher(port=taken.getsockname()[1]))).code == "ssh-unreachable"


async def test_a_host_that_never_speaks(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssh, "CONNECT_LIMIT_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        assert (await failing(server.launcher(port=mute.getsockname()[1]))).code == "ssh-unreachable"


async def test_no_python_and_no_package(server: Server, tmp_path: Path) -> None:
    assert (await failing(server.launcher(python="/no/such/python"))).code == "python-missing"
    bare = tmp_path / "python"
    bare.write_text("#!/bin/sh\necho \"$0: No module named 'distributed_grid'\" >&2\nexit 1\n")
    bare.chmod(0o755)
    error = await failing(server.launcher(python=str(bare)))
    assert error.code == "package-missing"
    assert "grid cluster install" in error.hint
