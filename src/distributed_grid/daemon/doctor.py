"""What the doctor, `grid distribute` and `grid logs` ask: Ray's own view, each node's health, the agents' logs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed_grid.core.errors import GridError, Refused
from distributed_grid.daemon.links import NodeLink
from distributed_grid.wire.rpc import CallContext, method

if TYPE_CHECKING:
    from distributed_grid.daemon.control import ControlPlane

CLOCK_TRIES = 3
HEALTH_LIMIT_S = 60.0
LOG_PATIENCE_S = 5.0


class DoctorService:
    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane

    async def _ask_ray(self, what: str) -> dict[str, Any]:
        found: dict[str, Any] = await (await self._plane.keeper.joined_bridge()).call(what)
        return found

    @method
    async def nodes(self, context: CallContext) -> list[dict[str, Any]]:
        """The nodes as Ray itself knows them, dead ones too."""
        return list((await self._ask_ray("nodes"))["nodes"])

    @method
    async def ray_tasks(self, context: CallContext) -> dict[str, Any]:
        """Ray's own tasks and actors that have not ended, all users': Ray has only one. Agents are left out."""
        return await self._ask_ray("tasks")

    @method
    async def agent_log(
        self, context: CallContext, *, node: str, lines: int = 50, wait: bool = False
    ) -> AsyncIterator[dict[str, Any]]:
        """An agent's log, from its node: its path, its last lines, and with `wait` what comes."""
        if context.uid not in (0, os.geteuid()):
            raise Refused("only the daemon's owner may read the agents' logs", code="not-owner")
        link = self._plane.links.get(node)
        async for item in link.stream("log_follow", wait_s=LOG_PATIENCE_S, lines=lines, wait=wait):
            yield item

    @method
    async def doctor(self, context: CallContext, *, node: str = "") -> dict[str, Any]:
        """Facts, not judgements: by node what it says of itself, its clock, and whether it sees our files."""
        names = [node] if node else self._plane.links.names()
        with _nonce(self._plane.paths.home) as (file, text):
            found = await asyncio.gather(*(self._examine(self._plane.links.get(name), file, text) for name in names))
        return {"nodes": dict(zip(names, found, strict=True)), "token_mode": self._token_mode()}

    async def _examine(self, link: NodeLink, file: Path, text: str) -> dict[str, Any]:
        if not link.state.online:
            return {"online": False, "reason": link.state.reason}
        try:
            skew_s, round_trip_s = await _clock(link)
            health = await link.call("health", timeout_s=HEALTH_LIMIT_S)
            shares = await link.call("read_nonce", path=str(file)) == text
        except GridError as error:
            return {"online": False, "reason": f"{error.message}: {error.cause}" if error.cause else error.message}
        return {
            "online": True, "skew_s": round(skew_s, 4), "round_trip_s": round(round_trip_s, 4), "shares_files": shares,
            "agent_version": link.state.agent.get("version"), "health": health,
        }  # fmt: skip

    def _token_mode(self) -> str | None:
        """How Ray's head on this machine checks who connects, from its own environment; None if it is not up."""
        for node in self._plane.keeper.nodes().values():
            if node["gcs_pid"]:
                return _variable(node["gcs_pid"], "RAY_AUTH_MODE")
        return None


def _variable(pid: int, name: str) -> str:
    try:
        pairs = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return ""
    return next((pair.partition("=")[2] for pair in pairs if pair.startswith(f"{name}=")), "")


async def _clock(link: NodeLink) -> tuple[float, float]:
    """(the node's clock less ours, round trip), from the quickest of a few answers."""
    best: tuple[float, float] | None = None
    for _ in range(CLOCK_TRIES):
        asked, began = time.time(), time.monotonic()
        theirs = float(await link.call("clock", timeout_s=10.0))
        round_trip_s = time.monotonic() - began
        if best is None or round_trip_s < best[1]:
            best = (theirs - (asked + round_trip_s / 2), round_trip_s)
    assert best is not None
    return best


@contextlib.contextmanager
def _nonce(directory: Path) -> Iterator[tuple[Path, str]]:
    """A small file that another node sees only if it shares this directory's file system."""
    file, text = directory / f".grid-nonce-{secrets.token_hex(6)}", secrets.token_hex(16)
    with contextlib.suppress(OSError):  # a full disk is a finding of its own
        file.write_text(text)
    try:
        yield file, text
    finally:
        file.unlink(missing_ok=True)
