"""Lending: workers offer what is idle, requests are matched to it, leases hold it.

General layout: `model` (ledger), `queue`, `preempt` and `offers` decide and are pure; `manager`, `protocol`, `jobs`
and `shared_lease` are for Python programs; the daemon does the rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distributed_grid.core.resources import AllocationPriority, ResourceType

if TYPE_CHECKING:
    from distributed_grid.orchestration.resource_sharing.jobs import SharedResult as SharedResult
    from distributed_grid.orchestration.resource_sharing.manager import ResourceSharingManager as ResourceSharingManager
    from distributed_grid.orchestration.resource_sharing.protocol import (
        ResourceSharingProtocol as ResourceSharingProtocol,
    )
    from distributed_grid.orchestration.resource_sharing.shared_lease import SharedLease as SharedLease

_LAZY = {
    "ResourceSharingManager": "manager",
    "ResourceSharingProtocol": "protocol",
    "SharedLease": "shared_lease",
    "SharedResult": "jobs",
}
__all__ = ["AllocationPriority", "ResourceType", *_LAZY]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
