"""Lending without a cluster: a real journal, and agents of the test's own that answer as they are told to."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from distributed_grid.agent.lease_claims import Claims
from distributed_grid.config.models import ClusterConfig
from distributed_grid.core.errors import GridError, NotFound, Unavailable
from distributed_grid.core.resources import GB, AllocationPriority
from distributed_grid.daemon.events import EventHub
from distributed_grid.daemon.lending import LendingService
from distributed_grid.daemon.lending_book import Waiter, new_lease_id
from distributed_grid.daemon.links import LinkState
from distributed_grid.daemon.tasks import TaskService
from distributed_grid.monitoring.snapshot import NodeSnapshot
from distributed_grid.orchestration.resource_sharing.model import Amounts, Lease, LeaseState
from distributed_grid.store.journal import Journal
from distributed_grid.store.tasks import TaskRow

LOW, NORMAL, HIGH, CRITICAL = AllocationPriority
CORES, MEMORY = 8, 32 * GB


class FakeAgent:
    """Keeps claims as a real one does; `errors` and `gates` say which of its calls fail or wait."""

    def __init__(self, node: str, folder: Path) -> None:
        self.state = LinkState(node, online=True, agent={"boot_id": "first"})
        self.node = node
        self.claims = Claims(folder / f"{node}.jsonl")
        self.tasks: dict[str, dict[str, Any]] = {}
        self.errors: dict[str, GridError] = {}
        self.gates: dict[str, asyncio.Event] = {}
        self.calls: list[str] = []

    async def client(self, _wait_s: float = 0.0) -> None:
        return None

    async def call(self, name: str, *, timeout_s: float = 30.0, **arguments: Any) -> Any:
        self.calls.append(name)
        await asyncio.sleep(0)  # the way there
        if not self.state.online:
            raise Unavailable(f"{self.node} is not online", code="node-offline")
        if name in self.gates:
            await self.gates[name].wait()
        if name in self.errors:
            raise self.errors[name]
        return getattr(self, name, self._nothing)(**arguments)

    def ask(self, name: str, **arguments: Any) -> asyncio.Future[Any]:
        return asyncio.ensure_future(self.call(name, **arguments))

    def _nothing(self, **_arguments: Any) -> None:
        return None

    def lease_claim(self, lease: dict[str, Any]) -> None:
        with self.claims.changing(lease["id"]):
            self.claims.take(lease, CORES, {0}, MEMORY, self.node)

    def lease_release(self, lease_id: str, fence: int, grace_s: float = 5.0) -> None:
        with self.claims.changing(lease_id):
            self.claims.held.pop(lease_id, None)
            self.claims.ended[lease_id] = fence

    def lease_list(self) -> list[dict[str, Any]]:
        return list(self.claims.held.values())

    def lease_suspend(self, lease_id: str, fence: int, held: dict[str, Any]) -> None:
        self._change(lease_id, held, "suspended")

    def lease_checkpoint(self, lease_id: str, fence: int) -> None:
        self._change(lease_id, {"cores": [], "gpus": [], "memory_bytes": 0}, "suspended")

    def lease_resume(self, lease_id: str, fence: int, grant: dict[str, Any]) -> None:
        self._change(lease_id, grant, "active")

    def _change(self, lease_id: str, held: dict[str, Any], state: str) -> None:
        with self.claims.changing(lease_id):
            claim = {**self.claims.held[lease_id], "held": held, "state": state}
            self.claims.take(claim, CORES, {0}, MEMORY, self.node)

    def task_list(self, task_ids: list[str]) -> list[dict[str, Any]]:
        return [self.tasks[one] for one in task_ids if one in self.tasks]

    def task_remove(self, task_id: str) -> None:
        if self.tasks.pop(task_id, None) is None:
            raise NotFound(task_id)


class FakeLinks(dict[str, FakeAgent]):
    def __iter__(self) -> Iterator[Any]:
        return iter(self.values())

    def names(self) -> list[str]:
        return list(self.keys())

    def get(self, node: str) -> FakeAgent:  # type: ignore[override]
        if node not in self.names():
            raise NotFound(node, code="unknown-node")
        return self[node]


class Bench:
    """A `LendingService` that was never started: its loop goes round when the test says so."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.journal = Journal.open(folder / "journal.sqlite3")
        self.agents = FakeLinks({name: FakeAgent(name, folder) for name in ("gpu1", "gpu2")})
        self.shots = {name: snapshot(name) for name in self.agents.names()}
        self.service = self._service()

    def _service(self) -> LendingService:
        events = EventHub(self.journal.events)
        plane = SimpleNamespace(
            journal=self.journal, links=self.agents, events=events, config=ClusterConfig(), memory=None,
            collector=SimpleNamespace(get_latest_snapshot=self.shots.get), keeper=SimpleNamespace(is_up=True),
            paths=SimpleNamespace(boosts=self.folder / "resource_boosts.json"), stop_asked=asyncio.Event(),
            tasks=TaskService(self.journal.tasks, self.agents, events),  # type: ignore[arg-type]
        )  # fmt: skip
        service = LendingService(plane)  # type: ignore[arg-type]
        service.loop.refresh()
        return service

    async def restart(self) -> None:
        """As after kill -9: what is in the journal and at the agents is all there is."""
        await self.service.book.close()
        self.service = self._service()
        self.service.book.restore()

    async def compare(self) -> None:
        for node in self.agents.names():
            await self.service.loop.claims._reconcile(node)
        await self.quiet()

    @property
    def book(self) -> Any:
        return self.service.book

    def lease(self, lease_id: str) -> Lease:
        found: Lease = self.book.ledger.leases[lease_id]
        return found

    def ask(
        self, cores: int = 1, priority: AllocationPriority = NORMAL, node: str = "", *, kind: str = "boost",
        waited_s: float = 0.0, memory: int = 0, lease_id: str = "",
    ) -> Waiter:  # fmt: skip
        nodes = (node,) if node else ()
        waiter: Waiter = self.book.enqueue(
            lease_id or new_lease_id(), Amounts(cores, 0, memory), priority, 0, kind=kind, target="gpu-master",
            nodes=nodes, duration_s=None,
        )  # fmt: skip
        if waited_s:
            object.__setattr__(waiter.request, "asked_at", waiter.request.asked_at - waited_s)
        return waiter

    async def lent(self, *arguments: Any, **more: Any) -> Lease:
        """One that is granted, with a task of that name in it if it is a run's."""
        lease = await asyncio.wait_for(self.ask(*arguments, **more).granted, 10)
        await self.quiet()
        if lease.kind == "run":
            task = f"task_{lease.id[:8]}"
            self.journal.tasks.put(
                TaskRow(task, lease.node, 0, ["x"], "running", lease.created, detail={"lease": lease.id})
            )
            self.book.set(lease.id, tasks=(task,))
            self.book.task_lease[task] = lease.id
        return self.lease(lease.id)

    async def quiet(self) -> None:
        """Until nothing is under way but what waits at a gate."""
        for _ in range(20):
            await asyncio.sleep(0.001)

    def state(self, lease_id: str) -> LeaseState:
        row = self.journal.leases.find(lease_id)
        assert row is not None
        return LeaseState(row.state)

    def kinds(self) -> list[str]:
        return [event.kind for event in self.journal.events.list(limit=100)]

    async def close(self) -> None:
        await self.service.book.close()
        self.journal.close()


def snapshot(node: str, **changes: Any) -> NodeSnapshot:
    told: dict[str, Any] = {
        "node": node, "at": 0.0, "cpu_cores_total": float(CORES), "cpu_cores_used": 0.0, "memory_total_bytes": MEMORY,
        "memory_used_bytes": 0, "memory_available_bytes": MEMORY, "gpu_count": 1,
    }  # fmt: skip
    return NodeSnapshot(**{**told, **changes})
