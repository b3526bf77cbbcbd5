"""Queue, victims, offers, amounts and staging: the written meaning of each rule."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import pytest

from distributed_grid.config.models import NodeConfig, ResourceSharingConfig
from distributed_grid.core.errors import NotFound, UsageError
from distributed_grid.core.resources import GB, AllocationPriority, ResourceType
from distributed_grid.monitoring.snapshot import GpuSnapshot, NodeSnapshot
from distributed_grid.orchestration.resource_sharing.amounts import check_duration, parse_amount, parse_type
from distributed_grid.orchestration.resource_sharing.model import NOTHING, Amounts, Grant, LeaseState, Ledger
from distributed_grid.orchestration.resource_sharing.offers import LentUse, lendable, offers_of, owned
from distributed_grid.orchestration.resource_sharing.preempt import How, Preemption, choose_victims, gives_way
from distributed_grid.orchestration.resource_sharing.queue import (
    AGING_S,
    HALF_LIFE_S,
    PATIENCE_S,
    FairShare,
    KeptFree,
    Request,
    in_order,
)
from distributed_grid.orchestration.resource_sharing.staging import files_for, packed
from tests.unit.orchestration.resource_sharing.test_ledger import full_ledger, make_lease

LOW, NORMAL, HIGH, CRITICAL = AllocationPriority


def request(name: str, priority: AllocationPriority = NORMAL, uid: int = 0, at: float = 0.0) -> Request:
    return Request(name, Amounts(cpu=1), priority, uid, at)


def names(requests: list[Request], use: dict[int, float] | None = None, now: float = 0.0) -> list[str]:
    return [one.id for one in in_order(requests, use or {}, now)]


# The queue


def test_priority_then_least_use_then_arrival() -> None:
    asked = [request("low", LOW), request("late", at=2), request("early", at=1), request("top", CRITICAL, at=3)]
    assert names(asked) == ["top", "early", "late", "low"]
    assert names([request("much", uid=1), request("little", uid=2, at=5)], {1: 10.0, 2: 1.0}) == ["little", "much"]


def test_waiting_raises_slowly_but_never_to_critical() -> None:
    old = request("old", LOW)
    assert [old.level(AGING_S * n) for n in range(4)] == [0, 1, 2, 2]
    assert names([old, request("new", at=AGING_S)], now=AGING_S + 1) == ["old", "new"]
    assert names([old, request("top", CRITICAL, at=1e6)], now=1e6) == ["top", "old"]


def test_small_requests_do_not_starve_a_large_one() -> None:
    large, small, kept = request("large"), request("small", at=1), KeptFree()
    assert not kept.is_due(large, now=PATIENCE_S - 1) and kept.is_due(large, now=PATIENCE_S + 1)
    kept.add(large, ["gpu1"])
    assert kept.from_(small) == {"gpu1"}, "and every other node is free to be asked"
    assert kept.from_(Request("memory", Amounts(memory_bytes=GB), NORMAL, 0, 1.0)) == set(), "of that it needs nothing"


def test_use_is_forgotten_by_halves() -> None:
    share = FairShare()
    share.add(1, Amounts(cpu=2), 100, now=0)
    assert share.of(1, now=0) == 200
    assert share.of(1, now=HALF_LIFE_S) == pytest.approx(100)


# Victims


def test_cores_are_freed_by_suspending_the_lowest() -> None:
    ledger = full_ledger()
    make_lease(ledger, 1, "gpu1", Amounts(cpu=4), priority=NORMAL, tasks=1)
    make_lease(ledger, 2, "gpu1", Amounts(cpu=4), priority=LOW, tasks=1)
    plan = choose_victims(ledger, Amounts(cpu=4), CRITICAL, only=["gpu1"])
    assert plan and [(one.lease.id, one.how) for one in plan.victims] == [("lease-2", How.SUSPEND)]
    both = choose_victims(ledger, Amounts(cpu=8), CRITICAL)
    assert both and len(both.victims) == 2


def test_memory_and_gpus_are_freed_by_storing_on_disk() -> None:
    ledger = full_ledger()
    make_lease(ledger, 1, "gpu1", Amounts(cpu=1, gpu=1), priority=LOW, tasks=1)
    plan = choose_victims(ledger, Amounts(gpu=1), CRITICAL, only=["gpu1"])
    assert plan and [(one.how, one.left) for one in plan.victims] == [(How.STORE, NOTHING)]


def test_one_that_is_frozen_still_has_its_memory_to_give() -> None:
    ledger = full_ledger()
    make_lease(ledger, 1, "gpu1", Amounts(cpu=8, memory_bytes=32 * GB), priority=LOW, tasks=1)
    frozen = Grant((), (), 32 * GB)
    ledger.change("lease-1", state=LeaseState.SUSPENDED, held=frozen)
    assert choose_victims(ledger, Amounts(cpu=8), CRITICAL, only=["gpu1"]) == Preemption("gpu1", ()), "they are free"
    plan = choose_victims(ledger, Amounts(memory_bytes=GB), CRITICAL, only=["gpu1"])
    assert plan and [one.how for one in plan.victims] == [How.STORE]
    ledger.change("lease-1", held=NOTHING)
    assert choose_victims(ledger, Amounts(memory_bytes=33 * GB), CRITICAL, only=["gpu1"]) is None


def test_who_is_never_a_victim() -> None:
    ledger = full_ledger()
    make_lease(ledger, 1, "gpu1", Amounts(cpu=8), priority=HIGH, tasks=1)
    make_lease(ledger, 2, "gpu1", Amounts(memory_bytes=32 * GB), priority=LOW)  # blocks may lie in it
    assert choose_victims(ledger, Amounts(cpu=1), CRITICAL, only=["gpu1"]) is None
    assert choose_victims(ledger, Amounts(memory_bytes=GB), CRITICAL, only=["gpu1"]) is None
    make_lease(ledger, 3, "gpu2", Amounts(cpu=4), priority=LOW, tasks=1)
    assert choose_victims(ledger, Amounts(cpu=1), HIGH, only=["gpu2"]) is None, "only critical preempts"
    ledger.change("lease-3", overdue=True)
    assert choose_victims(ledger, Amounts(cpu=1), LOW, only=["gpu2"]), "but what is past its time yields to anybody"


@pytest.mark.parametrize(
    ("priority", "short", "resting", "how"),
    [
        (LOW, ["cpu"], False, How.SUSPEND),
        (LOW, ["memory"], False, How.STORE),
        (LOW, ["cpu", "memory"], True, How.STORE),
        (LOW, ["gpu"], False, None),
        (NORMAL, ["cpu", "memory"], False, None),
        (NORMAL, [], True, How.SUSPEND),
        (HIGH, ["cpu", "memory"], True, None),
    ],
)
def test_who_gives_way_to_the_node_itself(
    priority: AllocationPriority, short: list[str], resting: bool, how: How | None
) -> None:
    ledger = full_ledger()
    lease = make_lease(ledger, 1, "gpu1", Amounts(cpu=2, memory_bytes=GB), priority=priority, tasks=1)
    victim = gives_way(lease, short, resting)
    assert (victim.how if victim else None) is how
    assert gives_way(make_lease(ledger, 2, "gpu1", Amounts(cpu=2), priority=priority), short, resting) is None
    frozen = ledger.change("lease-1", state=LeaseState.SUSPENDED, held=Grant((), (), GB))
    again = gives_way(frozen, short, resting)
    assert (again.how if again else None) is (How.STORE if how is How.STORE else None), "it still has its memory"


# Offers


def shot(**changes: Any) -> NodeSnapshot:
    told: dict[str, Any] = {
        "node": "gpu1", "at": 0.0, "cpu_cores_total": 8.0, "cpu_cores_used": 0.0, "memory_total_bytes": 32 * GB,
        "memory_used_bytes": 2 * GB, "memory_available_bytes": 30 * GB, "gpu_count": 2,
    }  # fmt: skip
    return NodeSnapshot(**{**told, **changes})


def lent(snapshot: NodeSnapshot, policy: str = "balanced", use: LentUse | None = None, **node: Any) -> Amounts:
    sharing = ResourceSharingConfig.model_validate({"policy": policy})
    config = NodeConfig.model_validate({"name": "gpu1", **node})
    return lendable(snapshot, config, sharing, use or LentUse(), frozenset()).amounts


def test_an_idle_node_lends_all_but_its_reserve() -> None:
    assert lent(shot()) == Amounts(8, 2, 29 * GB)
    assert lent(shot(), share={"reserve_cores": 2, "reserve_memory_gb": 4}) == Amounts(6, 2, 26 * GB)
    assert lent(shot(), share={"cpu": 3, "gpu": False, "memory": "1GB"}) == Amounts(3, 0, GB)
    assert lent(shot(), share=False) == Amounts()


def test_a_node_in_use_lends_nothing_of_that_kind() -> None:
    assert lent(shot(cpu_cores_used=3.0)).cpu == 0
    assert lent(shot(memory_used_bytes=20 * GB)).memory_bytes == 0
    assert lent(shot(cpu_cores_used=3.0), use=LentUse(cpu_cores=3.0)).cpu == 8, "what borrowers use is not the owner's"


def test_each_policy_has_its_meaning() -> None:
    assert lent(shot(), "conservative") == Amounts(4, 2, int(14.5 * GB)), "half of what is idle"
    assert lent(shot(cpu_cores_used=3.0), "aggressive").cpu == 5, "the free part of a node in use"
    assert lent(shot(cpu_cores_used=3.0), "conservative").cpu == 0


def test_gpus_are_offered_one_by_one() -> None:
    def gpu(index: int, used_gb: float, busy: float) -> GpuSnapshot:
        return GpuSnapshot(index, f"uuid-{index}", "GPU", 16 * GB, int(used_gb * GB), busy)

    found = shot(gpus=(gpu(0, 0, 0.9), gpu(1, 15.5, 0.0), gpu(2, 1, 0.1)), gpu_count=3)
    config, sharing = NodeConfig(name="gpu1"), ResourceSharingConfig()
    assert lendable(found, config, sharing, LentUse(), frozenset()).gpus == (2,)
    assert lendable(found, config, sharing, LentUse(), frozenset({0})).gpus == (0, 2), "a lent one may be busy"


def test_offers_are_at_most_so_many_and_expire() -> None:
    ledger = Ledger()
    book = ledger.set_node("gpu1", *owned(shot(), NodeConfig(name="gpu1")))
    ledger.offer("gpu1", Amounts(8, 2, 29 * GB), (0, 1))
    offers = offers_of(book, ResourceSharingConfig(), at=100.0)
    assert [(one["type"], one["amount"], one["expires_at"]) for one in offers] == [
        ("cpu", 8, 400.0), ("gpu", 2, 400.0), ("memory", 29.0, 400.0),
    ]  # fmt: skip
    assert len(offers_of(book, ResourceSharingConfig(max_offers_per_node=1), at=0.0)) == 1


# What people type


@pytest.mark.parametrize(
    ("kind", "text", "found"),
    [
        ("cpu", "2.0", Amounts(cpu=2)), ("gpu", 1, Amounts(gpu=1)), ("memory", "4", Amounts(memory_bytes=4 * GB)),
        ("memory", 0.5, Amounts(memory_bytes=GB // 2)), ("memory", "512MiB", Amounts(memory_bytes=GB // 2)),
    ],
)  # fmt: skip
def test_amounts(kind: str, text: Any, found: Amounts) -> None:
    assert parse_amount(ResourceType(kind), text) == found


@pytest.mark.parametrize("text", ["0", "-1", "x", "", "nan", "inf", "1.5", "1e400"])
@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_bad_amounts(kind: str, text: str) -> None:
    with pytest.raises(UsageError):
        parse_amount(ResourceType(kind), text)


@pytest.mark.parametrize("text", ["0", "-4", "x", "4 parsecs", "nan", "inf", "1 B"])
def test_bad_memory(text: str) -> None:
    with pytest.raises(UsageError):
        parse_amount(ResourceType.MEMORY, text)


def test_bad_types_and_durations() -> None:
    assert parse_type("GPU") is ResourceType.GPU
    with pytest.raises(UsageError):
        parse_type("tpu")
    for seconds in (0.0, -1.0, float("nan"), float("inf"), 100 * 366 * 86400.0):
        with pytest.raises(UsageError):
            check_duration(seconds)


# Files


def test_the_files_that_a_command_names(tmp_path: Path) -> None:
    files = ["train.py", "model.py", "data/a.csv", "data/b.csv", "pkg/__init__.py", "pkg/x.py", "notes.txt", ".git/c"]
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)

    def found(*argv: str, extra: tuple[str, ...] = ()) -> list[str]:
        return [str(one.relative_to(tmp_path)) for one in files_for(argv, tmp_path, extra)]

    assert found("true") == []
    assert found("python", "train.py", "--rate", "3") == ["model.py", "pkg/__init__.py", "pkg/x.py", "train.py"]
    assert found("wc", "data", "--in=notes.txt") == ["data/a.csv", "data/b.csv", "notes.txt"]
    assert found("python", "-m", "pkg.x") == ["pkg/__init__.py", "pkg/x.py"]
    assert found("cat", "../secret", "/etc/passwd", "no-such-file") == []
    assert found("true", extra=("data",)) == ["data/a.csv", "data/b.csv"]
    with pytest.raises(NotFound):
        found("true", extra=("missing",))
    archive = b"".join(packed(files_for(["cat", "data"], tmp_path), tmp_path))
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        assert tar.getnames() == ["data/a.csv", "data/b.csv"]
