"""Shows on a machine with a GPU, without Ray, that its figures are read and that a lease gives the very device.

    python scripts/check_gpu.py

Runs a node's own server in this process, leases GPU 0 from it, starts a PyTorch program under the lease and the shim,
and compares what that program sees with what NVML says of it. A second lease on the same GPU must be refused.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
import tempfile
from pathlib import Path
from typing import Any

from distributed_grid.agent.server import running_node
from distributed_grid.core.errors import Refused
from distributed_grid.wire.channel import connect, read_secret
from distributed_grid.wire.rpc import RpcClient

PROGRAM = """
import os, torch
held = torch.ones(1 << 28, device="cuda")
uuid = torch.cuda.get_device_properties(0).uuid
print(os.environ["CUDA_VISIBLE_DEVICES"], torch.cuda.device_count(), uuid, flush=True)
input()
print(int(held.sum().item()), flush=True)
"""
MIB = 1 << 20


def lease(name: str, gpus: list[int]) -> dict[str, Any]:
    grant = {"cores": [0], "gpus": gpus, "memory_bytes": 16 << 30}
    if name == "second":
        grant["cores"] = [1]
    return {"id": name, "fence": 1, "state": "active", "grant": grant, "held": grant, "tasks": []}


async def gpu_of(client: RpcClient) -> dict[str, Any]:
    """The GPU in the node's next sample."""
    async for shot in client.stream("watch"):
        if not shot["gpus"]:
            break
        found: dict[str, Any] = shot["gpus"][0]
        return found
    sys.exit("error: NVML shows no GPU here")


async def check(client: RpcClient) -> None:
    before = await gpu_of(client)
    total, used = before["memory_total_bytes"] // MIB, before["memory_used_bytes"] // MIB
    print(f"NVML: {before['name']}, {used} of {total} MiB used, {before['uuid']}")
    await client.call("lease_claim", lease=lease("first", [0]))
    try:
        await client.call("lease_claim", lease=lease("second", [0]))
        sys.exit("error: one GPU was leased twice")
    except Refused as refused:
        print(f"a second lease on it: {refused.message}")
    argv = [sys.executable, "-c", PROGRAM]
    spec = {"argv": argv, "env": dict(os.environ), "user": "root", "stdin": "pipe", "cwd": "/"}
    await client.call("lease_start", lease_id="first", fence=1, task_id="program", spec=spec, timeout_s=60)
    said = ""
    async with asyncio.timeout(180):
        async for item in client.stream("task_follow", task_id="program"):
            if "exit" in item:
                print(f"the program ended with {item['exit']['exit_code']}")
                break
            said += item["data"].decode()
            print(item["data"].decode(), end="")
            if item["stream"] == "stdout" and said.count("\n") == 1:
                await asyncio.sleep(2.5)
                now = await gpu_of(client)
                print(f"NVML while it holds 1 GiB: {now['memory_used_bytes'] // MIB} MiB used, by {now['processes']}")
                await client.call("job_input", task_id="program", data=b"\n", last=True)
    visible, count, uuid = said.split("\n")[0].split()
    assert (visible, count) == ("0", "1"), said
    assert before["uuid"].removeprefix("GPU-") == uuid, (before["uuid"], uuid)
    assert said.split("\n")[1] == str(1 << 28), said
    await client.call("lease_release", lease_id="first", fence=1)
    print("the program saw the very device that was leased")


async def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        token = Path(directory) / "token"
        token.write_text(secrets.token_hex(32))
        config = {"node": "gpu1", "role": "worker", "address": "127.0.0.1", "token_path": str(token),
                  "node_dir": f"{directory}/node", "embedded": False}  # fmt: skip
        async with running_node(config) as node:
            channel = await connect(node["host"], node["port"], read_secret(token), 10.0)
            client = await RpcClient.start(channel)
            await asyncio.sleep(2.0)
            await check(client)
            await client.close()


if __name__ == "__main__":
    asyncio.run(main())
