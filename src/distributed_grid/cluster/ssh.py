"""nodectl over SSH: one connection per node, kept; each way it can fail told apart."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distributed_grid.cluster.launcher import CONNECT_LIMIT_S, read_answer, remote_command
from distributed_grid.core.errors import Refused, TimedOut, Unavailable, UsageError

DEFAULT_HOME = "~/.distributed_grid"


class SshLauncher:
    """One node over SSH. The token and all else that is secret go over stdin, never on a command line."""

    kind = "ssh"

    def __init__(
        self,
        node: str,
        host: str,
        *,
        port: int = 22,
        user: str | None = None,
        key: str | None = None,
        state_dir: str = "",
        known_hosts: str | None = None,
        python: str | None = None,
    ) -> None:
        self.node, self.host, self.port, self.user, self.key = node, host, port, user, key
        self.state_dir = state_dir or DEFAULT_HOME
        self.known_hosts, self.python = known_hosts, python
        self._connection: Any = None
        self._connecting = asyncio.Lock()

    async def run(self, verb: str, payload: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        pythons = [self.python] if self.python else [f"{self.state_dir}/env/bin/python3", sys.executable]
        message = json.dumps(dict(payload)).encode()
        return read_answer(self.node, verb, *await self.execute(remote_command(verb, pythons), message, timeout_s))

    async def execute(self, command: str, stdin: Any, timeout_s: float) -> tuple[bytes, bytes, int | None]:
        """Run a line in the node's shell; `stdin` is bytes, or a readable file that is streamed."""
        import asyncssh

        connection = await self._connect()
        message = stdin if isinstance(stdin, bytes) else b""
        source = stdin if not isinstance(stdin, bytes) else asyncssh.PIPE if message else asyncssh.DEVNULL
        process: Any = None
        try:
            async with asyncio.timeout(timeout_s):
                process = await connection.create_process(command, encoding=None, stdin=source)
                if message:
                    with contextlib.suppress(OSError):  # it ended before it read: its exit status says why
                        process.stdin.write(message)
                        process.stdin.write_eof()
                done = await process.wait(check=False)
        except TimeoutError:
            raise TimedOut(f"{self.node} took more than {timeout_s:.0f} s", code="node-timeout") from None
        except (asyncssh.Error, OSError) as error:
            await self.close()
            raise Unavailable(
                f"the SSH connection to {self.node} broke", cause=str(error) or type(error).__name__,
                hint=f"ping {self.host}; then start again", code="ssh-lost",
            ) from error  # fmt: skip
        finally:
            if process is not None:
                process.close()
        if done.exit_status is None and connection.is_closed():
            raise Unavailable(
                f"the SSH connection to {self.node} was lost",
                hint=f"ping {self.host}; then start again", code="ssh-lost",
            )  # fmt: skip
        return bytes(done.stdout or b""), bytes(done.stderr or b""), done.returncode

    async def _connect(self) -> Any:
        async with self._connecting:
            if self._connection is not None and not self._connection.is_closed():
                return self._connection
            self._connection = await self._open()
            return self._connection

    async def _open(self) -> Any:
        import asyncssh

        where = f"{self.node} ({self.host}:{self.port})"
        options: dict[str, Any] = {"connect_timeout": CONNECT_LIMIT_S, "login_timeout": CONNECT_LIMIT_S,
                                   "keepalive_interval": 5, "keepalive_count_max": 4}  # fmt: skip
        if self.user:
            options["username"] = self.user
        if self.key:
            key = Path(self.key).expanduser()
            if not key.is_file():
                raise UsageError(
                    f"the SSH key of {self.node} is not there: {key}",
                    hint="correct `key` in the config", code="ssh-key",
                )  # fmt: skip
            options["client_keys"] = [str(key)]
        if self.known_hosts:
            options["known_hosts"] = str(Path(self.known_hosts).expanduser())
        try:
            return await asyncio.wait_for(
                asyncssh.connect(self.host, self.port, **options), CONNECT_LIMIT_S + 5
            )
        except asyncssh.HostKeyNotVerifiable as error:
            raise Refused(
                f"the host key of {where} is not the known one", cause=str(error),
                hint=f"ssh-keyscan -p {self.port} {self.host} >> ~/.ssh/known_hosts, once you have checked it",
                code="ssh-host-key",
            ) from error  # fmt: skip
        except asyncssh.PermissionDenied as error:
            raise Refused(
                f"{where} refuses our SSH key", cause=str(error),
                hint=f"ssh-copy-id -p {self.port} {self.user + '@' if self.user else ''}{self.host}", code="ssh-auth",
            ) from error  # fmt: skip
        except (asyncssh.KeyImportError, asyncssh.KeyEncryptionError) as error:
            raise UsageError(
                f"the SSH key of {self.node} cannot be read", cause=str(error),
                hint="a key with a passphrase must be in ssh-agent", code="ssh-key",
            ) from error  # fmt: skip
        except ValueError as error:  # a line of ~/.ssh/config or known_hosts that asyncssh does not understand
            raise UsageError(
                f"the SSH settings for {self.node} are wrong", cause=str(error), code="ssh-config"
            ) from error
        except (asyncssh.Error, OSError, TimeoutError) as error:
            raise Unavailable(
                f"{where} does not answer over SSH", cause=str(error) or "no answer in time",
                hint=f"ssh -p {self.port} {self.host} true", code="ssh-unreachable",
            ) from error  # fmt: skip

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
            with contextlib.suppress(TimeoutError, OSError):
                await asyncio.wait_for(connection.wait_closed(), 5.0)
