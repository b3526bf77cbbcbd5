"""What tests of lending have in common: an idle cluster before, and nothing lent after."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.lab.clusters import Cluster, EmbeddedCluster
from tests.lab.waiting import wait_until


def lending(cluster: Cluster) -> dict[str, Any]:
    found: dict[str, Any] = cluster.json("shared-status")
    return found


def nothing_lent(cluster: Cluster) -> bool:
    status = lending(cluster)
    return not status["allocations"] and not status["queue"]


def idle(cluster: EmbeddedCluster) -> Iterator[EmbeddedCluster]:
    """For a fixture: all workers online and idle before, and nothing lent after."""

    def ready() -> bool:
        offers = {(one["node"], one["type"], one["amount"]) for one in lending(cluster)["offers"]}
        return {("gpu1", "cpu", 8), ("gpu2", "cpu", 8), ("gpu1", "gpu", 1), ("gpu2", "gpu", 1)} <= offers

    wait_until(ready, 120, "both workers to offer all their cores", every_s=0.5)
    yield cluster
    give_all_back(cluster)


def give_all_back(cluster: Cluster) -> None:
    for lease in lending(cluster)["allocations"]:
        cluster.grid("resource-sharing", "release", "--force", lease["id"], check=False)
    wait_until(lambda: nothing_lent(cluster), 60, "everything to come back", every_s=0.5)


def counted(cluster: Cluster, task: str) -> int:
    """How far a counter came: every number once, in order."""
    lines = cluster.grid("jobs", "logs", task).stdout.split()
    assert lines == [str(number) for number in range(len(lines))], "no gap, nothing twice"
    return len(lines)
