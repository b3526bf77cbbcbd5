"""What can go wrong with a block; each kind survives the trip over a socket."""

from __future__ import annotations

from distributed_grid.core.errors import (
    GridError,
    NoResources,
    NotFound,
    Refused,
    Unavailable,
    UsageError,
    register_error,
)  # fmt: skip


@register_error
class PoolFull(NoResources):
    """No node has that much room."""

    code = "pool-full"


@register_error
class NoNodes(NoResources):
    """There is no node that could hold blocks."""

    code = "no-nodes"


@register_error
class BlockNotFound(NotFound):
    """It was freed, or never was."""

    code = "block-not-found"


@register_error
class BlockLost(GridError):
    """The node that held it is gone, and no other has a copy."""

    code = "block-lost"


@register_error
class StaleBlock(Refused):
    """The block moved on since this handle was made."""

    code = "stale-block"


@register_error
class OutOfRange(UsageError):
    """Past the end of the block, or not a size."""

    code = "out-of-range"


@register_error
class WrongKey(Refused):
    """The other end does not know this user's key."""

    code = "wrong-key"


@register_error
class ChecksumMismatch(GridError):
    """What arrived is not what was sent."""

    code = "checksum"


@register_error
class ServerLost(Unavailable):
    """The memory server does not answer, or the connection broke in the middle of something."""

    code = "memory-server-lost"


@register_error
class PoolClosed(Refused):
    """The pool was shut down, or never initialized."""

    code = "pool-closed"
