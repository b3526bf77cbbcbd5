"""The command half of `grid cluster install`: which nodes, progress on stderr, each node's outcome told apart."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from distributed_grid.commands._common import chosen_config, note, run
from distributed_grid.core.errors import GridError, Refused


def install_nodes(nodes: Sequence[str], config_path: str | None) -> dict[str, dict[str, str]]:
    """{node: {"done": text} or {"error": text}} for the nodes named, or for all of the configuration."""
    from distributed_grid.config.loader import load_cluster_config

    config = load_cluster_config(chosen_config(config_path))
    if config.embedded:
        raise Refused(
            "the cluster is on this machine, so there is nothing to install",
            hint="grid init --real-hosts my-lab.yaml, then: grid cluster install --config my-lab.yaml",
            code="install-embedded",
        )
    chosen = [config.node(name).name for name in nodes] or [node.name for node in config.nodes]
    return run(_install_all(config, chosen))


async def _install_all(config: Any, names: list[str]) -> dict[str, dict[str, str]]:
    from distributed_grid.cluster.plan import make_launchers, plan_cluster
    from distributed_grid.config.paths import GridPaths

    launchers = make_launchers(plan_cluster(config, GridPaths.default()))
    try:
        results = await asyncio.gather(*(_install_one(launchers[name], name) for name in names))
    finally:
        await asyncio.gather(*(launcher.close() for launcher in launchers.values()))
    return dict(zip(names, results, strict=True))


async def _install_one(launcher: Any, name: str) -> dict[str, str]:
    from distributed_grid.cluster.install import install_node

    if launcher.kind == "local":
        return {"done": "this machine; it is the model for the others"}
    try:
        probe = await install_node(launcher, lambda step: note(f"{name}: {step}"))
    except GridError as error:
        text = f"{error.message}: {error.cause}" if error.cause else error.message
        return {"error": f"{text} (try: {error.hint})" if error.hint else text}
    verb = "installed" if probe.get("changed") else "nothing to do, it is the same as here"
    return {"done": f"{verb}: Python {probe['python']}, Ray {probe['ray_version']} at {probe['executable']}"}
