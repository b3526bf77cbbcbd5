"""When pressure on the head begins and ends: a level and a time, a lower level and a time, or a limit that nears."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from distributed_grid.core.resources import ResourceType
from distributed_grid.orchestration.auto_offload.forecast import AGREEMENT, Trend, reach_s, trend
from distributed_grid.orchestration.auto_offload.signals import RESOURCES, Inputs, Settings
from distributed_grid.orchestration.auto_offload.state import PolicyState, Pressure

#: How many check intervals a level must last. Memory is quick, for it kills; cores and GPUs burst all the time.
HOLD_INTERVALS = {ResourceType.MEMORY: 0.8, ResourceType.CPU: 3.0, ResourceType.GPU: 3.0}
HARD_INTERVALS = 0.4
CLEAR_INTERVALS = 2.0
#: Use that stays between the two levels this long has settled there, and is pressure no more.
SETTLE_INTERVALS = 12.0
#: Share of time in which nothing at all ran for want of memory (percent of 10 s) that counts as hard pressure.
STALLED_FULL = 10.0
#: Cores that make others wait this much need to last only half as long.
STALLED_CPU = 40.0
FORECAST_WINDOW_S = 120.0
#: What grows fast shows in this one long before; but so does every tooth of a saw.
QUICK_WINDOW_S = 30.0
#: Acts before the limit when it is this near, and use is already close below the threshold.
EARLY_S = 60.0


@dataclass(frozen=True, slots=True)
class Change:
    """Pressure began, became hard, or (`cleared`) ended."""

    resource: ResourceType
    level: float
    hard: bool = False
    cleared: bool = False


def follow(
    state: PolicyState, inputs: Inputs, settings: Settings, trends: Mapping[ResourceType, Trend | None]
) -> tuple[PolicyState, tuple[Change, ...]]:
    """Begin and end pressure: a level and a time; a lower level and a time."""
    pressed, below, changes = dict(state.pressed), dict(state.below), []
    for resource in RESOURCES:
        level = inputs.head.level(resource)
        now_hard = _is_hard(resource, inputs, settings, held=resource.value in pressed)
        early = _is_early(resource, inputs, settings, trends[resource])
        held = pressed.get(resource.value)
        if held is None:
            over = level > settings.threshold(resource)
            hold_s = HOLD_INTERVALS[resource] * settings.check_interval_s
            if resource is ResourceType.CPU and inputs.head.cpu_some >= STALLED_CPU:
                hold_s /= 2
            if now_hard or early or (over and above_s(inputs, resource, settings.threshold(resource)) >= hold_s):
                pressed[resource.value] = Pressure(inputs.at, now_hard, early and not over)
                changes.append(Change(resource, level, now_hard))
            continue
        if now_hard and not held.hard:
            changes.append(Change(resource, level, True))
        early = held.early and level <= settings.threshold(resource)
        pressed[resource.value] = replace(held, hard=now_hard, early=early)
        clear = not now_hard and level < settings.clear_level(resource)
        settled = not now_hard and level <= settings.threshold(resource)
        interval_s = settings.check_interval_s
        long_clear = _lasts(below, resource.value, clear, inputs.at, CLEAR_INTERVALS * interval_s)
        long_settled = _lasts(below, f"{resource.value}:low", settled, inputs.at, SETTLE_INTERVALS * interval_s)
        if long_clear or long_settled:
            del pressed[resource.value]
            below = {key: at for key, at in below.items() if key.partition(":")[0] != resource.value}
            changes.append(Change(resource, level, cleared=True))
    return replace(state, pressed=pressed, below=below), tuple(changes)


def _lasts(since: dict[str, float], key: str, true: bool, at: float, hold_s: float) -> bool:
    """Whether something has been true for long enough; remembers since when."""
    if not true:
        since.pop(key, None)
        return False
    return at - since.setdefault(key, at) >= hold_s


def _is_hard(resource: ResourceType, inputs: Inputs, settings: Settings, held: bool) -> bool:
    """Memory far above its threshold, or so short that everything stands still; a blink of it is a burst."""
    if resource is not ResourceType.MEMORY:
        return False
    level, hard = inputs.head.memory, settings.hard_level(resource)
    if inputs.head.memory_full >= STALLED_FULL and level >= settings.clear_level(resource):
        return True
    return level >= hard and (held or above_s(inputs, resource, hard) >= HARD_INTERVALS * settings.check_interval_s)


def _is_early(resource: ResourceType, inputs: Inputs, settings: Settings, going: Trend | None) -> bool:
    """Memory that is close below its threshold and will reach the limit before a move would be done."""
    if resource is not ResourceType.MEMORY:
        return False
    if not settings.clear_level(resource) <= inputs.head.memory <= settings.threshold(resource):
        return False
    eta_s = reach_s(inputs.head.memory, settings.limit(resource), going)
    return eta_s is not None and eta_s <= EARLY_S


def above_s(inputs: Inputs, resource: ResourceType, threshold: float) -> float:
    """For how long, up to now, the level has been above without a break."""
    since = inputs.at
    for point in reversed(inputs.points):
        if point.level(resource) <= threshold:
            break
        since = min(since, point.at)
    return inputs.at - since


def trend_of(inputs: Inputs, resource: ResourceType, window_s: float, not_before: float) -> Trend | None:
    """A move makes a step in the figures, and what was before it says nothing about what comes."""
    start = max(inputs.at - window_s, not_before)
    return trend([(point.at, point.level(resource)) for point in inputs.points if point.at >= start])


def nearest(inputs: Inputs, resource: ResourceType, slow: Trend | None, not_before: float) -> Trend | None:
    """Where use is going now: the quick look where it agrees on a steeper rise than the slow one."""
    quick = trend_of(inputs, resource, QUICK_WINDOW_S, not_before)
    if quick is None or quick.agreement < AGREEMENT:
        return slow
    rises = slow is not None and slow.agreement >= AGREEMENT and slow.per_s >= quick.per_s
    return slow if rises else quick


def falls_fast(inputs: Inputs, resource: ResourceType, settings: Settings) -> bool:
    """Already on its way below the clear level, and there within two checks."""
    going = trend_of(inputs, resource, max(8.0, 1.5 * settings.check_interval_s), 0.0)
    if going is None or going.per_s >= 0 or going.agreement < AGREEMENT:
        return False
    ahead_s = 2 * settings.check_interval_s
    return inputs.head.level(resource) + going.per_s * ahead_s < settings.clear_level(resource)
