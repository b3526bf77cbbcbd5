"""`grid run-shared`: run a command on a worker under a lease of its own, as if it ran here."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from distributed_grid.commands._common import Seconds, chosen_file, config_option, emit, format_option, note, run
from distributed_grid.commands._lending_views import amounts_text, asked, priority_name
from distributed_grid.commands.execute import Output, _Interrupts
from distributed_grid.core.environment import passed_on
from distributed_grid.core.errors import ExitCode, GridError, Refused, TimedOut, Unavailable, UsageError
from distributed_grid.wire.channel import ChannelClosed

#: A worker that is silent for this long is given up by `--retry`.
LOST_S = 10.0
TRIES = 5
#: How often a boost that made room is asked whether it is back.
LOOK_S = 1.0
INPUT_BYTES, INPUT_AGAIN_S = 65536, 0.5

F = TypeVar("F", bound=Callable[..., Any])


def job_options(function: F) -> F:
    """What `run-shared` and `boost run` have in common."""
    options = [
        click.option("-e", "--env", "variables", multiple=True, metavar="NAME=VALUE", help="Set a variable."),
        click.option("--stage", multiple=True, metavar="PATH", help="Send this file or directory too (repeatable)."),
        click.option("--no-stage", is_flag=True, help="Send no files."),
        click.option("--no-stdin", is_flag=True, help="Leave standard input alone."),
        click.option("--cwd", default="", help="A directory of the worker; default: a fresh one."),
        click.option(
            "--timeout", "timeout_s", type=Seconds(min=0, min_open=True), help="End it after so many seconds."
        ),
        click.option("-d", "--detach", is_flag=True, help="Print the task's id and leave; see `grid jobs`."),
        click.option("--retry", is_flag=True, help="Run it again if its worker is lost or it must make room."),
        config_option,
        format_option,
    ]
    for option in reversed(options):
        function = option(function)
    return function


@dataclass(slots=True)
class JobOptions:
    argv: list[str]
    env: dict[str, str]
    stage: tuple[str, ...]
    no_stage: bool
    no_stdin: bool
    cwd: str
    timeout_s: float | None
    detach: bool
    retry: bool
    config: tuple[str | None, bool]
    output: str

    @classmethod
    def of(cls, argv: tuple[str, ...], options: dict[str, Any]) -> JobOptions:
        env = passed_on()
        if sys.stdout.isatty():
            size = os.get_terminal_size(sys.stdout.fileno())
            env.update(COLUMNS=str(size.columns), LINES=str(size.lines))
        for pair in options["variables"]:
            name, equals, value = pair.partition("=")
            if not name or not equals:
                raise UsageError(f"{pair!r} is not NAME=VALUE", code="usage")
            env[name] = value
        words = list(argv[1:] if argv[0] == "--" else argv)
        if not words:
            raise UsageError("no command given", hint="grid run-shared -r cpu -a 2 hostname", code="no-command")
        return cls(
            words, env, options["stage"], options["no_stage"], options["no_stdin"] or options["detach"], options["cwd"],
            options["timeout_s"], options["detach"], options["retry"], chosen_file(options["config_path"]),
            options["output"],
        )  # fmt: skip


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("-r", "--resource-type", "kind", default=None, help="cpu, gpu or memory.")
@click.option("-a", "--amount", default=None, help="How many cores or GPUs, or GB of memory; default: 1.")
@click.option("--cpu", default=None, help="Cores; with --memory and --gpu, several types at once.")
@click.option("--memory", default=None, help="Memory: GB, or with a unit (512MiB).")
@click.option("--gpu", default=None, help="GPUs.")
@click.option("-p", "--priority", default="medium", show_default=True, help="low, medium, high or urgent.")
@click.option("-n", "--node", "nodes", multiple=True, help="One of these workers (repeatable); default: any.")
@click.option("--boost", default="", metavar="ID", help="Run in this boost instead of asking anew.")
@click.option(
    "--wait-time", "wait_s", default=None, type=Seconds(0, 86400 * 30),
    help="Seconds to wait for it; default: as long as it takes.",
)  # fmt: skip
@job_options
@click.argument("argv", nargs=-1, required=True, metavar="CMD [ARGS]...", type=click.UNPROCESSED)
def command(
    kind: str | None, amount: str | None, cpu: str | None, memory: str | None, gpu: str | None, priority: str,
    nodes: tuple[str, ...], boost: str, wait_s: float | None, argv: tuple[str, ...], **options: Any,
) -> None:  # fmt: skip
    """Run a command on a worker with borrowed cores, memory or GPUs. Options after CMD are CMD's own.

    It runs in a directory of its own, with the files of this one that the command names (and the modules beside a
    Python program). Its output, input, signals and exit code are as if it ran here.

    \b
    grid run-shared --resource-type gpu --amount 1 --priority high python train.py
    grid run-shared -r cpu -a 2 -n gpu1 -n gpu2 python parallel_task.py
    grid run-shared --cpu 2 --memory 4 --gpu 1 python train.py
    """
    job = JobOptions.of(argv, options)
    if boost:
        if kind or amount or cpu or memory or gpu or nodes:
            raise UsageError("--boost says already where and how much", code="usage")
        run_job(job, lease=boost)
        return
    if amount is not None and kind is None:
        raise UsageError("--amount needs --resource-type", code="usage")
    pairs = [("cpu", cpu), ("memory", memory), ("gpu", gpu), (kind or "cpu", (amount or "1") if kind else None)]
    run_job(job, amounts=asked(pairs), priority=priority_name(priority), nodes=list(nodes), wait_s=wait_s)


def run_job(job: JobOptions, **request: Any) -> None:
    result = run(Job(job, request).run())
    if job.detach or job.output == "json":
        emit(result, job.output, lambda: click.echo(result["id"]))
    click.get_current_context().exit(int(result["exit_code"]))


class _Lost(Exception):
    """The worker is gone, or the job had to make room: `--retry` begins again."""


class Job:
    def __init__(self, job: JobOptions, request: dict[str, Any]) -> None:
        from distributed_grid.daemon.client import LastingClient

        self._job, self._request = job, request
        self._client = LastingClient(config_path=job.config[0], insist=job.config[1])
        self._is_again = self._told_room = False
        self._stdin = _Stdin(keep=job.retry)
        self._lease_id = ""
        self._telling: set[asyncio.Future[None]] = set()
        # Of its own only where both streams are one: a terminal makes one of them.
        both = os.isatty(1) and os.isatty(2)
        self._terminal = _size() if both and not job.detach and job.output != "json" else ""

    async def run(self) -> dict[str, Any]:
        try:
            for again in range(TRIES):
                try:
                    return await self._once()
                except _Lost as lost:
                    self._is_again = True
                    note(f"{lost}; running it again ({again + 1})")
            raise GridError(f"given up after {TRIES} tries", code="lost")
        finally:
            await self._client.close()

    async def _once(self) -> dict[str, Any]:
        import uuid

        from distributed_grid.daemon.tasks import new_task_id

        job, task_id, asked_at = self._job, new_task_id(), time.time()
        files = self._files()
        stdin = not job.no_stdin and _has_input()
        arguments = {
            "argv": job.argv, "task_id": task_id, "env": job.env, "cwd": job.cwd, "files": bool(files), "stdin": stdin,
            "lease_id": str(uuid.uuid4()), "terminal": self._terminal, "terminal_stdin": stdin and os.isatty(0),
            **self._request,
        }  # fmt: skip
        try:
            started, stream = await self._start(arguments, task_id, files)
        except asyncio.CancelledError:  # Ctrl-C; it may have begun in this very moment
            with contextlib.suppress(GridError):
                await self._client.call("task_cancel", task_id=task_id)
            raise
        node, self._lease_id = started["node"], started["lease"]["id"]
        if job.detach:
            return {"id": task_id, "node": node, "lease": started["lease"]["id"], "state": "running", "exit_code": 0}
        notices = asyncio.ensure_future(self._notices(stream))
        interrupts = _Interrupts(self._client, task_id, node)
        try:
            ended, show = await self._follow(task_id, node, stdin, interrupts)
        finally:
            notices.cancel()
            await asyncio.gather(notices, return_exceptions=True)
        if ended["state"] == "lost":
            if job.retry:
                raise _Lost(f"{task_id} on {node} is lost")
            note(f"{task_id} on {node} is lost: its shim ended, or the node was started anew")
        elif (job.retry or ended.get("signal")) and not interrupts.came.is_set():
            await self._check_made_room(task_id, node)
        if ended.get("error"):
            raise GridError.from_wire(ended["error"])
        code = ended.get("exit_code")
        result = {
            "id": task_id, "node": node, "state": ended["state"], "exit_code": 1 if code is None else code,
            "lease": started["lease"], "asked_at": asked_at, "started_at": ended.get("started_at"),
            "ended_at": ended.get("ended_at"), "cpu_s": ended.get("cpu_s"), "max_rss_bytes": ended.get("max_rss_bytes"),
        }  # fmt: skip
        return {**result, **show.kept()} if job.output == "json" else result

    async def _start(self, arguments: dict[str, Any], task_id: str, files: list[Path]) -> tuple[dict[str, Any], Any]:
        """What was started, and the stream that goes on telling about it."""
        while True:
            stream = (await self._client.client()).stream("lease_run", **arguments)
            try:
                return await self._until_started(stream, task_id, files), stream
            except ChannelClosed:
                note("the daemon is gone; connecting again")
            except Refused as error:
                if not self._is_again or error.code != "lease-not-active" or "lease" not in self._request:
                    raise
                await asyncio.sleep(LOOK_S)  # the boost made room, and what ran in it; it comes back by itself

    async def _check_made_room(self, task_id: str, node: str) -> None:
        """A program may end in any way when it is asked to: the lease says whether it was."""
        reason = await self._client.call("job_made_room", task_id=task_id, lease_id=self._lease_id)
        if reason and self._job.retry:
            raise _Lost(f"{task_id} on {node} was {reason}")
        if reason and not self._told_room:
            note(f"{task_id} on {node} was ended: {reason}")

    def _files(self) -> list[Path]:
        if self._job.no_stage:
            return []
        from distributed_grid.orchestration.resource_sharing.staging import files_for

        return files_for(self._job.argv, Path.cwd(), self._job.stage)

    async def _until_started(self, stream: Any, task_id: str, files: list[Path]) -> dict[str, Any]:
        told = ""
        async for item in stream:
            if "waiting" in item:
                where = item["waiting"]
                text = f"waiting, place {where['position']} of {where['of']}: {where['reason']}"
                if text != told:
                    told = text
                    note(text)
            elif "send" in item:
                await self._send(task_id, files)
            elif "started" in item:
                started: dict[str, Any] = item["started"]
                if told:
                    note(f"started on {started['node']} with {amounts_text(started['lease']['amounts'])}")
                return started
        raise ChannelClosed("the daemon ended the request")

    async def _send(self, task_id: str, files: list[Path]) -> None:
        from distributed_grid.orchestration.resource_sharing.staging import packed

        parts = packed(files, Path.cwd())
        part, first = next(parts, b""), True
        client = await self._client.client()
        while True:
            following = next(parts, None)
            await client.call(
                "job_put", timeout_s=300, task_id=task_id, data=part, first=first, last=following is None
            )
            if following is None:
                return
            part, first = following, False

    async def _notices(self, stream: Any) -> None:
        try:
            async for item in stream:
                if "notice" in item and "preempted" in item["notice"]:
                    self._told_room = item["notice"].startswith("releasing")
                    note(item["notice"])
                elif "notice" in item and item["notice"] == "it goes on":
                    note(item["notice"])
        except GridError:
            pass

    # -- while it runs --------------------------------------------------------------------------------------------

    async def _follow(
        self, task_id: str, node: str, stdin: bool, interrupts: _Interrupts
    ) -> tuple[dict[str, Any], Output]:
        show = Output(keep=self._job.output == "json")
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
            loop.add_signal_handler(number, interrupts.hit, number)
        if self._terminal:
            loop.add_signal_handler(signal.SIGWINCH, self._resized, task_id)
        typing = _Input(self._client, task_id, self._stdin)
        if stdin:
            typing.start()
        try:
            following = asyncio.ensure_future(self._output(task_id, node, show))
            done, _ = await asyncio.wait({following}, timeout=self._job.timeout_s)
            if done:
                return following.result(), show
            note(f"{task_id} on {node} is ended: it ran for more than {self._job.timeout_s:g} s")
            interrupts.came.set()
            await self._client.call("task_cancel", task_id=task_id)
            ended = await following
            return {**ended, "exit_code": int(ExitCode.TIMEOUT), "signal": None}, show
        except BrokenPipeError:  # `| head`: here it would end when it next writes, there it would fill the disk
            with contextlib.suppress(GridError):
                await self._client.call("task_cancel", task_id=task_id)
            raise
        finally:
            typing.stop()

    def _resized(self, task_id: str) -> None:
        async def tell() -> None:
            with contextlib.suppress(GridError):
                await self._client.call("job_resize", task_id=task_id, size=_size())

        telling = asyncio.ensure_future(tell())
        self._telling.add(telling)
        telling.add_done_callback(self._telling.discard)

    async def _output(self, task_id: str, node: str, show: Output) -> dict[str, Any]:
        while True:
            stream = (await self._client.client()).stream(
                "task_follow", task_id=task_id, stdout_from=show.offsets["stdout"], stderr_from=show.offsets["stderr"]
            )
            away = False
            try:
                while True:
                    async with asyncio.timeout(LOST_S if away and self._job.retry else None):
                        item = await anext(stream)
                    away = "away" in item
                    if away:
                        note(item["away"])
                    elif "exit" in item:
                        show.close()
                        ended: dict[str, Any] = item["exit"]
                        return ended
                    else:
                        show.write(item["stream"], item["offset"], item["data"])
            except ChannelClosed:
                note("the daemon is gone; connecting again")
            except TimeoutError:
                if "lease" not in self._request:  # what still runs there is ended once the node answers
                    await self._client.call("lease_release", lease_id=self._lease_id, force=True, timeout_s=90)
                raise _Lost(f"{node} has not answered for {LOST_S:g} s") from None


def _size() -> str:
    """`ROWSxCOLUMNS` of the terminal that we write to."""
    size = os.get_terminal_size(1)
    return f"{size.lines}x{size.columns}"


def _has_input() -> bool:
    """Something to read that is not nothing: not a closed or null stdin, nor a terminal that we are not in front of."""
    try:
        found = os.fstat(0)
        if found.st_rdev == Path(os.devnull).stat().st_rdev:
            return False
        return not os.isatty(0) or os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False


class _Stdin:
    """Our standard input, read once; with `keep` a second run of the command gets it from the beginning again."""

    def __init__(self, keep: bool) -> None:
        self.kept = -1  # a file without a name, as long as we live: a reader that can't be woken may use it to the end
        if keep:
            self.kept, name = tempfile.mkstemp()
            Path(name).unlink()
        self._lock = threading.Lock()

    def read(self, offset: int) -> bytes:
        """What follows at `offset`; waits for it. The reader of a run that is over may read what is ours."""
        with self._lock:
            if self.kept >= 0 and (data := os.pread(self.kept, INPUT_BYTES, offset)):
                return data
            try:
                data = os.read(0, INPUT_BYTES)
            except OSError:
                return b""
            if self.kept >= 0:
                os.pwrite(self.kept, data, offset)
            return data


class _Input(threading.Thread):
    """Hands our standard input on. A thread of its own: reading can't be cancelled, and must not hold up the end."""

    def __init__(self, client: Any, task_id: str, stdin: _Stdin) -> None:
        super().__init__(daemon=True, name="stdin")
        self._client, self._task_id, self._stdin = client, task_id, stdin
        self._loop = asyncio.get_running_loop()
        self._sending: asyncio.Task[None] | None = None
        self._is_over = False

    def run(self) -> None:
        offset = 0
        while not self._is_over:
            try:
                data = self._stdin.read(offset)
            except OSError as error:  # no place to keep it for a second run
                note(f"{self._task_id} gets no more input: {error.strerror}")
                return
            work = self._send(data, offset)
            try:
                asyncio.run_coroutine_threadsafe(work, self._loop).result()
            except (RuntimeError, concurrent.futures.CancelledError):
                work.close()  # the command has ended, and we with it
                return
            if not data:
                return
            offset += len(data)

    async def _send(self, data: bytes, offset: int) -> None:
        """Until it is there: at the same offset it is taken once, however often it is sent."""
        if self._is_over:
            return
        self._sending = asyncio.current_task()
        while True:
            try:
                return await self._client.call(  # type: ignore[no-any-return]
                    "job_input", task_id=self._task_id, data=data, offset=offset, last=not data, timeout_s=None
                )
            except (Unavailable, TimedOut):
                await asyncio.sleep(INPUT_AGAIN_S)  # the node is away, which `_output` tells; or it does not read
            except GridError as error:
                note(f"{self._task_id} gets no more input: {error.message}")
                self._is_over = True
                return

    def stop(self) -> None:
        """Nobody reads it any more."""
        self._is_over = True
        if self._sending:
            self._sending.cancel()
