"""How automatic offload tells: events with their figures, the state file's history, alerts to people."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from distributed_grid.core.clock import Clock
from distributed_grid.core.resources import ResourceType
from distributed_grid.daemon.auto_state import StateFile
from distributed_grid.daemon.auto_world import World
from distributed_grid.orchestration.auto_offload.alerts import send_alert
from distributed_grid.orchestration.auto_offload.policy import Decision
from distributed_grid.orchestration.auto_offload.pressure import Change
from distributed_grid.orchestration.auto_offload.signals import Inputs

log = logging.getLogger(__name__)

ALERT_GAP = 0.05


class Voice:
    def __init__(self, world: World, file: StateFile, clock: Clock) -> None:
        self._world = world
        self._file = file
        self._clock = clock
        self._alerting: set[asyncio.Task[Any]] = set()
        self._alerted = False

    async def close(self) -> None:
        for task in list(self._alerting):
            task.cancel()
        await asyncio.gather(*self._alerting, return_exceptions=True)

    def publish(self, kind: str, text: str, node: str, **data: Any) -> None:
        self._world.events.publish(kind, text, node=node, **data)
        self._file.note(self._clock.time(), kind, text)

    def tell(self, decision: Decision, head: str, *, dry_run: bool) -> None:
        kind = {"move": "auto.move", "cannot_help": "auto.cannot_help"}.get(decision.action, "auto.nothing")
        text = decision.reason[:1].upper() + decision.reason[1:]
        if decision.move is not None and dry_run:
            text = f"Dry run, nothing is moved: {decision.reason}"
        if decision.remedies:
            text += ". What would help: " + "; ".join(decision.remedies)
        self.publish(kind, text, head, **decision.figures)
        if decision.action == "cannot_help":
            self.alert(kind, text, head, dict(decision.figures))

    def tell_change(self, change: Change, head: str) -> None:
        """The collector tells of its own levels; ours may be others, and nothing is to be said twice."""
        resource = change.resource
        known = any(one.resource is resource and one.node == head for one in self._world.collector.active_pressure())
        word = resource.value.upper() if resource is not ResourceType.MEMORY else "Memory"
        level = f"({change.level * 100:.0f}%)"
        if change.cleared:
            if not known:
                self.publish("pressure.cleared", f"{word} pressure cleared {level}", head, resource=resource.value)
        elif change.hard:
            self.publish("pressure.hard", f"Hard {word.lower()} pressure {level}", head, resource=resource.value)
        elif not known:
            self.publish("pressure.high", f"{word} pressure detected {level}", head, resource=resource.value)

    def watch_memory(self, inputs: Inputs) -> None:
        """Once when the head's memory goes above `alerts.memory`, again only after it was well below."""
        limit, level = self._world.config().alerts.memory, inputs.head.memory
        if level > limit and not self._alerted:
            self._alerted = True
            text = f"Memory of {inputs.head.node} is at {level * 100:.0f}%, above {limit * 100:.0f}%"
            self.publish("alert.memory", text, inputs.head.node, level=round(level, 4), limit=limit)
            self.alert("alert.memory", text, inputs.head.node, {"level": round(level, 4), "limit": limit})
        elif level < limit - ALERT_GAP:
            self._alerted = False

    def alert(self, kind: str, text: str, node: str, figures: dict[str, Any]) -> None:
        alerts = self._world.config().alerts
        log.warning("%s [%s]: %s", kind, node, text)
        if not alerts.webhook and not alerts.command:
            return
        alert = {"kind": kind, "text": text, "node": node, "at": self._clock.time(), "figures": figures}
        task = asyncio.create_task(send_alert(alert, webhook=alerts.webhook, command=alerts.command))
        self._alerting.add(task)
        task.add_done_callback(self._alerting.discard)
