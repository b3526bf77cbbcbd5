"""Memory of other nodes, as if it were near: blocks that live until they are freed, seen by all of a user's processes.

The names load on first use, so that importing this package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distributed_grid.agent.memory.errors import (
        BlockLost,
        BlockNotFound,
        ChecksumMismatch,
        NoNodes,
        OutOfRange,
        PoolClosed,
        PoolFull,
        ServerLost,
        StaleBlock,
    )  # fmt: skip
    from distributed_grid.orchestration.distributed_memory_pool.array import RemoteArray
    from distributed_grid.orchestration.distributed_memory_pool.blocks import Block
    from distributed_grid.orchestration.distributed_memory_pool.filesystem import GridMemoryFileSystem
    from distributed_grid.orchestration.distributed_memory_pool.mapping import ObjectMapping
    from distributed_grid.orchestration.distributed_memory_pool.pool import DistributedMemoryPool
    from distributed_grid.orchestration.distributed_memory_pool.sync import SyncMemoryPool

__all__ = [
    "Block", "BlockLost", "BlockNotFound", "ChecksumMismatch", "DistributedMemoryPool", "GridMemoryFileSystem",
    "NoNodes", "ObjectMapping", "OutOfRange", "PoolClosed", "PoolFull", "RemoteArray", "ServerLost", "StaleBlock",
    "SyncMemoryPool",
]  # fmt: skip

_HERE = {
    "Block": "blocks", "DistributedMemoryPool": "pool", "GridMemoryFileSystem": "filesystem",
    "ObjectMapping": "mapping", "RemoteArray": "array", "SyncMemoryPool": "sync",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = f"{__name__}.{_HERE[name]}" if name in _HERE else "distributed_grid.agent.memory.errors"
    return getattr(import_module(home), name)
