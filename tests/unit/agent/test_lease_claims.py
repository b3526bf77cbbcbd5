"""A claim at the agent: checked again, safe to repeat, known to a new agent, and an old one is known for what it is."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distributed_grid.agent.lease_claims import Claims
from distributed_grid.agent.leases import LeaseCalls
from distributed_grid.agent.spool import TaskStatus
from distributed_grid.core.errors import GridError, NotFound, Refused
from distributed_grid.wire.rpc import CallContext


def claim(name: str, fence: int = 1, cores: tuple[int, ...] = (), memory: int = 0) -> dict[str, Any]:
    grant = {"cores": list(cores), "gpus": [], "memory_bytes": memory}
    return {"id": name, "fence": fence, "grant": grant, "held": grant, "tasks": []}


def take(claims: Claims, wanted: dict[str, Any]) -> None:
    claims.take(wanted, cores=4, gpus={0}, memory_bytes=100, node="gpu1")
    claims.save(wanted["id"])


def test_what_is_taken_is_taken(tmp_path: Path) -> None:
    claims = Claims(tmp_path / "leases.jsonl")
    take(claims, claim("a", cores=(0, 1), memory=60))
    take(claims, claim("a", cores=(0, 1), memory=60))  # again is fine
    for wrong in (claim("b", cores=(1,)), claim("b", cores=(4,)), claim("b", memory=41)):
        with pytest.raises(Refused):
            take(claims, wrong)
    take(claims, claim("b", cores=(2, 3), memory=40))
    assert set(Claims(tmp_path / "leases.jsonl").held) == {"a", "b"}, "a new agent knows them"


def test_fences_order_what_arrives_late(tmp_path: Path) -> None:
    claims = Claims(tmp_path / "leases.jsonl")
    take(claims, claim("a", fence=5, cores=(0,)))
    with pytest.raises(Refused):
        take(claims, claim("a", fence=4, cores=(0,)))
    with pytest.raises(Refused):
        claims.get("a", 4, "gpu1")
    with pytest.raises(NotFound):
        claims.get("b", 1, "gpu1")
    claims.held.clear()
    claims.ended["a"] = 5
    claims.save("a")
    with pytest.raises(Refused):
        take(Claims(tmp_path / "leases.jsonl"), claim("a", fence=5, cores=(0,)))


def test_a_damaged_file_is_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "leases.jsonl").write_text("{")
    assert Claims(tmp_path / "leases.jsonl").held == {}


def test_a_line_cut_short_is_forgotten_and_the_next_ones_are_not(tmp_path: Path) -> None:
    path = tmp_path / "leases.jsonl"
    take(Claims(path), claim("a", cores=(0,)))
    with path.open("ab") as file:
        file.write(b'{"held": {"b"')
    take(Claims(path), claim("c", cores=(1,)))
    assert set(Claims(path).held) == {"a", "c"}
    path.unlink(missing_ok=True)
    claims = Claims(path)
    for number in range(3000):
        claims.held.clear()
        take(claims, claim(str(number), cores=(0,)))
    assert path.stat().st_size < 300_000, "it does not grow for ever"


def test_what_cannot_be_written_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk: neither in memory nor, by half a line, in the file."""
    path = tmp_path / "leases.jsonl"
    claims = Claims(path)
    take(claims, claim("a", cores=(0,)))
    before, real = path.read_bytes(), os.write

    def full(fd: int, data: bytes) -> int:
        return real(fd, data[:10])

    def no_space(_claims: Claims) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        patched.setattr(Claims, "_write_all", no_space)
        with pytest.raises(GridError) as caught, claims.changing("b"):
            claims.take(claim("b", cores=(1,)), 4, {0}, 100, "gpu1")
        assert caught.value.code == "disk-full"
        with pytest.raises(GridError), claims.changing("a"):
            claims.held.pop("a")
            claims.ended["a"] = 1
    assert set(claims.held) == {"a"} and claims.ended == {} and path.read_bytes() == before
    take(claims, claim("c", cores=(1,)))
    assert set(Claims(path).held) == {"a", "c"}


class FakeTasks:
    """Tasks that live until they are cancelled; a start waits for `go`."""

    def __init__(self, spool: Path) -> None:
        self.spool = spool
        self.alive: set[str] = set()
        self.go = threading.Event()
        self.cancelling = 0
        self.most_at_once = 0

    def list(self) -> list[Any]:
        return []

    def processes(self, task_id: str) -> list[int]:
        return [-1] if task_id in self.alive else []

    def start(self, task_id: str, _spec: Any) -> TaskStatus:
        assert self.go.wait(10)
        self.alive.add(task_id)
        return TaskStatus(task_id, "running", ["x"], "", "")

    async def cancel(self, task_id: str, _grace_s: float) -> None:
        self.cancelling += 1
        self.most_at_once = max(self.most_at_once, self.cancelling)
        await asyncio.sleep(0.02)
        self.cancelling -= 1
        self.alive.discard(task_id)


def agent_with(tmp_path: Path) -> tuple[LeaseCalls, FakeTasks]:
    tasks = FakeTasks(tmp_path / "spool")
    latest = SimpleNamespace(cpu_cores_total=4, gpu_count=0, gpus=(), memory_total_bytes=100)
    node = SimpleNamespace(name="gpu1", node_dir=tmp_path, tasks=tasks, latest=latest)
    return LeaseCalls(node), tasks  # type: ignore[arg-type]


ASKED = CallContext()
SPEC = {"argv": ["x"], "env": {}}


async def test_nothing_outlives_a_lease_that_is_given_back_while_it_starts(tmp_path: Path) -> None:
    calls, tasks = agent_with(tmp_path)
    calls.lease_claim(ASKED, lease=claim("a", cores=(0,)))
    starting = asyncio.create_task(calls.lease_start(ASKED, lease_id="a", fence=1, task_id="t1", spec=SPEC))
    while not calls._starting:
        await asyncio.sleep(0.001)
    going = asyncio.create_task(calls.lease_release(ASKED, lease_id="a", fence=1))
    await asyncio.sleep(0.01)
    assert not going.done(), "what is being started is waited for"
    with pytest.raises(Refused) as caught:
        await calls.lease_start(ASKED, lease_id="a", fence=1, task_id="t2", spec=SPEC)
    assert caught.value.code == "lease-not-active"
    tasks.go.set()
    await asyncio.gather(starting, going)
    assert not tasks.alive and not calls._claims.held


async def test_many_tasks_of_one_lease_are_ended_at_once(tmp_path: Path) -> None:
    """One after the other, each with its grace, would take longer than anybody waits."""
    calls, tasks = agent_with(tmp_path)
    tasks.go.set()
    calls.lease_claim(ASKED, lease=claim("a", cores=(0,)))
    for number in range(3):
        await calls.lease_start(ASKED, lease_id="a", fence=1, task_id=f"t{number}", spec=SPEC)
    await calls.lease_release(ASKED, lease_id="a", fence=1)
    assert tasks.most_at_once == 3 and not tasks.alive


async def test_nothing_starts_in_a_lease_that_gave_its_cores_away(tmp_path: Path) -> None:
    calls, tasks = agent_with(tmp_path)
    tasks.go.set()
    calls.lease_claim(ASKED, lease=claim("a", cores=(0,)))
    await calls.lease_suspend(ASKED, lease_id="a", fence=1, held={"cores": [], "gpus": [], "memory_bytes": 0})
    with pytest.raises(Refused) as caught:
        await calls.lease_start(ASKED, lease_id="a", fence=1, task_id="t1", spec=SPEC)
    assert caught.value.code == "lease-not-active" and not tasks.alive
    await calls.lease_resume(ASKED, lease_id="a", fence=1, grant=claim("a", cores=(0,))["grant"])
    await calls.lease_start(ASKED, lease_id="a", fence=1, task_id="t1", spec=SPEC)
    assert tasks.alive == {"t1"}
