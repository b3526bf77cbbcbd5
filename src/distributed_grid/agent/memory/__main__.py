"""`python -m distributed_grid.agent.memory DIRECTORY NODE HOST [tls]`, the pool's key on stdin: starts one, returns."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from distributed_grid.agent.memory.launch import launch
from distributed_grid.agent.memory.server import run


def main(directory: str, node: str, host: str, tls: str = "") -> int:
    key = sys.stdin.buffer.read()
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    return launch(lambda ready: run(Path(directory), node, host, key, ready, tls=bool(tls)), Path(directory))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
