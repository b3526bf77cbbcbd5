"""Boosts for Python programs: a thin client of the daemon."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distributed_grid.config.models import ClusterConfig
from distributed_grid.core.errors import NoResources, NotFound, Refused
from distributed_grid.core.resources import AllocationPriority
from distributed_grid.orchestration.resource_boost.model import DEFAULT_DURATION_S, ResourceBoost, ResourceBoostRequest
from distributed_grid.orchestration.resource_sharing.jobs import SharedResult, run_command
from distributed_grid.orchestration.resource_sharing.manager import amounts_of
from distributed_grid.orchestration.resource_sharing.protocol import ResourceSharingProtocol, request_lease
from distributed_grid.orchestration.resource_sharing.shared_lease import SharedLease


class ResourceBoostManager:
    """`async with ResourceBoostManager(config) as boosts:` or `initialize` and `shutdown` by hand."""

    def __init__(self, config: ClusterConfig | None = None, *, protocol: ResourceSharingProtocol | None = None) -> None:
        self.config = config
        self.protocol = protocol or ResourceSharingProtocol()

    async def initialize(self) -> None:
        await self.protocol.initialize()

    async def shutdown(self) -> None:
        await self.protocol.shutdown()

    async def __aenter__(self) -> ResourceBoostManager:
        await self.initialize()
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.shutdown()

    async def request_boost(self, request: ResourceBoostRequest) -> str | None:
        """The boost's id; None if nothing that fits is free. What is wrong with the request raises."""
        try:
            view = await request_lease(
                self.protocol, kind="boost", amounts=amounts_of(request.resource_type, request.amount),
                target=request.target_node, priority=str(AllocationPriority.parse(request.priority)),
                nodes=[request.preferred_source] if request.preferred_source else [],
                duration_s=DEFAULT_DURATION_S if request.duration_seconds is None else request.duration_seconds,
            )  # fmt: skip
        except NoResources:
            return None
        return str(view["id"])

    async def release_boost(self, boost_id: str, *, force: bool = False) -> bool:
        """True if it was given back; False if there is no such boost, or not any more."""
        try:
            await self.protocol.call("lease_release", lease_id=boost_id, boost=True, force=force, timeout_s=120)
        except NotFound:
            return False
        except Refused as error:
            if error.code != "lease-over":
                raise
            return False
        return True

    async def renew_boost(self, boost_id: str, duration_seconds: float = DEFAULT_DURATION_S) -> ResourceBoost:
        return ResourceBoost.from_view(
            await self.protocol.call("boost_renew", boost_id=boost_id, duration_s=duration_seconds)
        )

    async def get_active_boosts(self, target_node: str | None = None) -> list[ResourceBoost]:
        found = [ResourceBoost.from_view(view) for view in (await self.protocol.call("boost_list"))["boosts"]]
        return [boost for boost in found if target_node in (None, boost.target_node)]

    async def get_boost_status(self) -> dict[str, Any]:
        """`total`, `totals` by type, `boosts`."""
        status: dict[str, Any] = await self.protocol.call("boost_list")
        return status

    async def lease(self, boost_id: str) -> SharedLease:
        """The boost as a lease, for Ray: `scheduling_strategy()`, `ray_options()`."""
        for view in (await self.protocol.call("lending_status"))["allocations"]:
            if view["id"].startswith(boost_id) and view["kind"] == "boost":
                return SharedLease.from_view(view, self.protocol)
        raise NotFound(f"no boost {boost_id}", code="not-found")

    async def run(self, boost_id: str, command: str | Sequence[str], *, job_id: str | None = None) -> SharedResult:
        """Run a command in the boost, to its end; the boost is kept."""
        return await run_command(self.protocol.client, command, request={"lease": boost_id}, job_id=job_id)
