"""GridOrchestrator, the grid for Python programs: uses the running daemon, or hosts the control plane; never two."""

from __future__ import annotations

import asyncio
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from distributed_grid.config.models import ClusterConfig
from distributed_grid.config.paths import GridPaths
from distributed_grid.core.errors import GridError, Refused, TimedOut, Unavailable, UsageError
from distributed_grid.core.resources import AllocationPriority, ResourceType
from distributed_grid.daemon.client import DaemonClient, LastingClient, connect
from distributed_grid.daemon.control import ControlPlane
from distributed_grid.daemon.tasks import new_task_id
from distributed_grid.orchestration.resource_sharing.jobs import RECONNECT_S, OnAway, SharedResult, run_command
from distributed_grid.orchestration.resource_sharing.manager import Amount, amounts_of, shared_status
from distributed_grid.wire.channel import ChannelClosed

#: How long a control plane that is just starting, or just ending, elsewhere is waited for.
PATIENCE_S = 30.0

OnStep = Callable[[str, str], None]


@dataclass(frozen=True, slots=True)
class ExecuteResult:
    """How a command on a node ended. `exit_code` is None only where it was lost with its node."""

    task_id: str
    node: str
    state: str
    exit_code: int | None
    stdout: str
    stderr: str


class GridOrchestrator:
    """Wires everything, decides nothing. `async with GridOrchestrator(config) as grid:` or the two calls by hand."""

    def __init__(self, config: ClusterConfig | None = None, *, paths: GridPaths | None = None) -> None:
        self.config = config if config is not None else ClusterConfig()
        self.paths = paths or GridPaths.default()
        self._client: DaemonClient | LastingClient | None = None
        self._plane: ControlPlane | None = None
        self._serving: asyncio.Task[None] | None = None

    @property
    def hosts_control_plane(self) -> bool:
        """Whether this program is the daemon for as long as it is initialized; else one is running beside it."""
        return self._plane is not None

    # -- its life -------------------------------------------------------------------------------------------------

    async def initialize(self) -> None:
        """Connect, or host; a second time does nothing."""
        if self._client is not None:
            return
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                await self._use_daemon()
                return
            except Unavailable as error:
                if error.code != "no-daemon":
                    raise
            try:
                await self._host()
                return
            except Refused as error:
                # Somebody took the lock between our two tries: its socket answers in a moment.
                if error.code != "daemon-running" or time.monotonic() > deadline:
                    raise
            await asyncio.sleep(0.1)

    async def _use_daemon(self) -> None:
        path = str(self.config.path) if self.config.path else None
        async with await connect(self.paths, config_path=path, insist=True) as client:
            await self._check_same(client)
        self._client = LastingClient(self.paths, config_path=path)

    async def _host(self) -> None:
        plane = ControlPlane(self.config, self.paths)
        await plane.start()
        self._plane = plane
        self._serving = asyncio.create_task(self._serve(plane), name="grid-control-plane")
        try:
            self._client = await connect(self.paths)
        except BaseException:
            await self.shutdown()
            raise

    @staticmethod
    async def _serve(plane: ControlPlane) -> None:
        """Until it is asked to stop, by `shutdown` or by `grid daemon stop`."""
        await plane.stop_asked.wait()
        await plane.stop()

    async def _check_same(self, client: DaemonClient) -> None:
        """A configuration made in the program has no file to compare: its nodes must be those that are served."""
        served = await client.call("status")
        theirs = (bool(served["embedded"]), [(node["name"], node["role"]) for node in served["nodes"]])
        ours = (self.config.embedded, [(node.name, node.role) for node in self.config.nodes])
        if theirs != ours:
            names = ", ".join(node["name"] for node in served["nodes"])
            raise Refused(
                "the running daemon serves another configuration than the one given",
                cause=f"pid {served['daemon_pid']} serves {names}; "
                f"given are {', '.join(node.name for node in self.config.nodes)}",
                hint="grid daemon stop (and grid cluster stop), or set GRID_HOME for a second cluster",
                code="other-config",
            )

    async def shutdown(self) -> None:
        """Leave. Nodes, Ray and running commands stay as they are; a second time does nothing."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()
        plane, self._plane = self._plane, None
        serving, self._serving = self._serving, None
        if plane is not None and serving is not None:
            plane.stop_asked.set()
            await serving

    async def __aenter__(self) -> GridOrchestrator:
        await self.initialize()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.shutdown()

    # -- what it can do -------------------------------------------------------------------------------------------

    async def call(self, name: str, *, timeout_s: float | None = 60.0, **arguments: Any) -> Any:
        """Any call of the daemon's; those of the rooms are wrapped below and in the rooms themselves."""
        return await self._connected().call(name, timeout_s=timeout_s, **arguments)

    def _connected(self) -> DaemonClient | LastingClient:
        if self._client is None:
            raise UsageError(
                "the orchestrator is not initialized", hint="await orchestrator.initialize()", code="not-initialized"
            )
        return self._client

    async def _open(self) -> DaemonClient:
        client = self._connected()
        if isinstance(client, LastingClient):
            return await client.client()
        if not client.is_open:  # our own control plane was stopped: there is nobody to ask, now or later
            raise Unavailable("the control plane was stopped", hint="shutdown(), then initialize()", code="no-daemon")
        return client

    async def status(self) -> dict[str, Any]:
        """As `grid status --format json`."""
        found: dict[str, Any] = await self.call("status")
        return found

    async def cluster_start(self, on_step: OnStep | None = None) -> list[dict[str, Any]]:
        """Bring up what is not up; the nodes. One that fails raises, after the others are up."""
        result: dict[str, Any] = {}
        async for step in (await self._open()).stream("cluster_start"):
            if "done" in step:
                result = step
            elif on_step:
                on_step(step["node"], step["step"])
        if result["failed"]:
            reasons = {name: GridError.from_wire(error) for name, error in result["failed"].items()}
            raise Unavailable(
                f"{', '.join(reasons)} did not come up",
                cause="; ".join(f"{name}: {error.message}" for name, error in reasons.items()),
                hint="grid doctor",
                code="nodes-failed",
                failed=result["failed"],
            )
        nodes: list[dict[str, Any]] = result["done"]
        return nodes

    async def cluster_stop(self, on_step: OnStep | None = None) -> None:
        """Take the cluster down: exactly what was started."""
        async for step in (await self._open()).stream("cluster_stop"):
            if on_step:
                on_step(step["node"], step["step"])

    async def execute(
        self,
        node: str,
        argv: Sequence[str] | str,
        *,
        cwd: str | Path | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> ExecuteResult:
        """Run a command on a node to its end. After `timeout_s` it is ended and TimedOut is raised."""
        words = shlex.split(argv) if isinstance(argv, str) else list(argv)
        task_id = new_task_id()
        await self.call(
            "task_start", node=node, argv=words, cwd=str(cwd) if cwd else None, env=dict(env or {}), task_id=task_id
        )
        try:
            async with asyncio.timeout(timeout_s):
                return await self._follow(task_id, node)
        except TimeoutError:
            try:
                await self.call("task_cancel", task_id=task_id)
            except Refused as error:
                if error.code != "already-ended":  # it ended in that very moment
                    raise
            raise TimedOut(f"{task_id} on {node} ran for more than {timeout_s:g} s and was ended") from None

    # -- lending --------------------------------------------------------------------------------------------------

    async def run_with_shared_resources(
        self,
        command: str | Sequence[str],
        resource_type: ResourceType | str | Mapping[ResourceType | str, Amount] = ResourceType.CPU,
        amount: Amount | None = None,
        priority: AllocationPriority | str = AllocationPriority.NORMAL,
        job_id: str | None = None,
        *,
        nodes: Sequence[str] = (),
        wait_s: float | None = None,
        env: Mapping[str, str] | None = None,
        retry: bool = False,
        on_away: OnAway | None = None,
    ) -> SharedResult:
        """Run a command on a worker with borrowed resources, to its end. Memory in GB; `wait_s` None: no limit.

        A worker that does not answer is told to `on_away` (else to the log) within seconds, and waited for; with
        `retry` the command runs again elsewhere after ten, and also if it had to make room.
        """
        request = {
            "amounts": amounts_of(resource_type, amount), "priority": str(AllocationPriority.parse(priority)),
            "nodes": list(nodes), "wait_s": wait_s,
        }  # fmt: skip
        return await run_command(
            self._open, command, request=request, job_id=job_id, env=env, retry=retry, on_away=on_away
        )

    async def get_shared_resource_status(self) -> dict[str, Any]:
        """`offers`, `allocations`, `queue` and `nodes`, as `grid shared-status --format json`."""
        return await shared_status(self)

    async def _follow(self, task_id: str, node: str) -> ExecuteResult:
        """The whole output and the end, across the death of the daemon."""
        parts: dict[str, bytearray] = {"stdout": bytearray(), "stderr": bytearray()}
        while True:
            client = await self._open()
            try:
                async for item in client.stream(
                    "task_follow", task_id=task_id, stdout_from=len(parts["stdout"]), stderr_from=len(parts["stderr"])
                ):
                    if "exit" in item:
                        return _result(task_id, node, item["exit"], parts)
                    if "data" in item:
                        parts[item["stream"]] += item["data"]
            except ChannelClosed:
                await asyncio.sleep(RECONNECT_S)


def _result(task_id: str, node: str, ended: Mapping[str, Any], parts: Mapping[str, bytearray]) -> ExecuteResult:
    if ended.get("error"):
        raise GridError.from_wire(ended["error"])
    return ExecuteResult(
        task_id=task_id, node=node, state=str(ended["state"]), exit_code=ended.get("exit_code"),
        stdout=parts["stdout"].decode(errors="replace"), stderr=parts["stderr"].decode(errors="replace"),
    )  # fmt: skip
