"""Shows on a machine with a GPU, without Ray, that a running CUDA program is moved live, GPU memory and all.

    python scripts/check_gpu_move.py [GIB]

Moves a PyTorch program to a second node on this machine, which has a network of its own (the driver's socket in the
program has a name that one network can have once): its lines must be those of a run that was not moved. Then moves
that are called off: the program must run on where it was, with its GPU.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from distributed_grid.agent.inspect.facts import inspect_tree
from distributed_grid.agent.inspect.target import target_facts
from distributed_grid.agent.moving.keeper import MoveKeeper
from distributed_grid.core.process import process_id
from distributed_grid.monitoring.gpu import GpuReader
from distributed_grid.orchestration.offloading.preflight import MoveOptions, preflight, used_paths

PROGRAM = """
import os, sys, time, torch
torch.manual_seed(0)
held = torch.arange(int(float(sys.argv[2]) * 2**30 / 4), dtype=torch.float32, device="cuda")
w, d = torch.randn(512, 512, device="cuda"), torch.randn(512, 512, device="cuda")
n = 0
while not os.path.exists(sys.argv[1]):
    w, n = torch.tanh(w @ d / 20) + w * 0.5, n + 1
    print(n, f"{w.abs().sum().item():.6e}", int(held[n].item()), flush=True)
    time.sleep(0.02)
sys.exit(7)
"""
LIMIT_S = 120.0


def wait_for(condition: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + LIMIT_S
    while not (answer := condition()):
        if time.monotonic() > deadline:
            sys.exit(f"error: waited in vain for {what}")
        time.sleep(0.01)
    return answer


def checked(pid: int) -> dict[str, Any]:
    """What pre-flight says of it, as the daemon would ask; options for the mover."""
    facts, gpus = inspect_tree(pid), GpuReader().read()
    here = target_facts("a", paths=used_paths(facts), gpus=gpus)
    mine = [gpu.index for gpu in gpus if any(one.pid in facts.pids for one in gpu.processes)]
    found = preflight(facts, here, replace(here, node="b", network="another"), MoveOptions(), mine)
    for one in found.findings:
        print(f"  {one.severity}: {one.text}")
    assert not found.stops("live"), "pre-flight refuses it"
    assert len(found.mover["gpu_pairs"]) == 1, found.mover
    return found.mover


def gpu_mib() -> int:
    argv = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split()[0])


# -- the second node ---------------------------------------------------------------------------------------------------


def pump(take: socket.socket, give: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the move was called off
        while data := take.recv(1 << 20):
            give.sendall(data)
        give.shutdown(socket.SHUT_WR)


def join(one: socket.socket, other: socket.socket) -> None:
    for pair in ((one, other), (other, one)):
        threading.Thread(target=pump, args=pair, daemon=True).start()


def serve_there(base: Path) -> None:
    """In a network of its own: a keeper, asked by JSON lines; a socket file is its cable."""
    with socket.socket() as sock:  # loopback is down in a new network
        name = struct.pack("16sh14x", b"lo", 0x41)
        fcntl.ioctl(sock, 0x8914, name)
    keeper = MoveKeeper(base / "b" / "moves", base / "b" / "spool", "b")
    cable = socket.socket(socket.AF_UNIX)
    cable.bind(str(base / "cable"))
    cable.listen()
    port = 0

    def carry() -> None:
        while True:
            far, _ = cable.accept()
            join(far, socket.create_connection(("127.0.0.1", port)))

    threading.Thread(target=carry, daemon=True).start()
    for line in sys.stdin:
        asked = json.loads(line)
        answer = getattr(keeper, asked["do"])(*asked["args"])
        if asked["do"] == "in_prepare":
            port = answer["port"]
            answer["key"] = answer["key"] if isinstance(answer["key"], str) else answer["key"].hex()
        print(json.dumps(answer), flush=True)


class There:
    def __init__(self, base: Path) -> None:
        self.base = base
        argv = ["unshare", "--net", sys.executable, __file__, "--there", str(base)]
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, do: str, *args: Any) -> dict[str, Any]:
        assert self.process.stdin and self.process.stdout
        print(json.dumps({"do": do, "args": args}), file=self.process.stdin, flush=True)
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer

    def plug_in(self) -> int:
        """A port here that leads there."""
        listener = socket.create_server(("127.0.0.1", 0))

        def carry() -> None:
            near, _ = listener.accept()
            far = socket.socket(socket.AF_UNIX)
            far.connect(str(self.base / "cable"))
            join(near, far)

        threading.Thread(target=carry, daemon=True).start()
        return int(listener.getsockname()[1])

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait(30)


class Run:
    """One program, its log, and the two nodes between which it is moved."""

    def __init__(self, base: Path, name: str, gib: str) -> None:
        self.base = base / name
        self.base.mkdir()
        self.log, self.end = self.base / "log", self.base / "end"
        self.here, self.there = MoveKeeper(self.base / "a" / "moves", self.base / "a" / "spool", "a"), There(self.base)
        with self.log.open("wb") as log:
            argv = [sys.executable, "-c", PROGRAM, str(self.end), gib]
            self.child = subprocess.Popen(
                argv, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True, cwd="/"
            )
        wait_for(lambda: len(self.lines()) > 20, "the program's first lines")

    def lines(self, file: Path | None = None) -> list[str]:
        return (file or self.log).read_text().splitlines()

    def begin(self, **more: Any) -> None:
        who = process_id(self.child.pid)
        assert who
        settings = {"encrypt": False, "strict": False, "file_roots": [str(self.base)]}
        at = self.there.ask("in_prepare", "m", "127.0.0.1", settings)
        port, key = self.there.plug_in(), bytes.fromhex(at["key"])
        options = {**checked(who.pid), "encrypt": False, **more}
        self.here.out_begin("m", who.pid, who.start_ticks, "127.0.0.1", port, key, options)

    def goes_on(self) -> None:
        before = len(self.lines())
        wait_for(lambda: len(self.lines()) > before + 10, "the program to run on at home")


def moved(base: Path, gib: str) -> list[str]:
    run = Run(base, "moved", gib)
    before = gpu_mib()
    run.begin()
    out = run.here.out_wait("m", timeout_s=LIMIT_S)
    assert out["phase"] == "copied", out
    staged = run.there.ask("in_wait", "m", ("staged", "failed"), LIMIT_S)
    assert staged["phase"] == "staged", staged
    spool = run.base / "b" / "spool" / "m" / "stdout"
    assert not spool.read_text(), "the copy ran before it was told to"
    print(f"staged, with {gpu_mib()} MiB on the GPU again ({before} before)")
    assert run.there.ask("in_go", "m")["phase"] == "running"
    pause = time.time() - out["frozen_at"]
    told = {name: value for name, value in out["figures"].items() if name.endswith("_s") or name == "bytes"}
    print(f"moved with a pause of {pause:.2f} s and more for parking: {told}, restored in {staged['restore_s']} s")
    print("stub:", run.here.out_finish("m", {"dir": str(run.base / "stub"), "label": "moved to b"})["stub"])
    wait_for(lambda: len(run.lines(spool)) > 50, "lines of the copy")
    run.end.touch()
    ended = run.there.ask("in_wait", "m", ("exited",), LIMIT_S)
    assert ended["exit"]["code"] == 7, ended
    run.child.kill()
    run.child.wait()
    run.there.close()
    return [*run.lines(), *run.lines(spool)]


def called_off(base: Path, gib: str, name: str, halt_at: str, kill: bool) -> None:
    run = Run(base, name, gib)
    run.begin(halt_at=halt_at)
    wait_for(lambda: run.here.out_status("m")["phase"] == halt_at, f"the move to be {halt_at}")
    if kill:
        state = run.here.moves / "m" / "out.json"
        os.kill(json.loads(state.read_text())["mover"]["pid"], signal.SIGKILL)
    run.here.out_abort("m")
    run.goes_on()
    run.there.ask("in_drop", "m")
    run.end.touch()
    assert run.child.wait(LIMIT_S) == 7
    run.there.close()
    check(run.lines(), [])
    print(f"{name}: it ran on at home, with its GPU")


def check(lines: list[str], reference: list[str]) -> None:
    assert [line.split()[0] for line in lines] == [str(n) for n in range(1, len(lines) + 1)], lines[-3:]
    common = min(len(lines), len(reference))
    assert lines[:common] == reference[:common], "the moved run's values are not those of one that was not moved"


def main(gib: str = "2") -> None:
    base = Path(tempfile.mkdtemp(prefix="grid-gpu-"))
    try:
        lines = moved(base, gib)
        plain = Run(base, "plain", gib)
        wait_for(lambda: len(plain.lines()) >= len(lines), "a run that is not moved")
        plain.end.touch()
        plain.child.wait(LIMIT_S)
        plain.there.close()
        check(lines, plain.lines())
        print(f"{len(lines)} lines, all those of a run that was not moved")
        called_off(base, gib, "called off while frozen", "frozen", kill=False)
        called_off(base, gib, "mover killed while frozen", "frozen", kill=True)
    finally:
        shutil.rmtree(base, ignore_errors=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--there"]:
        serve_there(Path(sys.argv[2]))
    else:
        main(*sys.argv[1:])
