"""The part of pre-flight that looks at GPUs: whether what a tree has there can be parked here and taken up there."""

from __future__ import annotations

import re
from collections.abc import Sequence

from distributed_grid.agent.inspect.facts import TreeFacts
from distributed_grid.agent.inspect.target import GpuFacts, TargetFacts
from distributed_grid.core.resources import format_bytes
from distributed_grid.orchestration.offloading.model import Finding

_CUDA = re.compile(r"^/dev/nvidia")
_HELP = "relaunch it (--strategy relaunch)"


def gpu_bytes(facts: TreeFacts, source: TargetFacts) -> int:
    """What the tree has on GPUs: as much is in its own memory while it moves."""
    return sum(gpu.used_by(facts.pids) for gpu in source.gpus)


def check_gpus(
    facts: TreeFacts, source: TargetFacts, target: TargetFacts, chosen: Sequence[int]
) -> list[Finding]:
    files = sorted({name for one in facts.processes for name in one.gpu_files})
    if not files:
        return []
    reason = _obstacle(facts, source, target, chosen, files)
    if reason:
        text = f"it has a GPU open ({', '.join(files[:2])}), and {reason}"
        return [Finding("gpu", "blocks", text, _HELP, details={"files": files})]
    text = (
        f"the {format_bytes(gpu_bytes(facts, source))} it has on its GPU wait in its memory while it moves: "
        "the pause is longer for them"
    )
    return [Finding("gpu", "notice", text)]


def _obstacle(
    facts: TreeFacts, source: TargetFacts, target: TargetFacts, chosen: Sequence[int], files: Sequence[str]
) -> str:
    if not any(map(_CUDA.match, files)):
        return "only NVIDIA's driver can park what is on it"
    for side in (source, target):
        if side.gpu_parking:
            return f"it cannot be parked on {side.node}: {side.gpu_parking}"
    used = used_gpus(facts, source)
    if not used:
        return "which GPU it uses cannot be told"
    there = {gpu.index: gpu.name for gpu in target.gpus}
    if [there.get(index) for index in chosen] != [gpu.name for gpu in used]:
        return f"{target.node} has no such GPU free ({', '.join(gpu.name for gpu in used)})"
    need = gpu_bytes(facts, source)
    if source.memory_available_bytes < need:
        return f"{source.node} has {format_bytes(source.memory_available_bytes)} of memory free for the " \
               f"{format_bytes(need)} on it"  # fmt: skip
    return ""


def used_gpus(facts: TreeFacts, source: TargetFacts) -> list[GpuFacts]:
    return [gpu for gpu in source.gpus if set(gpu.pids) & set(facts.pids)]


def gpu_pairs(facts: TreeFacts, source: TargetFacts, target: TargetFacts, chosen: Sequence[int]) -> dict[str, str]:
    """Which GPU of the target takes the place of which one here; empty where it uses none."""
    there = {gpu.index: gpu.uuid for gpu in target.gpus}
    mine = used_gpus(facts, source)
    return {gpu.uuid: there[index] for gpu, index in zip(mine, chosen, strict=False) if index in there}
