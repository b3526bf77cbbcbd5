"""Bring the cluster up from a program, run a command on every node, and leave it running."""

from __future__ import annotations

import asyncio

from distributed_grid import GridOrchestrator, load_cluster_config


async def main() -> None:
    async with GridOrchestrator(load_cluster_config()) as grid:
        nodes = await grid.cluster_start(lambda node, step: print(f"{node}: {step}"))
        results = await asyncio.gather(*(grid.execute(node["name"], ["uname", "-nr"]) for node in nodes))
        for result in results:
            print(f"{result.node}: {result.stdout.strip()} (exit code {result.exit_code})")


if __name__ == "__main__":
    asyncio.run(main())
