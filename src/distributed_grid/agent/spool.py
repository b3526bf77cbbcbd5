"""What lies in a task's directory, and what state of the task it proves.

    spec.json     what to run (0600); its environment is apart in env.json, which the shim deletes once it has it
    shim.lock     locked by the shim for life; shim.json: there was a shim, so the task had its one start
    staged.json   the main process: (pid, start ticks) as the agent sees it, boot id; all but the exec is done.
                  Where the spec says hold, the exec was rehearsed, and it waits for the file `go`
    started.json  the same, after the exec
    exit.json     exit code or signal, times, usage; or the error that kept the command from starting
    stdout stderr the program's own output, nothing else
    stdin input   where the spec says so: the FIFO that it reads, and the parts of its input still to come (see feed.py)
    checkpoint*   while it is on disk instead of in memory: see checkpoint.py
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from distributed_grid.core.errors import GridError, NotFound, Refused, UsageError
from distributed_grid.core.process import ProcessId, boot_id, children_of, read_stat

State = Literal["prepared", "staged", "running", "exited", "failed", "lost"]
ENDED: frozenset[State] = frozenset({"exited", "failed", "lost"})
SPEC, ENV, SHIM, STAGED, GO = "spec.json", "env.json", "shim.json", "staged.json", "go"
LOCK = "shim.lock"
PIPE = "pipe"
STARTED, EXIT, STDOUT, STDERR = "started.json", "exit.json", "stdout", "stderr"


@dataclass(frozen=True, slots=True)
class TaskSpec:
    """What to run, as asked for. `env` goes over the user's basic variables (HOME, USER, PATH…)."""

    argv: list[str]
    exe: str = ""  # the program's file, where argv[0] is only what it calls itself; empty: argv[0], searched in PATH
    env: dict[str, str] = field(default_factory=dict, repr=False)
    cwd: str = ""  # empty: the user's home
    user: str = ""  # empty: whoever the agent runs as
    stdin: str = ""  # a file, or a FIFO that its writer has opened; PIPE: see job_input.py; empty: /dev/null
    cores: list[int] = field(default_factory=list)
    cpu_quota_cores: float = 0.0
    memory_limit_bytes: int = 0
    group: str = ""  # tasks with the same name here share one memory limit
    nice: int = 0
    umask: int = 0o022
    rlimits: dict[str, list[int]] = field(default_factory=dict)  # RLIMIT_NOFILE: [soft, hard]
    hold: bool = False  # stop just before the exec, until `go`

    def check(self) -> None:
        texts = [*self.argv, *self.env.keys(), *self.env.values(), self.exe, self.cwd, self.stdin]
        if not self.argv or not self.argv[0]:
            raise UsageError("no command given", code="no-command")
        if any("\0" in text for text in texts) or any("=" in name or not name for name in self.env):
            raise UsageError("a command, directory or variable holds a character it cannot hold", code="bad-text")

    def to_wire(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_wire(cls, data: dict[str, Any]) -> TaskSpec:
        unknown = data.keys() - {one.name for one in fields(cls)}
        if unknown or "argv" not in data:
            raise UsageError(f"not a task: {', '.join(sorted(unknown)) or 'argv is missing'}", code="bad-task")
        return cls(**data)


@dataclass(frozen=True, slots=True)
class TaskStatus:
    task_id: str
    node: str
    state: State
    argv: list[str]
    user: str
    pid: int = 0  # the main process, as seen on the node
    start_ticks: int = 0
    shim_pid: int = 0
    namespaced: bool = False
    memory_limited: bool = False  # whether the kernel holds the memory limit asked for
    exit_code: int | None = None  # as a shell shows it: 128 + signal
    signal: int | None = None
    oom_killed: bool = False
    lingering: bool = False  # the main process ended, what it left behind still runs
    error: dict[str, str] | None = None  # why the command never started: kind, message
    started_at: float = 0.0
    ended_at: float = 0.0
    cpu_s: float = 0.0
    max_rss_bytes: int = 0
    stdout_bytes: int = 0
    stderr_bytes: int = 0
    input_taken: int | None = None  # of what came from home, once it was moved on

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    def failure(self) -> GridError | None:
        """The error to show when the command could not be started."""
        return start_error(self.error, self.node, self.argv) if self.error else None

    def to_wire(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_wire(cls, data: dict[str, Any]) -> TaskStatus:
        known = {one.name for one in fields(cls)}
        return cls(**{key: value for key, value in data.items() if key in known})


def start_error(error: dict[str, str], node: str, argv: list[str]) -> GridError:
    hints = {
        "command-not-found": f"install {argv[0]!r} on {node}, or give the full path of the command",
        "interpreter-not-found": f"check the first line (#!) of {argv[0]}, and what is installed on {node}",
        "command-denied": f"check the permissions with `ls -l` on {node}",
        "not-a-program": f"give the script a first line such as #!/bin/sh, or run `sh {argv[0]}`",
        "directory-not-found": f"choose a directory that exists on {node}",
        "directory-denied": f"choose a directory that the user may enter on {node}",
        "stdin": f"choose a file that the user may read on {node}",
    }
    kind = error["kind"]
    make = NotFound if kind.endswith("-not-found") else Refused if kind.endswith("-denied") else GridError
    what = "bring back" if kind == "checkpoint" else "start"
    return make(f"cannot {what} {argv[0]!r} on {node}", cause=error["message"], hint=hints.get(kind, ""), code=kind)


def read_json(path: Path) -> dict[str, Any] | None:
    try:
        return dict(json.loads(path.read_bytes()))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError:  # cut short by a power failure; those that matter are fsynced
        return None


def shim_alive(shim: dict[str, Any] | None, boot: str) -> bool:
    if shim is None or shim["boot_id"] != boot:
        return False
    return ProcessId(shim["pid"], shim["start_ticks"]).is_alive()


def living(pids: list[int]) -> list[int]:
    """Without those that ended and only wait to be collected."""
    return [pid for pid in pids if (stat := read_stat(pid)) and stat.state not in "ZX"]


def decide_state(
    exit_record: dict[str, Any] | None, had_shim: bool, alive: bool, started: bool, staged: bool, same_boot: bool
) -> State:
    """What the files prove. Without a shim and in the same boot, nothing ran yet: it may be started (again)."""
    if exit_record is not None:
        return "failed" if exit_record.get("error") else "exited"
    if had_shim and not alive:
        return "lost"
    if not same_boot:
        return "lost"
    if started:
        return "running"
    return "staged" if staged else "prepared"


def read_status(task_dir: Path) -> TaskStatus:
    """The task's state from its files and /proc; NotFound if there is no such task."""
    spec = read_json(task_dir / SPEC)
    if spec is None:
        raise NotFound(f"there is no task {task_dir.name!r}", code="task-not-found")
    boot = boot_id()
    shim = read_json(task_dir / SHIM)
    alive = shim_alive(shim, boot)  # asked first: a shim writes all its files before it ends
    started = read_json(task_dir / STARTED)
    staged = read_json(task_dir / STAGED)
    ended = read_json(task_dir / EXIT)
    same_boot = spec["boot_id"] == boot
    held = spec["hold"] and staged is not None
    state = decide_state(ended, shim is not None, alive, started is not None, held, same_boot)
    main = started or staged or {}
    end = ended or {}
    code, number = end.get("code"), end.get("signal")
    return TaskStatus(
        task_id=task_dir.name, node=spec["node"], state=state, argv=spec["argv"], user=spec["user"],
        pid=main.get("pid", 0), start_ticks=main.get("start_ticks", 0),
        shim_pid=(shim or {}).get("pid", 0), namespaced=(shim or {}).get("namespaced", False),
        memory_limited=spec["memory_limited"],
        exit_code=128 + number if number else code, signal=number, oom_killed=end.get("oom_killed", False),
        lingering=bool(ended and alive and shim and living(children_of(shim["pid"]))), error=end.get("error"),
        started_at=end.get("started_at", main.get("time", 0.0)), ended_at=end.get("ended_at", 0.0),
        cpu_s=end.get("user_s", 0.0) + end.get("system_s", 0.0), max_rss_bytes=end.get("max_rss_bytes", 0),
        stdout_bytes=_size(task_dir / STDOUT), stderr_bytes=_size(task_dir / STDERR),
        input_taken=end.get("input_taken"),
    )  # fmt: skip


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
