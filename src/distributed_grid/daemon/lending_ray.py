"""Leases in Ray too: a detached placement group for each, behind the agent's claim, so that plain Ray users see it."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any

from distributed_grid.core.errors import GridError, TimedOut, Unavailable
from distributed_grid.daemon.lending_book import LendingBook
from distributed_grid.orchestration.resource_sharing.model import Lease, LeaseState

if TYPE_CHECKING:
    from distributed_grid.daemon.control import ControlPlane

log = logging.getLogger(__name__)

LOOK_S = 1.0
#: Ray is asked what it has this often: a restarted head has forgotten everything.
COMPARE_S = 30.0
#: A lease is shown to Ray once it has lasted so long, or is asked for: most commands are over before.
AGE_S, RUN_AGE_S = 0.5, 5.0
#: Changes are followed together, so long after the first: what is just being asked for comes first.
DELAY_S = 0.1
CALL_LIMIT_S = 30.0
KEY = "lending.groups"


def bundle_of(lease: Lease) -> dict[str, float]:
    """What Ray sets aside; what a suspended lease gave up is free there too."""
    held = lease.held
    found = {"CPU": len(held.cores), "GPU": len(held.gpus), "memory": held.memory_bytes}
    return {name: float(value) for name, value in found.items() if value}


class RayGroups:
    """Follows the ledger; nobody waits for it but who wants to use Ray with a lease."""

    def __init__(self, plane: ControlPlane, book: LendingBook) -> None:
        self._plane = plane
        self._book = book
        #: lease -> (group, its bundle). Those of the last daemon are not known yet, but that there are some is.
        self._groups: dict[str, tuple[str, dict[str, float]]] = {}
        self._left = bool(plane.journal.kv.get(KEY, []))
        self._compared = 0.0
        self._changed = asyncio.Event()
        self._wanted: set[str] = set()
        self._due: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._book.on_change.append(self._on_change)
        self._task = asyncio.create_task(self._run(), name="lending-ray")

    def _on_change(self, lease: Lease) -> None:
        if self._due is None and lease.state is not LeaseState.CLAIMING:
            self._due = asyncio.get_running_loop().call_later(DELAY_S, self._changed.set)

    async def close(self) -> None:
        if self._due:
            self._due.cancel()
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            try:
                if self._plane.keeper.is_up and (self._groups or self._left or self._right()):
                    await self._follow()
            except GridError as error:
                log.debug("Ray does not follow the leases now: %s: %s", error.message, error.cause)
                self._compared = 0.0
                await asyncio.sleep(2 * LOOK_S)
            except Exception:  # the daemon's loop: a fault in one round must not end it
                log.exception("Ray does not follow the leases now")
                self._compared = 0.0
                await asyncio.sleep(2 * LOOK_S)
            self._changed.clear()
            if self._due:
                self._due.cancel()
                self._due = None
            try:
                async with asyncio.timeout(LOOK_S):
                    await self._changed.wait()
            except TimeoutError:
                pass

    def _right(self) -> dict[str, Lease]:
        now = time.time()
        return {
            lease.id: lease for lease in list(self._book.ledger.leases.values())
            if lease.state in (LeaseState.ACTIVE, LeaseState.SUSPENDED) and bundle_of(lease)
            and (now - lease.created > (RUN_AGE_S if lease.kind == "run" else AGE_S) or lease.id in self._wanted)
        }  # fmt: skip

    async def _follow(self) -> None:
        if time.monotonic() - self._compared > COMPARE_S:
            found = await self._call("lease_groups")
            right = self._right()
            self._groups = {
                one: (str(group), self._groups.get(one, ("", bundle_of(right[one])))[1])
                for one, group in found.items() if one in right
            }  # fmt: skip
            for stale in found.keys() - right.keys():
                await self._call("lease_group_remove", lease_id=stale)
            self._compared, self._left = time.monotonic(), False
            self._remember()
        right = self._right()
        for lease_id, (_group, bundle) in list(self._groups.items()):
            if lease_id not in right or bundle_of(right[lease_id]) != bundle:
                await self._call("lease_group_remove", lease_id=lease_id)
                self._groups.pop(lease_id, None)
                self._remember()
        for lease_id, lease in right.items():
            if lease_id not in self._groups:
                bundle = bundle_of(lease)
                self._groups[lease_id] = ("", bundle)
                self._remember()
                made = await self._call("lease_group", lease_id=lease_id, node=lease.node, bundle=bundle, limit_s=0.0)
                self._groups[lease_id] = (str(made["id"]), bundle)

    def _remember(self) -> None:
        self._plane.journal.kv.put(KEY, sorted(self._groups))

    async def _call(self, verb: str, **arguments: Any) -> dict[str, Any]:
        bridge = await self._plane.keeper.joined_bridge()
        return await bridge.call(verb, timeout_s=CALL_LIMIT_S, **arguments)

    async def ready(self, lease: Lease, wait_s: float) -> str:
        """The group's id, once Ray has set everything aside."""
        if not self._plane.keeper.is_up:
            raise Unavailable("no cluster is up", hint="grid cluster start", code="no-cluster")
        self._wanted.add(lease.id)
        self._changed.set()
        try:
            deadline = time.monotonic() + wait_s
            while time.monotonic() < deadline:
                if self._groups.get(lease.id, ("",))[0]:
                    made = await self._call(
                        "lease_group", lease_id=lease.id, node=lease.node, bundle=bundle_of(lease), limit_s=1.0
                    )
                    if made["ready"]:
                        return str(made["id"])
                await asyncio.sleep(0.05)
        finally:
            self._wanted.discard(lease.id)
        raise TimedOut(
            f"Ray has not set {lease.grant.amounts} aside on {lease.node} within {wait_s:g} s",
            cause="Ray's own tasks may still use it",
            hint="grid distribute status",
            code="ray-busy",
        )
