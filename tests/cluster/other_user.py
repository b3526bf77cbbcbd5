"""Run by tests: `other_user.py UID SOCKET CALL ARGUMENTS` calls the daemon as another user.

Only the connecting is done as that user: the kernel notes its uid then, and this Python may not be readable for it.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from distributed_grid.core.errors import GridError
from distributed_grid.wire.channel import connect_unix
from distributed_grid.wire.rpc import RpcClient


async def ask(uid: int, socket: Path, call: str, arguments: dict[str, Any]) -> Any:
    os.seteuid(uid)
    try:
        channel = await connect_unix(socket)
    finally:
        os.seteuid(0)
    client = await RpcClient.start(channel)
    try:
        if "refused" in client.hello:
            raise GridError.from_wire(client.hello["refused"])
        if call == "task_follow":
            said = b""
            async for item in client.stream(call, **arguments):
                said += item.get("data", b"") if item.get("stream") == "stdout" else b""
            return said.decode()
        if call == "lease_run":
            async for item in client.stream(call, **arguments):
                if "started" in item:
                    return item["started"]["task_id"]
        return await client.call(call, **arguments)
    finally:
        await client.close()


if __name__ == "__main__":
    try:
        answer = asyncio.run(ask(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4])))
        print(json.dumps({"answer": answer}))
    except GridError as error:
        print(json.dumps({"error": error.to_wire()}))
