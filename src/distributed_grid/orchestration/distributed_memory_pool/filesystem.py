"""Named objects of the memory pool as files, `gridmem://name`, for all that opens files through fsspec."""

from __future__ import annotations

import contextlib
import io
import os
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fsspec.spec import AbstractFileSystem

from distributed_grid.agent.memory.errors import BlockLost
from distributed_grid.config.loader import load_cluster_config
from distributed_grid.config.paths import GridPaths
from distributed_grid.core.errors import UsageError
from distributed_grid.orchestration.distributed_memory_pool import objects
from distributed_grid.orchestration.distributed_memory_pool.sync import SyncMemoryPool

READ_AHEAD_BYTES = 1024 * 1024
WRITE_BYTES = 8 * 1024 * 1024

_lock = threading.Lock()
#: fsspec keeps a file system per thread; they all use one pool.
_pools: dict[tuple[int, Path, str], SyncMemoryPool] = {}


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


def _pool_for(config: str | None) -> SyncMemoryPool:
    key = (os.getpid(), GridPaths.default().home, config or "")
    with _lock:
        if key not in _pools:
            pool = SyncMemoryPool(load_cluster_config(config))
            pool.initialize()
            _pools[key] = pool
        return _pools[key]


def close_pools() -> None:
    """Close the connections of this process's file systems; the next use opens them again."""
    with _lock:
        pools = [pool for (pid, _, _), pool in _pools.items() if pid == os.getpid()]
        _pools.clear()
    for pool in pools:
        pool.shutdown()


class GridMemoryFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """A file is an object of this user: it is there when it was closed, whole. Directories are parts of names.

    `config`: the configuration's path, if not the one in effect. `pool`: one that is open already. `preferred_node`,
    `strict`, `replicas`: where new files lie.
    """

    protocol = "gridmem"
    root_marker = ""

    def __init__(
        self, config: str | None = None, pool: SyncMemoryPool | None = None, preferred_node: str | None = None,
        strict: bool = False, replicas: int = 1, **storage_options: Any,
    ) -> None:  # fmt: skip
        super().__init__(**storage_options)
        self._config, self._given = config, pool
        self._options: dict[str, Any] = {"preferred_node": preferred_node, "strict": strict, "replicas": replicas}

    @property
    def pool(self) -> SyncMemoryPool:
        return self._given or _pool_for(self._config)

    @property
    def fsid(self) -> str:
        return f"gridmem_{GridPaths.default().home}"

    def __reduce__(self) -> Any:
        """In another process it opens a pool of its own."""
        make, (kind, args, options) = super().__reduce__()
        return make, (kind, args, {name: value for name, value in options.items() if name != "pool"})

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(one) for one in path]
        return str(super()._strip_protocol(path)).strip("/")

    # -- looking --------------------------------------------------------------------------------------------------

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        name = self._strip_protocol(path)
        if name:
            with contextlib.suppress(KeyError):
                return _info(objects.describe(self.pool, name))
        if name and not objects.every(self.pool, f"{name}/"):
            raise FileNotFoundError(f"gridmem://{name}")
        return _directory(name)

    def exists(self, path: str, **kwargs: Any) -> bool:
        """Only what is not there is not there: other errors are told."""
        try:
            self.info(path)
        except FileNotFoundError:
            return False
        except BlockLost:
            pass
        return True

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        name = self._strip_protocol(path)
        prefix = f"{name}/" if name else ""
        found: dict[str, dict[str, Any]] = {}
        for full, known in objects.every(self.pool, name).items():
            if full == name:
                found[full] = _info(known)
            elif full.startswith(prefix):
                child, _, deeper = full[len(prefix) :].partition("/")
                entry = _directory(prefix + child) if deeper else _info(known)
                found.setdefault(entry["name"], entry)
        if not found and name:
            raise FileNotFoundError(f"gridmem://{name}")
        return [found[one] if detail else one for one in sorted(found)]

    def find(
        self, path: str, maxdepth: int | None = None, withdirs: bool = False, detail: bool = False, **kwargs: Any
    ) -> Any:
        if maxdepth is not None or withdirs:
            return super().find(path, maxdepth=maxdepth, withdirs=withdirs, detail=detail, **kwargs)
        name = self._strip_protocol(path)
        known = objects.every(self.pool, name)
        found = {one: _info(known[one]) for one in sorted(known) if not name or one == name or one[len(name)] == "/"}
        return found if detail else list(found)

    def created(self, path: str) -> datetime:
        return datetime.fromtimestamp(self.info(path)["created"], UTC)

    modified = created

    def ukey(self, path: str) -> str:
        return str(self.info(path)["block"])

    # -- whole files ----------------------------------------------------------------------------------------------

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        with _as_files(path):
            return objects.get(self.pool, self._strip_protocol(path), start, end)

    def pipe_file(self, path: str, value: Any, mode: str = "overwrite", **kwargs: Any) -> None:
        if mode == "create" and self.exists(path):
            raise FileExistsError(path)
        objects.put(self.pool, self._name(path), value, **self._options)

    def put_file(self, lpath: str, rpath: str, **kwargs: Any) -> None:
        if not Path(lpath).is_dir():
            super().put_file(lpath, rpath, size=Path(lpath).stat().st_size, **kwargs)

    def cp_file(self, path1: str, path2: str, **kwargs: Any) -> None:
        name = self._strip_protocol(path1)
        if self.isdir(name):
            return
        with _as_files(path1):
            objects.copy(self.pool, name, self._name(path2), **self._options)

    def mv(self, path1: str, path2: str, recursive: bool = False, maxdepth: int | None = None, **kwargs: Any) -> None:
        """Each file in one step, with no byte moved."""
        old, new = self._strip_protocol(path1), self._name(path2)
        if path2.endswith("/"):
            new = f"{new}/{old.rpartition('/')[2]}"
        moved = self.find(old)
        if not moved or (moved != [old] and not recursive):
            raise FileNotFoundError(path1)
        for name in moved:
            with _as_files(name):
                self.pool.rename(objects.describe(self.pool, name)["id"], new + name[len(old) :])

    mv_file = mv

    def rm_file(self, path: str) -> None:
        with _as_files(path):
            objects.remove(self.pool, self._strip_protocol(path))

    _rm = rm_file

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> None:
        for name in self.expand_path(path, recursive=recursive, maxdepth=maxdepth):
            with contextlib.suppress(*[FileNotFoundError] if recursive else []):  # a directory ends with its files
                self.rm_file(name)

    def mkdir(self, path: str, create_parents: bool = True, **kwargs: Any) -> None:
        """Directories need not be made."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Directories need not be made."""

    def rmdir(self, path: str) -> None:
        """A directory ends with its last file."""

    # -- open files -----------------------------------------------------------------------------------------------

    def _open(
        self, path: str, mode: str = "rb", block_size: Any = None, autocommit: bool = True, size: int | None = None,
        **kwargs: Any,
    ) -> io.BufferedIOBase:  # fmt: skip
        """`size`: how long a new file will be at most, where that is known."""
        if mode == "rb":
            with _as_files(path):
                known = objects.describe(self.pool, self._strip_protocol(path))
            return ObjectReader(self.pool, known, block_size if isinstance(block_size, int) else READ_AHEAD_BYTES)
        if mode not in ("wb", "ab", "xb"):
            raise UsageError(f"there is no mode {mode!r}", hint="rb, wb, ab or xb", code="bad-mode")
        if mode == "xb" and self.exists(path):
            raise FileExistsError(path)
        name = self._name(path)
        before = objects.describe(self.pool, name) if mode == "ab" and objects.exists(self.pool, name) else None
        writer = objects.ObjectWriter(self.pool, name, None if before else size, **self._options)
        made = ObjectFile(writer, autocommit)
        if before:
            for part in self.pool.stream(before["id"], size=objects.size_of(before)):
                made.write(part)
        return made

    def _name(self, path: str) -> str:
        name = str(self._strip_protocol(path))
        if not name:
            raise UsageError("a file needs a name", hint="gridmem://NAME", code="bad-key")
        return name


class ObjectReader(io.BufferedReader):
    """A file that is read; it can be sought in."""

    def __init__(self, pool: SyncMemoryPool, known: dict[str, Any], buffer_bytes: int) -> None:
        self.size = objects.size_of(known)
        self.path = str(known["name"])
        super().__init__(_Raw(pool, str(known["id"]), self.size), max(1, min(buffer_bytes, self.size)))


class _Raw(io.RawIOBase):
    def __init__(self, pool: SyncMemoryPool, block: str, size: int) -> None:
        super().__init__()
        self._pool, self._block, self._size = pool, block, size
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise ValueError("before the beginning of the file")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")[: max(0, self._size - self._at)]
        if view:
            self._at += self._pool.read_into(self._block, view, offset=self._at)
        return len(view)

    def readall(self) -> bytes:
        data = self._pool.read(self._block, max(0, self._size - self._at), offset=min(self._at, self._size))
        self._at += len(data)
        return data


class ObjectFile(io.BufferedWriter):
    """A file that is written: it is there when it is closed, and not at all if an error ends the `with`."""

    def __init__(self, writer: objects.ObjectWriter, autocommit: bool) -> None:
        super().__init__(writer, WRITE_BYTES)
        self._writer, self._autocommit = writer, autocommit
        self.path = writer.object_name

    def close(self) -> None:
        if self.closed:
            return
        try:
            self.flush()
            if self._autocommit:
                self._writer.commit()
        except BaseException:
            self._end()
            raise
        super().close()

    def commit(self) -> None:
        """At the end of a transaction."""
        self._writer.commit()

    def discard(self) -> None:
        self._writer.discard()

    def __exit__(self, kind: Any, *rest: Any) -> None:
        if kind is None:
            self.close()
        else:
            self._end()

    def _end(self) -> None:
        try:
            self._writer.discard()
        finally:
            with contextlib.suppress(ValueError):  # what was not written yet has no place any more
                super().close()


@contextlib.contextmanager
def _as_files(path: str) -> Iterator[None]:
    try:
        yield
    except KeyError:
        raise FileNotFoundError(f"gridmem://{path}") from None


def _info(known: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": known["name"], "size": objects.size_of(known), "type": "file", "created": known["created"],
        "block": known["id"], "node": known["node"],
    }  # fmt: skip


def _directory(name: str) -> dict[str, Any]:
    return {"name": name, "size": 0, "type": "directory"}
