"""What runs on every node: one event loop that measures the node, keeps its tasks, and answers the daemon."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from distributed_grid import __version__
from distributed_grid.agent.health import HealthService
from distributed_grid.agent.inspect.service import InspectService
from distributed_grid.agent.leases import LeaseCalls
from distributed_grid.agent.links import BandwidthService
from distributed_grid.agent.logs import LogCalls, tell_call
from distributed_grid.agent.memory.service import MemoryService
from distributed_grid.agent.move_calls import MoveCalls
from distributed_grid.agent.node import AgentNode
from distributed_grid.agent.services import NodeService, TaskCalls
from distributed_grid.agent.staging.service import StagingService
from distributed_grid.core.priority import go_ahead
from distributed_grid.core.process import boot_id, process_id
from distributed_grid.wire.channel import Channel, read_secret, serve
from distributed_grid.wire.rpc import CallContext, RpcServer

log = logging.getLogger(__name__)

SAMPLE_INTERVAL_S = 1.0


async def serve_node(config: dict[str, Any], ready: Callable[[dict[str, Any]], None]) -> None:
    """Serve until cancelled. `config`: node, address, token_path, node_dir, declared, embedded, role."""
    go_ahead()
    node = AgentNode.from_config(config)
    secret = read_secret(Path(config["token_path"]))
    me = process_id(os.getpid())
    hello = {
        "node": node.name, "version": __version__, "pid": os.getpid(), "boot_id": boot_id(),
        "start_ticks": me.start_ticks if me else 0, "role": node.role, "uid": os.geteuid(),
    }  # fmt: skip
    services: list[object] = [NodeService(node), TaskCalls(node), BandwidthService(node), HealthService()]
    services += [InspectService(node), MoveCalls(node), StagingService(node), LeaseCalls(node)]
    services += [MemoryService(node, Path(config["token_path"])), LogCalls(node)]
    rpc = RpcServer(*services, hello=lambda: hello, guard=tell_call)

    async def on_channel(channel: Channel) -> None:
        await rpc.serve(channel, CallContext(peer=channel.peer))

    listener = await serve(node.address, 0, secret, on_channel)
    tasks = node.tasks.adopt()
    log.info("%s, version %s, pid %s, at %s:%s", node.name, __version__, os.getpid(), node.address, listener.port)
    log.info("%s tasks found", len(tasks))
    ready({"host": node.address, "port": listener.port, "pid": os.getpid(), "boot_id": boot_id()})
    try:
        await _measure(node)
    finally:
        await listener.close()


async def _measure(node: AgentNode) -> None:
    """One sample a second, on a steady beat."""
    loop = asyncio.get_running_loop()
    due = loop.time()
    while True:
        try:
            await node.take_sample()
        except Exception:  # one bad reading must not end the node's server
            log.exception("the node could not be measured")
        due = max(due + SAMPLE_INTERVAL_S, loop.time())
        await asyncio.sleep(due - loop.time())


@contextlib.asynccontextmanager
async def running_node(config: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """A node's server inside another program's loop, without Ray: for tests and for trying things by hand."""
    started: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(serve_node(config, started.set_result))
    waiting: set[asyncio.Future[Any]] = {task, started}
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        task.result()
    try:
        yield started.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
