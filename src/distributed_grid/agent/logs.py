"""The agent's own log: a file on its node, what goes into it, and the call that reads it from afar."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from distributed_grid.agent.node import AgentNode
from distributed_grid.wire.rpc import CallContext, method

log = logging.getLogger(__name__)

LOG = "agent.log"
MAX_BYTES = 4 * 1024 * 1024
CHUNK_BYTES = 64 * 1024
POLL_S = 0.2
#: Calls that change something, and what names their object. Never the command or its environment: secrets are in those.
TOLD = (
    "task_start", "task_cancel", "task_signal", "task_remove", "lease_claim", "lease_release", "lease_suspend",
    "lease_resume", "lease_checkpoint", "out_begin", "out_finish", "out_abort", "in_prepare", "in_go", "in_drop",
    "stub_exit", "memory_allocate", "memory_free", "memory_stop",
)  # fmt: skip
IDS = ("task_id", "move_id", "lease_id", "block")


def keep_log(node_dir: Path) -> None:
    """From now on, what we and asyncio have to say goes to the node's file; one older file is kept."""
    node_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    handler = RotatingFileHandler(node_dir / LOG, maxBytes=MAX_BYTES, backupCount=1)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    ours = logging.getLogger("distributed_grid")
    ours.setLevel(logging.INFO)
    for logger in (ours, logging.getLogger("asyncio")):
        logger.addHandler(handler)


def tell_call(context: CallContext, name: str, arguments: dict[str, Any]) -> None:
    """A guard for the agent's calls that refuses none. Written as soon as the call waits or has its answer."""
    if name in TOLD:
        told = next((arguments[one] for one in IDS if one in arguments), "")
        asyncio.get_running_loop().call_soon(log.info, "%s %s", name, told)


class LogCalls:
    def __init__(self, node: AgentNode) -> None:
        self._path = node.node_dir / LOG

    @method
    async def log_follow(
        self, context: CallContext, *, lines: int = 50, wait: bool = False
    ) -> AsyncIterator[dict[str, Any]]:
        """Where the file is, its last lines and, with `wait`, what is written from then on."""
        yield {"path": str(self._path)}
        offset = await asyncio.to_thread(self._begin, lines)
        inode = 0
        while True:
            found = await asyncio.to_thread(self._read, offset, inode)
            if found is None:
                if not wait:
                    return
                await asyncio.sleep(POLL_S)
                continue
            data, offset, inode = found
            yield {"data": data}

    def _begin(self, lines: int) -> int:
        """Where the last lines begin; the file is never long."""
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return 0
        kept = data.splitlines(keepends=True)[-lines:] if lines else []
        return len(data) - sum(map(len, kept))

    def _read(self, offset: int, inode: int) -> tuple[bytes, int, int] | None:
        """More of it; from the beginning of a new file, when the old one was put aside. None: nothing new."""
        try:
            with self._path.open("rb") as file:
                now = os.fstat(file.fileno())
                if (inode and now.st_ino != inode) or now.st_size < offset:
                    offset = 0
                file.seek(offset)
                data = file.read(CHUNK_BYTES)
                return (data, offset + len(data), now.st_ino) if data else None
        except FileNotFoundError:
            return None
