"""Where use is going: the median of all slopes between points, which a few odd points can't bend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median

from distributed_grid.core.resources import ResourceType, format_duration

#: More points than this say no more, and cost the square.
MAX_POINTS = 40
MIN_POINTS = 4
#: A rise that fewer pairs of points agree on is noise or a sawtooth.
AGREEMENT = 0.8


@dataclass(frozen=True, slots=True)
class Trend:
    """Change per second, and the share of pairs of points that go the same way."""

    per_s: float
    agreement: float


def trend(series: Sequence[tuple[float, float]]) -> Trend | None:
    """The robust slope of `(time, value)`s; None where there is too little to tell."""
    if len(series) > MAX_POINTS:
        step = (len(series) - 1) / (MAX_POINTS - 1)
        series = [series[round(i * step)] for i in range(MAX_POINTS)]
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in combinations(series, 2) if b[0] > a[0]]
    if len(series) < MIN_POINTS or not slopes:
        return None
    middle = median(slopes)
    same = sum(1 for one in slopes if (one > 0) == (middle > 0) and one != 0)
    return Trend(middle, same / len(slopes))


def reach_s(now: float, limit: float, going: Trend | None) -> float | None:
    """Seconds until `limit` is reached; None if it is not on the way there."""
    if now >= limit:
        return 0.0
    if going is None or going.per_s <= 0 or going.agreement < AGREEMENT:
        return None
    seconds = (limit - now) / going.per_s
    return seconds if seconds <= 3600 else None


def forecast_text(resource: ResourceType, limit: float, seconds: float | None) -> str:
    """`memory reaches 90% in 3m 40s`; empty if it does not."""
    if not seconds:
        return ""
    return f"{resource.value} reaches {limit * 100:.0f}% in {format_duration(seconds)}"
