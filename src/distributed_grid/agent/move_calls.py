"""The calls by which the daemon has this node carry a process out, take one in, and talk to the stub left behind."""

from __future__ import annotations

import asyncio
import base64
import json
import secrets
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from distributed_grid.agent.moving.keeper import MoveKeeper
from distributed_grid.agent.node import AgentNode
from distributed_grid.core.errors import GridError, Unavailable
from distributed_grid.core.process import boot_id
from distributed_grid.wire.rpc import CallContext, method

STUB_LIMIT_S = 20.0
#: A line of the stub's protocol: a chunk of output in base64 fits.
STUB_LINE_BYTES = 4 << 20


class MoveCalls:
    def __init__(self, node: AgentNode) -> None:
        self._node = node
        self._keeper = MoveKeeper(node.node_dir / "moves", node.tasks.spool, node.name)
        self._keeper.launchers.keep_spare()

    # -- out ------------------------------------------------------------------------------------------------------

    @method
    async def out_begin(
        self, context: CallContext, *, move_id: str, pid: int, start_ticks: int, host: str, port: int, key: bytes,
        options: dict[str, Any],
    ) -> dict[str, Any]:  # fmt: skip
        return await asyncio.to_thread(self._keeper.out_begin, move_id, pid, start_ticks, host, port, key, options)

    @method
    async def out_hold(self, context: CallContext, *, move_id: str, pid: int, start_ticks: int) -> dict[str, Any]:
        """For a relaunch: the tree is only stopped, and held until `out_abort` or `out_finish`."""
        return await asyncio.to_thread(self._keeper.out_hold, move_id, pid, start_ticks)

    @method
    async def out_status(self, context: CallContext, *, move_id: str) -> dict[str, Any]:
        return self._keeper.out_status(move_id)

    @method
    async def out_wait(
        self, context: CallContext, *, move_id: str, phases: list[str], within_s: float = 5.0
    ) -> dict[str, Any]:
        return await asyncio.to_thread(self._keeper.out_wait, move_id, phases, min(within_s, 60.0))

    @method
    async def out_abort(self, context: CallContext, *, move_id: str) -> dict[str, Any]:
        return await asyncio.to_thread(self._keeper.out_abort, move_id)

    @method
    async def out_finish(
        self, context: CallContext, *, move_id: str, label: str = "", stub: bool = True, moved_task: str = ""
    ) -> dict[str, Any]:
        """The source goes. With `stub` its pid lives on as one; `moved_task`: it was that task of this node."""
        spec: dict[str, Any] = {}
        if moved_task:
            spec["moved_marker"] = str(self._node.tasks.spool / moved_task / "moved")
        if stub:
            spec |= {"dir": await asyncio.to_thread(self._stub_dir, move_id), "label": label}
        return await asyncio.to_thread(self._keeper.out_finish, move_id, spec)

    def _stub_dir(self, move_id: str) -> str:
        """A directory that the process's own user can reach, unlike ours; its name is told to nobody else."""
        note = self._keeper.moves / move_id / "stub_dir"
        if note.exists():
            return note.read_text()
        path = Path(tempfile.gettempdir()) / f".grid-stub-{secrets.token_hex(12)}"
        note.write_text(str(path))
        return str(path)

    # -- in -------------------------------------------------------------------------------------------------------

    @method
    async def in_prepare(self, context: CallContext, *, move_id: str, options: dict[str, Any]) -> dict[str, Any]:
        return await asyncio.to_thread(self._keeper.in_prepare, move_id, self._node.address, options)

    @method
    async def in_status(self, context: CallContext, *, move_id: str) -> dict[str, Any]:
        return {**self._keeper.in_status(move_id), "boot_id": boot_id()}

    @method
    async def in_wait(
        self, context: CallContext, *, move_id: str, phases: list[str], within_s: float = 5.0
    ) -> dict[str, Any]:
        return await asyncio.to_thread(self._keeper.in_wait, move_id, phases, min(within_s, 60.0))

    @method
    async def in_go(self, context: CallContext, *, move_id: str) -> dict[str, Any]:
        return await asyncio.to_thread(self._keeper.in_go, move_id)

    @method
    async def in_drop(self, context: CallContext, *, move_id: str) -> dict[str, Any]:
        return await asyncio.to_thread(self._keeper.in_drop, move_id)

    @method
    async def move_list(self, context: CallContext) -> list[dict[str, Any]]:
        return await asyncio.to_thread(self._keeper.list)

    @method
    async def move_forget(self, context: CallContext, *, move_id: str) -> None:
        await asyncio.to_thread(self._keeper.forget, move_id)

    # -- the stub -------------------------------------------------------------------------------------------------

    async def _dial(self, move_id: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        note = self._keeper.moves / move_id / "stub_dir"
        try:
            path = note.read_text() + "/stub.sock"
            return await asyncio.wait_for(asyncio.open_unix_connection(path, limit=STUB_LINE_BYTES), STUB_LIMIT_S)
        except (OSError, TimeoutError) as error:
            raise Unavailable("the stub does not answer", cause=str(error), code="stub") from None

    async def _ask(self, move_id: str, request: dict[str, Any]) -> dict[str, Any]:
        reader, writer = await self._dial(move_id)
        try:
            async with asyncio.timeout(STUB_LIMIT_S):
                writer.write(json.dumps(request).encode() + b"\n")
                await writer.drain()
                line = await reader.readline()
        except (OSError, TimeoutError) as error:
            raise Unavailable("the stub does not answer", cause=str(error), code="stub") from None
        finally:
            writer.close()
        if not line:
            raise Unavailable("the stub is gone", code="stub")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer and answer["error"] != "gap":
            raise GridError("the stub could not write", cause=str(answer["error"]), code="stub-write")
        return answer

    @method
    async def stub_write(self, context: CallContext, *, move_id: str, fd: int, offset: int, data: bytes) -> int:
        """Append output where the program's went before; how far that stream is written now."""
        request = {"op": "write", "fd": fd, "offset": offset, "data": base64.b64encode(data).decode()}
        return int((await self._ask(move_id, request))["offsets"][str(fd)])

    @method
    async def stub_offsets(self, context: CallContext, *, move_id: str) -> dict[str, int]:
        """How much of each stream the stub has written: asked by a write of nothing, which disturbs nobody."""
        answer = await self._ask(move_id, {"op": "write", "fd": 1, "offset": 0, "data": ""})
        return {str(fd): int(offset) for fd, offset in answer["offsets"].items()}

    @method
    async def stub_input(self, context: CallContext, *, move_id: str, offset: int) -> dict[str, Any]:
        """`data` of the stub's standard input from there on, and whether it ends with that; nothing after a while."""
        reader, writer = await self._dial(move_id)
        try:
            writer.write(json.dumps({"op": "input", "offset": offset}).encode() + b"\n")
            line = await asyncio.wait_for(reader.readline(), STUB_LIMIT_S)
        except TimeoutError:
            return {"data": b"", "end": False}
        except OSError as error:
            raise Unavailable("the stub does not answer", cause=str(error), code="stub") from None
        finally:
            writer.close()
        if not line:
            raise Unavailable("the stub is gone", code="stub")
        answer = json.loads(line)
        if "error" in answer:
            raise GridError("the stub has not kept that part of the input", cause=f"from {offset}", code="stub-input")
        return {"data": base64.b64decode(answer["data"]), "end": bool(answer["end"])}

    @method
    async def stub_input_over(self, context: CallContext, *, move_id: str) -> None:
        """The program reads no more of it."""
        await self._ask(move_id, {"op": "input_over"})

    @method
    async def stub_exit(self, context: CallContext, *, move_id: str, code: int = 0, signal: int = 0) -> None:
        """The stub ends as the program did; fine if it is gone already."""
        try:
            await self._ask(move_id, {"op": "exit", "code": code, "signal": signal})
        except Unavailable:
            pass
        note = self._keeper.moves / move_id / "stub_dir"
        if note.exists():
            import shutil

            await asyncio.to_thread(shutil.rmtree, note.read_text(), ignore_errors=True)

    @method
    async def stub_follow(self, context: CallContext, *, move_id: str) -> AsyncIterator[dict[str, Any]]:
        """First how much of each stream is written, then each signal that the stub was sent; ends when it is gone.

        A signal comes with its number, and comes again to whoever asks next, until `stub_heard`.
        """
        reader, writer = await self._dial(move_id)
        try:
            writer.write(b'{"op": "hello"}\n')
            await writer.drain()
            while line := await reader.readline():
                yield json.loads(line)
        except OSError:
            pass
        finally:
            writer.close()

    @method
    async def stub_heard(self, context: CallContext, *, move_id: str, upto: int) -> None:
        """The signals up to that number reached the program. Its answer is not waited for: a stub may be stopped."""
        _, writer = await self._dial(move_id)
        try:
            writer.write(json.dumps({"op": "heard", "upto": upto}).encode() + b"\n")
            await asyncio.wait_for(writer.drain(), STUB_LIMIT_S)
        except (OSError, TimeoutError) as error:
            raise Unavailable("the stub does not answer", cause=str(error), code="stub") from None
        finally:
            writer.close()
