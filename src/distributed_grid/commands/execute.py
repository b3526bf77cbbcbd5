"""`grid execute`: run a command on a node, its output here, its exit code ours."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import click

from distributed_grid.commands._common import chosen_file, config_option, emit, format_option, note, run
from distributed_grid.core.environment import passed_on
from distributed_grid.core.errors import ExitCode, GridError, UsageError
from distributed_grid.wire.channel import ChannelClosed

#: Longer than the daemon itself waits for the node, and then for the start.
START_LIMIT_S = 120.0


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("-n", "--node", "nodes", multiple=True, help="Where (repeatable); default: the first worker online.")
@click.option("--all-nodes", is_flag=True, help="On every node that is online.")
@click.option(
    "--timeout", "timeout_s", type=click.FloatRange(min=0, min_open=True), help="End it after this many seconds."
)
@click.option("-e", "--env", "variables", multiple=True, metavar="NAME=VALUE", help="Set a variable (repeatable).")
@click.option("--cwd", default=None, help="Directory there; default: this one if it exists there, else your home.")
@click.option("-d", "--detach", is_flag=True, help="Print the task's id and leave it running; see `grid jobs`.")
@config_option
@format_option
@click.argument("argv", nargs=-1, required=True, metavar="CMD [ARGS]...", type=click.UNPROCESSED)
def command(
    nodes: tuple[str, ...], all_nodes: bool, timeout_s: float | None, variables: tuple[str, ...], cwd: str | None,
    detach: bool, config_path: str | None, output: str, argv: tuple[str, ...],
) -> None:  # fmt: skip
    """Run a command on a node, or on all of them. Options after CMD are CMD's own.

    It outlives the daemon, the agent and Ray; this command reconnects and shows the rest. The exit code is CMD's. Its
    standard input is empty (`grid run-shared` passes yours on). When nobody reads the output any more (`| head`), it
    is ended.

    \b
    grid execute -n gpu1 hostname
    grid execute --all-nodes nvidia-smi -L
    grid execute -n gpu1 --timeout 60 sh -c 'echo $HOME; exit 3'
    """
    if nodes and all_nodes:
        raise UsageError("-n and --all-nodes exclude each other", code="usage")
    words = list(argv[1:] if argv[0] == "--" else argv)
    environment = passed_on()
    for pair in variables:
        name, equals, value = pair.partition("=")
        if not name or not equals:
            raise UsageError(f"{pair!r} is not NAME=VALUE", code="usage")
        environment[name] = value
    work = Execution(chosen_file(config_path), words, environment, cwd, timeout_s, output == "json")
    results = run(work.run(list(nodes), all_nodes, detach))
    if output == "json" or detach:
        data = results if len(results) > 1 or all_nodes else results[0]
        emit(data, output, lambda: click.echo("\n".join(result["id"] for result in results)))
    codes = [result["exit_code"] for result in results]
    click.get_current_context().exit(next((int(code) for code in codes if code), 0))


class Execution:
    def __init__(
        self, config: tuple[str | None, bool], argv: list[str], env: dict[str, str], cwd: str | None,
        timeout_s: float | None, quiet: bool,
    ) -> None:  # fmt: skip
        from distributed_grid.daemon.client import LastingClient

        self._client = LastingClient(config_path=config[0], insist=config[1])
        self._interrupts = _Interrupts(self._client)
        self._argv, self._env, self._timeout_s, self._quiet = argv, env, timeout_s, quiet
        self._cwd, self._cwd_optional = (cwd, False) if cwd else (str(Path.cwd()), True)

    async def run(self, nodes: list[str], all_nodes: bool, detach: bool) -> list[dict[str, Any]]:
        try:
            if not nodes:
                nodes = await self._choose(all_nodes)
            return list(await asyncio.gather(*(self._one(node, detach, len(nodes) > 1) for node in nodes)))
        finally:
            await self._client.close()

    async def _choose(self, all_nodes: bool) -> list[str]:
        from distributed_grid.core.errors import Unavailable

        status = await self._client.call("cluster_status")
        online = [node for node in status["nodes"] if node["online"]]
        if not online:
            raise Unavailable("no node is online", hint="grid cluster start", code="no-cluster")
        if all_nodes:
            return [node["name"] for node in online]
        workers = [node["name"] for node in online if node["role"] != "head"]
        return workers[:1] or [online[0]["name"]]

    async def _one(self, node: str, detach: bool, many: bool) -> dict[str, Any]:
        from distributed_grid.daemon.tasks import new_task_id

        task_id = new_task_id()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._interrupts.hit, number)
        self._interrupts.starting[task_id] = node
        try:
            status = await self._start(node, task_id)
        except GridError as error:
            if not many:
                raise
            note(f"[{node}] error: {error.message}")
            return {"id": task_id, "node": node, "exit_code": int(error.exit_code), "error": error.to_wire()}
        finally:
            del self._interrupts.starting[task_id]
        if status is None:
            note(f"{task_id} was ended before it began on {node}")
            return {"id": task_id, "node": node, "state": "cancelled", "exit_code": int(ExitCode.INTERRUPTED)}
        if detach:
            return {"id": task_id, "node": node, "state": status["state"], "exit_code": None}
        show = Output(f"[{node}] " if many else "", keep=self._quiet)
        timed_out = False
        following = asyncio.ensure_future(follow_task(self._client, task_id, show))
        self._interrupts.started[task_id] = node
        done, _ = await asyncio.wait({following}, timeout=self._timeout_s)
        if not done:
            timed_out = True
            note(f"{task_id} on {node} is ended: it ran for more than {self._timeout_s:g} s")
            await self._cancel(task_id)
        try:
            ended = await following
        except BrokenPipeError:  # `| head`: here it would end when it next writes, there it would fill the disk
            await self._cancel(task_id)
            raise
        if ended.get("error"):
            told = GridError.from_wire(ended["error"])
            if not many:
                raise told
            note(f"[{node}] error: {told.message}")
        if ended["state"] == "lost":
            note(f"{task_id} on {node} is lost: its shim ended, or the node was started anew")
        code = int(ExitCode.TIMEOUT) if timed_out else ended.get("exit_code")
        result = {"id": task_id, "node": node, "state": ended["state"], "exit_code": 1 if code is None else code}
        return {**result, **show.kept()} if self._quiet else result

    async def _start(self, node: str, task_id: str) -> dict[str, Any] | None:
        """Start it once; None if Ctrl-C came before it was known to run, and then it does not run."""

        def ask() -> asyncio.Future[dict[str, Any]]:
            return asyncio.ensure_future(self._client.call(
                "task_start", node=node, argv=self._argv, cwd=self._cwd, env=self._env, task_id=task_id,
                cwd_optional=self._cwd_optional, timeout_s=START_LIMIT_S,
            ))  # fmt: skip

        starting, came = ask(), asyncio.ensure_future(self._interrupts.came.wait())
        waiting: set[asyncio.Future[Any]] = {starting, came}
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        came.cancel()
        if not self._interrupts.came.is_set():
            return starting.result()
        if not await self._is_known(task_id):  # the node is still waited for
            starting.cancel()
            await asyncio.wait({starting})
            if not await self._is_known(task_id):
                return None
            starting = ask()  # it was just written down: only the node can say whether it began
        await starting
        await self._cancel(task_id)
        return None

    async def _cancel(self, task_id: str) -> None:
        try:
            await self._client.call("task_cancel", task_id=task_id)
        except GridError as error:
            if error.code != "already-ended":
                raise

    async def _is_known(self, task_id: str) -> bool:
        return any(task["id"] == task_id for task in await self._client.call("task_list", active=True))


class _Interrupts:
    """Ctrl-C goes to the commands there, as it would here; the third time we stop waiting."""

    def __init__(self, client: Any, task_id: str = "", node: str = "") -> None:
        self._client = client
        self.started = {task_id: node} if task_id else {}
        self.starting: dict[str, str] = {}
        self._count = 0
        self.came = asyncio.Event()
        self._sending: set[asyncio.Future[None]] = set()

    def hit(self, number: int) -> None:
        self._count += 1
        self.came.set()
        if self._count >= 3:
            for task_id, node in (self.starting | self.started).items():
                note(f"{task_id} is left as it is on {node}: grid jobs attach {task_id}")
            os._exit(int(ExitCode.INTERRUPTED))
        for task_id in self.started:
            sending = asyncio.ensure_future(self._send(task_id, number))
            self._sending.add(sending)
            sending.add_done_callback(self._sending.discard)

    async def _send(self, task_id: str, number: int) -> None:
        try:
            await self._client.call("task_signal", task_id=task_id, number=number)
        except GridError as error:
            note(f"{task_id} did not get the signal: {error.message}")


class Output:
    """Where a task's output goes: our own stdout and stderr, byte for byte, or kept for JSON."""

    def __init__(self, prefix: str = "", keep: bool = False) -> None:
        self._prefix = prefix.encode()
        self._keep = keep
        self._parts: dict[str, list[bytes]] = {"stdout": [], "stderr": []}
        self._rest: dict[str, bytes] = {"stdout": b"", "stderr": b""}
        self.offsets = {"stdout": 0, "stderr": 0}

    def write(self, stream: str, offset: int, data: bytes) -> None:
        self.offsets[stream] = offset + len(data)
        if self._keep:
            self._parts[stream].append(data)
            return
        out = sys.stdout.buffer if stream == "stdout" else sys.stderr.buffer
        if self._prefix:
            lines = (self._rest[stream] + data).split(b"\n")
            self._rest[stream] = lines.pop()
            data = b"".join(self._prefix + line + b"\n" for line in lines)
        out.write(data)
        out.flush()

    def close(self) -> None:
        for stream, rest in self._rest.items():
            if rest:
                out = sys.stdout.buffer if stream == "stdout" else sys.stderr.buffer
                out.write(self._prefix + rest + b"\n")
                out.flush()

    def kept(self) -> dict[str, str]:
        return {stream: b"".join(parts).decode(errors="replace") for stream, parts in self._parts.items()}


async def follow_task(
    client: Any, task_id: str, show: Output, *, wait: bool = True, call: str = "task_follow"
) -> dict[str, Any]:
    """Show a task's output until it ends, across the death of the daemon; how it ended."""
    named = {"task_id" if call == "task_follow" else "move_id": task_id}
    while True:
        try:
            async for item in (await client.client()).stream(
                call, stdout_from=show.offsets["stdout"], stderr_from=show.offsets["stderr"], wait=wait, **named
            ):  # fmt: skip
                if "exit" in item:
                    show.close()
                    ended: dict[str, Any] = item["exit"]
                    return ended
                if "away" in item:
                    note(item["away"])
                else:
                    show.write(item["stream"], item["offset"], item["data"])
        except ChannelClosed:
            note("the daemon is gone; connecting again")
