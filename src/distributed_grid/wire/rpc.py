"""Calls and streams over a channel: typed arguments, errors that cross the wire, streams that wait for their reader."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import logging
import typing
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgpack

from distributed_grid.core.errors import GridError, InternalError, TimedOut, UsageError
from distributed_grid.wire.channel import Channel, ChannelClosed

log = logging.getLogger(__name__)

#: Raised by one with every change that an older peer could not understand.
PROTOCOL = 1
#: Items of one stream that may be under way without the reader having taken them.
STREAM_WINDOW = 16
MAX_CALLS_PER_CONNECTION = 512
CANCEL_LIMIT_S = 1.0

F = TypeVar("F", bound=Callable[..., Any])


def method(function: F) -> F:
    """Mark an async function, or an async generator, of a service as callable from the other end.

    A plain function too: it is called in the turn of the loop in which it was asked, and answered in it, unless what it
    returns has to be awaited. That is begun even if the caller hangs up meanwhile.
    """
    function.__grid_method__ = True  # type: ignore[attr-defined]
    return function


@dataclass(slots=True)
class CallContext:
    """Who calls: `uid` and `pid` come from the kernel for a unix socket, -1 for an agent's channel."""

    uid: int = -1
    pid: int = -1
    peer: str = ""
    #: Set by the server of the connection; what a service wants to remember about it.
    facts: dict[str, Any] = field(default_factory=dict)


class _Method:
    """One callable of a service and the check of its arguments."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.name = name
        self.function = function
        self.streams = inspect.isasyncgenfunction(function)
        self.waits = inspect.iscoroutinefunction(function)
        self._validate: Callable[[dict[str, Any]], dict[str, Any]] | None = None

    def check(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Those that were given, as the types that the function takes; its own defaults stand for the others."""
        if self._validate is None:
            self._validate = self._made()
        try:
            checked: dict[str, Any] = self._validate(arguments)
        except ValueError as error:  # pydantic's, which is imported with the first call
            from pydantic import ValidationError

            if not isinstance(error, ValidationError):
                raise
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or self.name
            raise UsageError(f"{self.name}: {where}: {first['msg']}", code="bad-argument") from None
        return checked

    def _made(self) -> Callable[[dict[str, Any]], dict[str, Any]]:
        from pydantic import ConfigDict, TypeAdapter
        from typing_extensions import TypedDict

        hints = typing.get_type_hints(self.function, include_extras=True)
        fields: dict[str, Any] = {}
        for name, parameter in list(inspect.signature(self.function).parameters.items())[1:]:
            given = parameter.default is inspect.Parameter.empty
            fields[name] = hints[name] if given else typing.NotRequired[hints[name]]
        make: Any = TypedDict  # with names that are known only now
        arguments = make(self.name, fields)
        arguments.__pydantic_config__ = ConfigDict(extra="forbid", arbitrary_types_allowed=True)
        return TypeAdapter(arguments).validator.validate_python


@dataclass(frozen=True, slots=True)
class _Call:
    channel: Channel
    context: CallContext
    number: int
    name: str
    arguments: dict[str, Any]


#: Told of each call before anything else is done about it, with the arguments as they came; may refuse it.
Guard = Callable[[CallContext, str, dict[str, Any]], None]
#: Told of each call that was not answered as asked.
OnError = Callable[[CallContext, str, dict[str, Any], GridError], None]


class RpcServer:
    """Serves an object's `@method`s over channels."""

    def __init__(
        self, *services: object, hello: Callable[[], dict[str, Any]], guard: Guard | None = None,
        on_error: OnError | None = None,
    ) -> None:  # fmt: skip
        self._methods: dict[str, _Method] = {}
        self._hello = hello
        self._guard = guard
        self._on_error = on_error
        for service in services:
            self.add(service)

    def add(self, service: object) -> None:
        for name, function in inspect.getmembers(service, callable):
            if getattr(function, "__grid_method__", False):
                if name in self._methods:
                    raise InternalError(f"two services offer {name}")
                self._methods[name] = _Method(name, function)

    @property
    def method_names(self) -> list[str]:
        return sorted(self._methods)

    async def serve(self, channel: Channel, context: CallContext) -> None:
        """Answer until the other end hangs up; what it had asked for and is still running is cancelled then."""
        running: dict[int, tuple[asyncio.Task[None], asyncio.Semaphore]] = {}
        await channel.send(pack({"hello": {"protocol": PROTOCOL, **self._hello()}}))
        try:
            await channel.hear(functools.partial(self._take, channel, context, running))
        except ChannelClosed:
            pass
        finally:
            tasks = [task for task, _window in running.values()]
            for task in tasks:
                _cancel_begun(task)
            await asyncio.gather(*tasks, return_exceptions=True)

    def _take(
        self, channel: Channel, context: CallContext, running: dict[int, tuple[asyncio.Task[None], asyncio.Semaphore]],
        data: bytes,
    ) -> None:  # fmt: skip
        message = unpack(data)
        number = message.get("i")
        if not isinstance(number, int):
            raise ChannelClosed("a message without a number")
        if "c" in message:
            if number in running:
                _cancel_begun(running[number][0])
        elif "k" in message:
            if number in running:
                running[number][1].release()
        elif number in running:
            raise ChannelClosed("two calls with one number")
        elif len(running) >= MAX_CALLS_PER_CONNECTION:
            if channel.is_clogged:
                raise ChannelClosed("too many calls, and no answer is taken")
            busy = GridError("too many calls at once on this connection", code="busy")
            channel.post(pack({"i": number, "e": busy.to_wire()}))
        else:
            arguments = message.get("a") or {}
            if not isinstance(arguments, dict):
                arguments = {"": arguments}  # no call has such an argument
            call = _Call(channel, context, number, str(message.get("m")), arguments)
            found = self._methods.get(call.name)
            rest: Awaitable[Any] | None = None
            if found is not None and not found.waits and not found.streams and not channel.is_clogged:
                rest = self._answer_now(found, call)
                if rest is None:
                    return
            window = asyncio.Semaphore(STREAM_WINDOW)
            task = asyncio.create_task(self._answer(call, window, rest))
            running[number] = (task, window)
            task.add_done_callback(functools.partial(_forget, running, number))

    def _answer_now(self, found: _Method, call: _Call) -> Awaitable[Any] | None:
        """What is still to be awaited before there is an answer, if anything."""
        try:
            result = found.function(call.context, **self._checked(found, call))
            if inspect.isawaitable(result):
                return result
            reply = {"i": call.number, "r": result}
        except Exception as error:  # noqa: BLE001 - the server's loop: a fault of ours must not end the connection
            reply = self._wrong(call, error)
        _reply(call, reply)
        return None

    async def _answer(self, call: _Call, window: asyncio.Semaphore, rest: Awaitable[Any] | None) -> None:
        try:
            found = self._methods.get(call.name)
            checked = self._checked(found, call) if rest is None else {}
            if rest is not None:
                reply: dict[str, Any] = {"i": call.number, "r": await rest}
            elif found is None:
                reply = {"i": call.number, "r": "pong"}
            elif found.streams:
                async with contextlib.aclosing(found.function(call.context, **checked)) as items:
                    async for item in items:
                        await window.acquire()
                        await call.channel.send(pack({"i": call.number, "s": item}))
                reply = {"i": call.number, "z": 1}
            else:
                result = found.function(call.context, **checked)
                reply = {"i": call.number, "r": await result if inspect.isawaitable(result) else result}
        except Exception as error:  # noqa: BLE001 - the server's loop: a fault of ours must not end the connection
            reply = self._wrong(call, error)
        _reply(call, reply)
        with contextlib.suppress(ChannelClosed):
            await call.channel.taken()

    def _checked(self, found: _Method | None, call: _Call) -> dict[str, Any]:
        """Its arguments; the guard is told before anything else is done about it, but for a ping."""
        if found is None and call.name == "ping":
            return {}
        if self._guard:
            self._guard(call.context, call.name, call.arguments)
        if found is None:
            raise UsageError(f"there is no call named {call.name!r}", code="unknown-call")
        return found.check(call.arguments)

    def _wrong(self, call: _Call, error: Exception) -> dict[str, Any]:
        if isinstance(error, GridError):
            told = error
        else:
            log.error("call %s failed", call.name, exc_info=error)
            cause = f"{type(error).__name__}: {error}"
            told = InternalError(f"{call.name} failed", cause=cause, hint="see `grid logs daemon`")
        if self._on_error:
            self._on_error(call.context, call.name, call.arguments, told)
        return {"i": call.number, "e": told.to_wire()}


def _reply(call: _Call, reply: dict[str, Any]) -> None:
    """The caller gets an answer, also where ours can't be sent as it is."""
    with contextlib.suppress(ChannelClosed):
        try:
            call.channel.post(pack(reply))
        except UsageError as error:  # too long, or not plain data
            told = InternalError(f"the answer to {call.name} can't be sent", cause=error.message, code=error.code)
            call.channel.post(pack({"i": call.number, "e": told.to_wire()}))


def _cancel_begun(task: asyncio.Task[None]) -> None:
    """A task that is cancelled before its first step never sees it: what was begun for it would not be undone."""
    asyncio.get_running_loop().call_soon(task.cancel)


def _forget(running: dict[int, Any], number: int, _task: asyncio.Task[None]) -> None:
    running.pop(number, None)


class RpcClient:
    """The calling end. Every answer is handed to the call that waits for it as it comes."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._next = 0
        self._waiting: dict[int, Callable[[dict[str, Any]], None]] = {}
        self._lost: ChannelClosed | None = None
        self._reader: asyncio.Task[None] | None = None
        self.hello: dict[str, Any] = {}

    @classmethod
    async def start(cls, channel: Channel, timeout_s: float = 10.0) -> RpcClient:
        client = cls(channel)
        try:
            async with asyncio.timeout(timeout_s):
                client.hello = unpack(await channel.recv()).get("hello", {})
        except TimeoutError:
            channel.close()
            await channel.wait_closed()
            raise TimedOut(f"{channel.peer} accepted the connection but said nothing", code="silent") from None
        except ChannelClosed:
            channel.close()
            await channel.wait_closed()
            raise
        client._reader = asyncio.create_task(client._read())
        return client

    @property
    def is_open(self) -> bool:
        return self._lost is None

    async def _read(self) -> None:
        try:
            await self._channel.hear(self._take)
        except ChannelClosed as error:
            self._lose(error)
        finally:
            self._lose(self._closed())

    def _closed(self) -> ChannelClosed:
        return ChannelClosed(f"the connection to {self._channel.peer} was closed")

    def _lose(self, why: ChannelClosed) -> None:
        self._lost = self._lost or why
        for tell in list(self._waiting.values()):
            tell({"lost": True})

    def _take(self, data: bytes) -> None:
        message = unpack(data)
        tell = self._waiting.get(message.get("i", -1))
        if tell:
            tell(message)

    async def _begin(self, name: str, arguments: dict[str, Any], tell: Callable[[dict[str, Any]], None]) -> int:
        number = self._number()
        self._waiting[number] = tell
        try:
            await self._channel.send(pack({"i": number, "m": name, "a": arguments}))
        except BaseException:
            self._waiting.pop(number, None)
            raise
        return number

    def _number(self) -> int:
        if self._lost:
            raise ChannelClosed(self._lost.message, cause=self._lost.cause)
        self._next += 1
        return self._next

    def _check(self, message: dict[str, Any]) -> None:
        if "lost" in message:
            assert self._lost is not None
            raise ChannelClosed(self._lost.message, cause=self._lost.cause)
        if "e" in message:
            raise GridError.from_wire(message["e"])

    async def call(self, name: str, *, timeout_s: float | None = 60.0, **arguments: Any) -> Any:
        answer = self.ask(name, **arguments)
        try:
            async with asyncio.timeout(timeout_s):  # sending waits too, where the other end takes nothing
                await self._channel.taken()
                return await answer
        except TimeoutError:
            raise TimedOut(f"{self._channel.peer} did not answer {name} within {timeout_s:g} s") from None
        finally:
            answer.cancel()

    def ask(self, name: str, **arguments: Any) -> asyncio.Future[Any]:
        """Sent in this very turn of the loop. Where the future is cancelled, so is the call at the other end."""
        number = self._number()
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        answer.add_done_callback(functools.partial(self._asked, number))
        self._channel.post(pack({"i": number, "m": name, "a": arguments}))
        self._waiting[number] = functools.partial(self._settle, answer)
        return answer

    def _asked(self, number: int, answer: asyncio.Future[Any]) -> None:
        self._waiting.pop(number, None)
        if answer.cancelled():
            with contextlib.suppress(ChannelClosed):
                self._channel.post(pack({"i": number, "c": 1}))

    def _settle(self, answer: asyncio.Future[Any], message: dict[str, Any]) -> None:
        if answer.done():  # nobody waits any more
            return
        try:
            self._check(message)
        except GridError as error:
            answer.set_exception(error)
        else:
            answer.set_result(message.get("r"))

    async def stream(self, name: str, **arguments: Any) -> AsyncIterator[Any]:
        queue: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        number = await self._begin(name, arguments, queue.put_nowait)
        ended = False
        try:
            while True:
                message = await queue.get()
                ended = "s" not in message
                self._check(message)
                if "z" in message:
                    return
                yield message.get("s")
                await self._channel.send(pack({"i": number, "k": 1}))
        finally:
            self._waiting.pop(number, None)
            if not ended:
                await self._cancel(number)

    async def _cancel(self, number: int) -> None:
        with contextlib.suppress(ChannelClosed, TimeoutError):
            async with asyncio.timeout(CANCEL_LIMIT_S):
                await self._channel.send(pack({"i": number, "c": 1}))

    async def close(self) -> None:
        self._channel.close()
        self._lose(self._closed())  # here, too: a task that is cancelled before its first step never sees it
        if self._reader:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        await self._channel.wait_closed()


def pack(message: dict[str, Any]) -> bytes:
    try:
        packed: bytes = msgpack.packb(message, use_bin_type=True, unicode_errors="surrogateescape")
    except (TypeError, ValueError, OverflowError) as error:
        raise UsageError("a message that is not plain data", cause=str(error), code="bad-message") from None
    return packed


def unpack(data: bytes) -> dict[str, Any]:
    try:
        message = msgpack.unpackb(data, raw=False, strict_map_key=False, unicode_errors="surrogateescape")
    except (ValueError, TypeError, msgpack.UnpackException) as error:  # TypeError: a key that is a list
        raise ChannelClosed("a message that can't be read", cause=str(error)) from None
    if not isinstance(message, dict):
        raise ChannelClosed("a message that is not a map")
    return message
