"""`python -m distributed_grid.daemon`: gridd itself, in the foreground of a session of its own."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import sys

from distributed_grid.cluster.record import ClusterRecord
from distributed_grid.config.loader import load_cluster_config
from distributed_grid.config.models import ClusterConfig
from distributed_grid.config.paths import GridPaths
from distributed_grid.core.errors import ConfigError, GridError, Unavailable
from distributed_grid.core.priority import go_ahead
from distributed_grid.daemon.control import ControlPlane

log = logging.getLogger(__name__)


def config_to_serve(named: str | None, found: str | None, paths: GridPaths) -> ClusterConfig:
    """The one named; one merely found, where whoever needed a daemon happened to be, only if no cluster is up.

    While one is up its own is served, so that a daemon that comes back serves what the one before it served. A command
    that named another is refused afterwards.
    """
    record = ClusterRecord.load(paths.cluster_record)
    if record is None or record.state in ("down", "stopping"):
        return load_cluster_config(named or found)
    for path in (named, record.config_path or found):
        try:
            config = load_cluster_config(path) if path else None
        except ConfigError as error:
            if path in (named, found):
                raise
            log.warning("the configuration that the cluster was started from can't be read: %s", error)
            continue
        if config is not None and (str(config.path) == record.config_path or _describes(config, record)):
            return config
    if record.config_path:
        return load_cluster_config(named or found)
    variables = {name: value for name, value in os.environ.items() if name != "GRID_CONFIG"}
    return load_cluster_config(cwd=paths.home, env=variables)


def _describes(config: ClusterConfig, record: ClusterRecord) -> bool:
    nodes = [(node.name, node.spec.role) for node in record.nodes.values()]
    return config.embedded == record.embedded and [(node.name, node.role) for node in config.nodes] == nodes


async def serve(named: str | None, found: str | None) -> None:
    paths = GridPaths.default()
    config = config_to_serve(named, found, paths)
    logging.getLogger().setLevel(config.daemon.log_level.upper())
    plane = ControlPlane(config, paths)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, plane.stop_asked.set)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    await plane.start()
    try:
        await plane.stop_asked.wait()
    finally:
        await plane.stop()


def main() -> int:
    parser = argparse.ArgumentParser(prog="gridd", description="The daemon of Distributed Grid.")
    parser.add_argument("--config", default=None, help="the configuration to serve")
    parser.add_argument("--found", default=None, help="the same, if no cluster is up that was started from another")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("asyncssh").setLevel(logging.WARNING)
    logging.getLogger("watchfiles").setLevel(logging.WARNING)
    go_ahead()
    try:
        asyncio.run(serve(arguments.config, arguments.found))
    except GridError as error:
        print("fatal: " + json.dumps(error.to_wire()), file=sys.stderr, flush=True)
        return int(error.exit_code)
    except OSError as error:  # a port in use, a disk that is full
        told = Unavailable("the daemon can't start", cause=str(error), hint="grid doctor", code="daemon-start")
        log.exception("the daemon can't start")
        print("fatal: " + json.dumps(told.to_wire()), file=sys.stderr, flush=True)
        return int(told.exit_code)
    return 0


if __name__ == "__main__":
    sys.exit(main())
