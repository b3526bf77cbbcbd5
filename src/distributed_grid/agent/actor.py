"""The agent as Ray sees it: an actor without CPUs that hosts the node's server in a thread of its own."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import traceback
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)


class AgentActor:
    """Created by the bridge with `ray.remote`; Ray places it, restarts it, and is not asked for anything else."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._ready = threading.Event()
        self._endpoint: dict[str, Any] = {}
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(config,), daemon=True, name="grid-agent")
        self._thread.start()

    def _run(self, config: dict[str, Any]) -> None:
        from distributed_grid.agent.logs import keep_log
        from distributed_grid.agent.server import serve_node

        def ready(endpoint: dict[str, Any]) -> None:
            self._endpoint = endpoint
            self._ready.set()

        try:
            keep_log(Path(config["node_dir"]))
            asyncio.run(serve_node(config, ready))
        except BaseException as error:
            log.exception("the agent's server ended")
            if self._ready.is_set():
                traceback.print_exc()
                os._exit(1)  # it served before: Ray puts a new one in its place
            self._failure = error
            self._ready.set()
            raise

    def endpoint(self) -> dict[str, Any]:
        """{host, port, pid, boot_id}; raises what kept the server from starting."""
        if not self._ready.wait(20):
            raise RuntimeError("the agent's server did not start within 20 s")
        if self._failure is not None or not self._thread.is_alive():
            raise RuntimeError(f"the agent's server ended: {self._failure!r}")
        return self._endpoint
