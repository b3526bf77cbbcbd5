"""A numpy-like array whose bytes lie in a block on another node: an index moves just the bytes that it means."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from distributed_grid.agent.memory.accounting import show_bytes
from distributed_grid.core.errors import UsageError
from distributed_grid.orchestration.distributed_memory_pool.blocks import Block, is_block_id
from distributed_grid.orchestration.distributed_memory_pool.cached import BATCH_BYTES, BATCH_PIECES, CachedBlock
from distributed_grid.orchestration.distributed_memory_pool.selection import Selection, select

if TYPE_CHECKING:
    from distributed_grid.orchestration.distributed_memory_pool.sync import SyncMemoryPool


class BadShape(UsageError, ValueError):
    code = "bad-shape"


class BadType(UsageError, TypeError):
    code = "bad-type"


class RemoteArray:
    """Made by `pool.array`, `put_array` and `get_array`; every call blocks until it is done.

    Parts that are read are copies; assign to change the array: `a[3] = row`. Small parts go through a cache: they
    reach the node at `flush` (or when the pool is shut down), and what others wrote is seen after `refresh`. Parts from
    64 KiB on go straight. `cache_bytes=0` keeps nothing back.
    """

    def __init__(
        self, pool: SyncMemoryPool, block: Block, shape: tuple[int, ...], dtype: np.dtype[Any],
        cache_bytes: int,
    ) -> None:  # fmt: skip
        self.block, self.shape, self.dtype = block, shape, dtype
        self._pool = pool
        self._bytes = CachedBlock(pool, block, max(1, self.nbytes), cache_bytes)

    # -- making and finding ---------------------------------------------------------------------------------------

    @classmethod
    def create(
        cls, pool: SyncMemoryPool, shape: int | tuple[int, ...], dtype: DTypeLike, preferred_node: str | None,
        cache_bytes: int, **options: Any,
    ) -> RemoteArray:  # fmt: skip
        shape, kind = _shape(shape), _dtype(dtype)
        size = max(1, math.prod(shape) * kind.itemsize)
        options["meta"] = {**(options.get("meta") or {}), **_meta(shape, kind, size)}
        return cls(pool, pool.allocate(size, preferred_node, **options), shape, kind, cache_bytes)

    @classmethod
    def store(
        cls, pool: SyncMemoryPool, data: Any, preferred_node: str | None, cache_bytes: int, *, name: str = "",
        owned: bool = False, **options: Any,
    ) -> RemoteArray:  # fmt: skip
        """It has its name, and outlives this process, only when it is whole."""
        data = np.asarray(data)
        made = cls.create(pool, data.shape, data.dtype, preferred_node, cache_bytes, owned=True, **options)
        try:
            made[...] = data
            made.flush()
            if name or not owned:
                pool.rename(made.block, name, keep=not owned)
        except BaseException:
            made.free()
            raise
        return made

    @classmethod
    def open(cls, pool: SyncMemoryPool, name: str, cache_bytes: int) -> RemoteArray:
        known = pool.info(name) if is_block_id(name) else pool.named(name)
        meta = known["meta"]
        if "dtype" not in meta or "shape" not in meta:
            hint = "numpy.frombuffer(pool.objects[NAME], dtype)"
            raise BadType(f"{name} is no array", cause="nothing is known of its shape", hint=hint)
        block = Block(known["id"], known["size_bytes"], known["node"])
        return cls(pool, block, tuple(meta["shape"]), _described(meta["dtype"]), cache_bytes)

    # -- as numpy has it ------------------------------------------------------------------------------------------

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.size * self.itemsize

    def __len__(self) -> int:
        if not self.shape:
            raise BadType("an array without axes has no length")
        return self.shape[0]

    def __repr__(self) -> str:
        where = self.block.node or "?"
        return f"<RemoteArray {self.dtype} {self.shape}, {show_bytes(self.nbytes)} on {where}>"

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        if copy is False:
            raise BadShape("a remote array can only be had as a copy")
        whole: NDArray[Any] = self[...]
        return whole if dtype is None else whole.astype(dtype, copy=False)

    def __getitem__(self, key: Any) -> Any:
        chosen = select(key, self.shape)
        found = self._read(chosen).view(self.dtype).reshape(chosen.counts)[chosen.local]
        keys = key if isinstance(key, tuple) else (key,)
        return np.asarray(found) if any(one is Ellipsis for one in keys) else found

    def __setitem__(self, key: Any, value: Any) -> None:
        chosen = select(key, self.shape)
        self._write(chosen, self._fitted(chosen, value))

    def __iter__(self) -> Iterator[Any]:
        len(self)
        for part in self.chunks():
            yield from part

    def chunks(self, chunk_bytes: int = BATCH_BYTES) -> Iterator[NDArray[Any]]:
        """Along the first axis, some of it at a time, in order; the next is fetched while this one is used."""
        count = len(self)
        rows = max(1, chunk_bytes * count // max(1, self.nbytes))
        for first in range(0, count, rows):
            yield self[first : first + rows]

    # -- what is kept here ----------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Have the node hold all that was assigned, so that others see it."""
        self._bytes.flush()

    def refresh(self) -> None:
        """See what others have written meanwhile."""
        self._bytes.forget()

    def free(self) -> None:
        """Give the memory back; the array is gone for everybody."""
        self._bytes.forget(unwritten_too=True)
        self._pool.deallocate(self.block)

    def __enter__(self) -> RemoteArray:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.flush()

    # -- bytes ----------------------------------------------------------------------------------------------------

    def _read(self, chosen: Selection) -> NDArray[np.uint8]:
        item, length = self.itemsize, chosen.length * self.itemsize
        if not chosen.size * item:
            return np.empty(0, np.uint8)
        if chosen.runs == 1:
            return self._bytes.read(int(chosen.starts(0, 1)[0]) * item, length)
        out = np.empty(chosen.size * item, np.uint8)
        for first, last in _batches(chosen.runs, length):
            offsets = chosen.starts(first, last) * item
            self._bytes.gather(offsets, length, out[first * length : last * length])
        return out

    def _fitted(self, chosen: Selection, value: Any) -> NDArray[Any]:
        """The value in the selection's own order and shape; nothing is copied yet."""
        given = np.asarray(value)
        shape = chosen.shape
        while given.ndim > len(shape) and given.shape[0] == 1:
            given = given[0]
        try:
            spread = np.broadcast_to(given, shape)
        except ValueError:
            raise BadShape(f"a value of shape {given.shape} does not fit into {shape}") from None
        return spread[tuple(one if isinstance(one, slice) else None for one in chosen.local)]

    def _write(self, chosen: Selection, value: NDArray[Any]) -> None:
        item, length = self.itemsize, chosen.length * self.itemsize
        if not chosen.size * item:
            return
        start = int(chosen.starts(0, 1)[0]) * item
        if chosen.runs == 1 and value.dtype == self.dtype and value.flags.c_contiguous:
            return self._bytes.write(start, _raw(value))
        flat = value.reshape(-1) if value.flags.c_contiguous else value.flat
        if chosen.runs == 1:
            step = max(1, BATCH_BYTES // item)
            for first in range(0, chosen.size, step):
                self._bytes.write(start + first * item, self._cast(flat[first : first + step]))
            return
        for first, last in _batches(chosen.runs, length):
            part = self._cast(flat[first * chosen.length : last * chosen.length])
            self._bytes.scatter(chosen.starts(first, last) * item, length, part)

    def _cast(self, part: NDArray[Any]) -> NDArray[np.uint8]:
        try:
            return _raw(np.ascontiguousarray(part, self.dtype))
        except (TypeError, ValueError) as error:
            raise BadType(f"{part.dtype} can't become {self.dtype}", cause=str(error)) from None


def _raw(array: NDArray[Any]) -> NDArray[np.uint8]:
    """Its bytes, where they lie; also of types that have no buffers, such as dates."""
    return array.reshape(-1).view(np.uint8)


def _batches(runs: int, length: int) -> Iterator[tuple[int, int]]:
    most = max(1, min(BATCH_PIECES, BATCH_BYTES // length))
    for first in range(0, runs, most):
        yield first, min(runs, first + most)


def _shape(given: Any) -> tuple[int, ...]:
    try:
        shape = tuple(operator.index(one) for one in (given if hasattr(given, "__iter__") else (given,)))
    except TypeError:
        shape = (-1,)
    if any(one < 0 for one in shape):
        raise BadShape(f"not the shape of an array: {given!r}")
    return shape


def _dtype(given: DTypeLike) -> np.dtype[Any]:
    try:
        kind = np.dtype(given)
    except TypeError as error:
        raise BadType(f"not the type of an array: {given!r}", cause=str(error)) from None
    if kind.hasobject or not kind.itemsize or kind.subdtype:
        hint = "numbers, dates, text of a fixed length, or records of these"
        raise BadType(f"{kind} has no fixed number of bytes", hint=hint)
    if _described(_description(kind)) != kind:
        raise BadType(f"{kind} is not a type that every numpy knows", hint=f"array.view('V{kind.itemsize}')")
    return kind


def _meta(shape: tuple[int, ...], dtype: np.dtype[Any], size: int) -> dict[str, Any]:
    return {"kind": "array", "shape": list(shape), "dtype": _description(dtype), "size_bytes": size}


def _description(dtype: np.dtype[Any]) -> str:
    return repr(np.lib.format.dtype_to_descr(dtype)) if dtype.names else dtype.str


def _described(text: str) -> np.dtype[Any]:
    return np.lib.format.descr_to_dtype(ast.literal_eval(text)) if text.startswith("[") else np.dtype(text)
