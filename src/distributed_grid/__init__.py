"""Distributed Grid: lends idle workers to a full head node and moves running processes there.

General layout: `commands` and `tui` talk to `daemon`; `daemon` wires `orchestration`, `cluster` and `store`;
`agent` runs on every node; `core`, `config` and `wire` are beneath all. Names here are loaded when first used,
so that `grid --help` imports nothing heavy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from distributed_grid.config.models import ClusterConfig as ClusterConfig
    from distributed_grid.core.orchestrator import GridOrchestrator as GridOrchestrator

_LAZY = {
    "ClusterConfig": "distributed_grid.config",
    "load_cluster_config": "distributed_grid.config",
    "GridOrchestrator": "distributed_grid.core.orchestrator",
}
__all__ = ["__version__", *_LAZY]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
