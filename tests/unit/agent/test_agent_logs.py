"""An agent's log, read from afar."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from distributed_grid.agent.logs import LOG, LogCalls
from distributed_grid.wire.rpc import CallContext


async def read(path: Path, lines: int) -> str:
    calls = LogCalls(SimpleNamespace(node_dir=path))  # type: ignore[arg-type]
    items = [item async for item in calls.log_follow(CallContext(), lines=lines)]
    assert items[0] == {"path": str(path / LOG)}
    return b"".join(item["data"] for item in items[1:]).decode()


async def test_the_last_lines(tmp_path: Path) -> None:
    assert await read(tmp_path, 5) == ""
    (tmp_path / LOG).write_text("".join(f"line {number}\n" for number in range(20000)))
    assert await read(tmp_path, 0) == ""
    assert await read(tmp_path, 2) == "line 19998\nline 19999\n"
    assert (await read(tmp_path, 100_000)).count("\n") == 20000


async def test_following_across_a_new_file(tmp_path: Path) -> None:
    calls: Any = LogCalls(SimpleNamespace(node_dir=tmp_path))  # type: ignore[arg-type]
    (tmp_path / LOG).write_text("old\nlast\n")
    async with contextlib.aclosing(calls.log_follow(CallContext(), lines=1, wait=True)) as items:
        await anext(items)
        async with asyncio.timeout(60):
            assert (await anext(items))["data"] == b"last\n"
            with (tmp_path / LOG).open("a") as log:
                log.write("more\n")
            assert (await anext(items))["data"] == b"more\n"
            (tmp_path / LOG).rename(tmp_path / "agent.log.1")
            (tmp_path / LOG).write_text("a new file that is longer than the old one was\n")
            assert (await anext(items))["data"].startswith(b"a new file")
