"""The control plane: wires journal, events, figures, links, cluster and services together. Decides nothing."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import time
from pathlib import Path
from typing import Any

from distributed_grid.config.loader import load_cluster_config
from distributed_grid.config.models import ClusterConfig
from distributed_grid.config.paths import GridPaths
from distributed_grid.config.watch import watch_config
from distributed_grid.core.clock import SystemClock
from distributed_grid.core.errors import GridError, Refused, TimedOut, Unavailable
from distributed_grid.core.resources import ResourceType
from distributed_grid.daemon.auto_offload import AutoOffloadService
from distributed_grid.daemon.doctor import DoctorService
from distributed_grid.daemon.events import EventHub
from distributed_grid.daemon.keeper import ClusterKeeper
from distributed_grid.daemon.lending import LendingService
from distributed_grid.daemon.links import LinkState, NodeLink, NodeLinks
from distributed_grid.daemon.memory import MemoryDirectory
from distributed_grid.daemon.offload import OffloadService
from distributed_grid.daemon.overview import OverviewService
from distributed_grid.daemon.server import DaemonServer
from distributed_grid.daemon.tasks import TaskService
from distributed_grid.monitoring.prometheus import MetricsServer, serve_metrics
from distributed_grid.monitoring.resource_metrics import PressureEvent, ResourceMetricsCollector
from distributed_grid.store.audit import AuditLog
from distributed_grid.store.journal import Journal
from distributed_grid.wire.channel import read_secret

log = logging.getLogger(__name__)

#: A watch of the configuration that ended by a fault of ours begins anew after this long.
WATCH_AGAIN_S = 5.0
#: Pressure is told when it has lasted this long, and so is its end.
PRESSURE_HOLD_S = 10.0


class StateLock:
    """The exclusive lock on the state directory: there is never more than one control plane."""

    def __init__(self, paths: GridPaths) -> None:
        self._path = paths.lock
        self._fd = -1

    def take(self) -> None:
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(self._fd, 32).decode(errors="replace").strip() or "unknown"
            os.close(self._fd)
            self._fd = -1
            raise Refused(
                "another daemon already serves this state directory",
                cause=f"pid {holder} holds {self._path}",
                hint="grid daemon status",
                code="daemon-running",
            ) from None
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, str(os.getpid()).encode(), 0)

    def drop(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class ControlPlane:
    def __init__(self, config: ClusterConfig, paths: GridPaths) -> None:
        self.config = config
        self.paths = paths
        self.started = time.time()
        self.stop_asked = asyncio.Event()
        self._lock = StateLock(paths)
        self._background: list[asyncio.Task[Any]] = []
        self._closing = contextlib.AsyncExitStack()
        self._watching: asyncio.Task[Any] | None = None
        self._metrics: MetricsServer | None = None

    async def start(self) -> None:
        """All of it or, where something is in the way, nothing: a program that hosts us may try again."""
        self.paths.ensure()
        self._lock.take()
        self._closing.callback(self._lock.drop)
        try:
            await self._start()
        except BaseException:
            await self._close()
            raise

    async def _start(self) -> None:
        self.journal = Journal.open(self.paths.journal, clock=SystemClock())
        self._closing.callback(self.journal.close)
        self.events = EventHub(self.journal.events)
        self.audit = AuditLog(self.paths.audit_log)
        self._closing.callback(self.audit.close)
        if self.journal.recovered:
            self.events.publish("journal.recovered", self.journal.recovered.describe())
        self.collector = ResourceMetricsCollector(
            clock=SystemClock(), on_pressure=self._on_pressure, hold_s=PRESSURE_HOLD_S
        )
        self._configure_collector()
        self.links = NodeLinks(self._make_link)
        self.keeper = ClusterKeeper(self.paths, self.events.publish, self._node_up, self._cluster_down)
        self.tasks = TaskService(self.journal.tasks, self.links, self.events)
        self.lending = LendingService(self)
        self.overview = OverviewService(self)
        self.offload = OffloadService(self)
        self.auto_offload = AutoOffloadService.of_plane(self, self.offload)
        self.memory = MemoryDirectory(self)
        services: list[object] = [
            self.memory, self.lending, self.lending.jobs,
            self.overview, self.tasks, DoctorService(self), self.offload, self.auto_offload,
        ]  # fmt: skip
        self._server = DaemonServer(
            self.socket_path, self.paths.socket, services, self.audit,
            lambda: self.config.daemon.allow_users, self._facts,
        )
        for part in (self.keeper.close, self.links.close_all, self.offload.close, self.lending.close):
            self._closing.push_async_callback(part)
        await self.keeper.resume()
        self.lending.start()
        if self.config.daemon.metrics_port is not None:  # before the socket, which says that all is well
            await self._serve_metrics(self.config.daemon.metrics_port)
        await self._server.start()
        self._closing.push_async_callback(self._server.close)
        self._watch()
        self.offload.recover()
        self._background.append(asyncio.create_task(self.keeper.run(), name="keeper"))
        self._background.append(asyncio.create_task(self.tasks.run(), name="tasks"))
        self._background.append(asyncio.create_task(self.memory.care.run(), name="memory"))
        self._background.append(asyncio.create_task(self.auto_offload.run(), name="auto-offload"))
        self.events.publish("daemon.started", f"the daemon is up, pid {os.getpid()}")

    async def _serve_metrics(self, port: int) -> None:
        try:
            self._metrics = await serve_metrics(port, self.overview.render_metrics)
        except OSError as error:
            raise Unavailable(
                f"metrics cannot be served on port {port}", cause=error.strerror or str(error),
                hint="set daemon.metrics_port to a free port, or to 0 for any", code="metrics-port",
            ) from error  # fmt: skip
        self._closing.push_async_callback(self._metrics.close)

    @property
    def socket_path(self) -> Path:
        return self.config.daemon.socket or self.paths.socket

    @property
    def metrics_port(self) -> int | None:
        return self._metrics.port if self._metrics else None

    def _facts(self) -> dict[str, Any]:
        return {"pid": os.getpid(), "config_path": str(self.config.path) if self.config.path else None}

    # -- the configuration ----------------------------------------------------------------------------------------

    def _watch(self) -> None:
        if self._watching:
            self._watching.cancel()
            self._watching = None
        if self.config.path:
            self._watching = asyncio.create_task(self._follow_config(self.config.path), name="config")

    async def _follow_config(self, path: Path) -> None:
        while True:
            try:
                await watch_config(path, self._on_config, self._on_bad_config, current=self.config)
            except Exception:
                log.exception("the watch of %s failed", path)
            await asyncio.sleep(WATCH_AGAIN_S)

    async def _on_config(self, config: ClusterConfig) -> None:
        """Taken whole and told, or the old one stays and the watch tries again."""
        if config.digest == self.config.digest:
            return
        before = self.config
        try:
            self._take_config(config)
            if self.keeper.is_up and _shape(config) != _shape(before):
                text = "the nodes in the configuration changed: they hold after the next cluster start"
                self.events.publish("config.nodes_changed", text)
            self.events.publish("config.reloaded", f"{config.path} was read again")
        except BaseException:
            self._take_config(before)
            raise

    def _take_config(self, config: ClusterConfig) -> None:
        self.config = config
        self._configure_collector()
        self._server.set_modes()

    def _configure_collector(self) -> None:
        sharing = self.config.resource_sharing
        self.collector.configure(
            sharing.pressure_thresholds, head_node_id=self.config.head.name, head_only_mode=sharing.head_only_mode
        )

    async def _on_bad_config(self, error: GridError) -> None:
        text = f"{error.message}: {error.cause}" if error.cause else error.message
        self.events.publish("config.refused", f"the old configuration is kept: {text}")

    async def use_config(self, path: str) -> None:
        """A command named a file: serve it, unless a cluster of another shape is up."""
        config = await asyncio.to_thread(load_cluster_config, path)
        if self.keeper.is_up and _shape(config) != _shape(self.config):
            raise Refused(
                f"the cluster that is up was not started from {path}",
                cause=f"it was started from {self.config.path or 'the built-in embedded configuration'}",
                hint="grid cluster stop, or set GRID_HOME for a second cluster",
                code="other-config",
            )
        await self._on_config(config)
        self.config = config
        self._watch()

    # -- the nodes ------------------------------------------------------------------------------------------------

    def _make_link(self, node: str) -> NodeLink:
        return NodeLink(
            node, self.keeper.find_agent, lambda: read_secret(self.paths.token), self.collector.feed, self._on_link
        )

    async def _node_up(self, node: str, endpoint: tuple[str, int] | None) -> None:
        self.links.open(node, endpoint)

    async def _cluster_down(self) -> None:
        await self.offload.call_off()  # while the nodes still answer
        await self.memory.cluster_down()
        await self.links.close_all()
        for node in self.collector.get_all_latest_snapshots():
            self.collector.forget(node)

    async def _on_link(self, state: LinkState, known_before: bool) -> None:
        """First what keeps the node, then what tells of it: a journal that can't be written costs only the telling."""
        if not state.online:
            self.keeper.node_went_silent(state.node)
            self._tell("node.offline", f"{state.node} is offline: {state.reason}", node=state.node)
            try:
                self.offload.node_is_down(state.node)
            except GridError as error:
                log.warning("what ran on %s is out of sight, which could not be told: %s", state.node, error.message)
            return
        self.keeper.node_is_back(state.node)
        self._tell("node.online", f"{state.node} is {'back' if known_before else 'online'}", node=state.node)
        for take_over in (self.tasks.adopt, self.memory.node_is_up):
            try:
                await take_over(state.node)
            except (Unavailable, TimedOut):
                raise  # the link is tried again
            except GridError as error:  # trying again would change nothing, and the node is useful all the same
                log.warning("%s: not all was taken over: %s", state.node, error)
        self.offload.node_is_up(state.node)

    def _tell(self, kind: str, text: str, node: str = "") -> None:
        """An event of something that is so, whether the journal can be written or not."""
        try:
            self.events.publish(kind, text, node=node)
        except GridError as error:
            log.warning("%s: %s (not in the journal: %s)", kind, text, error.message)

    def lent_on(self, node: str) -> dict[str, Any]:
        """What of a node is promised to leases."""
        return self.lending.lent(node)

    def _on_pressure(self, event: PressureEvent) -> None:
        if self.auto_offload.tells_of(event.node, event.resource):
            return  # said already, by the thresholds of automatic offload
        kind, word = ("pressure.cleared", "cleared") if event.cleared else ("pressure.high", "detected")
        name = "Memory" if event.resource is ResourceType.MEMORY else event.resource.value.upper()
        text = f"{name} pressure {word} ({event.pressure * 100:.0f}%)"
        pressure = round(event.pressure, 4)
        self.events.publish(kind, text, node=event.node, resource=event.resource.value, pressure=pressure)

    # -- the end --------------------------------------------------------------------------------------------------

    async def stop(self) -> None:
        """Leave: nodes, tasks and Ray stay as they are, and the next daemon finds them."""
        self._tell("daemon.stopped", f"the daemon leaves, pid {os.getpid()}")
        await self._close()

    async def _close(self) -> None:
        running = [*self._background, *([self._watching] if self._watching else [])]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self._closing.aclose()


def _shape(config: ClusterConfig) -> Any:
    """What can't change under a running cluster: which nodes there are and where."""
    return (config.embedded, [(node.name, node.host, node.port, node.user, node.role) for node in config.nodes])
