"""Pressure stall information: how long tasks waited for cpu, memory or io, of the machine or of one cgroup."""

from __future__ import annotations

from pathlib import Path

from distributed_grid.monitoring.snapshot import Psi

RESOURCES = ("cpu", "memory", "io")


def parse_psi(text: str) -> Psi | None:
    """The `some` and `full` lines as percentages and microseconds; None if it is not such a text."""
    values: dict[str, dict[str, float]] = {}
    for line in text.splitlines():
        words = line.split()
        if not words or words[0] not in ("some", "full"):
            continue
        try:
            values[words[0]] = {key: float(value) for key, _, value in (word.partition("=") for word in words[1:])}
        except ValueError:
            return None
    some = values.get("some")
    if some is None:
        return None
    full = values.get("full", {})  # cpu has no `full` line before Linux 5.13
    return Psi(
        some_avg10=some.get("avg10", 0.0), some_avg60=some.get("avg60", 0.0),
        full_avg10=full.get("avg10", 0.0), full_avg60=full.get("avg60", 0.0),
        some_total_us=int(some.get("total", 0)), full_total_us=int(full.get("total", 0)),
    )  # fmt: skip


def read_psi(resource: str, cgroup: Path | None = None, proc: Path = Path("/proc")) -> Psi | None:
    """Of a v2 cgroup where one is given, else of the machine; None where the kernel does not keep it."""
    path = cgroup / f"{resource}.pressure" if cgroup else proc / "pressure" / resource
    try:
        return parse_psi(path.read_text())
    except OSError:  # absent, or switched off (reads then give EOPNOTSUPP)
        return None
