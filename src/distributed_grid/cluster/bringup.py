"""Brings the whole cluster up and down: all nodes at once, each one's failure told apart, the rest still up."""

from __future__ import annotations

import asyncio
import base64
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from distributed_grid.cluster.bridge import AGENT_CLASS
from distributed_grid.cluster.bridge_client import BridgeClient
from distributed_grid.cluster.files import write_private
from distributed_grid.cluster.launcher import NodeLauncher
from distributed_grid.cluster.plan import make_launchers, plan_cluster, require_local, same_shape
from distributed_grid.cluster.record import ClusterRecord, NodeRecord
from distributed_grid.config.models import ClusterConfig
from distributed_grid.config.paths import GridPaths
from distributed_grid.core.errors import GridError

Progress = Callable[[str, str], None]  # (node, what happens there now)

TOKEN_LIMIT_S = 30.0
STATUS_LIMIT_S = 30.0
STOP_LIMIT_S = 60.0
AGENT_LIMIT_S = 90.0
EMBEDDED_TRIES = 3
_WORTH_ANOTHER_PORT = {"port-in-use", "ray-start"}


def silent(node: str, step: str) -> None:
    pass


def ensure_token(paths: GridPaths) -> Path:
    """The cluster's secret, made once, mode 0600."""
    paths.ensure()
    if not paths.token.exists():
        write_private(paths.token, secrets.token_hex(32).encode())
    paths.token.chmod(0o600)  # one that was copied here by hand may be open to others
    return paths.token


async def bring_up(
    config: ClusterConfig,
    paths: GridPaths,
    launchers: Mapping[str, NodeLauncher] | None,
    bridge: BridgeClient,
    progress: Progress = silent,
    *,
    actor: str = AGENT_CLASS,
    before_end: Callable[[], Awaitable[None]] | None = None,
) -> ClusterRecord:
    """Start what is not up yet. Raises only where the head could not be started; then nothing is left behind.

    `before_end` is awaited before an older cluster that is in the way is brought down.
    """
    ensure_token(paths)
    await bridge.spawn()
    tries = EMBEDDED_TRIES if config.embedded else 1
    new_ports = False
    while True:
        tries -= 1
        record = await _record_to_start(config, paths, before_end, new_ports=new_ports)
        run = _BringUp(record, paths, launchers or make_launchers(record), bridge, progress, actor)
        run.start_limit_s = config.ray.start_timeout_seconds
        try:
            require_local(record.head.address)
            await run.start_all(fresh=False)
            return record
        except GridError as error:
            if tries <= 0 or error.code not in _WORTH_ANOTHER_PORT:
                raise
            new_ports = True
        finally:
            if launchers is None:
                await close_all(run.launchers.values())


async def restart_all(
    record: ClusterRecord, paths: GridPaths, launchers: Mapping[str, NodeLauncher], bridge: BridgeClient,
    progress: Progress = silent, *, actor: str = AGENT_CLASS,
) -> ClusterRecord:  # fmt: skip
    """After the head's death: its GCS took all that Ray knew with it, so every raylet starts again. Tasks live on."""
    await _BringUp(record, paths, launchers, bridge, progress, actor).start_all(fresh=True, again=True)
    return record


async def restart_node(
    record: ClusterRecord, node: str, paths: GridPaths, launchers: Mapping[str, NodeLauncher], bridge: BridgeClient,
    progress: Progress = silent, *, actor: str = AGENT_CLASS,
) -> NodeRecord:  # fmt: skip
    """A worker whose raylet died, or that came back; the head's return is `restart_all`."""
    run = _BringUp(record, paths, launchers, bridge, progress, actor)
    found = record.node(node)
    await run.start_worker(found, fresh=True, head_is_up=None)
    record.settle()
    run.save()
    if found.error:
        raise GridError.from_wire(found.error)
    return found


async def bring_down(
    record: ClusterRecord, paths: GridPaths, launchers: Mapping[str, NodeLauncher] | None, bridge: BridgeClient | None,
    progress: Progress = silent, *, again: bool = False,
) -> ClusterRecord:  # fmt: skip
    """End what was started, workers first; a node that cannot be reached stays in the record, with its reason.

    `again`: nobody asked for it to be down, so the record says at no moment that it is meant to be.
    """
    used = launchers or make_launchers(record)
    record.state = "failed" if again else "stopping"
    for node in record.nodes.values():
        node.state, node.agent = "stopping", None
    record.save(paths.cluster_record)
    if bridge is not None:
        await bridge.close()

    async def stop(node: NodeRecord) -> None:
        progress(node.name, "stopping")
        try:
            await used[node.name].run("stop", {"spec": node.spec.to_wire()}, STOP_LIMIT_S)
        except GridError as error:
            node.fail(error)
            progress(node.name, f"not stopped: {error.message}")
        else:
            node.state, node.error, node.ray_node_id = "down", None, ""
            progress(node.name, "stopped")

    try:
        await asyncio.gather(*(stop(node) for node in record.workers))
        await stop(record.head)
    finally:
        if launchers is None:
            await close_all(used.values())
    record.settle()
    if again:
        record.state = "failed"
    elif record.state != "down":
        record.state = "stopping"  # not to be brought back: the stop is tried again
    record.save(paths.cluster_record)
    return record


async def close_all(launchers: Iterable[NodeLauncher]) -> None:
    for one in launchers:
        await one.close()


async def _record_to_start(
    config: ClusterConfig, paths: GridPaths, before_end: Callable[[], Awaitable[None]] | None, *, new_ports: bool
) -> ClusterRecord:
    """The record there is, where it describes this configuration; else a new one, and the old cluster ends first."""
    old = await asyncio.to_thread(ClusterRecord.load, paths.cluster_record)
    new = await asyncio.to_thread(plan_cluster, config, paths, old.cluster_id if old else "")
    if old is None:
        return new
    same = same_shape(old, new)
    if same and old.state != "down" and not new_ports:
        old.config_path = new.config_path
        return old
    # What is left of the same nodes goes when they start, by its mark; other nodes must be ended now.
    if old.state != "down" or (not same and any(node.state != "down" for node in old.nodes.values())):
        if before_end is not None:
            await before_end()
        await bring_down(old, paths, None, None)
    return new


class _BringUp:
    """One bring-up: what its steps share."""

    def __init__(
        self, record: ClusterRecord, paths: GridPaths, launchers: Mapping[str, NodeLauncher], bridge: BridgeClient,
        progress: Progress, actor: str,
    ) -> None:  # fmt: skip
        self.record, self.paths, self.launchers, self.bridge = record, paths, launchers, bridge
        self.progress, self.actor = progress, actor
        self.start_limit_s = 120.0

    def save(self) -> None:
        self.record.save(self.paths.cluster_record)

    async def start_all(self, *, fresh: bool, again: bool = False) -> None:
        """`again`: it was up before, and is wanted up even if this fails."""
        record = self.record
        for node in record.nodes.values():
            node.state, node.error = "starting", None
        record.state, record.started_at = "starting", record.started_at or time.time()
        self.save()
        if not fresh:  # a head that is gone took Ray's state with it, so its workers' raylets are worth nothing
            try:
                found = await self.launchers[record.head.name].run(
                    "status", {"spec": record.head.spec.to_wire()}, STATUS_LIMIT_S
                )
            except GridError as error:
                record.head.fail(error)
                record.settle()
                self.save()
                raise
            fresh = not found["up"]
        head_is_up: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        workers = [
            asyncio.create_task(self.start_worker(one, fresh=fresh, head_is_up=head_is_up)) for one in record.workers
        ]
        try:
            await self._start_head(fresh)
            head_is_up.set_result(None)
            await asyncio.gather(self._place_agent(record.head), *workers)
        except BaseException as error:
            head_is_up.cancel()
            for one in workers:
                one.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
            if isinstance(error, GridError):
                if fresh:  # we started it: nothing half-started is left behind, and users' tasks are not touched
                    await bring_down(record, self.paths, self.launchers, self.bridge, again=again)
                record.head.fail(error)
                record.settle()
                if fresh and not again:
                    record.state = "down"  # it never was up, so nobody is to bring it back
                self.save()
            raise
        record.settle()
        self.save()

    async def _start_head(self, fresh: bool) -> None:
        head = self.record.head
        self.progress(head.name, "starting Ray")
        self._started(head, await self._run_start(head, fresh))
        await self.bridge.connect(self.record.gcs_address, head.address, fresh=fresh and self.bridge.is_joined)

    async def start_worker(self, node: NodeRecord, *, fresh: bool, head_is_up: asyncio.Future[None] | None) -> None:
        """Start one worker and place its agent; a failure is written into its record, not raised."""
        try:
            node.state, node.error = "starting", None
            launcher = self.launchers[node.name]
            if node.launcher == "ssh":
                self.progress(node.name, "connecting")
                token = base64.b64encode(await asyncio.to_thread(self.paths.token.read_bytes)).decode()
                await launcher.run("put-token", {"state_dir": node.spec.state_dir, "token": token}, TOKEN_LIMIT_S)
            self.progress(node.name, "starting Ray")
            self._started(node, await self._run_start(node, fresh))
            if head_is_up is not None:
                await asyncio.shield(head_is_up)
            await self._place_agent(node)
        except GridError as error:
            node.fail(error)
            self.progress(node.name, f"failed: {error.message}")
            self.save()

    async def _run_start(self, node: NodeRecord, fresh: bool) -> dict[str, Any]:
        payload = {"spec": node.spec.to_wire(), "fresh": fresh, "limit_s": self.start_limit_s}
        return await self.launchers[node.name].run("start", payload, self.start_limit_s + STOP_LIMIT_S)

    def _started(self, node: NodeRecord, answer: Mapping[str, Any]) -> None:
        node.ray_node_id, node.token_path = str(answer["ray_node_id"]), str(answer["token_path"])
        node.state_dir = str(answer["state_dir"])
        self.progress(node.name, "Ray was up already" if answer["already"] else "Ray is up")
        self.save()

    async def _place_agent(self, node: NodeRecord) -> None:
        self.progress(node.name, "placing the agent")
        node.agent = await self.bridge.call(
            "ensure_agent", node=node.name, ray_node_id=node.ray_node_id, config=agent_config(self.record, node),
            actor=self.actor, limit_s=AGENT_LIMIT_S - 10, timeout_s=AGENT_LIMIT_S,
        )  # fmt: skip
        node.state = "up"
        self.progress(node.name, "up")
        self.save()


def agent_config(record: ClusterRecord, node: NodeRecord) -> dict[str, Any]:
    """What an agent is told about the node it is to serve; paths are the node's own."""
    return {
        "node": node.name, "role": node.spec.role, "address": node.address, "embedded": record.embedded,
        "cluster_id": record.cluster_id, "token_path": node.token_path, "state_dir": node.state_dir,
        "node_dir": str(GridPaths(Path(node.state_dir)).node_dir(node.name)), "declared": node.declared,
    }  # fmt: skip
