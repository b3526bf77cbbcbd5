"""The moves of a node, as its agent commands them: each side of a move is a directory and processes of its own.

Holds nothing in memory: a new agent goes on with what the directories say. Every call may be repeated. All calls block
(up to their limits) and are safe in threads.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from distributed_grid.agent.moving import criu
from distributed_grid.agent.moving.held import end_mover, needs_cure, release
from distributed_grid.agent.moving.launch import Launchers, last_words
from distributed_grid.agent.moving.state import (
    State,
    cpu_ticks,
    inner_pid,
    live_tree,
    locked,
    named,
    read_json,
    thread_states,
    wait_gone,
    wake_is_due,
)  # fmt: skip
from distributed_grid.agent.moving.track import self_test
from distributed_grid.core.errors import GridError, NotFound, Refused, TimedOut, UsageError
from distributed_grid.core.process import ProcessId, boot_id

MOVE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,119}")
OUT, IN, STAGE = "out.json", "in.json", "stage.json"
STUB_DIR = "stub_dir"  # a file with the path of the stub's own directory
FINISH_LIMIT_S = 60.0
HOLD_LIMIT_S = 40.0
GO_LIMIT_S = 30.0
POLL_S = 0.003
RETRY_S = 0.5
OUT_HELD = ("copied", "failed")
OUT_OVER = ("aborted", "finished")
IN_OVER = ("failed", "dropped", "exited", "lost")


def _woken(state: dict[str, Any], tree: list[int], mover_alive: bool) -> bool:
    if "cpu_ticks" in state:
        return cpu_ticks(tree) > int(state["cpu_ticks"])
    # Of a relaunch there is no copy of what it was: a parent that wakes its stopped child (tmux, screen) would have it
    # run again in the moment between its guard and its stub.
    return bool(state.get("woken")) or not mover_alive or any(map(wake_is_due, tree))


class MoveKeeper:
    def __init__(self, moves: Path, spool: Path, node: str = "", tmpfs: Path = Path("/dev/shm")) -> None:
        self.moves = moves
        self.spool = spool
        self.node = node
        self.tmpfs = tmpfs
        self.launchers = Launchers()
        moves.mkdir(mode=0o700, parents=True, exist_ok=True)

    # -------------------------------------------------------------- source

    def out_begin(
        self, move_id: str, pid: int, start_ticks: int, host: str, port: int, key: bytes, options: dict[str, Any]
    ) -> dict[str, Any]:
        """Start carrying the tree over; returns at once, `out_wait` says how it goes."""
        directory = self._dir(move_id)
        if (directory / OUT).exists():
            return self.out_status(move_id)
        criu.require()
        spec = self._claim(directory, ProcessId(pid, start_ticks), self._shm(move_id, "out"))
        options = {"precopy": self.can_track()} | options
        spec |= {"host": host, "port": port, "key": key.hex(), "options": options}
        self.launchers.launch("out", directory, spec)
        return self.out_status(move_id)

    def out_hold(self, move_id: str, pid: int, start_ticks: int) -> dict[str, Any]:
        """For a relaunch: the tree is only stopped, and held until `out_abort` or `out_finish`."""
        directory = self._dir(move_id)
        if not (directory / OUT).exists():
            spec = self._claim(directory, ProcessId(pid, start_ticks), directory / "held")
            self.launchers.launch("hold", directory, spec)
        status = self.out_wait(move_id, timeout_s=HOLD_LIMIT_S)
        if status["error"]:
            raise GridError.from_wire(status["error"])
        if status["phase"] != "copied":
            raise GridError("the move broke off", cause=f"its mover ended in {status['phase']}", code="mover-lost")
        return status

    def _claim(self, directory: Path, root: ProcessId, shm: Path) -> dict[str, Any]:
        """The state file, before its mover: whoever calls the move off meanwhile finds it, and the mover finds that."""
        if not root.is_alive():
            raise NotFound(f"process {root.pid} is gone", code="process-not-found")
        directory.mkdir(mode=0o700, exist_ok=True)
        facts = {
            "move_id": directory.name, "pid": root.pid, "start_ticks": root.start_ticks,
            "inner_pid": inner_pid(root.pid), "shm": str(shm),
        }  # fmt: skip
        State(directory / OUT).set(side="out", phase="new", mover=None, error=None, **facts)
        return facts

    def can_track(self) -> bool:
        """Whether this kernel can track writes; tried once per kernel, the answer kept beside the moves."""
        note = self.moves / f".tracking-{os.uname().release}"
        if not note.exists():
            note.write_text(self_test())
        return not note.read_text()

    def out_status(self, move_id: str) -> dict[str, Any]:
        """`phase`: new, precopy, freezing, frozen, sent, copied; aborted (with `error` if by itself), failed, finished.

        A mover that died shows as `mover_alive` false in a phase before copied: abort it. `held`: all of it is stopped,
        as it should be. `woken`: somebody let it run since it was copied, or (of a relaunch) tried to, or may have
        while nobody guarded it: abort it, too.
        """
        state = read_json(self._dir(move_id) / OUT)
        if state is None:
            raise NotFound(f"there is no move {move_id!r} from here", code="move-not-found")
        root = ProcessId(state["pid"], state["start_ticks"])
        mover = named(state.get("mover"))
        mover_alive = bool(mover and mover.is_alive())
        tree = live_tree(root) if state["phase"] in OUT_HELD else []  # asked often while it still runs
        held = bool(tree) and all(thread_states(pid) <= set("TtZX") for pid in tree)
        return {
            "move_id": move_id, "phase": state["phase"], "pid": state["pid"], "start_ticks": state["start_ticks"],
            "alive": root.is_alive(), "mover_alive": mover_alive, "error": state.get("error"),
            "figures": state.get("figures", {}), "streams": state.get("streams", []),
            "frozen_at": state.get("frozen_at", 0.0), "stub": state.get("stub", False),
            "stub_reason": state.get("stub_reason", ""), "held": held,
            "woken": state["phase"] == "copied" and _woken(state, tree, mover_alive),
        }  # fmt: skip

    def out_wait(self, move_id: str, phases: Collection[str] = (), timeout_s: float = 60.0) -> dict[str, Any]:
        """The status once it is held, over or in one of `phases`, its mover died, or the time is up."""
        deadline = time.monotonic() + timeout_s
        while True:
            status = self.out_status(move_id)
            if status["phase"] in (*OUT_HELD, *OUT_OVER, *phases) or time.monotonic() > deadline:
                return status
            if not status["mover_alive"]:
                return self.out_status(move_id)
            time.sleep(POLL_S)

    def out_abort(self, move_id: str) -> dict[str, Any]:
        """The source runs on at once, as before; also when its mover is dead."""
        self.out_status(move_id)  # NotFound
        with locked(self._dir(move_id)):
            state = self._out(move_id)
            if state["phase"] == "new" and state["mover"] is None:
                state.set(phase="aborted")  # it had not begun, and will not
        if state["phase"] == "aborted":
            return self.out_status(move_id)
        state = end_mover(state)
        if not needs_cure(state):
            release(state)
            return self.out_status(move_id)
        return self._carry_out("release", state, "aborted", {})

    def out_finish(self, move_id: str, stub: dict[str, Any] | None = None) -> dict[str, Any]:
        """After the commit: the source goes, its root pid becomes the stub (`dir`, `label`), or is killed."""
        state = self._out(move_id)
        if state["phase"] == "finished":
            return self.out_status(move_id)
        return self._carry_out("finish", end_mover(state), "finished", stub or {})

    def _carry_out(self, side: str, state: State, phase: str, stub: dict[str, Any]) -> dict[str, Any]:
        """By a process of its own, started again if somebody kills it; the status once it has done so."""
        directory = state.path.parent
        move_id = directory.name
        deadline = time.monotonic() + FINISH_LIMIT_S
        while True:
            root = ProcessId(state["pid"], state["start_ticks"])
            self.launchers.launch(side, directory, {"pid": root.pid if root.is_alive() else os.getpid(), "stub": stub})
            while (status := self.out_status(move_id))["mover_alive"] and time.monotonic() < deadline:
                time.sleep(POLL_S)
            status = self.out_status(move_id)
            if status["phase"] == phase:
                return status
            if side == "finish" and status["phase"] == "replacing" and not stub.get("dir") and not status["alive"]:
                # Its root was the last of its pid namespace: who ended it there was ended with it.
                fresh = self._out(move_id)
                shutil.rmtree(fresh["shm"], ignore_errors=True)
                fresh.set(phase="finished", stub=False, stub_reason="no stub was asked for")
                return self.out_status(move_id)
            if time.monotonic() > deadline:
                why = last_words(directory)
                if side == "release":
                    raise TimedOut("the source could not be let go", code="release", cause=why)
                raise TimedOut("the source could not be removed", code="finish", cause=why)
            time.sleep(RETRY_S)

    # -------------------------------------------------------------- target

    def in_prepare(self, move_id: str, host: str, options: dict[str, Any]) -> dict[str, Any]:
        """Listen on `host` for the source; where, and with what key."""
        directory = self._dir(move_id)
        if (directory / IN).exists():
            # Asked again: the first answer, and with it the key, was lost.
            if self.in_status(move_id)["phase"] not in ("listening", "dropped", "failed", "lost"):
                raise Refused(f"the move {move_id} is under way", code="move-exists", hint="drop it first")
            self.in_drop(move_id)
            shutil.rmtree(directory, ignore_errors=True)
        criu.require()
        directory.mkdir(mode=0o700, exist_ok=True)
        key = secrets.token_bytes(32)
        task_id = options.get("task_id", move_id)
        if not MOVE_ID.fullmatch(task_id) or (self.spool / task_id).exists():
            raise Refused(f"there is a task {task_id} already", code="task-exists")
        spec = {
            "move_id": move_id, "bind": host, "key": key.hex(), "options": {"node": self.node} | options,
            "shm": str(self._shm(move_id, "in")), "task_dir": str(self.spool / task_id),
        }  # fmt: skip
        self.spool.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.launchers.launch("in", directory, spec)
        return {"host": host, "port": self._in(move_id)["port"], "key": key}

    def in_status(self, move_id: str) -> dict[str, Any]:
        """`phase`: listening, receiving, received, staging, staged, running, exited; failed, lost, dropped."""
        directory = self._dir(move_id)
        state = self._in(move_id).data
        stage = read_json(directory / STAGE) or {}
        task_dir = Path(state["task_dir"])
        phase, error = state["phase"], state.get("error")
        mover = named(state.get("mover"))
        shim = named(read_json(task_dir / "shim.json"))
        if phase == "received":
            phase = "staging" if stage.get("phase", "waiting") == "waiting" else stage["phase"]
        ended = read_json(task_dir / "exit.json")
        if phase == "dropped":
            pass
        elif ended is not None:
            phase = "exited"
        elif stage.get("phase") == "failed" and state["phase"] != "failed":
            told = criu.explain_lines(stage["errors"], "the process could not be restored on the target")
            phase, error = "failed", told.to_wire()
        elif phase in ("staging", "staged", "running"):
            if shim is None or not shim.is_alive():
                phase = "exited" if (task_dir / "exit.json").exists() else "lost"
        elif phase in ("listening", "receiving") and not (mover and mover.is_alive()):
            fresh = read_json(directory / IN) or {}
            if fresh.get("phase") == phase:
                phase = "lost"
        started = read_json(task_dir / "started.json")
        main = started or read_json(task_dir / "staged.json") or {}
        return {
            "move_id": move_id, "phase": phase, "task_id": task_dir.name, "pid": main.get("pid", 0),
            "start_ticks": main.get("start_ticks", 0), "error": error, "bytes": state.get("bytes", 0),
            "restore_s": stage.get("restore_s", 0.0), "started_at": (started or {}).get("time", 0.0),
            "streams": state.get("streams", []),
            "going": (task_dir / "go").exists(), "exit": ended,
            "rebooted": (read_json(task_dir / "spec.json") or {}).get("boot_id", boot_id()) != boot_id(),
        }  # fmt: skip

    def in_wait(self, move_id: str, phases: Collection[str] = ("staged",), timeout_s: float = 60.0) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        while True:
            status = self.in_status(move_id)
            if status["phase"] in (*phases, *IN_OVER) or time.monotonic() > deadline:
                return status
            time.sleep(POLL_S)

    def in_go(self, move_id: str) -> dict[str, Any]:
        """Let the stopped copy run; the answer's phase is running or exited. Said by a file: it stays said."""
        status = self.in_status(move_id)
        if status["phase"] in ("running", "exited"):
            return status
        if status["phase"] != "staged":
            raise Refused(f"there is nothing to let go: the move is {status['phase']}", code="not-staged")
        task_dir = self.spool / status["task_id"]
        (task_dir / "go").touch()
        shim = named(read_json(task_dir / "shim.json"))
        if shim:
            shim.signal(signal.SIGUSR1)
        status = self.in_wait(move_id, ("running",), GO_LIMIT_S)
        if status["phase"] not in ("running", "exited"):
            raise GridError("the copy was let go but does not answer", code="go", cause=str(status["phase"]))
        return status

    def in_drop(self, move_id: str) -> dict[str, Any]:
        """The stopped copy and all that came with it are gone; refused once it was let go."""
        state = self._in(move_id)
        task_dir = Path(state["task_dir"])
        if (task_dir / "go").exists():
            raise Refused("it was let go: only a cancel ends it now", code="running")
        for one in (named(state.data.get("mover")), named(read_json(task_dir / "shim.json"))):
            if one and one.signal(signal.SIGKILL) and not wait_gone(one, 20.0):
                raise TimedOut("the copy does not end", code="drop")
        shutil.rmtree(task_dir, ignore_errors=True)
        for left in self.spool.glob(f".new-*-{task_dir.name}"):
            shutil.rmtree(left, ignore_errors=True)
        shutil.rmtree(state["shm"], ignore_errors=True)
        state.set(phase="dropped")
        return self.in_status(move_id)

    # -------------------------------------------------------------- all

    def list(self) -> list[dict[str, Any]]:
        """Every side of every move that this node knows of, with `side`."""
        found = []
        for directory in sorted(one for one in self.moves.iterdir() if one.is_dir()):
            if (directory / OUT).exists():
                found.append({"side": "out"} | self.out_status(directory.name))
            if (directory / IN).exists():
                found.append({"side": "in"} | self.in_status(directory.name))
        return found

    def forget(self, move_id: str) -> None:
        """Remove the records of a move that is over here; the task, if it became one, is not touched."""
        directory = self._dir(move_id)
        over = {"out": OUT_OVER, "in": ("dropped", "exited", "lost")}
        for one in self.list():
            if one["move_id"] == move_id and one["phase"] not in over[one["side"]]:
                raise Refused(f"the move {move_id} is {one['phase']}", code="move-active")
        for name in (OUT, IN):
            if state := read_json(directory / name):
                shutil.rmtree(state["shm"], ignore_errors=True)
        if (note := directory / STUB_DIR).exists():
            shutil.rmtree(note.read_text(), ignore_errors=True)
        shutil.rmtree(directory, ignore_errors=True)

    def _dir(self, move_id: str) -> Path:
        if not MOVE_ID.fullmatch(move_id):
            raise UsageError(f"{move_id!r} is not the id of a move", code="bad-move-id")
        return self.moves / move_id

    def _shm(self, move_id: str, side: str) -> Path:
        where = self.tmpfs if os.access(self.tmpfs, os.W_OK) else self._dir(move_id)
        return where / f"grid-{side}-{move_id}-{secrets.token_hex(4)}"

    def _out(self, move_id: str) -> State:
        self.out_status(move_id)  # NotFound
        return State(self._dir(move_id) / OUT)

    def _in(self, move_id: str) -> State:
        path = self._dir(move_id) / IN
        if not path.exists():
            raise NotFound(f"there is no move {move_id!r} to here", code="move-not-found")
        return State(path)
