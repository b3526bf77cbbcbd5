"""Automatic offload in the daemon: gathers signals each check, lets the policy decide, and carries the decision out."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from distributed_grid.core.clock import Clock, SystemClock
from distributed_grid.core.errors import GridError, Refused, TimedOut, Unavailable
from distributed_grid.core.resources import ResourceType
from distributed_grid.daemon.auto_flight import ARRIVED, UNDER_WAY, Flight
from distributed_grid.daemon.auto_record import Records
from distributed_grid.daemon.auto_state import StateFile
from distributed_grid.daemon.auto_voice import Voice
from distributed_grid.daemon.auto_world import OwnMover, World, gather, world_of
from distributed_grid.orchestration.auto_offload.faults import Fault, fault_in, fault_of
from distributed_grid.orchestration.auto_offload.policy import Decision, decide, forecasts, say
from distributed_grid.orchestration.auto_offload.ranking import Ranked, busy_jobs
from distributed_grid.orchestration.auto_offload.signals import Candidate, Inputs, Mover, Settings
from distributed_grid.orchestration.auto_offload.state import (
    CALLED_OFF,
    RETURNED_S,
    PolicyState,
    leave_alone,
    move_ended,
    refused,
)
from distributed_grid.wire.rpc import CallContext, method

if TYPE_CHECKING:
    from distributed_grid.daemon.control import ControlPlane

log = logging.getLogger(__name__)

#: Refusals by the planner that one check may run into before it waits for the next.
TRIES = 5
SCAN_LIMIT_S = 30.0
#: Without pressure nobody asks for processes; a replay with other thresholds must know them all the same.
RECORD_SCAN_S = 60.0
RECORD_SCAN_LIMIT_S = 5.0
LEAST_REST_S = 0.05
#: A broken move is told at once, a line that is down only after some seconds of silence.
LINK_LOOKS = 8
#: How a scan's own filters begin to say why they pass something over.
FILTERED = ("it uses ", "it has run for ")
IN_DOUBT = "IN_DOUBT"
_KEY = "auto_offload"


class AutoOffloadService:
    def __init__(self, world: World, mover: Mover, *, clock: Clock | None = None, look_again_s: float = 1.0) -> None:
        self._world = world
        self._mover = mover
        self._clock = clock or SystemClock()
        self._look_again_s = look_again_s
        kept = world.store.get(_KEY, {}) or {}
        self._state = PolicyState.from_wire(kept.get("state", {}))
        self._dry_run = bool(kept.get("dry_run", False))
        self._seen_returns: set[str] = set(kept.get("returns", []))
        self._records = Records()
        self._scanned_at = float("-inf")
        self._file = StateFile(world.state_path)
        self._voice = Voice(world, self._file, self._clock)
        self._decision: Decision | None = None
        self._inputs: Inputs | None = None
        self._flying: asyncio.Task[None] | None = None
        #: Outlives its task where the daemon is stopped in between.
        self._flight = Flight.from_wire(kept.get("flight"))
        self._poke = asyncio.Event()
        self._moves: dict[str, Any] = {}

    @classmethod
    def of_plane(cls, plane: ControlPlane, offload: Any) -> AutoOffloadService:
        return cls(world_of(plane), OwnMover(offload))

    # -- the loop -------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        try:
            while True:
                began = self._clock.monotonic()
                self._poke.clear()
                try:
                    await self.check()
                except GridError as error:
                    log.warning("auto-offload: %s", error.message)
                except Exception:  # the daemon's loop: one bad check must not end all the others
                    log.exception("auto-offload: a check failed")
                await self._rest(began)
        finally:
            await self.close()

    async def _rest(self, began: float) -> None:
        """Until the next check is due, by the interval as it is configured now."""
        await asyncio.sleep(LEAST_REST_S)  # also after a check that took longer than the interval
        while (left := began + self._settings().check_interval_s - self._clock.monotonic()) > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left, 1.0)):
                    await self._poke.wait()
                return

    def poke(self) -> None:
        """Check now."""
        self._poke.set()

    async def close(self) -> None:
        """What becomes of a move in flight is the offload service's to say; it is looked up after the restart."""
        if self._flying is not None:
            self._flying.cancel()
            await asyncio.gather(self._flying, return_exceptions=True)
        await self._voice.close()

    def _settings(self) -> Settings:
        return Settings.of(self._world.config())

    async def check(self) -> Decision | None:
        """One look at the head, and what follows from it; None while there are no figures of it."""
        settings = self._settings()
        self._moves = await self._mover.offload_status(limit=50, brief=True)
        self._follow_flight(settings)
        inputs = gather(self._world, self._clock.time(), self._busy())
        if inputs is None:
            self._write_state(settings)
            return None
        self._note_returns(inputs.head.node)
        self._voice.watch_memory(inputs)
        decision = await self._decide(inputs, settings)
        self._write_state(settings)
        return decision

    async def _decide(self, inputs: Inputs, settings: Settings) -> Decision:
        self._state, decision = decide(self._state, inputs, settings)
        for change in decision.changes:
            self._voice.tell_change(change, inputs.head.node)
        if decision.action == "scan":
            inputs, decision = await self._chosen(inputs, settings, decision)
        elif inputs.at - self._scanned_at >= RECORD_SCAN_S:
            with contextlib.suppress(GridError):
                inputs = await self._looked(inputs, RECORD_SCAN_LIMIT_S)
        self._decision, self._inputs = decision, inputs
        self._records.add(inputs)
        if decision.news:
            self._voice.tell(decision, inputs.head.node, dry_run=self._dry_run)
        if decision.move is not None and not self._dry_run:
            self._start(decision.move, decision, settings)
        elif decision.move is not None:
            # Said, not done: as if it had been, or the same would be said at every check.
            best = decision.move
            self._state = leave_alone(self._state, inputs.at, best.candidate.key, "named in a dry run", 600.0)
        self._keep()
        return decision

    async def _chosen(self, inputs: Inputs, settings: Settings, scan: Decision) -> tuple[Inputs, Decision]:
        """Look at the processes and decide with them."""
        try:
            inputs = await self._looked(inputs, SCAN_LIMIT_S)
        except GridError as error:
            text = f"{scan.reason}, and automatic offload can't help: the processes can't be seen: {_said(error)}"
            blind = replace(scan, action="cannot_help", key="blind", reason=text, remedies=("`grid doctor`",))
            self._state, decision = say(self._state, blind, inputs.at)
            return inputs, decision
        before = self._state.batch_left
        self._state, decision = await self._agreed(self._state, inputs, settings)
        if decision.move is not None and (why := await self._overtaken(settings)):
            dropped = replace(decision, action="nothing", key="overtaken", reason=why, move=None, batch=())
            self._state, decision = say(replace(self._state, batch_left=before), dropped, inputs.at)
        return inputs, decision

    async def _agreed(
        self, state: PolicyState, inputs: Inputs, settings: Settings
    ) -> tuple[PolicyState, Decision]:
        """The best move that the planner agrees to; what it refuses is left out for a while."""
        for _ in range(TRIES):
            before = state.batch_left
            state, decision = decide(state, inputs, settings)
            if decision.move is None:
                return state, decision
            why, fault = await self._refusal(decision.move)
            if not why:
                return state, decision
            key, target = decision.move.candidate.key, decision.move.target.node
            state = refused(replace(state, batch_left=before), self._clock.time(), key, target, why, fault)
        text = f"{TRIES} moves were refused, the last because: {why}; looking further at the next check"
        none = replace(decision, action="nothing", key="refused", reason=text, move=None, batch=())
        return say(state, none, inputs.at)

    async def _overtaken(self, settings: Settings) -> str:
        """Looking and planning take their time; what a person did meanwhile counts."""
        self._moves = await self._mover.offload_status(limit=50, brief=True)
        if busy := self._busy():
            return f"one move at a time: {busy}"
        if self._settings() == settings:
            return ""
        self.poke()
        return "the configuration was changed meanwhile: deciding anew"

    # -- looking --------------------------------------------------------------------------------------------------

    def _busy(self) -> str:
        if self._flight is not None:
            return str(self._flight)
        for move in self._moves.get("active", []):
            if move["state"] in UNDER_WAY:
                return f"PID {move['pid']} to {move['target']}"
        return ""

    async def _looked(self, inputs: Inputs, limit_s: float) -> Inputs:
        """With the head's processes and, where cores are short, how many jobs are busy on each node."""
        self._scanned_at = inputs.at
        rows = await self._scan(inputs.head.node, limit_s)
        found = []
        for row in rows:
            # What a scan passes over only for its size or its age is the policy's to judge.
            small = str(row.get("why_not", "")).startswith(FILTERED)
            found.append(Candidate.of({**row, "movable": True, "why_not": ""} if small else row))
        crowds = {inputs.head.node: busy_jobs(rows)}
        if ResourceType.CPU.value in self._state.pressed:
            names = [worker.node for worker in inputs.workers if worker.online]
            looks = await asyncio.gather(*(self._scan(name, limit_s) for name in names), return_exceptions=True)
            # A worker that does not answer is judged by its figures alone.
            crowds |= {n: busy_jobs(look) for n, look in zip(names, looks, strict=True) if isinstance(look, list)}
        return replace(inputs, candidates=tuple(found), crowds=crowds)

    async def _scan(self, node: str, limit_s: float) -> list[dict[str, Any]]:
        try:
            async with asyncio.timeout(limit_s):
                return await self._mover.offload_scan(node=node, everything=True)
        except TimeoutError:
            raise TimedOut(f"the processes of {node} were not listed within {limit_s:g} s") from None

    def _note_returns(self, head: str) -> None:
        """What a person brought home stays there for a while; it has a new pid, so by its command line."""
        for move in [*self._moves.get("active", []), *self._moves.get("finished", [])]:
            over = move["state"] not in (*UNDER_WAY, IN_DOUBT)
            if move["target"] == head and move["id"] not in self._seen_returns and over:
                self._seen_returns.add(move["id"])
                why = "it was brought back"
                self._state = leave_alone(self._state, self._clock.time(), move["command"], why, RETURNED_S)

    # -- moving ---------------------------------------------------------------------------------------------------

    def _options(self) -> dict[str, Any]:
        """What of a process would be lost is nobody's to give up but its owner's: live, unless that is allowed."""
        return {"automatic": True, **({} if self._world.config().offload.auto_relaunch else {"strategy": "live"})}

    async def _refusal(self, move: Ranked) -> tuple[str, Fault]:
        """Why the planner does not agree, and whose fault that is; empty if it does."""
        try:
            plan = await self._mover.offload_plan(
                pid=move.candidate.pid, target_node=move.target.node, options=self._options()
            )
        except GridError as error:
            return _said(error), fault_of(error)
        if plan.get("strategy") == "relaunch" and not self._world.config().offload.auto_relaunch:
            return "it could only be started anew, and offload.auto_relaunch is off", "process"
        if plan.get("strategy") in ("live", "relaunch"):
            return "", "unclear"
        why = str(next(iter(plan.get("blocking") or []), "") or plan.get("why") or "it cannot be moved")
        return why, fault_in(plan)

    def _start(self, move: Ranked, decision: Decision, settings: Settings) -> None:
        one = move.candidate
        self._flight = flight = Flight(one.key, one.pid, one.node, move.target.node, self._clock.time())
        self._keep()  # before it is begun: should it take the daemon down with it, that must be known
        self._flying = asyncio.create_task(self._carry(flight, decision.reason, settings), name="auto-offload-move")

    async def _carry(self, flight: Flight, reason: str, settings: Settings) -> None:
        failed, fault = "", "unclear"  # type: tuple[str, Fault]
        try:
            async with contextlib.aclosing(
                self._mover.offload_execute(  # type: ignore[type-var]
                    pid=flight.pid, target_node=flight.target, options=self._options(), automatic=True, reason=reason
                )
            ) as steps:
                async for step in steps:
                    done = step.get("done")
                    if done and done.get("state") in ("ABORTED", "LOST"):
                        failed = str(done.get("reason") or done["state"].lower())
        except GridError as error:
            failed, fault = _said(error), await self._fault(error, flight.target)
        except Exception as error:  # a fault of ours in the mover counts as a failed move, not as the loop's end
            log.exception("auto-offload: the move failed")
            failed = f"{type(error).__name__}: {error}"
        self._ended(flight, settings, failed, fault)

    async def _fault(self, error: GridError, target: str) -> Fault:
        """The head hears of a broken connection before its line to the worker is known to be down: look for a while."""
        fault = fault_of(error)
        for _ in range(LINK_LOOKS if fault == "unclear" else 0):
            if not self._world.link(target)[0]:
                return "target"
            await asyncio.sleep(self._look_again_s)
        return fault

    def _follow_flight(self, settings: Settings) -> None:
        """What its own task does not live to see: a move that is in doubt, or that a restart came between."""
        flight = self._flight
        if flight is None:
            return
        row = flight.find(self._moves)
        state, carried = row.get("state", ""), self._flying is not None and not self._flying.done()
        if state == IN_DOUBT:
            if self._flying is not None:
                self._flying.cancel()  # only the waiting for it: the offload service carries it on
            text = f"{flight.target} does not say whether it runs; `grid offload resolve {row['id']} --here|--there`"
            self._ended(flight, settings, text, "unclear")
        elif carried or state in UNDER_WAY:
            return
        elif state in ARRIVED:
            self._ended(flight, settings)
        else:
            self._ended(flight, settings, str(row.get("reason") or "the daemon was started anew"), "process")

    def _ended(self, flight: Flight, settings: Settings, failed: str = "", fault: Fault = "unclear") -> None:
        self._flight = None
        self._state = move_ended(
            self._state, self._clock.time(), settings, flight.key, flight.target, failed=failed, fault=fault
        )
        told = {"pid": flight.pid, "target": flight.target}
        text = f"Automatic offload of PID {flight.pid} to {flight.target}"
        if not failed:
            self._voice.publish("auto.moved", f"{text} is done", flight.node, **told)
        elif fault == "user":
            self._voice.publish("auto.failed", f"{text}: {CALLED_OFF}, and it stays for a while", flight.node, **told)
        else:
            self._voice.publish("auto.failed", f"{text} failed: {failed}", flight.node, **told)
            self._voice.alert("auto.failed", f"{text} failed: {failed}", flight.node, told)
        self._keep()

    def tells_of(self, node: str, resource: ResourceType) -> bool:
        """Whether this pressure was told here, and its end will be."""
        return node == self._world.config().head.name and resource.value in self._state.pressed

    # -- keeping --------------------------------------------------------------------------------------------------

    def _keep(self) -> None:
        kept = {
            "state": self._state.to_wire(), "dry_run": self._dry_run, "returns": sorted(self._seen_returns)[-500:],
            "flight": self._flight.to_wire() if self._flight else None,
        }  # fmt: skip
        if kept != self._world.store.get(_KEY):
            self._world.store.put(_KEY, kept)

    def _write_state(self, settings: Settings) -> None:
        self._file.write(self._status(settings), self._moves.get("active", []), self._moves.get("finished", []))

    def _status(self, settings: Settings) -> dict[str, Any]:
        config = self._world.config()
        return {
            "enabled": settings.enabled, "dry_run": self._dry_run, "head": config.head.name,
            "head_only_mode": config.resource_sharing.head_only_mode, "thresholds": dict(settings.thresholds),
            "check_interval_seconds": settings.check_interval_s, "cooldown_seconds": settings.cooldown_s,
            "config_path": str(config.path) if config.path else None,
            "pressure": sorted(self._state.pressed),
            "hard": sorted(name for name, held in self._state.pressed.items() if held.hard),
        }  # fmt: skip

    # -- calls ----------------------------------------------------------------------------------------------------

    @method
    async def auto_status(self, context: CallContext) -> dict[str, Any]:
        """What is set, what is seen, what was decided last."""
        now = self._clock.time()
        settings, decision, inputs = self._settings(), self._decision, self._inputs
        left = [(key, one) for key, one in self._state.left_alone.items() if one.until > now]
        levels = {r: round(inputs.head.level(ResourceType(r)), 4) for r in settings.thresholds} if inputs else {}
        return {
            **self._status(settings), "busy": self._busy(), "at": now, "levels": levels,
            "decision": {"action": decision.action, "reason": decision.reason} if decision else None,
            "forecasts": forecasts(self._state, inputs, settings) if inputs else {},
            "cooldown_left_s": max(0.0, round(self._state.cooldown_until - now, 1)),
            "left_alone": {key: {"why": one.why, "left_s": round(one.until - now)} for key, one in left},
        }  # fmt: skip

    @method
    async def auto_apply(self, context: CallContext, *, dry_run: bool) -> dict[str, Any]:
        """The configuration was changed: look at once."""
        if context.uid not in (0, os.geteuid()):
            raise Refused("only the daemon's owner may change automatic offload", code="not-owner")
        self._dry_run = dry_run
        self._keep()
        self.poke()
        self._write_state(self._settings())
        return self._status(self._settings())

    @method
    async def auto_preview(self, context: CallContext) -> dict[str, Any]:
        """What would be decided now, if it were on; changes nothing."""
        inputs = gather(self._world, self._clock.time(), self._busy())
        if inputs is None:
            raise Unavailable("there are no figures of the head", hint="grid cluster start", code="no-cluster")
        inputs = await self._looked(inputs, SCAN_LIMIT_S)
        _state, decision = await self._agreed(self._state, inputs, replace(self._settings(), enabled=True))
        move = decision.move
        return {
            "action": decision.action, "reason": decision.reason, "remedies": list(decision.remedies),
            "figures": dict(decision.figures), "pid": move.candidate.pid if move else None,
            "target": move.target.node if move else None, "candidates": len(inputs.candidates or ()),
        }  # fmt: skip

    @method
    async def auto_record(self, context: CallContext) -> AsyncIterator[dict[str, Any]]:
        """The last hour's checks, oldest first, for a replay."""
        for record in self._records:
            yield record


def _said(error: GridError) -> str:
    return f"{error.message}: {error.cause}" if error.cause else error.message
