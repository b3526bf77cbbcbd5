"""`ray start` that loads Ray first and only then waits for the head, so that all nodes can start at once."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from pathlib import Path

from distributed_grid.core.process import read_stat

WAIT_LIMIT_S = 90.0
#: Ray itself gives a raylet 30 s to register, which is little on a machine that starts many things at once.
RAYLET_LIMIT_S = 75.0
HEAD_UNREACHABLE = 3  # an exit code
#: Exit code for a raylet that ended while it started. It gives its two Python agents 15 s to say their ports, whatever
#: is configured, and then aborts (`WaitForPersistedPort`, Ray 2.60): worth another try.
RAYLET_ENDED = 4


def wait_for(address: str, limit_s: float = WAIT_LIMIT_S) -> bool:
    """Whether something accepts connections at `host:port` within the limit."""
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + limit_s
    while True:
        try:
            with socket.create_connection((host, int(port)), timeout=2.0):
                return True
        except OSError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)


def wait_for_head_node(address: str, limit_s: float = WAIT_LIMIT_S) -> None:
    """Wait until the head node itself has registered: `ray start` would look for it only every 2 s, 20 times."""
    from ray._raylet import GcsClient  # type: ignore[attr-defined]
    from ray.exceptions import RpcError

    deadline = time.monotonic() + limit_s
    client = GcsClient(address=address)
    while time.monotonic() < deadline:
        try:
            if any(one.is_head_node for one in client.get_all_node_info(timeout=5).values()):
                return
        except RpcError:  # a head that is started once more has another cluster's id; `ray start` says the rest better
            wait_for(address, deadline - time.monotonic())
            client = GcsClient(address=address)
        time.sleep(0.1)


def raylet_ended(children: Path = Path("/proc/self/task")) -> bool:
    """Whether a raylet that this process started has ended: nobody has reaped it yet."""
    try:
        pids = {int(pid) for task in children.iterdir() for pid in (task / "children").read_text().split()}
    except OSError:  # a thread ended just now, or a kernel without that file: asked again, or waited for as Ray does
        return False
    stats = [stat for pid in pids if (stat := read_stat(pid)) is not None]
    return any(stat.comm == "raylet" and stat.state in "ZX" for stat in stats)


def watch_raylet() -> None:
    """Ray would go on asking for a raylet that is not there any more; ends this process then."""
    while not raylet_ended():
        time.sleep(0.2)
    print("the raylet ended while it started, as it does where the machine is too busy", flush=True)
    os._exit(RAYLET_ENDED)


def wait_for_raylet(limit_s: float = RAYLET_LIMIT_S) -> None:
    """Have `ray start` wait that long for its raylet, by making the question it asks again and again a patient one."""
    from ray._private import services

    ask_once = services.get_node

    def ask(*arguments: object, **named: object) -> object:
        deadline = time.monotonic() + limit_s
        while True:
            try:
                return ask_once(*arguments, **named)  # type: ignore[no-untyped-call]
            except RuntimeError:  # it has not registered yet
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    services.get_node = ask


def main(argv: list[str]) -> int:
    awaited = ""
    if argv and argv[0].startswith("--wait-for="):
        awaited = argv.pop(0).partition("=")[2]
    from ray.scripts import scripts

    if awaited and not wait_for(awaited):
        print(f"nothing answers at {awaited} after {WAIT_LIMIT_S:.0f} s", file=sys.stderr)
        return HEAD_UNREACHABLE
    if awaited:
        wait_for_head_node(awaited)
    wait_for_raylet()
    threading.Thread(target=watch_raylet, name="watch-raylet", daemon=True).start()
    scripts.cli.main(args=argv, prog_name="ray")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
