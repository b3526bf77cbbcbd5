"""Lending for Python programs: a thin client of the daemon, which alone decides and remembers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from distributed_grid.config.models import ClusterConfig
from distributed_grid.core.resources import AllocationPriority, ResourceType
from distributed_grid.orchestration.resource_sharing.amounts import combine, parse_amount, parse_type
from distributed_grid.orchestration.resource_sharing.jobs import SharedResult, run_command
from distributed_grid.orchestration.resource_sharing.protocol import Caller, ResourceSharingProtocol, request_lease
from distributed_grid.orchestration.resource_sharing.shared_lease import SharedLease

Amount = str | int | float


def amounts_of(
    resource_type: ResourceType | str | Mapping[ResourceType | str, Amount], amount: Amount | None
) -> dict[str, int]:
    """One type and its amount, or a map of several."""
    pairs = resource_type if isinstance(resource_type, Mapping) else {resource_type: 1 if amount is None else amount}
    return combine(*(parse_amount(parse_type(kind), value) for kind, value in pairs.items())).to_wire()


class ResourceSharingManager:
    """`async with ResourceSharingManager(config) as sharing:` or `initialize` and `shutdown` by hand."""

    def __init__(self, config: ClusterConfig | None = None, *, protocol: ResourceSharingProtocol | None = None) -> None:
        self.config = config
        self.protocol = protocol or ResourceSharingProtocol()

    async def initialize(self) -> None:
        await self.protocol.initialize()

    async def shutdown(self) -> None:
        await self.protocol.shutdown()

    async def __aenter__(self) -> ResourceSharingManager:
        await self.initialize()
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.shutdown()

    async def request(
        self,
        resource_type: ResourceType | str | Mapping[ResourceType | str, Amount],
        amount: Amount | None = None,
        *,
        target_node: str = "",
        priority: AllocationPriority | str = AllocationPriority.NORMAL,
        sources: Sequence[str] = (),
        wait_s: float = 0.0,
    ) -> SharedLease:
        """Borrow until it is released; memory in GB, or with a unit. NoResources if it is not there in time."""
        view = await request_lease(
            self.protocol, amounts=amounts_of(resource_type, amount), target=target_node,
            priority=str(AllocationPriority.parse(priority)), nodes=list(sources), wait_s=wait_s,
        )  # fmt: skip
        return SharedLease.from_view(view, self.protocol)

    async def release(self, allocation_id: str, *, force: bool = False) -> bool:
        done = await self.protocol.call("lease_release", lease_id=allocation_id, force=force, timeout_s=120)
        return bool(done["state"] == "released")

    async def get_status(self) -> dict[str, Any]:
        """`offers`, `allocations`, `queue`, `nodes`, as `grid shared-status --format json`."""
        return await shared_status(self.protocol)

    async def get_offers(self) -> list[dict[str, Any]]:
        offers: list[dict[str, Any]] = (await self.get_status())["offers"]
        return offers

    async def get_allocations(self) -> list[SharedLease]:
        return [SharedLease.from_view(view, self.protocol) for view in (await self.get_status())["allocations"]]

    async def run(
        self,
        command: str | Sequence[str],
        resource_type: ResourceType | str | Mapping[ResourceType | str, Amount] = ResourceType.CPU,
        amount: Amount | None = None,
        *,
        priority: AllocationPriority | str = AllocationPriority.NORMAL,
        nodes: Sequence[str] = (),
        wait_s: float | None = None,
        job_id: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> SharedResult:
        """Run a command with borrowed resources, to its end."""
        request = {
            "amounts": amounts_of(resource_type, amount), "priority": str(AllocationPriority.parse(priority)),
            "nodes": list(nodes), "wait_s": wait_s,
        }  # fmt: skip
        return await run_command(self.protocol.client, command, request=request, job_id=job_id, env=env)


async def shared_status(caller: Caller) -> dict[str, Any]:
    found: dict[str, Any] = await caller.call("lending_status")
    return found
