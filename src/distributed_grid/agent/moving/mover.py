"""The process of one side of a move: detached from the agent that started it, found again by its directory.

`python -I -m distributed_grid.agent.moving.mover SIDE DIR`, its orders as JSON on stdin (they hold the key, so neither
argv nor a file); with `--spare` side and directory too come with them. Without orders it ends. The first process forks
and ends once the second has its state file: out, hold (the source of a relaunch) and in go on alone, and `finish` and
`release` (which need ptrace, hence a process of their own) end by themselves.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

from distributed_grid.agent.moving.launch import LOG
from distributed_grid.agent.moving.state import State, identity, locked
from distributed_grid.core.errors import GridError, InternalError, Refused

_CLONE_NEWNS, _CLONE_NEWPID = 0x00020000, 0x20000000


def main(side: str, directory: Path, spec: dict[str, Any]) -> int:
    """The launcher: 0 once the mover is on its own."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for value in ("-900", "0"):  # Ray's workers hand down 1000; going below needs a right we may lack
        try:
            Path("/proc/self/oom_score_adj").write_text(value)
            break
        except OSError:
            continue
    other = _other_namespaces(spec["pid"]) if side in ("out", "hold", "finish", "release") else {}
    if "pid" in other:
        _enter(other["pid"], _CLONE_NEWPID)  # for the child: it sees the tree as the tree sees itself
    told, tell = os.pipe()
    done, doing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(tell)
        os.close(done)
        _become_mover(side, directory, spec, told, doing, other)
    os.close(doing)
    os.write(tell, json.dumps(identity(child)).encode())
    os.close(tell)
    return 0 if os.read(done, 1) == b"k" else 1


def _other_namespaces(pid: int) -> dict[str, int]:
    """Descriptors of the namespaces in which that process lives and we do not: it was moved here before."""
    found = {}
    for kind in ("pid", "mnt"):
        theirs = Path(f"/proc/{pid}/ns/{kind}")
        if theirs.readlink() != Path(f"/proc/self/ns/{kind}").readlink():
            found[kind] = os.open(theirs, os.O_RDONLY)
    return found


def _enter(fd: int, kind: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(fd, kind) != 0:
        raise OSError(ctypes.get_errno(), "setns")


def _become_mover(
    side: str, directory: Path, spec: dict[str, Any], told: int, doing: int, other: dict[str, int]
) -> NoReturn:
    code = 1
    try:
        me = json.loads(os.read(told, 4096))
        os.close(told)
        if "mnt" in other:
            _enter(other["mnt"], _CLONE_NEWNS)
        os.setsid()
        code = _run(side, directory, spec, me, doing)
    except BaseException:  # noqa: BLE001 - a forked child must never return into its parent's code
        traceback.print_exc()
    finally:
        os._exit(code)


def _run(side: str, directory: Path, spec: dict[str, Any], me: dict[str, int], doing: int) -> int:
    if side in ("out", "hold"):
        return _run_out(side, directory, spec, me, doing)
    if side == "in":
        return _run_in(directory, spec, me, doing)
    from distributed_grid.agent.moving.held import release, replace

    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # not while a process's registers are not its own
    state = State(directory / "out.json")
    state.set(mover=me)
    os.write(doing, b"k")
    if side == "release":
        release(state, inside=True)
    else:
        replace(state, spec["stub"], inside=True)
    return 0


def _run_out(side: str, directory: Path, spec: dict[str, Any], me: dict[str, int], doing: int) -> int:
    with locked(directory):
        state = State(directory / "out.json")
        if state["phase"] == "new":
            state.set(mover=me)
    os.write(doing, b"k")
    if state["phase"] != "new":
        return 0  # called off before it began
    os.close(doing)
    from distributed_grid.agent.moving.hold import Cancelled, Holder
    from distributed_grid.agent.moving.source import Source

    Path(spec["shm"]).mkdir(mode=0o700)
    # CRIU holds two descriptors per MiB of memory.
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    source = Source(spec, state) if side == "out" else Holder(spec, state)
    signal.signal(signal.SIGTERM, source.on_term)
    try:
        source.run()
        return 0
    except Cancelled:
        return 0  # whoever called it off releases the source
    except (GridError, OSError) as error:
        told = error if isinstance(error, GridError) else InternalError("the move failed", cause=str(error))
        if not source.root.is_alive():
            told = Refused(f"process {spec['pid']} ended while it was being moved", code="gone")
        state.set(error=told.to_wire(), figures=source.figures)
        if state["phase"] == "sent":
            state.set(phase="failed")  # the target may be whole: the source stays held until somebody decides
        else:
            from distributed_grid.agent.moving.held import release

            release(state, inside=True)
        return 1


def _run_in(directory: Path, spec: dict[str, Any], me: dict[str, int], doing: int) -> int:
    from distributed_grid.agent.moving import stream
    from distributed_grid.agent.moving.target import Target

    state = State(directory / "in.json")
    listener = stream.listen(spec["bind"])
    state.set(
        side="in", phase="listening", mover=me, move_id=spec["move_id"], shm=spec["shm"], task_dir=spec["task_dir"],
        port=listener.getsockname()[1], error=None,
    )  # fmt: skip
    os.write(doing, b"k")
    os.close(doing)
    try:
        Target(spec, state, listener).run()
        return 0
    except (GridError, OSError) as error:
        told = error if isinstance(error, GridError) else InternalError("the move failed", cause=str(error))
        state.set(phase="failed", error=told.to_wire())
        return 1


def load() -> None:
    """All that any side needs, before the orders come: loading takes longer than all else here."""
    import distributed_grid.agent.moving.held
    import distributed_grid.agent.moving.source
    import distributed_grid.agent.moving.target  # noqa: F401


def show_as(*words: str) -> None:
    """What `ps` shows: a spare is started with padding where its side and directory come to stand."""
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b") ")[2].split()
    first, end = int(fields[45]), int(fields[46])  # arg_start and arg_end
    with open("/proc/self/cmdline", "rb") as file:
        now = file.read().split(b"\0")[:-1]
    line = b"\0".join([*now[: now.index(b"--spare")], *map(os.fsencode, words), b""])
    if len(line) <= end - first:
        ctypes.memmove(first, line.ljust(end - first, b"\0"), end - first)


if __name__ == "__main__":
    is_spare = sys.argv[1] == "--spare"
    if is_spare:
        load()
    told = sys.stdin.read()
    if not told:
        sys.exit(0)
    orders = json.loads(told)
    if is_spare:
        show_as(orders["side"], orders["dir"])
    with open(Path(orders["dir"]) / LOG, "ab") as log:
        os.dup2(log.fileno(), 2)
    sys.exit(main(orders["side"], Path(orders["dir"]), orders["spec"]))
