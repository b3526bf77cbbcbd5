"""Boosts: leases with a duration, asked for by a person."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distributed_grid.core.resources import AllocationPriority, ResourceType
from distributed_grid.orchestration.resource_boost.model import ResourceBoost, ResourceBoostRequest

if TYPE_CHECKING:
    from distributed_grid.orchestration.resource_boost.manager import ResourceBoostManager as ResourceBoostManager
    from distributed_grid.orchestration.resource_boost.persistence import (
        ResourceBoostPersistence as ResourceBoostPersistence,
    )

_LAZY = {"ResourceBoostManager": "manager", "ResourceBoostPersistence": "persistence"}
__all__ = ["AllocationPriority", "ResourceBoost", "ResourceBoostRequest", "ResourceType", *_LAZY]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
