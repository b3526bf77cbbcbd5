"""Running a command under a lease from Python: its whole output, exit code, node and times."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shlex
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from distributed_grid.core.environment import passed_on
from distributed_grid.core.errors import GridError, UsageError
from distributed_grid.orchestration.resource_sharing.amounts import check_wait
from distributed_grid.orchestration.resource_sharing.staging import files_for, packed
from distributed_grid.wire.channel import ChannelClosed

log = logging.getLogger(__name__)

#: A worker that is silent for this long is given up, where the command is to be run again then; so often.
LOST_S, TRIES = 10.0, 5
#: Between two tries to reach the daemon: it may just be starting.
RECONNECT_S = 0.05


class Line(Protocol):
    """An open connection to the daemon."""

    async def call(self, name: str, *, timeout_s: float | None = 60.0, **arguments: Any) -> Any: ...

    def stream(self, name: str, **arguments: Any) -> AsyncIterator[Any]: ...


@dataclass(frozen=True, slots=True)
class SharedResult:
    """How a command under a lease ended; also usable like a mapping."""

    job_id: str
    node: str
    state: str
    exit_code: int | None
    stdout: str
    stderr: str
    lease_id: str
    cores: tuple[int, ...]
    gpus: tuple[int, ...]
    waited_s: float
    started_at: float
    ended_at: float

    @property
    def success(self) -> bool:
        return self.exit_code == 0

    def __getitem__(self, name: str) -> Any:
        return self.to_dict()[name]

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "success": self.success}


OpenLine = Callable[[], Awaitable[Line]]
OnOutput = Callable[[str, bytes], None]
#: Told why, when the worker does not answer.
OnAway = Callable[[str], None]


class _RunAgain(Exception):
    """The worker is gone, or the command had to make room."""


async def run_command(
    open_line: OpenLine, command: str | Sequence[str], *, request: Mapping[str, Any], job_id: str | None = None,
    env: Mapping[str, str] | None = None, cwd: Path | None = None, stage: Sequence[str] | None = (),
    on_output: OnOutput | None = None, on_away: OnAway | None = None, retry: bool = False,
) -> SharedResult:  # fmt: skip
    """`stage` None sends no files. Cancelled at any moment, nothing is left: what runs by then is ended.

    `open_line` gives the open connection, or a new one: a daemon that is killed and comes back is not noticed.
    """
    argv = shlex.split(command) if isinstance(command, str) else list(command)
    if not argv:
        raise UsageError("no command given", code="no-command")
    check_wait(request.get("wait_s"))
    here = cwd or Path.cwd()
    files = files_for(argv, here, stage) if stage is not None else []
    arguments = {"argv": argv, "env": {**passed_on(), **(env or {})}, "files": bool(files), **request}
    job = _Job(open_line, arguments, files, here, job_id, on_output, on_away, retry)
    for _ in range(TRIES):
        try:
            return await job.run_once()
        except _RunAgain as reason:
            log.warning("%s; running it again", reason)
    raise GridError(f"given up after {TRIES} tries", code="lost")


@dataclass(slots=True)
class _Job:
    open_line: OpenLine
    arguments: dict[str, Any]
    files: list[Path]
    cwd: Path
    job_id: str | None
    on_output: OnOutput | None
    on_away: OnAway | None
    retry: bool

    async def run_once(self) -> SharedResult:
        task_id = f"{self.job_id or f'task_{int(time.time())}'}_{uuid.uuid4().hex[:6]}"
        asked_at = time.time()
        try:
            started = await self._start({**self.arguments, "task_id": task_id, "lease_id": str(uuid.uuid4())}, task_id)
            ended, parts = await self._follow(task_id, started)
            if self.retry:
                await self._check_made_room(task_id, started, ended)
        except asyncio.CancelledError:
            with contextlib.suppress(GridError):  # it has not begun, or has just ended
                await (await self.open_line()).call("task_cancel", task_id=task_id)
            raise
        return _result(task_id, self.job_id, started, ended, parts, asked_at)

    async def _start(self, arguments: dict[str, Any], task_id: str) -> dict[str, Any]:
        while True:
            line = await self.open_line()
            try:
                async with contextlib.aclosing(line.stream("lease_run", **arguments)) as stream:  # type: ignore[type-var]
                    async for item in stream:
                        if "send" in item:
                            await _send(line, task_id, self.files, self.cwd)
                        elif "started" in item:
                            started: dict[str, Any] = item["started"]
                            return started
            except ChannelClosed:
                pass
            await asyncio.sleep(RECONNECT_S)

    async def _follow(
        self, task_id: str, started: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, bytearray]]:
        parts: dict[str, bytearray] = {"stdout": bytearray(), "stderr": bytearray()}
        while True:
            line = await self.open_line()
            stream = line.stream(
                "task_follow", task_id=task_id, stdout_from=len(parts["stdout"]), stderr_from=len(parts["stderr"])
            )
            away = False
            try:
                while True:
                    async with asyncio.timeout(LOST_S if away and self.retry else None):
                        item = await anext(stream)
                    away = "away" in item
                    if away:
                        self._tell_away(task_id, item["away"])
                    elif "exit" in item:
                        return item["exit"], parts
                    else:
                        parts[item["stream"]] += item["data"]
                        if self.on_output:
                            self.on_output(item["stream"], item["data"])
            except (ChannelClosed, StopAsyncIteration):
                await asyncio.sleep(RECONNECT_S)
            except TimeoutError:
                if "lease" not in self.arguments:  # what still runs there is ended once the node answers
                    lease_id = started["lease"]["id"]
                    await line.call("lease_release", lease_id=lease_id, force=True, timeout_s=90)
                raise _RunAgain(f"{started['node']} has not answered for {LOST_S:g} s") from None

    def _tell_away(self, task_id: str, text: str) -> None:
        if self.on_away:
            self.on_away(text)
        else:
            log.warning("%s: %s", task_id, text)

    async def _check_made_room(self, task_id: str, started: Mapping[str, Any], ended: Mapping[str, Any]) -> None:
        if ended["state"] == "lost":
            raise _RunAgain(f"{task_id} on {started['node']} is lost")
        reason = await (await self.open_line()).call("job_made_room", task_id=task_id, lease_id=started["lease"]["id"])
        if reason:
            raise _RunAgain(f"{task_id} on {started['node']} was {reason}")


async def _send(line: Line, task_id: str, files: list[Path], cwd: Path) -> None:
    parts = list(packed(files, cwd)) or [b""]
    for at, part in enumerate(parts):
        await line.call(
            "job_put", timeout_s=300, task_id=task_id, data=part, first=at == 0, last=at == len(parts) - 1
        )


def _result(
    task_id: str, job_id: str | None, started: Mapping[str, Any], ended: Mapping[str, Any],
    parts: Mapping[str, bytearray], asked_at: float,
) -> SharedResult:  # fmt: skip
    if ended.get("error"):
        raise GridError.from_wire(ended["error"])
    grant = started["lease"]["grant"]
    began = float(ended.get("started_at") or 0.0)
    return SharedResult(
        job_id or task_id, started["node"], str(ended["state"]), ended.get("exit_code"),
        parts["stdout"].decode(errors="replace"), parts["stderr"].decode(errors="replace"), started["lease"]["id"],
        tuple(grant["cores"]), tuple(grant["gpus"]), max(0.0, began - asked_at), began,
        float(ended.get("ended_at") or 0.0),
    )  # fmt: skip
