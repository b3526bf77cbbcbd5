"""What a worker offers: idle by its thresholds, less its reserve; the policy says how readily."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from distributed_grid.config.models import NodeConfig, ResourceSharingConfig
from distributed_grid.core.resources import GB, ResourceType
from distributed_grid.monitoring.snapshot import NodeSnapshot
from distributed_grid.orchestration.resource_sharing.model import Amounts, NodeBook

#: The part of what is idle that each policy lends. `aggressive` also lends the free part of a node that is in use.
LENT_PART = {"conservative": 0.5, "balanced": 1.0, "aggressive": 1.0}


@dataclass(frozen=True, slots=True)
class LentUse:
    """What the processes under leases use: not the owner's use, so it does not count against a node's idleness."""

    cpu_cores: float = 0.0
    memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Lendable:
    """The most a node lends in all just now, what is lent already included, and why not more."""

    amounts: Amounts
    gpus: tuple[int, ...] = ()
    reasons: tuple[tuple[str, str], ...] = ()  # (type, why it is not offered)


def owned(shot: NodeSnapshot, node: NodeConfig) -> tuple[int, tuple[int, ...], int]:
    """Cores, GPU indices and bytes that the node could ever lend: what it has, less its reserve, as far as it may."""
    gpus = tuple(gpu.index for gpu in shot.gpus) or tuple(range(shot.gpu_count))
    most = node.share.limit(ResourceType.GPU)
    cores = _capped(int(shot.cpu_cores_total - node.share.reserve_cores), node.share.limit(ResourceType.CPU))
    memory = shot.memory_total_bytes - int(node.share.reserve_memory_gb * GB)
    memory = _capped(memory, node.share.limit(ResourceType.MEMORY), GB)
    return max(0, cores), gpus if most is None else gpus[: int(most)], max(0, memory)


def lendable(
    shot: NodeSnapshot, node: NodeConfig, sharing: ResourceSharingConfig, use: LentUse, lent_gpus: frozenset[int]
) -> Lendable:
    """`lent_gpus`: what runs there is the borrowers', so how busy they are does not count."""
    limits, part = sharing.thresholds, LENT_PART[sharing.policy]
    strict = sharing.policy != "aggressive"
    reasons: list[tuple[str, str]] = []
    cores_used = max(0.0, shot.cpu_cores_used - use.cpu_cores)
    cores_free = shot.cpu_cores_total - cores_used
    cpu = math.floor((shot.cpu_cores_total - math.ceil(cores_used - 0.5) - node.share.reserve_cores) * part + 1e-9)
    cpu = _capped(cpu, node.share.limit(ResourceType.CPU))
    if strict and cores_used / max(1.0, shot.cpu_cores_total) > limits.cpu_percent_max:
        reasons.append(("cpu", f"its owner uses {cores_used:.1f} of {shot.cpu_cores_total:g} cores"))
        cpu = 0
    elif cores_free < limits.cpu_min_cores:
        reasons.append(("cpu", f"only {cores_free:.1f} cores are free"))
        cpu = 0
    memory_used = max(0, shot.memory_used_bytes - use.memory_bytes)
    memory_free = shot.memory_total_bytes - memory_used
    memory = int((memory_free - node.share.reserve_memory_gb * GB) * part)
    memory = _capped(memory, node.share.limit(ResourceType.MEMORY), GB)
    if strict and memory_used / max(1, shot.memory_total_bytes) > limits.memory_percent_max:
        reasons.append(("memory", f"its owner uses {memory_used / GB:.1f} of {shot.memory_total_bytes / GB:.1f} GB"))
        memory = 0
    elif memory_free < limits.memory_min_gb * GB:
        reasons.append(("memory", f"only {memory_free / GB:.1f} GB are free"))
        memory = 0
    gpus = _idle_gpus(shot, sharing, lent_gpus)
    most = node.share.limit(ResourceType.GPU)
    if most is not None:
        gpus = gpus[: int(most)]
    if not gpus and shot.gpu_count:
        reasons.append(("gpu", "no GPU is idle"))
    return Lendable(Amounts(max(0, cpu), len(gpus), max(0, memory)), gpus, tuple(reasons))


def _capped(value: int, most: float | None, unit: int = 1) -> int:
    return value if most is None else min(value, int(most * unit))


def _idle_gpus(shot: NodeSnapshot, sharing: ResourceSharingConfig, lent: frozenset[int]) -> tuple[int, ...]:
    if not shot.gpus:
        return tuple(range(shot.gpu_count))  # declared only: there is nothing to measure
    limits, found = sharing.thresholds, []
    for gpu in shot.gpus:
        free_mb = (gpu.memory_total_bytes - gpu.memory_used_bytes) / 1024**2
        busy = sharing.policy != "aggressive" and (gpu.utilization or 0.0) > limits.gpu_utilization_max
        if gpu.index in lent or (not busy and free_mb >= limits.gpu_memory_min_mb):
            found.append(gpu.index)
    return tuple(found)


def offers_of(book: NodeBook, sharing: ResourceSharingConfig, at: float) -> list[dict[str, Any]]:
    """What is shown and may be asked for: one offer for each type, at most `max_offers_per_node`."""
    free = book.free
    offers = [
        {
            "offer_id": f"{book.name}:{kind.value}", "node": book.name, "type": kind.value, "amount": free.of(kind),
            "offered_at": at, "expires_at": at + sharing.offer_expiry,
        }
        for kind in ResourceType if free.of(kind)
    ]  # fmt: skip
    return offers[: sharing.max_offers_per_node]
