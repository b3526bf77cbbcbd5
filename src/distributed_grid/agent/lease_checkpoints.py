"""The agent's side of a task on disk: what its shim is told to do, and how that went."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

from distributed_grid.agent.checkpoint import ORDER, RESULT
from distributed_grid.agent.moving import criu
from distributed_grid.agent.program import write_json
from distributed_grid.agent.spool import SHIM, read_json, shim_alive
from distributed_grid.core.errors import GridError, Refused, TimedOut
from distributed_grid.core.process import ProcessId, boot_id, read_stat

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
#: An image is at most a little larger than what is in memory.
SPARE_BYTES = 256 << 20
POLL_S = 0.02


def state_of(task_dir: Path) -> str:
    """`running`, `changing` (its shim is at it) or `stored`."""
    order, result = read_json(task_dir / ORDER), read_json(task_dir / RESULT)
    shim = read_json(task_dir / SHIM)
    if order is None or not shim_alive(shim, boot_id()):
        return "running"
    if result is None or int(result["number"]) < int(order["number"]):
        return "changing"
    return str(result["phase"])


def order(task_dir: Path, want: str, **more: Any) -> int:
    """Said by a file, so that it stays said; the number by which the answer is known."""
    number = int((read_json(task_dir / ORDER) or {}).get("number", 0)) + 1
    write_json(str(task_dir / ORDER), {"number": number, "want": want, "criu": criu.find(), **more})
    shim = read_json(task_dir / SHIM)
    if shim and shim_alive(shim, boot_id()):
        ProcessId(shim["pid"], shim["start_ticks"]).signal(signal.SIGUSR1)
    return number


async def until_done(task_dir: Path, number: int, limit_s: float) -> dict[str, Any]:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        result = await asyncio.to_thread(read_json, task_dir / RESULT)
        if result and int(result["number"]) >= number:
            return result
        if not shim_alive(read_json(task_dir / SHIM), boot_id()):
            raise GridError(f"{task_dir.name} has ended", code="gone")
        await asyncio.sleep(POLL_S)
    raise TimedOut(f"{task_dir.name} takes more than {limit_s:g} s", code="checkpoint")


def check_possible(task_dir: Path, pids: list[int]) -> None:
    """Refused where it is plain that it can't be stored."""
    criu.require()
    shim = read_json(task_dir / SHIM) or {}
    if not shim.get("stores"):
        why = "it has no namespace of its own"
        raise Refused(f"{task_dir.name} can't be stored on disk", cause=why, code="checkpoint")
    needed = sum(stat.rss_pages * PAGE_BYTES for pid in pids if (stat := read_stat(pid))) + SPARE_BYTES
    if shutil.disk_usage(task_dir).free < needed:
        raise Refused(f"{task_dir.name} can't be stored on disk", cause="there is too little space", code="checkpoint")


async def store_all(tasks: dict[Path, list[int]], cores: list[int], limit_s: float) -> None:
    """All of them are on disk afterwards, or (with an error) none is."""
    asked: list[Path] = []
    try:
        for task_dir, pids in tasks.items():
            check_possible(task_dir, pids)
        for task_dir in tasks:
            number = await asyncio.to_thread(order, task_dir, "store")
            asked.append(task_dir)
            result = await until_done(task_dir, number, limit_s)
            if result["phase"] != "stored":
                told = criu.explain_lines(list(result["errors"]), f"{task_dir.name} can't be stored on disk")
                raise Refused(told.message, cause=told.cause, code="checkpoint")
    except BaseException:
        for task_dir in asked:
            order(task_dir, "run", cores=cores)
        raise


async def bring_back(task_dir: Path, cores: list[int], limit_s: float) -> None:
    number = await asyncio.to_thread(order, task_dir, "run", cores=cores)
    result = await until_done(task_dir, number, limit_s)
    if result["phase"] == "stored":
        raise criu.explain_lines(list(result["errors"]), f"{task_dir.name} could not be brought back yet")
