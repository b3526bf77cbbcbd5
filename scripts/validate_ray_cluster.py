#!/usr/bin/env python3
"""Checks the running cluster from both sides, the daemon's and Ray's own; exits 0 if all is well, else 1."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

try:
    from distributed_grid.cluster.bridge_client import BridgeClient
    from distributed_grid.config.paths import GridPaths
    from distributed_grid.core.errors import GridError
except ModuleNotFoundError:  # a plain `python`: take the one that `make setup` made
    ours = Path(__file__).resolve().parents[1] / ".venv" / "bin" / "python"
    if not ours.exists() or Path(sys.prefix) == ours.parents[1]:
        raise
    os.execv(ours, [str(ours), *sys.argv])

Finding = tuple[bool, str]  # (well, what was found)


def cluster_status(config: str | None) -> dict[str, Any]:
    """What the daemon says, by the command that people use."""
    argv = [sys.executable, "-m", "distributed_grid.cli", "cluster", "status", "--format", "json"]
    done = subprocess.run(argv + (["--config", config] if config else []), capture_output=True, text=True, timeout=60)
    if done.returncode != 0:
        raise GridError("`grid cluster status` failed", cause=done.stderr.strip()[-500:], hint="grid cluster start")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


async def ray_nodes(address: str, token: Path) -> list[dict[str, Any]]:
    """What Ray says, over a connection of its own."""
    with tempfile.TemporaryDirectory(prefix="grid-validate-") as place:
        bridge = BridgeClient(token, Path(place) / "bridge.log")
        try:
            await bridge.connect(address, address.rpartition(":")[0])
            return list((await bridge.call("nodes"))["nodes"])
        finally:
            await bridge.close()


def judge(status: dict[str, Any], nodes: list[dict[str, Any]]) -> list[Finding]:
    """Both views against each other, node by node."""
    findings: list[Finding] = [(status["state"] == "up", f"the cluster is {status['state']}")]
    alive: dict[str, list[dict[str, Any]]] = {}
    for one in nodes:
        if one["alive"]:
            alive.setdefault(one["node"] or one["address"], []).append(one)
    for node in status["nodes"]:
        name = node["name"]
        found = alive.pop(name, [])
        findings.append((len(found) == 1, f"{name}: {len(found)} live Ray nodes carry its name"))
        says = "answers" if node["online"] else f"is silent ({node.get('reason') or 'no reason given'})"
        findings.append((bool(node["online"]), f"{name}: its agent {says}"))
        for one in found:
            amounts = one["resources"]
            memory_gb = amounts.get("memory", 0) / 1024**3
            text = f"{amounts.get('CPU', 0):g} CPU, {amounts.get('GPU', 0):g} GPU, {memory_gb:.1f} GB"
            findings.append((amounts.get("CPU", 0) > 0, f"{name}: Ray offers {text} at {one['address']}"))
    findings += [(False, f"{name}: a Ray node that the configuration does not know") for name in alive]
    return findings


def main() -> int:
    parser = argparse.ArgumentParser(description="Check the running Ray cluster.")
    parser.add_argument("--config", help="the cluster's configuration file")
    arguments = parser.parse_args()
    try:
        status = cluster_status(arguments.config)
        if not status.get("ray_address"):
            raise GridError(f"no cluster is up (it is {status['state']})", hint="grid cluster start")
        nodes = asyncio.run(ray_nodes(status["ray_address"], GridPaths.default().token))
    except GridError as error:
        print(f"error: {error.message}", file=sys.stderr)
        for label, text in (("cause", error.cause), ("try", error.hint)):
            if text:
                print(f"{label}: {text}", file=sys.stderr)
        return 1
    findings = judge(status, nodes)
    for well, text in findings:
        print(f"{'ok  ' if well else 'BAD '} {text}")
    bad = sum(not well for well, _ in findings)
    print("all is well" if not bad else f"{bad} of {len(findings)} findings are bad")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
