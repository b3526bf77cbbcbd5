"""Files and pipes into the memory pool and out of it: whole or not at all."""

from __future__ import annotations

import contextlib
import io
import os
import secrets
import select
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed_grid.agent.memory.errors import PoolFull
from distributed_grid.commands._progress import Progress
from distributed_grid.commands.memory_views import length_of
from distributed_grid.core.errors import GridError, NotFound, Refused, UsageError

if TYPE_CHECKING:
    from distributed_grid.orchestration.distributed_memory_pool.sync import SyncMemoryPool

CHUNK_BYTES = 16 * 1024 * 1024
#: What came through a pipe is sent on when nothing more comes for so long.
PAUSE_S = 0.2


@dataclass(frozen=True)
class Place:
    """Where a new object shall lie."""

    node: str | None = None
    strict: bool = False
    replicas: int = 1
    at_rest: str = ""


# -- in -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def source(file: str) -> Iterator[tuple[io.RawIOBase, int | None]]:
    """What is read, and how many bytes that will be, if that can be known."""
    with contextlib.ExitStack() as stack:
        with telling(file):
            if Path(file).is_dir():
                raise UsageError(f"{file} is a directory", hint=f"tar c {file} | grid memory store KEY -", code="usage")
            piped = file == "-"
            stream = stack.enter_context(open(0 if piped else file, "rb", buffering=0, closefd=not piped))
            state = os.fstat(stream.fileno())
            size = None
            # Files of the kernel say that they are empty.
            if stat.S_ISREG(state.st_mode) and state.st_size:
                size = max(0, state.st_size - os.lseek(stream.fileno(), 0, os.SEEK_CUR))
        yield stream, size


@contextlib.contextmanager
def telling(file: str) -> Iterator[None]:
    """What the system has against a file, as an error of ours."""
    try:
        yield
    except BrokenPipeError:
        raise
    except FileNotFoundError as error:
        raise NotFound(f"there is no {error.filename or file}", code="file-error") from None
    except PermissionError as error:
        raise Refused(f"{error.filename or file}: {error.strerror}", code="file-error") from None
    except OSError as error:
        raise GridError(f"{error.filename or file}: {error.strerror or error}", code="file-error") from None


def store(
    pool: SyncMemoryPool, key: str, file: str, place: Place, most_bytes: int | None = None
) -> tuple[dict[str, Any], float]:
    """Put a file under a name; what had the name stays until the new one is whole. Its block, and the seconds."""
    from distributed_grid.orchestration.distributed_memory_pool.objects import ObjectWriter

    with source(file) as (stream, size):
        progress = Progress(f"storing {key}", size)
        most = most_bytes if size is None else size
        try:
            writer = ObjectWriter(
                pool, key, most, preferred_node=place.node, strict=place.strict, replicas=place.replicas,
                at_rest=place.at_rest,
            )  # fmt: skip
            try:
                for data in _chunks(stream, file, most):
                    writer.write(data)
                    progress.add(len(data))
                if size is not None and progress.done_bytes < size:
                    raise GridError(f"{file} got shorter while it was read", code="file-changed")
                writer.commit()
            finally:
                writer.discard()
        except PoolFull as error:
            raise _with_advice(pool, key, error, most is None) from None
        finally:
            progress.close()
    return pool.info(pool.find(key)), progress.elapsed_s


def _with_advice(pool: SyncMemoryPool, key: str, error: PoolFull, piped: bool) -> PoolFull:
    if piped:
        error.hint = "--size, if you know it: a pipe of unknown length needs twice the room for a while"
    else:
        with contextlib.suppress(GridError):
            pool.find(key)
            error.hint = f"grid memory deallocate {key}, which has its room until the new one is whole"
    return error


def _chunks(stream: io.RawIOBase, name: str, most: int | None) -> Iterator[memoryview]:
    """What comes, up to `most` bytes; more than that is an error, but for a file, which may grow."""
    buffer, count = memoryview(bytearray(CHUNK_BYTES)), 0
    while data := _read(stream, name, buffer if most is None else buffer[: most - count]):
        yield data
        count += len(data)
    if most is not None and not stat.S_ISREG(os.fstat(stream.fileno()).st_mode) and _read(stream, name, buffer[:1]):
        raise UsageError(f"more came than {most} bytes", hint="a greater --size", code="out-of-range")


def _read(stream: io.RawIOBase, name: str, buffer: memoryview) -> memoryview:
    """Fill it, or as far as a slow pipe does before it pauses; empty only at the end."""
    have = 0
    with telling(name):
        while have < len(buffer):
            if have and not select.select([stream], [], [], PAUSE_S)[0]:
                break
            count = stream.readinto(buffer[have:])
            if count is None:  # who shares this pipe may have set it so that it does not wait
                select.select([stream], [], [])
                continue
            if not count:
                break
            have += count
    return buffer[:have]


# -- out ----------------------------------------------------------------------------------------------------------


def retrieve(
    pool: SyncMemoryPool, found: dict[str, Any], output: str, offset: int = 0, size: int | None = None
) -> tuple[int, float]:
    """A block's bytes into a file (`-`: standard output); how many, and the seconds."""
    from distributed_grid.orchestration.distributed_memory_pool.sync import chunks_of

    pieces = list(chunks_of(length_of(found), offset, size, CHUNK_BYTES))
    total = sum(length for _, length in pieces)
    buffer = memoryview(bytearray(min(CHUNK_BYTES, total)))
    progress = Progress(f"retrieving {found['name'] or found['id']}", total)
    try:
        with target(output) as stream:
            for start, length in pieces:
                piece = buffer[:length]
                pool.read_into(found["id"], piece, offset=start)
                with telling(output):
                    _write(stream, piece)
                progress.add(length)
    finally:
        progress.close()
    return total, progress.elapsed_s


def _write(stream: io.RawIOBase, data: memoryview) -> None:
    while data:
        count = stream.write(data)
        if count is None:
            select.select([], [stream], [])
        else:
            data = data[count:]


@contextlib.contextmanager
def target(output: str) -> Iterator[io.RawIOBase]:
    """Where bytes go: a plain file appears only when it is whole, and takes the place of the old one then."""
    if output == "-":
        with open(1, "wb", buffering=0, closefd=False) as stream:
            yield stream
        return
    path = Path(os.path.realpath(output))
    with contextlib.ExitStack() as stack:
        with telling(output):
            mode = path.stat().st_mode if path.exists() else None
            if stat.S_ISDIR(mode or 0):
                raise UsageError(f"{output} is a directory", hint=f"-o {output}/FILE", code="usage")
            direct = mode is not None and not stat.S_ISREG(mode)
            beside = path if direct else path.with_name(f".grid-{secrets.token_hex(6)}")
            stream = stack.enter_context(open(beside, "wb" if direct else "xb", buffering=0))
        if direct:
            yield stream
            return
        stack.callback(beside.unlink, missing_ok=True)
        if mode is not None:
            beside.chmod(stat.S_IMODE(mode))
        yield stream
        with telling(output):
            stream.close()
            beside.replace(path)
