"""What can be lent and measured: the only ResourceType, amounts, and how people write them."""

from __future__ import annotations

import math
import re
from enum import Enum, StrEnum

from distributed_grid.core.errors import UsageError

GB = 1024**3
_UNITS = {
    "": GB, "b": 1,
    "k": 1000, "kb": 1000, "kib": 1024,
    "m": 1000**2, "mb": 1000**2, "mib": 1024**2,
    "g": GB, "gb": GB, "gib": GB,
    "t": 1024**4, "tb": 1024**4, "tib": 1024**4,
}  # fmt: skip


class ResourceType(StrEnum):
    CPU = "cpu"
    GPU = "gpu"
    MEMORY = "memory"

    def __str__(self) -> str:
        return self.value


class AllocationPriority(int, Enum):
    """One scale for both vocabularies: `urgent` is critical, `medium` is normal."""

    LOW = 0
    NORMAL = 1
    HIGH = 2
    CRITICAL = 3

    @classmethod
    def parse(cls, text: str | AllocationPriority) -> AllocationPriority:
        if isinstance(text, AllocationPriority):
            return text
        word = text.strip().lower()
        word = {"urgent": "critical", "medium": "normal"}.get(word, word)
        try:
            return cls[word.upper()]
        except KeyError:
            raise UsageError(
                f"unknown priority {text!r}",
                hint="one of low, normal (medium), high, critical (urgent)",
                code="priority",
            ) from None

    def __str__(self) -> str:
        return self.name.lower()


def parse_memory(text: str | int | float) -> int:
    """Bytes from what people type: a plain number is GB, a unit is taken as written (`512MiB`, `4GB`)."""
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:[eE][0-9]+)?)\s*([a-zA-Z]*)\s*", str(text))
    if not match or match.group(2).lower() not in _UNITS:
        hint = "a number of GB, or with a unit: 4, 0.5, 512MiB, 4GB"
        raise UsageError(f"{text!r} is not an amount of memory", hint=hint, code="amount")
    value = float(match.group(1)) * _UNITS[match.group(2).lower()]
    if not math.isfinite(value):
        raise UsageError(f"{text!r} is not an amount of memory", code="amount")
    return round(value)


def format_bytes(count: float) -> str:
    """Short and readable: `512 B`, `3.2 GB` (1024-based, as `free -h` shows)."""
    value = float(count)
    for unit in ("B", "KB", "MB", "GB"):
        if abs(value) < 1024 or unit == "GB":
            return f"{value:.0f} {unit}" if unit == "B" or abs(value) >= 100 else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")


def format_duration(seconds: float) -> str:
    """`5m 32s`, as the dashboard shows ages and remaining times."""
    left = max(0, round(seconds))
    days, left = divmod(left, 86400)
    hours, left = divmod(left, 3600)
    minutes, secs = divmod(left, 60)
    if days:
        return f"{days}d {hours}h"
    if hours:
        return f"{hours}h {minutes}m"
    return f"{minutes}m {secs}s" if minutes else f"{secs}s"
