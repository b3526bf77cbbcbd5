"""What the blocking pool offers beyond blocks: arrays and named objects, loaded on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from distributed_grid.orchestration.distributed_memory_pool.array import RemoteArray
    from distributed_grid.orchestration.distributed_memory_pool.mapping import ObjectMapping
    from distributed_grid.orchestration.distributed_memory_pool.sync import SyncMemoryPool

#: What a remote array may keep here, both of what it read and of what it has still to write.
ARRAY_CACHE_BYTES = 64 * 1024 * 1024


class ObjectCalls:
    @property
    def _self(self) -> SyncMemoryPool:
        return cast("SyncMemoryPool", self)

    @property
    def objects(self) -> ObjectMapping:
        """Named objects, as a dictionary of bytes."""
        from distributed_grid.orchestration.distributed_memory_pool.mapping import ObjectMapping

        return ObjectMapping(self._self)

    def array(
        self, shape: int | tuple[int, ...], dtype: Any = "float64", preferred_node: str | None = None, *,
        cache_bytes: int = ARRAY_CACHE_BYTES, **options: Any,
    ) -> RemoteArray:  # fmt: skip
        """A new array of zeros in a block of its own; `options` as of `allocate`."""
        from distributed_grid.orchestration.distributed_memory_pool.array import RemoteArray

        return RemoteArray.create(self._self, shape, dtype, preferred_node, cache_bytes, **options)

    def put_array(
        self, array: Any, preferred_node: str | None = None, *, cache_bytes: int = ARRAY_CACHE_BYTES, **options: Any
    ) -> RemoteArray:
        """A copy of a local array; with a `name`, it has it when it is whole."""
        from distributed_grid.orchestration.distributed_memory_pool.array import RemoteArray

        return RemoteArray.store(self._self, array, preferred_node, cache_bytes, **options)

    def get_array(self, name: str, *, cache_bytes: int = ARRAY_CACHE_BYTES) -> RemoteArray:
        """The array of that name, or in that block, from any process of the user."""
        from distributed_grid.orchestration.distributed_memory_pool.array import RemoteArray

        return RemoteArray.open(self._self, name, cache_bytes)
