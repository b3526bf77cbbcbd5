"""The watcher, with real files: a change is taken, a wrong one is told and the old one stays."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from distributed_grid.config.edit import set_values
from distributed_grid.config.loader import load_cluster_config
from distributed_grid.config.models import ClusterConfig
from distributed_grid.config.watch import watch_config
from distributed_grid.core.errors import ConfigError, GridError

LIMIT_S = 60
Seen = asyncio.Queue[ClusterConfig | ConfigError]


@contextlib.asynccontextmanager
async def watching(file: Path, current: ClusterConfig | None = None) -> AsyncIterator[Seen]:
    seen: Seen = asyncio.Queue()
    stop = asyncio.Event()
    watch = asyncio.create_task(
        watch_config(file, seen.put_nowait, seen.put_nowait, current=current, stop=stop, poll_s=0.5)
    )
    try:
        yield seen
    finally:
        stop.set()
        await asyncio.wait_for(watch, LIMIT_S)


async def port(seen: Seen) -> int:
    found = await asyncio.wait_for(seen.get(), LIMIT_S)
    assert isinstance(found, ClusterConfig), found
    return found.ray.port


async def test_changes_errors_renames_and_removal(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text("ray: {port: 1}\n")
    async with watching(file, load_cluster_config(file, env={})) as seen:
        set_values(file, {"ray.port": 2})
        assert await port(seen) == 2

        beside = tmp_path / "x.yaml.swp"  # as editors save
        beside.write_text("ray: {prot: 3}\n")
        beside.replace(file)
        wrong = await asyncio.wait_for(seen.get(), LIMIT_S)
        assert isinstance(wrong, ConfigError) and "x.yaml:1: ray.prot: unknown key" in wrong.message

        beside.write_text("# a date that is none\nname: 2024-13-45\n")
        beside.replace(file)
        wrong = await asyncio.wait_for(seen.get(), LIMIT_S)
        assert isinstance(wrong, ConfigError) and "x.yaml:2: not valid YAML" in wrong.message

        beside.write_text("ray: {port: 2}\n")  # back to what it was: told again, since an error was told
        beside.replace(file)
        assert await port(seen) == 2

        file.unlink()
        gone = await asyncio.wait_for(seen.get(), LIMIT_S)
        assert isinstance(gone, ConfigError) and gone.code == "config-file"
        beside.write_text("ray: {port: 4}\n")
        beside.replace(file)
        assert await port(seen) == 4
        assert seen.empty()


async def test_a_change_before_the_watch_began_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text("ray: {port: 1}\n")
    before = load_cluster_config(file, env={})
    file.write_text("ray: {port: 2}\n")
    async with watching(file, before) as seen:
        assert await port(seen) == 2


async def test_a_cancelled_watch_ends(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text("")
    seen: Seen = asyncio.Queue()
    watch = asyncio.create_task(watch_config(file, seen.put_nowait, seen.put_nowait, current=ClusterConfig()))
    await asyncio.wait_for(seen.get(), LIMIT_S)  # it runs
    watch.cancel()
    done, _ = await asyncio.wait({watch}, timeout=LIMIT_S)
    assert watch in done


@pytest.mark.parametrize("text", ["ray: {port: 2}\n", "ray: {prot: 2}\n"])
async def test_what_could_not_be_told_is_told_again(tmp_path: Path, text: str) -> None:
    file = tmp_path / "x.yaml"
    file.write_text("ray: {port: 1}\n")
    before = load_cluster_config(file, env={})
    file.write_text(text)
    told: Seen = asyncio.Queue()
    faults = iter([GridError("the disk is full", code="disk-full"), OSError("no socket")])

    def tell(found: ClusterConfig | ConfigError) -> None:
        for fault in faults:
            raise fault
        told.put_nowait(found)

    stop = asyncio.Event()
    watch = asyncio.create_task(watch_config(file, tell, tell, current=before, stop=stop, poll_s=0.01))
    assert isinstance(await asyncio.wait_for(told.get(), LIMIT_S), ClusterConfig if "port" in text else ConfigError)
    stop.set()
    await asyncio.wait_for(watch, LIMIT_S)
    assert told.empty()
