"""A lease in a Python program's hands: what it holds, and how Ray tasks use it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from distributed_grid.core.resources import AllocationPriority
from distributed_grid.orchestration.resource_sharing.model import Grant
from distributed_grid.orchestration.resource_sharing.protocol import Caller

#: How long Ray may take to set aside what is lent.
RAY_LIMIT_S = 60.0


@dataclass(frozen=True, slots=True)
class SharedLease:
    id: str
    kind: str
    node: str
    target: str
    priority: AllocationPriority
    state: str
    grant: Grant
    created: float
    expires: float | None
    _caller: Caller = field(repr=False, compare=False)

    @classmethod
    def from_view(cls, view: Mapping[str, Any], caller: Caller) -> SharedLease:
        return cls(
            view["id"], view["kind"], view["node"], view["target"], AllocationPriority.parse(view["priority"]),
            view["state"], Grant.from_wire(view["grant"]), view["created"], view["expires"], caller,
        )  # fmt: skip

    async def scheduling_strategy(self) -> Any:
        """For `.options(scheduling_strategy=…)` of a Ray task: it runs on the lease's node, inside the reservation."""
        found = await self._caller.call("lease_ray", lease_id=self.id, wait_s=RAY_LIMIT_S, timeout_s=RAY_LIMIT_S + 30)
        # Ray is the program's own business: it is imported only where a program that uses it asks for this.
        raylet = import_module("ray._raylet")
        groups = import_module("ray.util.placement_group")
        strategies = import_module("ray.util.scheduling_strategies")
        group = groups.PlacementGroup(raylet.PlacementGroupID(bytes.fromhex(found["placement_group"])))
        return strategies.PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)

    async def ray_options(self) -> dict[str, Any]:
        """All of `.options(**…)` for one Ray task that uses the whole lease."""
        options: dict[str, Any] = {"scheduling_strategy": await self.scheduling_strategy()}
        options["num_cpus"] = len(self.grant.cores)
        if self.grant.gpus:
            options["num_gpus"] = len(self.grant.gpus)
        if self.grant.memory_bytes:
            options["memory"] = self.grant.memory_bytes
        return options

    async def release(self, *, force: bool = False) -> bool:
        done = await self._caller.call("lease_release", lease_id=self.id, force=force, timeout_s=120)
        return bool(done["state"] == "released")
