"""How nodes are shown in tables, the same in every view."""

from __future__ import annotations

import time
from typing import Any

from distributed_grid.core.resources import format_bytes, format_duration


def node_state(node: dict[str, Any]) -> str:
    if node["online"]:
        return "online"
    return "offline"


def age(node: dict[str, Any]) -> str:
    return f"{node['age_s']:.0f}s" if node["online"] and node.get("age_s") is not None else "-"


def lent(node: dict[str, Any]) -> str:
    given = node["lent"]
    parts = []
    if given["cpu"]:
        parts.append(f"{given['cpu']:g} cores")
    if given["gpu"]:
        parts.append(f"{given['gpu']} GPU")
    if given["memory_bytes"]:
        parts.append(format_bytes(given["memory_bytes"]))
    return ", ".join(parts) or "-"


def since(node: dict[str, Any]) -> str:
    return f"since {format_duration(time.time() - node['since'])}" if node.get("since") else ""


def use_cells(node: dict[str, Any]) -> tuple[str, str, str]:
    """CPU, memory and GPU as `used/total`; a dash for what is not known."""
    use = node.get("use")
    if not use or not node["online"]:
        return "-", "-", "-"
    cpu = f"{use['cpu_cores_used']:.1f}/{use['cpu_cores_total']:g} cores"
    memory = f"{format_bytes(use['memory_used_bytes'])}/{format_bytes(use['memory_total_bytes'])}"
    gpus = use.get("gpus") or []
    total = use.get("gpu_count") or len(gpus)
    if not total:
        return cpu, memory, "none"
    busy = sum(float(gpu.get("utilization") or 0.0) for gpu in gpus)
    return cpu, memory, f"{busy:.1f}/{total}"


def node_row(node: dict[str, Any]) -> tuple[str, ...]:
    state = f"{node_state(node)} {since(node)}".strip()
    reason = "" if node["online"] else str(node.get("reason") or "")
    return (node["name"], node["role"], state, *use_cells(node), lent(node), age(node), reason)
