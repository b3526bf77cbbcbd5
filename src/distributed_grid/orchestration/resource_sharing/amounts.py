"""What people type as an amount, turned into exact cores, GPUs and bytes; each mistake gets one clear error."""

from __future__ import annotations

import math

from distributed_grid.core.errors import UsageError
from distributed_grid.core.resources import ResourceType, parse_memory
from distributed_grid.orchestration.resource_sharing.model import Amounts

MAX_DURATION_S = 366 * 86400.0
SMALLEST_BYTES = 1024**2
#: More than any node has of anything, and still a number that can be sent.
MOST = 2**62


def parse_type(text: str | ResourceType) -> ResourceType:
    try:
        return ResourceType(str(text).strip().lower())
    except ValueError:
        raise UsageError(
            f"unknown resource type {str(text)!r}", hint="one of cpu, gpu, memory", code="resource-type"
        ) from None


def parse_amount(kind: ResourceType, amount: str | float | int) -> Amounts:
    """Cores and GPUs whole; memory in GB, or with a unit."""
    if kind is ResourceType.MEMORY:
        text = str(amount).strip()
        if text.startswith("-") or text.lower() in ("nan", "inf", "+inf", "infinity"):
            raise _bad(kind, amount)
        count = parse_memory(text)
        if count < SMALLEST_BYTES:
            raise _bad(kind, amount)
        return Amounts(memory_bytes=min(count, MOST))
    try:
        value = float(amount)
    except (TypeError, ValueError):
        raise _bad(kind, amount) from None
    if not math.isfinite(value) or value <= 0:
        raise _bad(kind, amount)
    if value != int(value):
        noun = "cores" if kind is ResourceType.CPU else "GPUs"
        raise UsageError(f"{noun} are lent whole: {amount} is not", hint=f"ask for {math.ceil(value)}", code="amount")
    count = min(int(value), MOST)
    return Amounts(cpu=count) if kind is ResourceType.CPU else Amounts(gpu=count)


def _bad(kind: ResourceType, amount: object) -> UsageError:
    units = {"cpu": "a number of cores: 2", "gpu": "a number of GPUs: 1", "memory": "GB, or with a unit: 4, 512MiB"}
    return UsageError(f"{amount!s:.60} is not an amount of {kind.value}", hint=units[kind.value], code="amount")


def combine(*parts: Amounts) -> Amounts:
    return Amounts(
        sum(one.cpu for one in parts), sum(one.gpu for one in parts), sum(one.memory_bytes for one in parts)
    )


def check_wait(seconds: float | None) -> float | None:
    """How long a request waits; None: for as long as it takes."""
    if seconds is not None and (math.isnan(seconds) or seconds < 0):
        raise UsageError(f"a waiting time of {seconds:g} s makes no sense", hint="--wait-time 60", code="duration")
    return seconds


def check_duration(seconds: float) -> float:
    if not math.isfinite(seconds) or seconds <= 0:
        raise UsageError(f"a duration of {seconds:g} s makes no sense", hint="--duration 3600", code="duration")
    if seconds > MAX_DURATION_S:
        raise UsageError(
            f"a duration of {seconds / 86400:.0f} days is too long",
            cause="the longest is 366 days",
            hint="`grid resource-sharing request` takes what is kept until it is released",
            code="duration",
        )
    return seconds
