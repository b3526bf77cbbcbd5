"""Which nodes have room for a process, and which of them is best."""

from __future__ import annotations

import pytest
from offload_facts import worker

from distributed_grid.core.errors import NoResources, NotFound, Refused, Unavailable
from distributed_grid.core.resources import GB
from distributed_grid.monitoring.snapshot import GpuSnapshot
from distributed_grid.orchestration.offloading.matcher import NodeState, check_target, match
from distributed_grid.orchestration.offloading.model import Need

NEED = Need(cpu_cores=2.0, memory_bytes=4 * GB)


def head() -> NodeState:
    return worker("gpu-master", is_head=True)


def order(*nodes: NodeState, need: Need = NEED) -> list[str]:
    return [one.node for one in match(need, nodes, source="gpu-master").targets]


def test_never_the_head_nor_where_it_is() -> None:
    found = match(NEED, [head(), worker("gpu1"), worker("gpu2")], source="gpu1")
    assert [one.node for one in found.targets] == ["gpu2"]
    assert found.rejected == {"gpu-master": "it is the head"}


def test_lent_memory_is_not_free() -> None:
    found = match(NEED, [worker("gpu1", lent_memory_bytes=30 * GB), worker("gpu2")], source="gpu-master")
    assert [one.node for one in found.targets] == ["gpu2"] and "lent" in found.rejected["gpu1"]


def test_load_data_link_and_arrivals_decide() -> None:
    assert order(worker("gpu1", used_cores=5), worker("gpu2")) == ["gpu2", "gpu1"]
    assert order(worker("gpu1", used_bytes=24 * GB), worker("gpu2")) == ["gpu2", "gpu1"]
    assert order(worker("gpu1"), worker("gpu2", local_bytes=GB)) == ["gpu2", "gpu1"]
    assert order(worker("gpu1", bandwidth_bytes_s=1e6), worker("gpu2", bandwidth_bytes_s=1e9)) == ["gpu2", "gpu1"]
    assert order(worker("gpu1", arriving=1), worker("gpu2")) == ["gpu2", "gpu1"]
    assert order(worker("gpu2"), worker("gpu1")) == ["gpu1", "gpu2"]
    assert order(worker("gpu1", local_bytes=GB), worker("gpu2", boosted=True)) == ["gpu2", "gpu1"]


def test_too_few_cores_are_told_or_refused() -> None:
    nodes = [worker("gpu1", used_cores=7.5, local_bytes=GB), worker("gpu2", lent_cpu_cores=7)]
    found = match(NEED, nodes, source="gpu-master")
    assert all("slower" in one.shortages[0] for one in found.targets) and len(found.targets) == 2
    strict = match(NEED, nodes, source="gpu-master", strict_cpu=True)
    assert strict.targets == ()
    with pytest.raises(NoResources, match="no node has room") as caught:
        strict.best()
    assert "gpu1: 0.5 cores free" in caught.value.cause


def test_gpus_by_type_and_memory() -> None:
    gpus = tuple(GpuSnapshot(index, f"u{index}", name, 80 * GB, used, 0.0)
                 for index, name, used in ((0, "H200", 70 * GB), (1, "H200", 0), (2, "A100", 0)))  # fmt: skip
    need = Need(1.0, GB, gpu_memory_bytes=20 * GB, gpu_count=1, gpu_name="H200")
    found = match(need, [worker("gpu1", gpus=gpus), worker("gpu2")], source="gpu-master")
    assert [(one.node, one.gpus) for one in found.targets] == [("gpu1", (1,))]
    lent = match(need, [worker("gpu1", gpus=gpus, lent_gpus=(1,))], source="gpu-master")
    assert lent.rejected == {"gpu1": "0 fitting GPUs of type H200 free, 1 needed"}


def test_a_target_asked_for_gets_exactly_one_clear_answer() -> None:
    nodes = [
        head(), worker("gpu1"), worker("gpu2", used_bytes=31 * GB),
        NodeState("gpu3", False, False, reason="silent for 5 s"),
    ]  # fmt: skip
    assert check_target("gpu1", NEED, nodes, source="gpu-master").node == "gpu1"
    for name, kind, code in (
        ("gpu9", NotFound, "unknown-node"), ("gpu-master", Refused, "target-head"), ("gpu2", NoResources, "full"),
        ("gpu3", Unavailable, "node-offline"),
    ):  # fmt: skip
        with pytest.raises(kind) as caught:
            check_target(name, NEED, nodes, source="gpu1" if name == "gpu-master" else "gpu-master")
        assert caught.value.code == code
    with pytest.raises(Refused, match="already runs"):
        check_target("gpu1", NEED, nodes, source="gpu1")
    assert check_target("gpu-master", NEED, nodes, source="gpu1", home=True).node == "gpu-master"
