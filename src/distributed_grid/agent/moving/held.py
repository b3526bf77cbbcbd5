"""What becomes of the held source: it runs on (`release`), or a stub takes its place (`replace`).

Both work from the state file alone, also when the mover is dead, and may be called again. What needs ptrace has to run
`inside` its pid namespace, in a process of its own.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

from distributed_grid.agent.moving import cure, gpu
from distributed_grid.agent.moving.ptrace import exec_in_place
from distributed_grid.agent.moving.state import State, live_tree, named, resume, tracer_of, wait_gone
from distributed_grid.core.errors import Refused, TimedOut, Unavailable
from distributed_grid.core.process import ProcessId

MOVER_END_LIMIT_S = 70.0  # it waits for CRIU to take its code out of the process, twice 30 s at worst
TRACER_LIMIT_S = 30.0
KILL_LIMIT_S = 20.0
STUB_LIMIT_S = 20.0


def end_mover(state: State) -> State:
    """The state as the mover left it. It ends at its next safe point, and with it what it held: tracking, the link."""
    mover = named(state.data.get("mover"))
    if mover and mover.signal(signal.SIGTERM) and not wait_gone(mover, MOVER_END_LIMIT_S):
        mover.signal(signal.SIGKILL)
        wait_gone(mover, 5.0)
    return State(state.path)


def wait_untraced(root: ProcessId) -> None:
    """A CRIU whose mover died is about to let go of the tree by itself."""
    deadline = time.monotonic() + TRACER_LIMIT_S
    for pid in live_tree(root):
        while tracer_of(pid):
            if time.monotonic() > deadline:
                raise TimedOut("another process still traces the source", code="traced")
            time.sleep(0.002)


def root_of(state: State, inside: bool) -> ProcessId:
    """The root of the tree, by the pid it has for us: `inside` its own pid namespace or out of it."""
    return ProcessId(state["inner_pid" if inside else "pid"], state["start_ticks"])


def release(state: State, inside: bool = False) -> None:
    """The source runs on, as before."""
    if state["phase"] in ("finished", "replacing"):
        raise Refused("the move is finished: the source is gone", code="finished")
    root = root_of(state, inside)
    wait_untraced(root)
    if inside and (told := cure.cure(Path(state["shm"]) / cure.NAME)):
        print("put right:", "; ".join(told), file=sys.stderr)
    if state["phase"] not in ("new", "precopy", "aborted"):
        resume(root, state.data.get("stopped_before", []))
    if state.data.get("parked"):
        _unpark(root)
    shutil.rmtree(state["shm"], ignore_errors=True)
    state.set(phase="aborted", alive=root.is_alive())


def _unpark(root: ProcessId) -> None:
    """Its GPU is its own again; where somebody took the room meanwhile this is tried again until there is some."""
    try:
        gpu.call("unpark", *live_tree(root))
    except gpu.GpuError as error:
        raise Unavailable("it waits for its GPU", cause=str(error), code="gpu-unpark") from None


def needs_cure(state: State) -> bool:
    """Whether `release` has to be called from inside: CRIU was at work in the process, and it is still there."""
    over = state["phase"] in ("replacing", "finished")
    return not over and (Path(state["shm"]) / cure.NAME).exists() and root_of(state, inside=False).is_alive()


def replace(state: State, stub: dict[str, Any], inside: bool = False) -> None:
    """The tree goes; its root pid lives on as the stub, or is killed where that cannot be."""
    if state["phase"] == "finished":
        return
    if state["phase"] not in ("copied", "sent", "failed", "replacing"):
        raise Refused(f"the source is not held: its move is {state['phase']}", code="not-held")
    root = root_of(state, inside)
    wait_untraced(root)
    state.set(phase="replacing")
    if marker := stub.get("moved_marker"):
        Path(marker).touch()
    reason = "it was gone"
    for pid in [one for one in live_tree(root) if one != root.pid][::-1]:
        os.kill(pid, signal.SIGKILL)
    if root.is_alive():
        reason = _become_stub(root, stub) if stub.get("dir") else "no stub was asked for"
        if reason:
            root.signal(signal.SIGKILL)
            wait_gone(root, KILL_LIMIT_S)
        else:
            os.kill(root.pid, signal.SIGCONT)
            reason = _await_stub(root, Path(stub["dir"]))
    shutil.rmtree(state["shm"], ignore_errors=True)
    state.set(phase="finished", stub=not reason, stub_reason=reason)


def _await_stub(root: ProcessId, directory: Path) -> str:
    """Empty once it listens, and for one that is slow: it has taken the place, and whoever wants it dials again."""
    deadline = time.monotonic() + STUB_LIMIT_S
    while not (directory / "stub.sock").exists() and time.monotonic() < deadline:
        if not root.is_alive():
            return "the stub ended at once"
        time.sleep(0.002)
    return ""


def _become_stub(root: ProcessId, stub: dict[str, Any]) -> str:
    """Empty if the stub took its place, else why not."""
    directory = Path(stub["dir"])
    if str(directory / "stub.py").encode() in Path(f"/proc/{root.pid}/cmdline").read_bytes().split(b"\0"):
        return ""  # it did so before we were called again
    owner = Path(f"/proc/{root.pid}").stat()
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        (directory / "stub.sock").unlink(missing_ok=True)
        program = directory / "stub.py"
        shutil.copyfile(Path(__file__).with_name("stub.py"), program)
        for path in (directory, program):
            os.chown(path, owner.st_uid, owner.st_gid)
    except OSError as error:
        return str(error)
    reason = ""
    for python in (sys.executable, "/usr/bin/python3"):
        argv = [python, "-I", "-S", str(program), str(directory), *stub.get("label", "moved by the grid").split()]
        try:
            exec_in_place(root.pid, python, argv, ["PATH=/usr/bin:/bin"])
            return ""
        except OSError as error:
            reason += f"{python}: {error}; "
    return reason
