"""When to move what: a pure state machine over signals; time comes in with them, so a recorded history replays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from distributed_grid.core.resources import ResourceType, format_bytes, format_duration
from distributed_grid.orchestration.auto_offload.forecast import AGREEMENT, Trend, forecast_text, reach_s
from distributed_grid.orchestration.auto_offload.pressure import (
    EARLY_S,
    FORECAST_WINDOW_S,
    Change,
    above_s,
    falls_fast,
    follow,
    nearest,
    trend_of,
)
from distributed_grid.orchestration.auto_offload.ranking import CROWDED, YOUNG, Need, Ranked, rank
from distributed_grid.orchestration.auto_offload.signals import RESOURCES, Inputs, Settings
from distributed_grid.orchestration.auto_offload.state import PolicyState, Pressure

HEAD_STALE_S = 15.0
#: The same "do nothing" or "can't help" is not said again within this time.
SAY_AGAIN_S = 600.0


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do now, why, and with which figures. `news` is false for a "do nothing" that was said already."""

    action: Literal["nothing", "scan", "move", "cannot_help"]
    key: str
    reason: str
    figures: Mapping[str, Any] = field(default_factory=dict)
    move: Ranked | None = None
    #: All that would have to go to reach the clear level, the first of them now.
    batch: tuple[Ranked, ...] = ()
    remedies: tuple[str, ...] = ()
    changes: tuple[Change, ...] = ()
    news: bool = True


def decide(state: PolicyState, inputs: Inputs, settings: Settings) -> tuple[PolicyState, Decision]:
    """One look. A `scan` asks to be called again with candidates; all else is final for this check."""
    slow = {r: trend_of(inputs, r, FORECAST_WINDOW_S, state.last_move_at) for r in RESOURCES}
    trends = {r: nearest(inputs, r, slow[r], state.last_move_at) for r in RESOURCES}
    if inputs.head.online and inputs.head.age_s <= HEAD_STALE_S:
        state, changes = follow(state, inputs, settings, slow)
        decision = _act(state, inputs, settings, trends)
    else:
        changes = ()
        text = f"the head's figures are {inputs.head.age_s:.0f}s old: not acting on them"
        decision = Decision("nothing", "stale", text)
    if decision.move is not None:
        state = replace(state, batch_left=(state.batch_left or len(decision.batch)) - 1)
    elif state.batch_left and decision.action != "scan" and decision.key != "busy":
        # The rest need not go, or can't: the cooldown is that of the last one which did.
        until = max(state.cooldown_until, state.last_move_at + settings.cooldown_s)
        state = replace(state, batch_left=0, cooldown_until=until)
    decision = replace(decision, changes=changes, figures={**_figures(inputs, settings, trends), **decision.figures})
    return say(state, decision, inputs.at)


# -- action -----------------------------------------------------------------------------------------------------------


def _act(
    state: PolicyState, inputs: Inputs, settings: Settings, trends: Mapping[ResourceType, Trend | None]
) -> Decision:
    calm = _calm(state, inputs, settings, trends)
    if calm is not None:
        return calm
    last: Decision | None = None
    for resource in sorted(
        (r for r in RESOURCES if r.value in state.pressed), key=lambda r: (not state.pressed[r.value].hard,)
    ):
        held, level = state.pressed[resource.value], inputs.head.level(resource)
        story = _story(resource, inputs, settings, held, trends[resource])
        if falls_fast(inputs, resource, settings):
            last = last or Decision("nothing", "falling", f"{story}, but falling fast: waiting")
            continue
        if level <= settings.clear_level(resource):
            last = last or Decision("nothing", "easing", f"{story}: low enough, waiting for it to stay so")
            continue
        if inputs.candidates is None:
            return Decision("scan", "scan", story)
        best, stay, full = _ranked(state, inputs, settings, resource, trends[resource])
        if best:
            return _move(resource, story, best, inputs, settings)
        if level <= settings.threshold(resource) and not held.early:
            text = f"{story}: below the threshold, and nothing worth moving"
            last = last or Decision("nothing", "settled", text)
            continue
        if YOUNG in stay.values():
            last = last or Decision("nothing", "young", f"{story}: what could be moved has not run for long enough")
            continue
        if full and set(full.values()) == {CROWDED}:
            last = last or Decision("nothing", "crowded", f"{story}: the workers are as crowded as the head")
            continue
        decision = _cannot_help(resource, story, stay, full, inputs)
        last = decision if last is None or last.action == "nothing" else last
    assert last is not None
    return last


def _calm(
    state: PolicyState, inputs: Inputs, settings: Settings, trends: Mapping[ResourceType, Trend | None]
) -> Decision | None:
    """Reasons to do nothing that need no look at processes."""
    levels = ", ".join(f"{r.value} {_percent(inputs.head.level(r))}" for r in RESOURCES)
    if not settings.enabled:
        return Decision("nothing", "disabled", f"automatic offload is off ({levels})")
    if not state.pressed:
        over = [r for r in RESOURCES if inputs.head.level(r) > settings.threshold(r)]
        if over:
            resource, threshold = over[0], settings.threshold(over[0])
            lasts = above_s(inputs, resource, threshold)
            text = f"{resource.value} {_percent(inputs.head.level(resource))} is above {_percent(threshold)}"
            return Decision("nothing", "watching", f"{text} for {lasts:.0f}s: watching whether it lasts")
        ahead = [forecast_text(r, settings.limit(r), _eta(r, inputs, settings, trends[r])) for r in RESOURCES]
        return Decision("nothing", "calm", f"no pressure ({levels})" + "".join(f"; {text}" for text in ahead if text))
    if inputs.busy:
        return Decision("nothing", "busy", f"one move at a time: {inputs.busy}")
    if inputs.at < state.cooldown_until:
        left = format_duration(state.cooldown_until - inputs.at)
        return Decision("nothing", "cooldown", f"under pressure ({levels}), next move in {left} at the earliest")
    return None


def _ranked(
    state: PolicyState, inputs: Inputs, settings: Settings, resource: ResourceType, going: Trend | None
) -> tuple[list[Ranked], dict[str, str], dict[str, str]]:
    head = inputs.head
    total = _total(resource, inputs)
    ahead = head.level(resource)
    if going is not None and going.agreement >= AGREEMENT:
        ahead = min(1.0, max(ahead, ahead + going.per_s * EARLY_S))  # what grows needs more room than it shows now
    eta_s = _eta(resource, inputs, settings, going)
    soon = resource is ResourceType.MEMORY and eta_s is not None and eta_s <= EARLY_S
    urgent = state.pressed[resource.value].hard or soon
    need = Need(
        resource, (ahead - settings.clear_level(resource)) * total, total, urgent, inputs.crowds, head.node,
        _per_gpu_byte(resource, inputs),
    )  # fmt: skip
    workers = [worker for worker in inputs.workers if worker.node != head.node]
    return rank(
        inputs.candidates or (), workers, need, settings, head.node,
        left_alone={key: left.why for key, left in state.left_alone.items() if left.until > inputs.at},
        shunned={node: left.why for node, left in state.shunned.items() if left.until > inputs.at},
        failures=state.failures, bandwidth=inputs.bandwidth,
    )  # fmt: skip


def _per_gpu_byte(resource: ResourceType, inputs: Inputs) -> float:
    """Whose kernels keep a GPU busy is not known; they are taken to go with the memory that each process has there."""
    held = sum(one.gpu_memory_bytes for one in inputs.candidates or ())
    if resource is not ResourceType.GPU or not held:
        return 1.0
    return max(1.0, inputs.head.gpu * _total(resource, inputs) / held)


def _move(
    resource: ResourceType, story: str, ranked: list[Ranked], inputs: Inputs, settings: Settings
) -> Decision:
    best, level = ranked[0], inputs.head.level(resource)
    share = best.frees / _total(resource, inputs)
    batch, freed = [], 0.0
    for one in ranked:
        if level - freed <= settings.clear_level(resource):
            break
        batch.append(one)
        freed += one.frees / _total(resource, inputs)
    candidate = best.candidate
    amount = candidate.gpu_memory_bytes if resource is ResourceType.GPU else best.frees
    text = (
        f"{story}: moving PID {candidate.pid} ({short(candidate.command)}) to {best.target.node}, "
        f"frees {_amount(resource, amount)} ({_percent(share)}) for about {format_duration(best.cost_s)}"
    )
    if len(batch) > 1:
        text += f"; {len(batch)} processes must go to reach {_percent(settings.clear_level(resource))}"
    figures = {
        "resource": resource.value, "level": round(level, 4), "pid": candidate.pid, "target": best.target.node,
        "frees": best.frees, "frees_share": round(share, 4), "cost_s": round(best.cost_s, 2),
        "score": round(best.score, 5), "batch": [one.candidate.pid for one in batch], "ranked": len(ranked),
    }  # fmt: skip
    return Decision("move", "move", text, figures, best, tuple(batch))


def _cannot_help(
    resource: ResourceType, story: str, stay: dict[str, str], full: dict[str, str], inputs: Inputs
) -> Decision:
    """Said once, with what would help."""
    fits_nowhere = any(why == "no worker fits" for why in stay.values()) or (bool(stay) and not inputs.workers)
    remedies: list[str] = []
    if fits_nowhere:
        cause = "no worker fits" + "".join(f"; {node}: {why}" for node, why in sorted(full.items()))
        remedies.append("free a worker, or add one")
        remedies.append(f"`grid boost request {inputs.head.node} {resource.value} AMOUNT` for new work")
        remedies.append("a higher threshold for what the workers may hold")
    else:
        reasons: dict[str, int] = {}
        for why in stay.values():
            reasons[why] = reasons.get(why, 0) + 1
        told = ", ".join(f"{why} ({count})" for why, count in sorted(reasons.items(), key=lambda item: -item[1])[:3])
        cause = "nothing may be moved" + (f": {told}" if told else ": no process is worth it")
        if "marked never" in reasons:
            remedies.append("a `never` mark less (offload.never, GRID_OFFLOAD)")
        remedies.append("`grid offload scan --all` shows why each process stays")
        remedies.append(f"`grid boost request {inputs.head.node} {resource.value} AMOUNT` for new work")
    key = f"{resource.value}:{'full' if fits_nowhere else 'stay'}"
    text = f"{story}, and automatic offload can't help: {cause}"
    figures = {"resource": resource.value, "stay": dict(list(stay.items())[:50]), "workers": full}
    return Decision("cannot_help", f"cannot_help:{key}", text, figures, remedies=tuple(remedies))


# -- words ------------------------------------------------------------------------------------------------------------


def say(state: PolicyState, decision: Decision, at: float) -> tuple[PolicyState, Decision]:
    """Decide whether this is new, and remember that it was said. A scan is only half a decision."""
    if decision.action == "scan":
        return state, replace(decision, news=False)
    news = True
    if decision.action in ("nothing", "cannot_help"):
        lately = at - state.said_at.get(decision.key, -1e18) < SAY_AGAIN_S
        news = decision.key != state.said and not lately
    if news:
        state = replace(state, said_at={**state.said_at, decision.key: at})
    return replace(state, said=decision.key), replace(decision, news=news)


def _story(
    resource: ResourceType, inputs: Inputs, settings: Settings, held: Pressure, going: Trend | None
) -> str:
    level, word = inputs.head.level(resource), "hard pressure, " if held.hard else ""
    text = f"{word}{resource.value} {_percent(level)} (threshold {_percent(settings.threshold(resource))})"
    lasts = inputs.at - held.since
    if lasts >= 1:
        text += f" for {format_duration(lasts)}"
    if resource is ResourceType.MEMORY and inputs.head.memory_full >= 1:
        text += f", stalled {inputs.head.memory_full:.0f}% of the time"
    ahead = forecast_text(resource, settings.limit(resource), _eta(resource, inputs, settings, going))
    return f"{text}, {ahead}" if ahead else text


def _eta(resource: ResourceType, inputs: Inputs, settings: Settings, going: Trend | None) -> float | None:
    return reach_s(inputs.head.level(resource), settings.limit(resource), going)


def forecasts(state: PolicyState, inputs: Inputs, settings: Settings) -> dict[str, str]:
    """For the screen: `memory reaches 90% in 3m 40s` by resource, where it does."""
    found = {}
    for resource in RESOURCES:
        slow = trend_of(inputs, resource, FORECAST_WINDOW_S, state.last_move_at)
        going = nearest(inputs, resource, slow, state.last_move_at)
        text = forecast_text(resource, settings.limit(resource), _eta(resource, inputs, settings, going))
        if text:
            found[resource.value] = text
    return found


def _figures(
    inputs: Inputs, settings: Settings, trends: Mapping[ResourceType, Trend | None]
) -> dict[str, Any]:
    found: dict[str, Any] = {
        "levels": {r.value: round(inputs.head.level(r), 4) for r in RESOURCES},
        "thresholds": {r.value: settings.threshold(r) for r in RESOURCES},
        "psi": {"memory_some": inputs.head.memory_some, "memory_full": inputs.head.memory_full,
                "cpu_some": inputs.head.cpu_some, "io_some": inputs.head.io_some},
    }  # fmt: skip
    slopes = {r.value: round(going.per_s, 6) for r, going in trends.items() if going is not None}
    return {**found, "slopes_per_s": slopes}


def _total(resource: ResourceType, inputs: Inputs) -> float:
    head = inputs.head
    if resource is ResourceType.CPU:
        return max(head.cpu_cores, 1e-9)
    return float(max(head.memory_bytes if resource is ResourceType.MEMORY else head.gpu_memory_bytes, 1))


def _amount(resource: ResourceType, amount: float) -> str:
    return f"{amount:.1f} cores" if resource is ResourceType.CPU else format_bytes(amount)


def _percent(fraction: float) -> str:
    return f"{fraction * 100:.0f}%"


def printable(text: str) -> str:
    """On one line, and nothing in it that a terminal would obey: a command line is whatever its owner made it."""
    return text if text.isprintable() else "".join(one if one.isprintable() else " " for one in text)


def short(command: str, limit: int = 40) -> str:
    """`/venv/bin/python /home/ann/train.py -n 3` as `python train.py -n 3`."""
    words = printable(command).split(" ")
    text = " ".join([*(word.rpartition("/")[2] or word for word in words[:2]), *words[2:]])
    return text if len(text) <= limit else text[: limit - 1] + "…"
