"""Errors, resources, clock: what everything else stands on; and GridOrchestrator, which wires everything."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distributed_grid.core.orchestrator import GridOrchestrator as GridOrchestrator

__all__ = ["GridOrchestrator"]


def __getattr__(name: str) -> Any:
    if name == "GridOrchestrator":
        from distributed_grid.core.orchestrator import GridOrchestrator

        return GridOrchestrator
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
