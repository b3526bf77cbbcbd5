"""Processes grouped into jobs: a training run and its workers are one tree; the shell above them is not in it."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from distributed_grid.agent.inspect.facts import tty_name, user_name
from distributed_grid.agent.inspect.origin import (
    JOB_LAUNCHERS,
    is_wrapper,
    origin_of,
    read_argv,
    read_environment_raw,
)
from distributed_grid.agent.inspect.plain import from_plain, to_plain
from distributed_grid.agent.inspect.sockets import read_sockets
from distributed_grid.monitoring.snapshot import GpuSnapshot, ProcessSample

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
LEAST_CORES = 0.02
#: Libraries whose presence in memory says what a program does: a part of a path -> its name.
LIBRARIES = {
    "/torch/": "torch", "/tensorflow/": "tensorflow", "/jaxlib/": "jax", "/vllm/": "vllm", "/tensorrt": "tensorrt",
    "/onnxruntime/": "onnxruntime", "/llama_cpp/": "llama", "/libllama": "llama", "/ctranslate2/": "ctranslate2",
    "/xgboost/": "xgboost", "/lightgbm/": "lightgbm", "/catboost/": "catboost", "/sklearn/": "sklearn",
    "/pandas/": "pandas", "/polars/": "polars", "/pyarrow/": "pyarrow", "/duckdb": "duckdb", "/cudf/": "cudf",
    "/libjvm.so": "jvm", "/numpy/": "numpy", "/scipy/": "scipy", "/libcuda.so": "cuda", "/libmpi.so": "mpi",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Identity:
    """What rarely changes in a process's life, read once."""

    comm: str
    argv: tuple[str, ...]
    origin: str


@dataclass(frozen=True, slots=True)
class TreeSample:
    """One job as seen over the last minute, with what tells its type. Sums are over the tree."""

    pid: int
    start_ticks: int
    pids: tuple[int, ...]
    uid: int
    uids: tuple[int, ...]  # of all in the tree
    user: str
    comm: str
    argv: tuple[str, ...]
    origin: str = "user"
    state: str = "S"
    age_s: float = 0.0
    cpu_cores: float = 0.0  # since the last look
    cpu_cores_1m: float = 0.0
    cpu_wait_1m: float = 0.0  # cores it was ready to use and did not get: a full node gives nobody a whole one
    cpu_time_s: float = 0.0
    memory_bytes: int = 0  # private pages of each, the largest shared part once
    peak_memory_bytes: int = 0
    gpu_memory_bytes: int = 0
    gpu_indices: tuple[int, ...] = ()
    gpu_utilization: float = 0.0
    threads: int = 1
    tty: str = ""
    stdin_tty: bool = False
    foreground: bool = False
    #: Seconds since its terminal was last read, by whoever; None: not since the process started, or no terminal.
    tty_read_age_s: float | None = None
    session_leader: bool = False
    parents: tuple[str, ...] = ()  # names, nearest first
    service: str = ""  # the systemd unit that it belongs to
    libraries: tuple[str, ...] = ()
    listens: bool = False
    read_bytes: int = 0
    write_bytes: int = 0
    exe: str = ""
    cwd: str = ""
    #: What it says itself of being moved by itself: `GRID_OFFLOAD=never`, `avoid` or `prefer` in its environment.
    mark: str = ""

    @property
    def cpu_cores_wanted(self) -> float:
        """What it would use if nobody else wanted it; one that hardly runs at all wants nothing."""
        return self.cpu_cores_1m + (self.cpu_wait_1m if self.cpu_cores_1m >= LEAST_CORES else 0.0)

    def to_wire(self) -> dict[str, Any]:
        return to_plain(self)

    @staticmethod
    def from_wire(data: Mapping[str, Any]) -> TreeSample:
        return from_plain(TreeSample, data)


class Identities:
    """Command line and origin of each process, kept while it lives and its name stays the same."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], Identity] = {}

    def of(self, samples: Iterable[ProcessSample]) -> dict[int, Identity]:
        before, self._known = self._known, {}
        found: dict[int, Identity] = {}
        for one in samples:
            key = (one.pid, one.start_ticks)
            identity = before.get(key)
            if identity is None or identity.comm != one.comm:
                argv = read_argv(one.pid)
                identity = Identity(one.comm, argv, origin_of(one.comm, argv, read_environment_raw(one.pid)))
            self._known[key] = found[one.pid] = identity
        return found


def group_trees(
    samples: Sequence[ProcessSample], identities: Mapping[int, Identity]
) -> list[tuple[ProcessSample, list[ProcessSample]]]:
    """Each user's job as (root, all of it). Pure.

    A process belongs to its parent's job unless the parent only wraps jobs (a shell, tmux, a service manager), is
    another user's, the grid's or Ray's, or has one of theirs below it; or unless it leads a session of its own, as what
    was started to outlive its parent does.
    """
    by_pid = {one.pid: one for one in samples}
    apart = above_ours(samples, identities)
    roots: dict[int, int] = {}

    def root_of(pid: int) -> int:
        line = []
        while pid not in roots:
            line.append(pid)
            if _begins_job(by_pid[pid], by_pid, identities, apart):
                roots[pid] = pid
                break
            pid = by_pid[pid].ppid
        for one in line:
            roots[one] = roots[pid]
        return roots[pid]

    trees: dict[int, list[ProcessSample]] = {}
    for one in samples:
        if identities[one.pid].origin == "user":
            trees.setdefault(root_of(one.pid), []).append(one)
    return [(by_pid[root], members) for root, members in trees.items() if identities[root].origin == "user"]


def above_ours(samples: Iterable[ProcessSample], identities: Mapping[int, Identity]) -> set[int]:
    """Everything that has a process of the grid or of Ray below it: it cannot go anywhere as a whole."""
    by_pid = {one.pid: one for one in samples}
    found: set[int] = set()
    for pid, identity in identities.items():
        if identity.origin == "user":
            continue
        above = by_pid[pid].ppid
        while above in by_pid and above not in found:
            found.add(above)
            above = by_pid[above].ppid
    return found


def _begins_job(
    one: ProcessSample, by_pid: Mapping[int, ProcessSample], identities: Mapping[int, Identity], apart: set[int]
) -> bool:
    parent = by_pid.get(one.ppid)
    if parent is None or parent.pid <= 1 or parent.uid != one.uid or parent.pid in apart or one.pid in apart:
        return True
    about = identities[parent.pid]
    if about.origin != "user" or is_wrapper(parent.comm, about.argv):
        return True
    if one.session == one.pid:
        return JOB_LAUNCHERS.search(" ".join(about.argv[:4])) is None
    return False


def summarise(
    root: ProcessSample, members: Sequence[ProcessSample], identity: Identity, gpus: Iterable[GpuSnapshot]
) -> TreeSample:
    """The sums of one tree; what is dear to read comes with `with_details`."""
    pids = {one.pid for one in members}
    gpu_bytes, indices, utilization = 0, [], 0.0
    for gpu in gpus:
        mine = [process for process in gpu.processes if process.pid in pids]
        if mine:
            indices.append(gpu.index)
            gpu_bytes += sum(process.memory_used_bytes or 0 for process in mine)
            utilization += sum(process.utilization or 0.0 for process in mine)
    memory = max(one.rss_bytes for one in members) if len(members) == 1 else _memory(members)
    # Peaks of different moments: their sum is the most that it can have been, so never too little is reserved.
    grown = sum(max(0, one.peak_rss_bytes - one.rss_bytes) for one in members)
    return TreeSample(
        pid=root.pid, start_ticks=root.start_ticks, pids=(root.pid, *sorted(pids - {root.pid})), uid=root.uid,
        uids=tuple(sorted({one.uid for one in members})), user=user_name(root.uid), comm=root.comm,
        argv=identity.argv or (root.comm,), origin=identity.origin, state=root.state, age_s=root.age_s,
        cpu_cores=sum(one.cpu_cores for one in members), cpu_cores_1m=sum(one.cpu_cores_1m for one in members),
        cpu_wait_1m=sum(one.cpu_wait_1m for one in members),
        cpu_time_s=sum(one.cpu_time_s for one in members), memory_bytes=memory, peak_memory_bytes=memory + grown,
        gpu_memory_bytes=gpu_bytes, gpu_indices=tuple(indices), gpu_utilization=utilization,
        threads=sum(one.threads for one in members), tty=tty_name(root.tty_nr),
        session_leader=root.session == root.pid,
    )  # fmt: skip


def _memory(members: Sequence[ProcessSample]) -> int:
    private = shared = 0
    for one in members:
        try:
            words = Path(f"/proc/{one.pid}/statm").read_text().split()
        except OSError:
            continue
        private += max(0, int(words[1]) - int(words[2])) * PAGE_BYTES
        shared = max(shared, int(words[2]) * PAGE_BYTES)
    return private + shared


def with_details(tree: TreeSample, names: Mapping[int, tuple[int, str]]) -> TreeSample:
    """The same with what its type is told by; `names`: pid -> (parent, name) of every process."""
    base = Path(f"/proc/{tree.pid}")
    parents: list[str] = []
    above = names.get(tree.pid, (0, ""))[0]
    while above in names and len(parents) < 16:
        parents.append(names[above][1])
        above = names[above][0]
    read = written = 0
    libraries: set[str] = set()
    inodes: set[int] = set()
    for pid in tree.pids[:64]:
        libraries |= _libraries(pid)
        done = _io(pid)
        read, written = read + done[0], written + done[1]
        inodes |= _socket_inodes(pid)
    table = read_sockets(tree.pid) if inodes else {}
    return replace(
        tree, **_terminal(tree), parents=tuple(parents), service=_service(base), libraries=tuple(sorted(libraries)),
        listens=any(table[inode].state == "LISTEN" for inode in inodes & table.keys()),
        read_bytes=read, write_bytes=written, exe=_target(base / "exe"), cwd=_target(base / "cwd"),
        mark=_mark(tree.pid),
    )  # fmt: skip


def _terminal(tree: TreeSample) -> dict[str, Any]:
    if not tree.tty:
        return {}
    try:
        raw = Path(f"/proc/{tree.pid}/stat").read_text(errors="replace")
        words = raw[raw.rindex(")") + 2 :].split()
        read_at = os.stat(tree.tty).st_atime  # noqa: PTH116
    except (OSError, ValueError):
        return {}
    now = time.time()
    since = now - read_at
    # The kernel keeps a terminal's times in steps of 8 s; the shell read the command line just before the start.
    fresh = since < tree.age_s - 8
    stdin = _target(Path(f"/proc/{tree.pid}/fd/0"))
    return {
        "foreground": words[5] == words[2],
        "stdin_tty": stdin in (tree.tty, "/dev/tty"),
        "tty_read_age_s": max(0.0, since) if fresh else None,
    }


def _mark(pid: int) -> str:
    for entry in read_environment_raw(pid):
        if entry.startswith(b"GRID_OFFLOAD="):
            word = entry.partition(b"=")[2].decode(errors="replace").strip().lower()
            return word if word in ("never", "avoid", "prefer") else ""
    return ""


def _target(path: Path) -> str:
    try:
        return os.readlink(path)  # noqa: PTH115
    except OSError:
        return ""


def _libraries(pid: int) -> set[str]:
    try:
        text = Path(f"/proc/{pid}/maps").read_text(errors="replace")
    except OSError:
        return set()
    return {name for part, name in LIBRARIES.items() if part in text}


def _io(pid: int) -> tuple[int, int]:
    """Bytes read and written by system calls, caches included; 0 where we may not know."""
    try:
        words = Path(f"/proc/{pid}/io").read_text().split()
        return int(words[1]), int(words[3])
    except (OSError, ValueError, IndexError):
        return 0, 0


def _socket_inodes(pid: int) -> set[int]:
    found: set[int] = set()
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):  # noqa: PTH208
            link = _target(Path(f"/proc/{pid}/fd/{name}"))
            if link.startswith("socket:["):
                found.add(int(link[8:-1]))
    except OSError:
        pass
    return found


def _service(base: Path) -> str:
    """The systemd unit, where it is one of the system's services (not of a user's session)."""
    try:
        text = (base / "cgroup").read_text()
    except OSError:
        return ""
    match = re.search(r"/system\.slice/(?:[^/\n]+\.slice/)*([^/\n]+\.service)", text)
    return match.group(1) if match else ""
