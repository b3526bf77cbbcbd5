"""Where a process could go: its need against what each worker has free and not lent, then data, link and load."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from distributed_grid.core.errors import GridError, NoResources, NotFound, Refused, Unavailable
from distributed_grid.core.resources import GB, format_bytes
from distributed_grid.monitoring.snapshot import NodeSnapshot
from distributed_grid.orchestration.offloading.model import Need

#: Below this a link is slow for a move; at it, it counts half.
_USUAL_BYTES_S = 125e6


@dataclass(frozen=True, slots=True)
class NodeState:
    """A node as the daemon knows it now."""

    name: str
    is_head: bool
    online: bool
    snapshot: NodeSnapshot | None = None
    lent_cpu_cores: float = 0.0
    lent_memory_bytes: int = 0
    lent_gpus: tuple[int, ...] = ()
    bandwidth_bytes_s: float | None = None  # from the source; None: never measured
    local_bytes: int = 0  # of the process's files, those that are there already
    arriving: int = 0  # moves on their way there
    boosted: bool = False  # the head holds a boost there: that is room for its processes
    reason: str = ""  # why it is offline
    allowed: bool = True  # its config lets it take processes in


@dataclass(frozen=True, slots=True)
class Target:
    node: str
    score: float
    reasons: tuple[str, ...]
    shortages: tuple[str, ...] = ()  # what it will have less of than it would like
    free_cpu_cores: float = 0.0
    free_memory_bytes: int = 0
    gpus: tuple[int, ...] = ()

    def to_wire(self) -> dict[str, Any]:
        return {
            "node": self.node, "score": round(self.score, 3), "reasons": list(self.reasons),
            "shortages": list(self.shortages), "free_cpu_cores": round(self.free_cpu_cores, 2),
            "free_memory_bytes": self.free_memory_bytes, "gpus": list(self.gpus),
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Match:
    targets: tuple[Target, ...]  # best first
    rejected: dict[str, str]  # node -> why not

    def best(self) -> Target:
        if not self.targets:
            said = "; ".join(f"{node}: {why}" for node, why in self.rejected.items()) or "there is no worker"
            raise NoResources(
                "no node has room for it", cause=said, hint="grid status shows what is free", code="no-target"
            )
        return self.targets[0]


def match(
    need: Need, nodes: Iterable[NodeState], *, source: str, strict_cpu: bool = False, exclude: Sequence[str] = ()
) -> Match:
    """Rank the workers. Memory and GPUs must be there; too few free cores are only told, unless `strict_cpu`. Pure."""
    targets: list[Target] = []
    rejected: dict[str, str] = {}
    for node in nodes:
        if node.name == source:
            continue
        reason = _excluded(node, exclude)
        found = reason or _fit(need, node, strict_cpu)
        if isinstance(found, str):
            rejected[node.name] = found
        else:
            targets.append(found)
    # Enough cores first, whatever else; then by score, and by name so that the order never depends on chance.
    targets.sort(key=lambda one: (len(one.shortages), -one.score, one.node))
    return Match(tuple(targets), rejected)


def check_target(name: str, need: Need, nodes: Iterable[NodeState], *, source: str, home: bool = False) -> Target:
    """The one node that was asked for, or exactly one clear reason why not. `home`: the head is allowed too."""
    by_name = {node.name: node for node in nodes}
    node = by_name.get(name)
    if node is None:
        known = ", ".join(sorted(by_name))
        raise NotFound(
            f"there is no node {name!r}", cause=f"the nodes are {known}", hint="grid status", code="unknown-node"
        )
    if name == source:
        raise Refused(f"it already runs on {name}", hint="choose another node", code="same-node")
    if node.is_head and not home:
        raise Refused(
            f"{name} is the head, and nothing is moved there", hint="grid offload return ID brings home what was moved",
            code="target-head",
        )  # fmt: skip
    reason = "" if home and node.is_head and node.online and node.snapshot else _excluded(node, ())
    if reason:
        raise _unusable(node, reason)
    found = _fit(need, node, strict_cpu=False)
    if isinstance(found, str):
        raise NoResources(f"{name} has no room for it", cause=found, hint="grid status shows what is free", code="full")
    return found


def _unusable(node: NodeState, reason: str) -> GridError:
    if not node.online or node.snapshot is None:
        return Unavailable(f"{node.name} is not online", cause=node.reason, hint="grid status", code="node-offline")
    return Refused(f"{node.name} takes nothing in", cause=reason, code="target-refuses")


def _excluded(node: NodeState, exclude: Sequence[str]) -> str:
    if node.is_head:
        return "it is the head"
    if not node.online:
        return f"it is not online{': ' + node.reason if node.reason else ''}"
    if node.snapshot is None:
        return "its figures are not known yet"
    if not node.allowed:
        return "its configuration says so"
    return "it was tried before" if node.name in exclude else ""


def _fit(need: Need, node: NodeState, strict_cpu: bool) -> Target | str:
    shot = node.snapshot
    assert shot is not None
    cores = max(0.0, shot.cpu_cores_total - shot.cpu_cores_used - node.lent_cpu_cores)
    memory = max(0, min(shot.memory_available_bytes, shot.memory_total_bytes - shot.memory_used_bytes)
                 - node.lent_memory_bytes)  # fmt: skip
    if memory < need.memory_bytes:
        lent = f" ({format_bytes(node.lent_memory_bytes)} are lent)" if node.lent_memory_bytes else ""
        return f"{format_bytes(memory)} of memory free{lent}, {format_bytes(need.memory_bytes)} needed"
    gpus = _gpus(need, node)
    if isinstance(gpus, str):
        return gpus
    shortages = []
    # A tenth less is within what samples of a second can tell.
    if cores < need.cpu_cores * 0.9:
        short = f"{cores:.1f} cores free, {need.cpu_cores:.1f} used so far"
        if strict_cpu:
            return short
        shortages.append(f"{short}: it will be slower there")
    return _scored(need, node, shot, cores, memory, gpus, shortages)


def _scored(
    need: Need, node: NodeState, shot: NodeSnapshot, cores: float, memory: int, gpus: tuple[int, ...],
    shortages: list[str],
) -> Target:  # fmt: skip
    reasons = [f"{cores:.1f} cores and {format_bytes(memory)} free"]
    room = min(1.0, cores / max(1.0, 2 * need.cpu_cores))
    space = min(1.0, memory / max(1, 4 * need.memory_bytes))
    score = 0.35 * room + 0.15 * space + 0.2 * (1 - shot.cpu_pressure) + 0.1 * (1 - shot.memory_pressure)
    if node.local_bytes:
        score += 0.2 * min(1.0, node.local_bytes / GB)
        reasons.append(f"{format_bytes(node.local_bytes)} of its files are there already")
    if node.bandwidth_bytes_s:
        score += 0.2 * node.bandwidth_bytes_s / (node.bandwidth_bytes_s + _USUAL_BYTES_S)
        reasons.append(f"{format_bytes(node.bandwidth_bytes_s)} a second to it")
    else:
        score += 0.1  # not known: neither good nor bad
    stall = shot.psi_memory.some_avg10 / 100 if shot.psi_memory else 0.0
    score -= 0.3 * min(1.0, stall)
    if node.arriving:
        score -= 0.15 * node.arriving
        reasons.append(f"{node.arriving} on their way there")
    if node.boosted:
        score += 0.5  # more than data and link together: it is paid for
        reasons.append("the head holds a boost there")
    if gpus:
        reasons.append(f"GPU {', '.join(map(str, gpus))} free")
    return Target(node.name, score, tuple(reasons), tuple(shortages), cores, memory, gpus)


def _gpus(need: Need, node: NodeState) -> tuple[int, ...] | str:
    if not need.gpu_count:
        return ()
    shot = node.snapshot
    assert shot is not None
    free = [
        gpu for gpu in shot.gpus
        if gpu.index not in node.lent_gpus and (not need.gpu_name or gpu.name == need.gpu_name)
        and gpu.memory_total_bytes - gpu.memory_used_bytes >= need.gpu_memory_bytes / need.gpu_count
    ]  # fmt: skip
    if len(free) < need.gpu_count:
        kind = f" of type {need.gpu_name}" if need.gpu_name else ""
        return f"{len(free)} fitting GPUs{kind} free, {need.gpu_count} needed"
    free.sort(key=lambda gpu: (gpu.pressure, gpu.index))
    return tuple(sorted(gpu.index for gpu in free[: need.gpu_count]))
