"""Gathers from the nodes what a scan or a plan needs, and lets the pure planner decide."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from distributed_grid.agent.inspect.candidates import TreeSample
from distributed_grid.agent.inspect.facts import TreeFacts
from distributed_grid.agent.inspect.target import TargetFacts
from distributed_grid.core.errors import GridError, NotFound, Refused, UsageError
from distributed_grid.core.resources import GB
from distributed_grid.daemon.mover import AWAY, OVER, MoveRequest
from distributed_grid.daemon.staging import FileStaging
from distributed_grid.orchestration.offloading.classifier import classify
from distributed_grid.orchestration.offloading.detector import detect, why_not
from distributed_grid.orchestration.offloading.matcher import NodeState, Target, check_target, match
from distributed_grid.orchestration.offloading.model import (
    Candidate,
    Finding,
    move_id,
    need_of,
    parse_process,
    process_name,
)
from distributed_grid.orchestration.offloading.planner import PastMove, Plan, make_plan
from distributed_grid.orchestration.offloading.preflight import MoveOptions, used_directories, used_paths
from distributed_grid.orchestration.offloading.relaunch import relaunch_task, save_signal
from distributed_grid.orchestration.offloading.staging import Agreement
from distributed_grid.store.moves import MoveRow

if TYPE_CHECKING:
    from distributed_grid.daemon.control import ControlPlane

PAST_MOVES = 50
STAGE_LARGE = "--stage-large copies them, --leave-large leaves them here"


class Planner:
    def __init__(self, plane: ControlPlane, files: FileStaging) -> None:
        self._plane = plane
        self._files = files

    @property
    def _head(self) -> str:
        return self._plane.config.head.name

    # -- scan -----------------------------------------------------------------------------------------------------

    async def scan(self, uid: int, node: str | None, everything: bool) -> list[dict[str, Any]]:
        if node is not None:
            links = [self._plane.links.get(node)]
            await links[0].client()  # a node that was named must answer
        else:
            links = [link for link in self._plane.links if link.state.online]
        found = await asyncio.gather(*(self._scan_node(link.node, uid, everything) for link in links))
        return [row for rows in found for row in rows]

    async def _scan_node(self, node: str, uid: int, everything: bool) -> list[dict[str, Any]]:
        amounts = self._plane.config.offload.detect
        least = {} if everything else {
            "min_cpu_cores": amounts.min_cpu_cores * 0.9, "min_memory_bytes": int(amounts.min_memory_gb * GB),
            "min_gpu_memory_bytes": int(amounts.min_gpu_memory_gb * GB), "min_age_s": amounts.min_age_seconds,
        }  # fmt: skip
        trees = [TreeSample.from_wire(one) for one in await self._plane.links.get(node).call("candidates", **least)]
        offered, passed = detect(node, trees, self._plane.config.offload, asked_by=uid)
        rows = [self._row(one, "") for one in offered]
        if everything:
            for one in passed:
                rows.append(self._row(Candidate(node, one.tree, classify(one.tree), need_of(one.tree)), one.reason))
        return rows

    def _row(self, one: Candidate, reason: str) -> dict[str, Any]:
        told = one.to_wire(self._head)
        return {**told, "host_pid": one.tree.pid, "movable": not reason, "why_not": reason}

    # -- plan -----------------------------------------------------------------------------------------------------

    async def plan(
        self, uid: int, pid: int | str, target_node: str | None, asked: dict[str, Any]
    ) -> tuple[dict[str, Any], MoveRequest | None]:
        """The plan as plain data, and the request for the mover; None where the plan refuses."""
        node, number = parse_process(str(pid), self._head)
        source = self._plane.links.get(node)
        going_home = bool(asked.get("return"))
        tree = await self._tree(node, number)
        self.check_not_moving(node, tree.pid, tree.start_ticks)
        facts = TreeFacts.from_wire(await source.call("inspect", pid=number, start_ticks=tree.start_ticks))
        facts = replace(facts, moved=bool(self._current_move(node, tree.pid, tree.start_ticks)))
        need, kind = need_of(tree), classify(tree)
        config = self._plane.config
        error = why_not(
            facts, node=node, asked_by=uid, kind=kind, force=bool(asked.get("force")), never=config.offload.never,
            head=self._head, head_only=config.resource_sharing.head_only_mode, by_hand=not asked.get("automatic"),
            agent_uid=int(source.state.agent.get("uid", 0)),
        )  # fmt: skip
        if error is not None:
            raise error
        states = self._node_states(node)
        if target_node is not None:
            target = check_target(target_node, need, states, source=node, home=going_home)
        else:
            target = match(need, states, source=node).best()
        options = await self._options(facts, node, target.node, asked)
        paths = used_paths(facts)
        here, there = await asyncio.gather(
            source.call("target_facts", paths=paths, uid=tree.uid, user=tree.user),
            self._plane.links.get(target.node).call("target_facts", paths=paths, uid=tree.uid, user=tree.user),
        )
        link = self._plane.journal.links.get(node, target.node)
        plan = make_plan(
            facts, node=node, need=need, target=target, source_facts=TargetFacts.from_wire(here),
            target_facts=TargetFacts.from_wire(there), options=options, classification=kind, past=self._past(),
            bandwidth_bytes_s=link.bytes_per_s if link else None,
        )  # fmt: skip
        told = self._told(plan, target)
        if plan.strategy is None:
            return told, None
        staging, notices, refusal = await self._files.plan(
            facts, plan.strategy, node, plan.files, options.shared_dirs,
            lambda directories: self._shared(directories, node, target.node), options.staging_limit_bytes,
            options.stage_large,
        )  # fmt: skip
        told["notices"] += notices
        if refusal:
            asks = Finding("staging-limit", "asks", refusal, STAGE_LARGE, "both", "--stage-large").to_wire()
            told["blocking"].append(f"{refusal} ({STAGE_LARGE})")
            return {**told, "strategy": "refuse", "why": refusal, "cannot_carry": [*told["cannot_carry"], asks]}, None
        return told, await self._request(plan, facts, asked, options, staging)

    async def _tree(self, node: str, pid: int) -> TreeSample:
        link = self._plane.links.get(node)
        found = await link.call("candidates", pid=pid)
        if not found:
            with contextlib.suppress(NotFound):
                facts = TreeFacts.from_wire(await link.call("inspect", pid=pid))
                if facts.root.origin == "kernel" and (error := why_not(facts, node=node, asked_by=0)):
                    raise error
            raise NotFound(
                f"there is no process {pid} on {node}", hint="ps aux | grep NAME, or grid offload scan -a",
                code="process-not-found",
            )  # fmt: skip
        return TreeSample.from_wire(found[0])

    def check_not_moving(self, node: str, pid: int, start_ticks: int) -> None:
        """Whatever was committed once is a stub now, with the pid and the start time of the program that it was."""
        for row in self._plane.journal.moves.list(node=node, pid=pid, start_ticks=start_ticks):
            if row.state in AWAY:
                hint = f"grid offload return {row.id}"
                raise Refused(f"PID {pid} was moved to {row.target}", hint=hint, code="already-moved")
            if row.state not in OVER or (row.state == "ABORTED" and not row.data.get("released")):
                text = f"PID {pid} is being moved already"
                raise Refused(text, hint="grid offload status", code="already-moving")
            if row.state != "ABORTED":
                raise self._moved_on(row)

    def _moved_on(self, row: MoveRow) -> Refused:
        """Its program is known by another pid by now, which is what can be moved."""
        for now in self._plane.journal.moves.list():
            home, running = now.data.get("home") or {}, now.data.get("running") or {}
            if home.get("move") == row.id and now.state in AWAY and running.get("pid"):
                who = process_name(now.target, running["pid"], self._head)
                text = f"PID {row.pid} was moved, and its program is process {who} now"
                return Refused(text, hint=f"grid offload execute {who}", code="already-moved")
        text = f"PID {row.pid} was moved to {row.target}, and on from there"
        return Refused(text, hint="grid offload status", code="already-moved")

    def _node_states(self, source: str) -> list[NodeState]:
        plane = self._plane
        shots = plane.collector.get_all_latest_snapshots()
        states = []
        boosted = plane.lending.boosted_nodes()
        arriving = [row.target for row in plane.journal.moves.list() if row.state not in (*OVER, *AWAY)]
        for node in plane.config.nodes:
            link = plane.links.get(node.name) if node.name in plane.links.names() else None
            rate = plane.journal.links.get(source, node.name)
            lent = plane.lending.taken(node.name)
            states.append(
                NodeState(
                    node.name, node.is_head, bool(link and link.state.online), shots.get(node.name),
                    lent_cpu_cores=lent["cpu"], lent_memory_bytes=lent["memory_bytes"],
                    bandwidth_bytes_s=rate.bytes_per_s if rate else None, arriving=arriving.count(node.name),
                    boosted=node.name in boosted,
                    reason=link.state.reason if link else "not started",
                )
            )  # fmt: skip
        return states

    async def _options(self, facts: TreeFacts, source: str, target: str, asked: dict[str, Any]) -> MoveOptions:
        config = self._plane.config.offload
        capture = asked.get("capture_state", True)
        strategy = asked.get("strategy") or config.strategy
        if not capture or asked.get("runtime_env"):
            word = "--runtime-env" if asked.get("runtime_env") else "--capture-state=False"
            if asked.get("strategy") == "live":
                text = f"{word} starts the program again from its beginning, so it cannot be moved live"
                raise UsageError(text, hint=f"leave out {word}, or --strategy live", code="live-or-relaunch")
            strategy = "relaunch"
        # It loses what is in memory, so it is done only where it was asked for or the configuration allows it.
        relaunch = strategy == "relaunch" or (config.auto_relaunch and not asked.get("return"))
        return MoveOptions(
            strategy=strategy, relaunch_allowed=relaunch, tcp_close=bool(asked.get("tcp_close")),
            cut_pipes=bool(asked.get("cut_pipes")), feed=not facts.under_shim or self._is_fed(source, facts),
            capture_state=capture, stage_large=asked.get("stage_large"),
            staging_limit_bytes=int(config.staging_limit_gb * GB),
            shared_dirs=await self._shared(used_directories(facts), source, target),
        )  # fmt: skip

    async def _shared(self, directories: list[str], source: str, target: str) -> tuple[str, ...]:
        """Those that both nodes see, proven by a file that one writes and the other reads."""
        if self._plane.config.embedded:
            return ("/",)  # one kernel, one file system

        async def proven(directory: str) -> bool:
            try:
                nonce = await self._plane.links.get(source).call("write_nonce", directory=directory)
            except GridError:
                return False
            try:
                read = await self._plane.links.get(target).call("read_nonce", path=nonce["path"])
                return bool(read == nonce["text"])
            finally:
                with contextlib.suppress(GridError):
                    await self._plane.links.get(source).call("remove_nonce", path=nonce["path"])

        answers = await asyncio.gather(*(proven(one) for one in directories))
        return tuple(one for one, yes in zip(directories, answers, strict=True) if yes)

    def _past(self) -> list[PastMove]:
        found = []
        for row in self._plane.journal.moves.list(limit=PAST_MOVES):
            pause, figures = row.data.get("pause_s"), row.data.get("figures") or {}
            if pause:
                strategy = str(row.data.get("strategy"))
                found.append(PastMove(strategy, int(figures.get("bytes") or 0), float(pause), row.target))
        return found

    def _told(self, plan: Plan, target: Target) -> dict[str, Any]:
        told = plan.to_wire(self._head)
        told["blocking"] = [f"{one.text}{' (' + one.help + ')' if one.help else ''}" for one in plan.obstacles]
        told["notices"] = [one.text for one in plan.notices]
        told["target_score"] = round(target.score, 3)
        return told

    @staticmethod
    def refusal(plan: dict[str, Any]) -> Refused:
        helps = [one["help"] for one in plan["cannot_carry"] if one.get("help")]
        return Refused(
            f"process {plan['pid']} cannot be moved to {plan['target']}", cause=plan["why"],
            hint=helps[0] if helps else "", code="cannot-carry",
        )  # fmt: skip

    # -- the request ----------------------------------------------------------------------------------------------

    async def _request(
        self, plan: Plan, facts: TreeFacts, asked: dict[str, Any], options: MoveOptions, staging: Agreement
    ) -> MoveRequest:
        encrypt = self._plane.config.offload.encrypt
        common = {"encrypt": encrypt, "strict": bool(asked.get("strict"))}
        roots = sorted({str(path).rpartition("/")[0] or "/" for path in plan.files} | {facts.root.cwd})
        request = MoveRequest(
            move_id=self._new_id(plan.pid), node=plan.node, pid=plan.pid, start_ticks=plan.start_ticks,
            target=plan.target, uid=plan.uid, strategy=str(plan.strategy), command=" ".join(plan.argv),
            options={"source": {**common, **plan.mover}, "target": {**common, "file_roots": roots}},
            facts={
                "bytes_total": plan.bytes, "files": list(plan.files),
                "input": plan.strategy == "live" and bool(plan.mover["feed"]),
            },
        )  # fmt: skip
        if staging:
            request.facts |= {"staging": staging.to_wire(), "roots": list(staging.home.trees)}
            request.options["source"]["files"] = list(staging.frozen)
        before = self._current_move(plan.node, plan.pid, plan.start_ticks)
        if before:
            request.facts["from_task"] = before
        if plan.strategy == "relaunch":
            request.spec = await self._relaunch_spec(plan, facts, asked, options)
            config = self._plane.config.offload
            request.options["save"] = {"number": save_signal(config.save_signal), "grace_s": config.grace_seconds}
        return request

    def _new_id(self, pid: int) -> str:
        now = time.time()
        while self._plane.journal.moves.find(found := move_id(now, pid)):
            now += 1
        return found

    def _current_move(self, node: str, pid: int, start_ticks: int) -> str:
        """The move that brought the process to where it is, for a second hop or the way home."""
        for row in self._plane.journal.moves.list(target=node, state="CLEANED"):
            running = row.data.get("running") or {}
            if running.get("pid") == pid and running.get("start_ticks") == start_ticks:
                return row.id
        return ""

    def _is_fed(self, node: str, facts: TreeFacts) -> bool:
        before = self._current_move(node, facts.root.pid, facts.root.start_ticks)
        return bool(before and self._plane.journal.moves.get(before).data.get("input"))

    async def _relaunch_spec(
        self, plan: Plan, facts: TreeFacts, asked: dict[str, Any], options: MoveOptions
    ) -> dict[str, Any]:
        root = facts.root
        env: dict[str, str] = {}
        if options.capture_state:
            env = await self._plane.links.get(plan.node).call(
                "environment", pid=plan.pid, start_ticks=plan.start_ticks
            )
        as_root = self._plane.links.get(plan.target).state.agent.get("uid") == 0
        return relaunch_task(
            root, env, asked.get("runtime_env") or {}, user=plan.user, capture=options.capture_state, limits=as_root
        )
