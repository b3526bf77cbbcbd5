"""Follows the configuration file: a change is taken without a restart, a wrong one is told and not taken."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

from watchfiles import awatch

from distributed_grid.config.loader import load_source
from distributed_grid.config.models import ClusterConfig
from distributed_grid.config.yaml_source import digest_of, parse, read_bytes
from distributed_grid.core.errors import ConfigError

OnChange = Callable[[ClusterConfig], Awaitable[None] | None]
OnError = Callable[[ConfigError], Awaitable[None] | None]

_GONE = "gone"

log = logging.getLogger(__name__)


async def watch_config(
    path: str | Path,
    on_change: OnChange,
    on_error: OnError,
    *,
    current: ClusterConfig | None = None,
    stop: asyncio.Event | None = None,
    poll_s: float = 5.0,
) -> None:
    """Call `on_change` for each new valid content, `on_error` for each invalid one; until cancelled or stopped.

    The directory is watched, since editors and `set_values` put a new file in the old one's place; what counts
    is the content, looked at on each event and every `poll_s`, since network file systems send no events.
    `current` is what is in effect: a change made before the watch began is noticed too. What a callback raises is
    logged, and the same content is told again after `poll_s`.
    """
    file = Path(path).expanduser().absolute()
    seen = current.digest if current is not None else _digest(file)
    stop = stop or asyncio.Event()

    async def look() -> str:
        try:
            return await _look(file, seen, on_change, on_error)
        except Exception:
            log.exception("%s was not taken; once more in %g s", file, poll_s)
            await _pause(stop, poll_s)  # the log may lie in the folder that is watched
            return seen

    while not stop.is_set():
        seen = await look()
        folders = {folder for folder in (file.parent, file.resolve().parent) if folder.is_dir()}
        if not folders:
            await _pause(stop, poll_s)
            continue
        try:
            async for _ in awatch(
                *folders,
                watch_filter=None,
                debounce=200,
                step=50,
                rust_timeout=int(poll_s * 1000),
                yield_on_timeout=True,
                stop_event=stop,
                recursive=False,
            ):
                seen = await look()
                if not file.parent.is_dir():
                    break
        except (OSError, RuntimeError) as error:  # no watches left on this machine, or a folder that went away
            log.info("can't watch %s, looking every %g s: %s", file, poll_s, error)
            await _pause(stop, poll_s)


async def _look(file: Path, seen: str, on_change: OnChange, on_error: OnError) -> str:
    try:
        content = read_bytes(file)
    except ConfigError as err:
        if seen != _GONE:
            await _tell(on_error(err))
        return _GONE
    digest = digest_of(content)
    if digest != seen:
        try:
            config = load_source(parse(content, file), env=os.environ)
        except ConfigError as err:
            await _tell(on_error(err))
        else:
            await _tell(on_change(config))
    return digest


def _digest(file: Path) -> str:
    try:
        return digest_of(read_bytes(file))
    except ConfigError:
        return _GONE


async def _tell(answer: Awaitable[None] | None) -> None:
    if inspect.isawaitable(answer):
        await answer


async def _pause(stop: asyncio.Event, seconds: float) -> None:
    try:
        await asyncio.wait_for(stop.wait(), seconds)
    except TimeoutError:
        pass
