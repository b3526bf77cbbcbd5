"""The daemon's unix socket: who may come in, what each request leaves in the audit log."""

from __future__ import annotations

import contextlib
import logging
import os
import pwd
from collections.abc import Callable
from pathlib import Path
from typing import Any

from distributed_grid import __version__
from distributed_grid.core.errors import GridError, Refused, UsageError
from distributed_grid.store.audit import AuditLog
from distributed_grid.wire.channel import Channel, ChannelClosed, Listener, serve_unix
from distributed_grid.wire.rpc import CallContext, RpcServer, pack

log = logging.getLogger(__name__)

#: Calls that only look: they are answered even while the audit log cannot be written (a full disk), others are not.
READ_ONLY = (
    "daemon_status", "cluster_status", "status", "events_recent", "events_follow", "snapshots_follow", "bandwidth_list",
    "task_list", "task_status", "task_follow", "lending_status", "boost_list",
    "offload_scan", "offload_plan", "offload_status", "offload_follow",
    "auto_status", "auto_preview", "auto_record",
    "memory_find", "memory_list", "memory_stats", "agent_log", "ray_tasks",
)  # fmt: skip


def _uid_of(name_or_uid: str | int) -> int:
    if isinstance(name_or_uid, int) or str(name_or_uid).isdigit():
        return int(name_or_uid)
    try:
        return pwd.getpwnam(str(name_or_uid)).pw_uid
    except KeyError:
        return -1


class DaemonServer:
    """Serves the control plane's services to the daemon's owner and to `allow_users`, and to nobody else."""

    def __init__(
        self,
        path: Path,
        known_path: Path,
        services: list[object],
        audit: AuditLog,
        allow_users: Callable[[], list[str | int]],
        facts: Callable[[], dict[str, Any]],
    ) -> None:
        self._path, self._known_path = path, known_path
        self._audit = audit
        self._allow_users = allow_users
        self._rpc = RpcServer(
            *services, hello=lambda: {"version": __version__, **facts()}, guard=self._guard, on_error=self._on_error
        )
        self._listener: Listener | None = None

    def _allowed(self, uid: int) -> bool:
        return uid in (0, os.geteuid()) or uid in [_uid_of(user) for user in self._allow_users()]

    async def start(self) -> None:
        self._listener = await serve_unix(self._path, self._on_channel)
        if self._path != self._known_path:  # commands look there, wherever the socket is
            self._known_path.unlink(missing_ok=True)
            self._known_path.symlink_to(self._path)
        self.set_modes()

    def set_modes(self) -> None:
        """The peer's uid is checked on every connection; the mode only has to let the allowed ones knock."""
        shared = bool(self._allow_users())
        with contextlib.suppress(FileNotFoundError):  # somebody removed it: nobody can knock
            self._path.chmod(0o666 if shared else 0o600)
        self._known_path.parent.chmod(0o711 if shared else 0o700)  # never that of a socket in /tmp

    async def _on_channel(self, channel: Channel) -> None:
        uid, pid = channel.peer_credentials()
        if not self._allowed(uid):
            self._audit.record(uid=uid, pid=pid, method="connect", target={}, outcome="refused")
            error = Refused(
                f"user {uid} may not use this daemon",
                hint=f"ask its owner (uid {os.geteuid()}) to add you to daemon.allow_users",
                code="not-allowed",
            )
            try:
                await channel.send(pack({"hello": {"refused": error.to_wire()}}))
            except ChannelClosed:
                pass
            return
        await self._rpc.serve(channel, CallContext(uid=uid, pid=pid, peer=f"uid {uid}"))

    def _guard(self, context: CallContext, name: str, arguments: dict[str, Any]) -> None:
        try:
            target = _summary(arguments)
            self._audit.record(uid=context.uid, pid=context.pid, method=name, target=target, outcome="accepted")
        except GridError as error:
            if name not in READ_ONLY:
                raise
            log.warning("%s of uid %d is not in the audit log: %s", name, context.uid, error)

    def _on_error(self, context: CallContext, name: str, arguments: dict[str, Any], error: GridError) -> None:
        """A second line for what was not carried out: the first was written before anybody could know."""
        outcome = f"{'refused' if isinstance(error, Refused | UsageError) else 'failed'}: {error.code}"
        try:
            target = _summary(arguments)
            self._audit.record(uid=context.uid, pid=context.pid, method=name, target=target, outcome=outcome)
        except GridError as fault:
            log.warning("%s of uid %d (%s) is not in the audit log: %s", name, context.uid, error.code, fault)

    async def close(self) -> None:
        if self._listener:
            await self._listener.close()
        self._path.unlink(missing_ok=True)
        self._known_path.unlink(missing_ok=True)


def _summary(arguments: dict[str, Any]) -> dict[str, Any]:
    """What the audit log keeps, of any arguments: never an environment's values, never bulk data."""
    kept: dict[str, Any] = {}
    for name, value in ((str(key), value) for key, value in arguments.items()):
        if name in ("env", "runtime_env"):
            kept[name] = sorted(map(str, value)) if isinstance(value, dict) else None
        elif isinstance(value, str | int | float | bool) or value is None:
            kept[name] = value
        elif isinstance(value, list | tuple) and len(value) <= 64:
            kept[name] = [str(one)[:200] for one in value]
        else:
            kept[name] = f"<{type(value).__name__}>"
    return kept
