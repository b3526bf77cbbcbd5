"""A boost and the request for one, as the documents name their fields."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from distributed_grid.core.resources import AllocationPriority, ResourceType

DEFAULT_DURATION_S = 3600.0


@dataclass
class ResourceBoostRequest:
    """What is asked for; memory in GB."""

    target_node: str
    resource_type: ResourceType
    amount: float
    priority: AllocationPriority = AllocationPriority.NORMAL
    duration_seconds: float | None = None  # None: an hour
    preferred_source: str | None = None


@dataclass(frozen=True)
class ResourceBoost:
    """A lease with a duration."""

    boost_id: str
    source_node: str
    target_node: str
    resource_type: ResourceType
    amount: float
    priority: AllocationPriority
    allocated_at: float
    expires_at: float | None
    is_active: bool = True
    cores: tuple[int, ...] = field(default=())
    gpus: tuple[int, ...] = field(default=())

    @property
    def allocation_id(self) -> str:
        return self.boost_id

    @property
    def remaining_seconds(self) -> float | None:
        return None if self.expires_at is None else max(0.0, self.expires_at - time.time())

    @classmethod
    def from_view(cls, view: Mapping[str, Any]) -> ResourceBoost:
        return cls(
            str(view["boost_id"]), str(view["source_node"]), str(view["target_node"]),
            ResourceType(view["resource_type"]), float(view["amount"]), AllocationPriority.parse(view["priority"]),
            float(view["allocated_at"]), view["expires_at"], bool(view["is_active"]),
            tuple(view.get("cores", ())), tuple(view.get("gpus", ())),
        )  # fmt: skip
