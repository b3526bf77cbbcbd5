"""The configuration: one model for every layout of the YAML, its layers, and where each value came from.

The names load on first use, so that importing this package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distributed_grid.config.edit import set_values
    from distributed_grid.config.find import find_config_file
    from distributed_grid.config.loader import load_cluster_config, origins
    from distributed_grid.config.models import (
        AutoOffloadConfig,
        ClusterConfig,
        NodeConfig,
        ResourceSharingConfig,
    )
    from distributed_grid.config.watch import watch_config
    from distributed_grid.core.errors import ConfigError

__all__ = [
    "AutoOffloadConfig",
    "ClusterConfig",
    "ConfigError",
    "NodeConfig",
    "ResourceSharingConfig",
    "find_config_file",
    "load_cluster_config",
    "origins",
    "set_values",
    "watch_config",
]

_HOMES = {
    "AutoOffloadConfig": "config.models",
    "ClusterConfig": "config.models",
    "ConfigError": "core.errors",
    "NodeConfig": "config.models",
    "ResourceSharingConfig": "config.models",
    "find_config_file": "config.find",
    "load_cluster_config": "config.loader",
    "origins": "config.loader",
    "set_values": "config.edit",
    "watch_config": "config.watch",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"distributed_grid.{_HOMES[name]}"), name)
