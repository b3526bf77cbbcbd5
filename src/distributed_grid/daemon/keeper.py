"""Keeps the cluster as it was asked to be: brings it up and down, and brings back what dies meanwhile."""

from __future__ import annotations

import asyncio
import logging
import shlex
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from distributed_grid.cluster.bridge import AGENT_CLASS
from distributed_grid.cluster.bridge_client import BridgeClient
from distributed_grid.cluster.bringup import (
    agent_config,
    bring_down,
    bring_up,
    close_all,
    ensure_token,
    restart_all,
    restart_node,
)  # fmt: skip
from distributed_grid.cluster.files import read_json
from distributed_grid.cluster.launcher import NodeLauncher
from distributed_grid.cluster.plan import make_launchers
from distributed_grid.cluster.ray_node import auth_environment
from distributed_grid.cluster.record import ClusterRecord, NodeRecord
from distributed_grid.config.models import ClusterConfig
from distributed_grid.config.paths import GridPaths
from distributed_grid.core.errors import GridError, Unavailable
from distributed_grid.core.process import ProcessId

log = logging.getLogger(__name__)

CHECK_S = 1.0
STATUS_LIMIT_S = 15.0
AGENT_LIMIT_S = 60.0
#: A node that can't be brought back is tried again after this long, twice as long each time.
FIRST_RETRY_S, LAST_RETRY_S = 2.0, 60.0

Publish = Callable[..., Any]
OnNode = Callable[[str, tuple[str, int] | None], Awaitable[None]]
OnDown = Callable[[], Awaitable[None]]


@dataclass(slots=True)
class Retry:
    """When a node that is away is tried next."""

    due: float = 0.0
    delay_s: float = FIRST_RETRY_S

    def failed(self, now: float) -> None:
        self.due = now + self.delay_s
        self.delay_s = min(LAST_RETRY_S, self.delay_s * 2)


class ClusterKeeper:
    def __init__(self, paths: GridPaths, publish: Publish, on_node: OnNode, on_down: OnDown) -> None:
        self._paths = paths
        self._publish = publish
        self._on_node = on_node
        self._on_down = on_down
        self._record: ClusterRecord | None = None
        self._launchers: dict[str, NodeLauncher] = {}
        self._bridge = BridgeClient(paths.token, paths.home / "bridge.log")
        #: Held while nodes are started or stopped, so that two don't do it at once.
        self._changing = asyncio.Lock()
        self._silent: set[str] = set()
        self._retries: dict[str, Retry] = {}
        self._wake = asyncio.Event()
        #: Starts and stops under way: the loop itself would not keep them.
        self._work: set[asyncio.Future[None]] = set()

    # -- what it is -----------------------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        return self._record.state if self._record else "down"

    @property
    def is_up(self) -> bool:
        return self.state in ("up", "degraded", "starting")

    @property
    def bridge(self) -> BridgeClient:
        return self._bridge

    def describe(self) -> dict[str, Any]:
        record = self._record
        return {
            "state": self.state,
            "cluster_id": record.cluster_id if record else None,
            "embedded": record.embedded if record else None,
            "started": record.started_at if record and self.is_up else None,
            "ray_address": record.gcs_address if record and self.is_up else None,
            "dashboard_url": self._dashboard_url() if record and self.is_up else None,
        }

    def _dashboard_url(self) -> str:
        assert self._record is not None
        return f"http://127.0.0.1:{self._record.head.spec.ports['dashboard']}"

    def nodes(self) -> dict[str, dict[str, Any]]:
        """By name: address, Ray's pids where the node is on this machine, and what went wrong."""
        found: dict[str, dict[str, Any]] = {}
        for node in self._record.nodes.values() if self._record else ():
            pids = self._ray_pids(node)
            found[node.name] = {
                "address": node.address,
                "state": node.state,
                "raylet_pid": pids["raylet"].pid if "raylet" in pids else None,
                "gcs_pid": pids["gcs_server"].pid if "gcs_server" in pids else None,
                "error": _reason(node),
            }
        return found

    def failures(self) -> dict[str, dict[str, Any]]:
        return {node.name: node.error for node in self._record.nodes.values() if node.error} if self._record else {}

    def ray_environment(self) -> dict[str, str]:
        assert self._record is not None
        return {
            "RAY_ADDRESS": self._record.gcs_address,
            **auth_environment(str(self._paths.token)),
            "RAY_API_SERVER_ADDRESS": self._dashboard_url(),
            "RAY_JOB_SUBMISSION_ADDRESS": self._dashboard_url(),
        }

    def _ray_pids(self, node: NodeRecord) -> dict[str, ProcessId]:
        """Ray's own processes of a node on this machine, as recorded when it was started."""
        if node.launcher != "local":
            return {}
        data = read_json(self._paths.node_dir(node.name) / "ray.json") or {}
        return {comm: ProcessId(pid, ticks) for pid, ticks, comm in data.get("processes", [])}

    # -- up and down ----------------------------------------------------------------------------------------------

    async def start(self, config: ClusterConfig) -> AsyncIterator[dict[str, Any]]:
        async for step in self._with_progress(lambda progress: self._start(config, progress)):
            yield step

    async def _start(self, config: ClusterConfig, progress: Callable[[str, str], None]) -> None:
        async with self._changing:
            ensure_token(self._paths)
            self._publish("cluster.starting", f"bringing up {', '.join(node.name for node in config.nodes)}")
            try:
                record = await bring_up(
                    config, self._paths, None, self._bridge, progress, before_end=self._on_down
                )
            except GridError as error:
                self._record = ClusterRecord.load(self._paths.cluster_record)
                self._publish("cluster.failed", _text(error))
                raise
            await self._take(record)
        bad = self.failures()
        self._publish("cluster.started", f"up, without {', '.join(bad)}" if bad else "all nodes are up")

    async def _take(self, record: ClusterRecord) -> None:
        await close_all(self._launchers.values())
        self._record, self._launchers = record, make_launchers(record)
        self._retries.clear()
        self._silent = {node.name for node in record.nodes.values() if node.state != "up"}
        for node in record.nodes.values():
            await self._on_node(node.name, _endpoint(node))

    async def stop(self) -> AsyncIterator[dict[str, Any]]:
        async for step in self._with_progress(self._stop):
            yield step

    async def _stop(self, progress: Callable[[str, str], None]) -> None:
        async with self._changing:
            record = self._record or ClusterRecord.load(self._paths.cluster_record)
            if record is None:
                return
            self._record = record
            was_up = record.state != "down"
            await self._on_down()
            await bring_down(record, self._paths, self._launchers or None, self._bridge, progress)
            bad = self.failures()
            if was_up:
                text = f"down, but {', '.join(bad)} did not answer" if bad else "all nodes are down"
                self._publish("cluster.stopped", text)

    async def _with_progress(
        self, work: Callable[[Callable[[str, str], None]], Awaitable[None]]
    ) -> AsyncIterator[dict[str, Any]]:
        """Steps as they happen. The work goes on when the one who asked hangs up: half a cluster helps nobody."""
        steps: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()

        async def run() -> None:
            try:
                await work(lambda node, step: steps.put_nowait({"node": node, "step": step}))
            finally:
                steps.put_nowait(None)

        task = asyncio.ensure_future(run())
        self._work.add(task)
        task.add_done_callback(self._work_done)
        while (step := await steps.get()) is not None:
            yield step
        await task

    def _work_done(self, task: asyncio.Future[None]) -> None:
        self._work.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.info("a start or stop of the cluster failed: %s", error)  # also where nobody waits for it any more

    async def resume(self) -> None:
        """At the daemon's start: take over what the record says is there."""
        record = await asyncio.to_thread(ClusterRecord.load, self._paths.cluster_record)
        if record is None:
            return
        if record.state in ("down", "stopping"):  # a stop that was cut short is finished by `run`
            self._record = record
            return
        record.settle()
        if record.state == "down":
            record.state = "degraded"
        await self._take(record)

    # -- agents ---------------------------------------------------------------------------------------------------

    async def find_agent(self, node: str) -> tuple[str, int]:
        """Where a node's agent listens; Ray is asked to bring one up if there is none."""
        record = self._record
        if record is None or record.state in ("down", "stopping"):
            raise Unavailable("no cluster is up", hint="grid cluster start", code="no-cluster")
        if self._changing.locked():
            raise Unavailable("nodes are being started", code="busy-starting")
        found = record.node(node)
        if found.error is not None:
            raise GridError.from_wire(found.error)
        if not self._bridge.is_joined:
            await self._bridge.connect(record.gcs_address, record.head.address)
        found.agent = await self._bridge.call(
            "ensure_agent", node=node, ray_node_id=found.ray_node_id, config=agent_config(record, found),
            actor=AGENT_CLASS, limit_s=AGENT_LIMIT_S - 10, timeout_s=AGENT_LIMIT_S,
        )  # fmt: skip
        record.save(self._paths.cluster_record)
        endpoint = _endpoint(found)
        assert endpoint is not None
        return endpoint

    async def joined_bridge(self) -> BridgeClient:
        """The bridge, joined to the cluster that is up; for what Ray is to know of leases."""
        record = self._record
        if record is None or not self.is_up:
            raise Unavailable("no cluster is up", hint="grid cluster start", code="no-cluster")
        if self._changing.locked():
            raise Unavailable("nodes are being started", code="busy-starting")
        if not self._bridge.is_joined:
            await self._bridge.connect(record.gcs_address, record.head.address)
        return self._bridge

    async def show_job(self, job_id: str, node: str, argv: list[str], metadata: dict[str, str]) -> None:
        """Have Ray's dashboard show a job of ours on a node; nobody waits for it."""
        await self._bridge.call(
            "submit_job", dashboard=self._dashboard_url(), submission_id=job_id, entrypoint=shlex.join(argv), node=node,
            metadata=metadata, timeout_s=60.0,
        )  # fmt: skip

    def node_went_silent(self, node: str) -> None:
        self._silent.add(node)
        self._wake.set()

    def node_is_back(self, node: str) -> None:
        self._silent.discard(node)
        self._retries.pop(node, None)

    # -- bringing back --------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Once a second: is Ray's head there; are the nodes that went silent there."""
        while True:
            try:
                async with asyncio.timeout(CHECK_S):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            if self._record is None or self._record.state == "down" or self._changing.locked():
                continue
            try:
                if self._record.state == "stopping":
                    await self._finish_stop()
                else:
                    await self._check(self._record)
            except GridError as error:
                log.warning("bringing back failed: %s", _text(error))
            except Exception:
                log.exception("bringing back failed")

    async def _finish_stop(self) -> None:
        """A stop that was cut short, or that could not end the head, is tried again, more and more rarely."""
        retry = self._retries.setdefault("", Retry())
        if time.monotonic() >= retry.due:
            retry.failed(time.monotonic())
            await self._stop(lambda _node, _step: None)

    async def _check(self, record: ClusterRecord) -> None:
        head = self._ray_pids(record.head)
        if not all(name in head and head[name].is_alive() for name in ("raylet", "gcs_server")):
            await self._bring_back(record.head, record)
            return
        for node in record.workers:
            if node.name not in self._silent and self._local_ray_lives(node):
                continue
            retry = self._retries.setdefault(node.name, Retry())
            if time.monotonic() < retry.due:
                continue
            await self._bring_back(node, record)

    def _local_ray_lives(self, node: NodeRecord) -> bool:
        pids = self._ray_pids(node)
        return node.launcher != "local" or ("raylet" in pids and pids["raylet"].is_alive())

    async def _bring_back(self, node: NodeRecord, record: ClusterRecord) -> None:
        retry = self._retries.setdefault(node.name, Retry())
        if time.monotonic() < retry.due:
            return
        before = node.error
        try:
            if node is not record.head and await self._ray_runs(node):
                node.state, node.error = "up", None  # Ray is there: its agent is found by the link itself
                retry.failed(time.monotonic())
                return
            async with self._changing:
                if record is not self._record or record.state in ("down", "stopping"):
                    return
                if node is record.head:
                    self._publish(
                        "ray.head_lost", f"Ray's head on {node.name} is gone: starting it again", node=node.name
                    )
                    await restart_all(record, self._paths, self._launchers, self._bridge)
                else:
                    self._publish("ray.node_lost", f"Ray on {node.name} is gone: starting it again", node=node.name)
                    await restart_node(record, node.name, self._paths, self._launchers, self._bridge)
        except GridError as error:
            retry.failed(time.monotonic())
            node.fail(error)
            record.settle()
            record.save(self._paths.cluster_record)
            if before is None or before.get("message") != error.message:
                self._publish("node.not_back", f"{node.name} can't be brought back: {_text(error)}", node=node.name)
            return
        where = "all nodes" if node is record.head else node.name
        self._publish("ray.back", f"Ray runs again on {where}", node=node.name)
        self._silent.discard(node.name)
        self._retries.pop(node.name, None)
        for one in record.nodes.values() if node is record.head else (node,):
            await self._on_node(one.name, _endpoint(one))

    async def _ray_runs(self, node: NodeRecord) -> bool:
        if not self._local_ray_lives(node):
            return False
        found = await self._launchers[node.name].run("status", {"spec": node.spec.to_wire()}, STATUS_LIMIT_S)
        return bool(found["up"])

    async def close(self) -> None:
        """The daemon leaves; what was started stays."""
        await self._bridge.close()
        await close_all(self._launchers.values())


def _endpoint(node: NodeRecord) -> tuple[str, int] | None:
    return (str(node.agent["host"]), int(node.agent["port"])) if node.agent else None


def _text(error: GridError) -> str:
    return f"{error.message}: {error.cause}" if error.cause else error.message


def _reason(node: NodeRecord) -> str:
    return _text(GridError.from_wire(node.error)) if node.error else ""
