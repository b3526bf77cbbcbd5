"""Moves a process between two directories of this machine, by hand: `try_move.py [PID] [--mb N] [--plain]`."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from distributed_grid.agent.moving.keeper import MoveKeeper
from distributed_grid.core.process import process_id

PROGRAM = """
import sys, time
memory = bytearray(int(sys.argv[1]) << 20)
for at in range(0, len(memory), 4096): memory[at] = at // 4096 % 251
step = 0
while step < int(sys.argv[2]):
    step += 1
    memory[step * 7919 * 4096 % len(memory) + 1] = step % 251
    print(step, flush=True)
    time.sleep(0.01)
print(sum(memory[::4096]) % 65521, flush=True)
sys.exit(7)
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("pid", nargs="?", type=int)
    parser.add_argument("--mb", type=int, default=50)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--plain", action="store_true", help="no encryption")
    parser.add_argument("--no-precopy", action="store_true")
    parser.add_argument("--strict", action="store_true")
    args = parser.parse_args()
    base = Path(tempfile.mkdtemp(prefix="grid-try-"))
    here = MoveKeeper(base / "a/moves", base / "a/spool", "a")
    there = MoveKeeper(base / "b/moves", base / "b/spool", "b")
    if args.pid is None:
        with (base / "log").open("wb") as log:
            child = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, str(args.mb), str(args.steps)], stdout=log, stderr=log,
                stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        args.pid = child.pid
        while (base / "log").stat().st_size == 0:
            time.sleep(0.05)
    who = process_id(args.pid)
    assert who
    began = time.monotonic()
    options = {"encrypt": not args.plain, "strict": args.strict}
    at = there.in_prepare("try", "127.0.0.1", options)
    print(f"prepared {time.monotonic() - began:.3f} s")
    here.out_begin("try", who.pid, who.start_ticks, at["host"], at["port"], at["key"],
                   options | {"precopy": not args.no_precopy})  # fmt: skip
    out = here.out_wait("try")
    print(f"copied {time.monotonic() - began:.3f} s", json.dumps(out, indent=1))
    if out["phase"] != "copied":
        print(there.in_status("try"))
        return
    staged = there.in_wait("try")
    print(f"staged {time.monotonic() - began:.3f} s; paused {time.time() - out['frozen_at']:.3f}", json.dumps(staged))
    if staged["phase"] != "staged":
        print(here.out_abort("try"))
        return
    print(there.in_go("try")["phase"], f"{time.monotonic() - began:.3f} s; paused {time.time() - out['frozen_at']:.3f}")
    print(here.out_finish("try", {"dir": str(base / "stub"), "label": "moved to b"}))
    subprocess.run(["ps", "-o", "pid,ppid,stat,args", "-p", str(args.pid)])
    print(there.in_wait("try", ("exited",), 60))
    before, after = (base / "log").read_text().split(), (base / "b/spool/try/stdout").read_text().split()
    print("here", before[-3:], "there", after[:3], after[-2:])
    os.kill(args.pid, signal.SIGKILL)
    shutil.rmtree(base)


if __name__ == "__main__":
    main()
