"""Named objects as a dictionary of bytes, for plain programs and for zarr."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from fsspec.mapping import FSMap

from distributed_grid.core.errors import UsageError
from distributed_grid.orchestration.distributed_memory_pool import objects
from distributed_grid.orchestration.distributed_memory_pool.blocks import check_meta

if TYPE_CHECKING:
    from distributed_grid.orchestration.distributed_memory_pool.sync import SyncMemoryPool

#: In an object's meta: its bytes are a pickle.
PICKLED = "pickled"


class ObjectMapping(FSMap):  # type: ignore[misc]
    """Names to bytes, of this user, seen by all of his processes; a value is replaced whole or not at all.

    Anything with the buffer protocol can be put in; bytes come out, and nothing is pickled. It is one of fsspec's
    mappings, so that what takes these (zarr) takes it too.
    """

    def __init__(self, pool: SyncMemoryPool, prefix: str = "", **options: Any) -> None:
        from distributed_grid.orchestration.distributed_memory_pool.filesystem import GridMemoryFileSystem

        super().__init__(prefix, GridMemoryFileSystem(pool=pool, skip_instance_cache=True, **options))
        self._pool, self._options = pool, options
        self._prefix = f"{self.root}/" if self.root else ""

    def under(self, prefix: str) -> ObjectMapping:
        """Only those whose name begins with `prefix/`, by the rest of their name."""
        return ObjectMapping(self._pool, self._prefix + prefix, **self._options)

    def _name(self, key: object) -> str:
        if not isinstance(key, str) or not key:
            raise UsageError(f"a name is a text, not {key!r}", code="bad-key")
        return self._prefix + key

    def __getitem__(self, key: str, default: Any = None) -> bytes:
        return objects.get(self._pool, self._name(key))

    def __setitem__(self, key: str, value: Any) -> None:
        objects.put(self._pool, self._name(key), value, **self._options)

    def put(self, key: str, value: Any, *, meta: dict[str, Any] | None = None, pickled: bool = False) -> None:
        """As `mapping[key] = value`, with metadata (anything JSON). `pickled`: any object, for `load` to unpickle."""
        if pickled:
            value, meta = pickle.dumps(value, protocol=5), {**(meta or {}), PICKLED: True}
        objects.put(self._pool, self._name(key), value, check_meta(meta), **self._options)

    def meta(self, key: str) -> dict[str, Any]:
        """What was given with the value, and `size_bytes`."""
        return dict(objects.describe(self._pool, self._name(key))["meta"])

    def load(self, key: str) -> Any:
        """What was put in with `pickled=True`; nothing else is ever unpickled."""
        if not self.meta(key).get(PICKLED):
            raise UsageError(f"{key} was not pickled", hint="mapping[key]: its bytes", code="not-pickled")
        return pickle.loads(self[key])

    def __delitem__(self, key: str) -> None:
        objects.remove(self._pool, self._name(key))

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and bool(key) and objects.exists(self._pool, self._prefix + key)

    def __iter__(self) -> Iterator[str]:
        return (name.removeprefix(self._prefix) for name in sorted(objects.every(self._pool, self._prefix)))

    def __len__(self) -> int:
        return len(objects.every(self._pool, self._prefix))

    def clear(self) -> None:
        for name in objects.every(self._pool, self._prefix):
            with contextlib.suppress(KeyError):  # somebody else was faster
                objects.remove(self._pool, name)

    def pop(self, key: str, *default: Any) -> Any:
        try:
            value = self[key]
            del self[key]
        except KeyError:
            if default:
                return default[0]
            raise
        return value

    def __repr__(self) -> str:
        return f"<ObjectMapping gridmem://{self.root}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return FSMap, (self.root, self.fs)
