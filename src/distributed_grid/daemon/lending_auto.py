"""The rebalancer: reserves memory of workers while the head is short of it, and gives it back afterwards."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from typing import TYPE_CHECKING

from distributed_grid.core.errors import GridError, NoResources, Unavailable
from distributed_grid.core.resources import GB, AllocationPriority, format_bytes
from distributed_grid.orchestration.resource_sharing.model import Amounts, Lease, LeaseState
from distributed_grid.orchestration.resource_sharing.rebalance import MemoryWish

if TYPE_CHECKING:
    from distributed_grid.daemon.control import ControlPlane
    from distributed_grid.daemon.lending import LendingService

log = logging.getLogger(__name__)

LOOK_S = 1.0


class Rebalancer:
    def __init__(self, plane: ControlPlane, service: LendingService) -> None:
        self._plane = plane
        self._service = service
        self._wish = MemoryWish()
        self._due = 0.0
        self._in_vain = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="rebalancer")

    async def close(self) -> None:
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self._look()
            except GridError as error:
                log.warning("rebalancing failed: %s: %s", error.message, error.cause)
            except Exception:  # the daemon's loop: a fault in one round must not end it
                log.exception("rebalancing failed")

    async def _look(self) -> None:
        config = self._plane.config
        shot = self._plane.collector.get_latest_snapshot(config.head.name)
        if shot is None:
            return
        use, sharing = shot.memory_pressure, config.resource_sharing
        if not sharing.enabled or sharing.mode != "dynamic_balancing":
            self._wish = MemoryWish()
            await self._give_back("automatic requests are off")
            return
        levels = sharing.pressure_thresholds.memory
        total = min(shot.memory_total_bytes, shot.memory_real_bytes or shot.memory_total_bytes)
        before, self._wish = self._wish, self._wish.seen(use, total, sharing.policy, levels.high, levels.low)
        if not self._wish.pressed:
            self._in_vain = False
            await self._give_back(f"memory of {config.head.name} is down to {use:.0%}")
        elif not before.pressed or time.monotonic() >= self._due:
            self._due = time.monotonic() + sharing.rebalance_interval_seconds
            await self._reserve(use)

    def _leases(self) -> list[Lease]:
        found = self._service.book.ledger.leases.values()
        return [one for one in found if one.kind == "auto" and one.state is not LeaseState.RELEASING]

    async def _reserve(self, use: float) -> None:
        """What is missing, in one piece; else as much as the best worker has."""
        held = sum(lease.grant.memory_bytes for lease in self._leases())
        missing = self._wish.wanted_bytes - held
        if missing < GB:
            return
        self._service.loop.refresh()
        most = max((book.free.memory_bytes for book in self._service.book.ledger.nodes.values()), default=0)
        head = self._plane.config.head.name
        try:
            lease = await self._service.reserve(
                Amounts(memory_bytes=min(missing, max(GB, most // GB * GB))), kind="auto", uid=os.geteuid(),
                priority=AllocationPriority.NORMAL,
            )  # fmt: skip
        except (NoResources, Unavailable) as error:
            if not self._in_vain:
                self._in_vain = True
                text = f"memory of {head} is at {use:.0%}, and no worker has any to lend: {error.cause}"
                self._plane.events.publish("sharing.in_vain", text, node=head)
            return
        self._in_vain = False
        text = f"memory of {head} is at {use:.0%}: {format_bytes(lease.grant.memory_bytes)} of {lease.node} reserved"
        self._plane.events.publish("sharing.reserved", text, node=lease.node, lease=lease.id)

    async def _give_back(self, why: str) -> None:
        for lease in self._leases():
            if await self._service.unreserve(lease.id, why):
                text = f"{why}: {format_bytes(lease.grant.memory_bytes)} of {lease.node} given back"
                self._plane.events.publish("sharing.given_back", text, node=lease.node, lease=lease.id)
