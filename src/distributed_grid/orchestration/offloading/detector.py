"""What a scan offers, and what may never be moved: filters are for finding, safety rules are for everything."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from distributed_grid.agent.inspect.candidates import TreeSample
from distributed_grid.agent.inspect.facts import TreeFacts
from distributed_grid.config.models import DetectConfig, OffloadConfig
from distributed_grid.core.errors import GridError, Refused
from distributed_grid.core.process import ProcessId
from distributed_grid.core.resources import GB, format_bytes, format_duration
from distributed_grid.orchestration.offloading.classifier import CRITICAL, classify, is_critical
from distributed_grid.orchestration.offloading.model import Candidate, Classification, ProcessType, need_of


@dataclass(frozen=True, slots=True)
class PassedOver:
    """A tree that a scan does not offer, and why."""

    node: str
    tree: TreeSample
    reason: str


def detect(
    node: str,
    trees: Iterable[TreeSample],
    config: OffloadConfig,
    *,
    asked_by: int = 0,
    gpu_names: Mapping[int, str] | None = None,
) -> tuple[list[Candidate], list[PassedOver]]:
    """What to offer to that user (root sees all), best first, and what was passed over. Pure."""
    offered: list[Candidate] = []
    passed: list[PassedOver] = []
    for tree in trees:
        kind = classify(tree)
        reason = _why_not_offered(tree, kind, config, asked_by)
        if reason:
            passed.append(PassedOver(node, tree, reason))
        else:
            offered.append(Candidate(node, tree, kind, need_of(tree, gpu_names)))
    offered.sort(key=lambda one: (-one.tree.cpu_cores_1m, -one.tree.memory_bytes, one.tree.pid))
    return offered, passed


_ORIGINS = {
    "grid": "it is the grid's own", "ray": "it is Ray's", "kernel": "it is a kernel thread",
    "above": "a part of the grid, or of Ray, is below it",
}  # fmt: skip


def _why_not_offered(tree: TreeSample, kind: Classification, config: OffloadConfig, asked_by: int) -> str:
    if tree.origin != "user":
        return _ORIGINS[tree.origin]
    if is_critical(tree):
        return "it is a part of the system"
    if not _may(asked_by, tree.uids):
        return f"it belongs to {tree.user}"
    if pattern := fits(tree.argv, config.never):
        return f"the configuration never moves {pattern!r}"
    if not kind.type.offered:
        return f"{kind.type.value.lower()}: {'; '.join(kind.reasons)}"
    return too_small(tree, config.detect)


def too_small(tree: TreeSample, detect: DetectConfig) -> str:
    """Why it is not worth a move, in words; empty if it is. One of the amounts is enough."""
    if tree.age_s < detect.min_age_seconds:
        wanted = format_duration(detect.min_age_seconds)
        return f"it has run for {format_duration(tree.age_s)} only, and {wanted} are asked for"
    cores = max(tree.cpu_cores, tree.cpu_cores_wanted) if tree.age_s < 60 else tree.cpu_cores_wanted
    # The kernel counts in steps: a core kept busy shows as a hair less than one.
    if cores >= detect.min_cpu_cores * 0.9:
        return ""
    if tree.memory_bytes >= detect.min_memory_gb * GB:
        return ""
    if tree.gpu_memory_bytes and tree.gpu_memory_bytes >= detect.min_gpu_memory_gb * GB:
        return ""
    return f"it uses {tree.cpu_cores_1m:.1f} cores and {format_bytes(tree.memory_bytes)} only"


def fits(argv: Iterable[str], patterns: Iterable[str]) -> str:
    """The first pattern that the command line, or its program alone, fits; empty if none does."""
    words = list(argv)
    line = " ".join(words)
    program = words[0].rpartition("/")[2] if words else ""
    for pattern in patterns:
        if fnmatch.fnmatchcase(line, pattern) or fnmatch.fnmatchcase(program, pattern):
            return pattern
    return ""


def _may(uid: int, owners: Iterable[int]) -> bool:
    return uid == 0 or all(owner == uid for owner in owners)


def why_not(
    facts: TreeFacts,
    *,
    node: str,
    asked_by: int,
    kind: Classification | None = None,
    force: bool = False,
    never: Collection[str] = (),
    head: str = "",
    head_only: bool = False,
    by_hand: bool = True,
    moving: Collection[ProcessId] = (),
    agent_uid: int = 0,
) -> GridError | None:
    """The safety rules: why that very tree may not be moved at all, or None. Its age and size do not matter here."""
    root = facts.root
    name = f"process {root.pid} ({' '.join(root.argv) or root.comm})"[:160]
    if root.origin == "kernel":
        return Refused(f"{name} cannot be moved", cause="it is a kernel thread", code="kernel-thread")
    if root.pid == 1:
        return Refused(f"{name} cannot be moved", cause="it is the first process of its system", code="init")
    # Whose it is comes before anything else about it: other users' processes are none of the asker's business.
    owners = {one.uid for one in facts.processes} | {one.euid for one in facts.processes}
    if not _may(asked_by, owners):
        return Refused(
            f"process {root.pid} is not yours", cause=f"it belongs to {root.user}",
            hint=f"ask {root.user}, or root", code="not-owner",
        )  # fmt: skip
    for one in facts.processes:
        if one.origin in ("grid", "ray"):
            whose = "the grid's own" if one.origin == "grid" else "Ray's"
            where = "it is" if one.pid == root.pid else f"below it, process {one.pid} ({one.comm}) is"
            code = "ours" if one.origin == "grid" else "rays"
            return Refused(f"{name} cannot be moved", cause=f"{where} {whose}", code=code)
    if root.comm in CRITICAL:
        return Refused(f"{name} cannot be moved", cause="it is a part of the system", code="critical")
    if root.id in moving:
        return Refused(f"{name} is already being moved", hint="grid offload status", code="already-moving")
    if agent_uid != 0 and owners != {agent_uid}:
        return Refused(
            f"{name} cannot be moved",
            cause=f"the grid is not root on {node}, so it moves processes of its own user only",
            hint=f"start the cluster as root on {node}", code="agent-rights",
        )  # fmt: skip
    if pattern := fits(root.argv, never):
        return Refused(
            f"{name} is never moved", cause=f"the configuration says so: {pattern!r}", hint="offload.never",
            code="never",
        )  # fmt: skip
    if head_only and head and node != head and not by_hand:
        return Refused(f"{name} is not on {head}", cause="head-only mode is on", code="head-only")
    if kind is not None and not kind.type.offered:
        return _not_offered(name, kind, force, by_hand)
    return None


def _not_offered(name: str, kind: Classification, force: bool, by_hand: bool) -> GridError | None:
    if force and by_hand:
        return None
    what = "interactive" if kind.type is ProcessType.INTERACTIVE else "a daemon"
    return Refused(
        f"{name} is {what}, and those are left where they are", cause="; ".join(kind.reasons),
        hint="--force moves it all the same" if by_hand else "", code=kind.type.value.lower(),
    )  # fmt: skip
