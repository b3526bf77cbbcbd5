"""Everything about a process tree that decides whether and how it can be moved, read from /proc in one go.

The environment is here by name only; its values are read by `read_environment`, when a process is about to be started
again elsewhere.
"""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from distributed_grid.agent.inspect.descriptors import OpenFile, Outsiders, may_read, open_files, with_peers
from distributed_grid.agent.inspect.mapped import MappedFile, mapped_files
from distributed_grid.agent.inspect.origin import (
    container_of,
    is_shim,
    origin_of,
    parents_of,
    read_argv,
    read_environment_raw,
)
from distributed_grid.agent.inspect.plain import from_plain, to_plain
from distributed_grid.core.errors import NotFound, Refused
from distributed_grid.core.process import ProcessId, Stat, parse_stat, read_stat, tree_of

NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "time", "user", "uts")
#: Lines of /proc/PID/limits and what setrlimit(2) calls them.
_LIMITS = {
    "Max cpu time": "RLIMIT_CPU", "Max file size": "RLIMIT_FSIZE", "Max data size": "RLIMIT_DATA",
    "Max stack size": "RLIMIT_STACK", "Max core file size": "RLIMIT_CORE", "Max resident set": "RLIMIT_RSS",
    "Max processes": "RLIMIT_NPROC", "Max open files": "RLIMIT_NOFILE", "Max locked memory": "RLIMIT_MEMLOCK",
    "Max address space": "RLIMIT_AS", "Max pending signals": "RLIMIT_SIGPENDING",
    "Max msgqueue size": "RLIMIT_MSGQUEUE", "Max nice priority": "RLIMIT_NICE",
    "Max realtime priority": "RLIMIT_RTPRIO", "Max realtime timeout": "RLIMIT_RTTIME",
}  # fmt: skip
_PF_KTHREAD = 0x00200000
LOOKS = 5
_GPU = re.compile(r"^/dev/(nvidia|dri/|kfd)")


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    pid: int
    start_ticks: int
    ppid: int
    pgid: int
    sid: int  # 0: its session leader is outside of our pid namespace
    comm: str
    state: str
    argv: tuple[str, ...] = ()
    exe: str = ""
    exe_deleted: bool = False
    cwd: str = ""
    cwd_deleted: bool = False
    root_dir: str = "/"
    env_names: tuple[str, ...] = ()
    uid: int = 0
    euid: int = 0
    gid: int = 0
    groups: tuple[int, ...] = ()
    user: str = ""
    capabilities: int = 0  # effective
    nice: int = 0
    umask: int = 0o022
    limits: dict[str, tuple[int, int]] = field(default_factory=dict)  # RLIMIT_NOFILE: (soft, hard); -1 is no limit
    tty: str = ""  # controlling terminal
    foreground: bool = False  # in its terminal's foreground group
    threads: int = 1
    tracer_pid: int = 0
    seccomp: int = 0  # 2: filters
    inner_pid: int = 0  # as it sees itself
    inner_sid: int = 0  # 0: its session leader is outside of its own pid namespace
    other_namespaces: tuple[str, ...] = ()  # kinds in which it is not where we are
    rss_bytes: int = 0
    shared_bytes: int = 0  # of files, and in shared memory
    shmem_bytes: int = 0  # in shared memory
    pinned_bytes: int = 0  # VmPin: pages that a device may write to
    locked_bytes: int = 0
    swap_bytes: int = 0
    peak_rss_bytes: int = 0
    files: tuple[OpenFile, ...] = ()
    mapped: tuple[MappedFile, ...] = ()
    origin: str = "user"  # kernel, grid, ray, user
    readable: bool = True  # False: its descriptors and memory map are not ours to see

    @property
    def id(self) -> ProcessId:
        return ProcessId(self.pid, self.start_ticks)

    @property
    def gpu_files(self) -> tuple[str, ...]:
        names = [one.path for one in self.files if one.kind == "device"] + [one.path for one in self.mapped]
        return tuple(sorted({name for name in names if _GPU.match(name)}))

    def to_wire(self) -> dict[str, Any]:
        return to_plain(self)

    @staticmethod
    def from_wire(data: Mapping[str, Any]) -> ProcessFacts:
        told = {**data, "limits": {name: tuple(pair) for name, pair in data.get("limits", {}).items()}}
        return from_plain(ProcessFacts, told, files=OpenFile, mapped=MappedFile)


@dataclass(frozen=True, slots=True)
class TreeFacts:
    """A process and all its descendants, parents first."""

    processes: tuple[ProcessFacts, ...]
    parents: tuple[tuple[int, str], ...] = ()  # (pid, name) above the root, nearest first
    memory_bytes: int = 0  # together: private pages of each, the largest shared part once
    clean_bytes: int = 0  # of that, pages of files as they are: the target reads them from its own
    #: Of the root: inside the tree, outside of it, or beyond its pid namespace (then CRIU cannot take it).
    session_leader: str = "inside"
    container: str = ""  # control group of a container that we are not in ourselves
    under_shim: bool = False  # a task of the grid: in a pid namespace of our own making, perhaps
    moved: bool = False  # the planner's word: an earlier move brought it here, and its stub is at home

    @property
    def root(self) -> ProcessFacts:
        return self.processes[0]

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(one.pid for one in self.processes)

    def to_wire(self) -> dict[str, Any]:
        return to_plain(self)

    @staticmethod
    def from_wire(data: Mapping[str, Any]) -> TreeFacts:
        told = {**data, "parents": tuple((int(pid), str(name)) for pid, name in data.get("parents", ()))}
        return from_plain(TreeFacts, told, processes=ProcessFacts)


def inspect_tree(pid: int, start_ticks: int = 0) -> TreeFacts:
    """Look at the tree below that very process (start 0: whoever has the pid now); NotFound if it is gone."""
    stat = read_stat(pid)
    if stat is None or stat.state in "ZX" or start_ticks not in (0, stat.start_ticks):
        raise _gone(pid, reused=stat is not None and start_ticks not in (0, stat.start_ticks))
    for _ in range(LOOKS):
        facts: dict[int, ProcessFacts] = {}
        files: dict[int, tuple[OpenFile, ...]] = {}
        for one in tree_of(pid):
            found = _process(one)
            if found is not None:
                facts[one] = found
                files[one] = open_files(one)
        if pid not in facts or facts[pid].start_ticks != stat.start_ticks:
            raise _gone(pid)
        files = with_peers(files, Outsiders(frozenset(facts)))
        if facts.keys() >= set(tree_of(pid)):
            break  # else a child was born meanwhile, and may have the other end of a pipe
    processes = [replace(facts[one], files=files[one]) for one in facts]
    return TreeFacts(
        processes=tuple(processes), parents=tuple(parents := parents_of(pid)), memory_bytes=_memory(facts.values()),
        clean_bytes=_clean(facts.values()), session_leader=_leader(facts), container=container_of(pid),
        under_shim=any(is_shim(read_argv(above)) for above, _ in parents),
    )  # fmt: skip


def read_environment(pid: int, start_ticks: int) -> dict[str, str]:
    """The variables it was started with, values and all: secrets may be among them."""
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except PermissionError:
        raise Refused(f"the environment of process {pid} is not ours to read", code="not-readable") from None
    except OSError:
        raise _gone(pid) from None
    stat = read_stat(pid)
    if stat is None or stat.start_ticks != start_ticks:
        raise _gone(pid)
    pairs = (os.fsdecode(part).partition("=") for part in raw.split(b"\0") if b"=" in part)
    return {name: value for name, _, value in pairs if name}


def _gone(pid: int, *, reused: bool = False) -> NotFound:
    cause = "another process has that number now" if reused else "it has ended"
    hint = f"ps aux | grep {pid}; grid offload scan shows what can be moved"
    return NotFound(f"process {pid} not found", cause=cause, hint=hint, code="process-not-found")


def _memory(processes: Iterable[ProcessFacts]) -> int:
    """Bytes held together: private pages of each, and the largest shared part once."""
    private = shared = 0
    for one in processes:
        private += max(0, one.rss_bytes - one.shared_bytes)
        shared = max(shared, one.shared_bytes)
    return private + shared


def _clean(processes: Iterable[ProcessFacts]) -> int:
    found = list(processes)
    return max(one.shared_bytes for one in found) - max(one.shmem_bytes for one in found) if found else 0


def _leader(facts: Mapping[int, ProcessFacts]) -> str:
    root = next(iter(facts.values()))
    if root.inner_sid == 0:
        return "beyond"
    return "inside" if root.sid in facts else "outside"




def _process(pid: int) -> ProcessFacts | None:
    """None where it is gone or a zombie (which a parent will reap wherever it is)."""
    base = Path(f"/proc/{pid}")
    try:
        raw = (base / "stat").read_text(errors="replace")
        stat: Stat = parse_stat(raw)
        status = _status(base)
    except (OSError, ValueError, IndexError):
        return None
    if stat.state in "ZX":
        return None
    environment = read_environment_raw(pid)
    argv = read_argv(pid)
    uids, gids = status.get("Uid", "0 0").split(), status.get("Gid", "0 0").split()
    cwd, cwd_deleted = _link(base / "cwd")
    exe, exe_deleted = _link(base / "exe")
    words = raw[raw.rindex(")") + 2 :].split()
    kernel = bool(int(words[6]) & _PF_KTHREAD)
    tty = tty_name(stat.tty_nr)
    return ProcessFacts(
        pid=pid, start_ticks=stat.start_ticks, ppid=stat.ppid, pgid=stat.pgrp, sid=stat.session, comm=stat.comm,
        state=stat.state, argv=argv, exe=exe, exe_deleted=exe_deleted, cwd=cwd, cwd_deleted=cwd_deleted,
        root_dir=_link(base / "root")[0] or "/",
        env_names=tuple(part.partition(b"=")[0].decode(errors="replace") for part in environment),
        uid=int(uids[0]), euid=int(uids[1]), gid=int(gids[0]), user=user_name(int(uids[0])),
        groups=tuple(int(word) for word in status.get("Groups", "").split()),
        capabilities=int(status.get("CapEff", "0"), 16), nice=stat.nice, umask=int(status.get("Umask", "22"), 8),
        limits=_limits(base), tty=tty, foreground=bool(tty) and int(words[5]) == stat.pgrp, threads=stat.threads,
        tracer_pid=int(status.get("TracerPid", "0")), seccomp=int(status.get("Seccomp", "0")),
        inner_pid=int(status.get("NSpid", str(pid)).split()[-1]), inner_sid=int(status.get("NSsid", "1").split()[-1]),
        other_namespaces=_other_namespaces(base), rss_bytes=_kb(status, "VmRSS"),
        shared_bytes=_kb(status, "RssFile") + _kb(status, "RssShmem"), shmem_bytes=_kb(status, "RssShmem"),
        pinned_bytes=_kb(status, "VmPin"),
        locked_bytes=_kb(status, "VmLck"), swap_bytes=_kb(status, "VmSwap"), peak_rss_bytes=_kb(status, "VmHWM"),
        mapped=mapped_files(pid), origin=origin_of(stat.comm, argv, environment, kernel=kernel),
        readable=may_read(pid),
    )  # fmt: skip


def _status(base: Path) -> dict[str, str]:
    pairs = (line.partition(":") for line in (base / "status").read_text(errors="replace").splitlines())
    return {name: value.strip() for name, _, value in pairs}


def _kb(status: Mapping[str, str], name: str) -> int:
    return int(status.get(name, "0").split()[0]) * 1024


def _link(path: Path) -> tuple[str, bool]:
    try:
        name = os.readlink(path)  # noqa: PTH115
    except OSError:
        return "", False
    return name.removesuffix(" (deleted)"), name.endswith(" (deleted)")


def _limits(base: Path) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    try:
        lines = (base / "limits").read_text().splitlines()[1:]
    except OSError:
        return found
    for line in lines:
        name = _LIMITS.get(line[:26].strip())
        words = line[26:].split()
        if name and len(words) >= 2:
            soft, hard = (-1 if word == "unlimited" else int(word) for word in words[:2])
            found[name] = (soft, hard)
    return found


def _other_namespaces(base: Path) -> tuple[str, ...]:
    found = []
    for kind in NAMESPACES:
        try:
            if os.readlink(base / "ns" / kind) != os.readlink(f"/proc/self/ns/{kind}"):  # noqa: PTH115
                found.append(kind)
        except OSError:
            continue
    return tuple(found)


def tty_name(number: int) -> str:
    """The terminal that /proc/PID/stat gives as a device number; empty for none."""
    if not number:
        return ""
    major, minor = os.major(number), os.minor(number)
    if 136 <= major <= 143:
        return f"/dev/pts/{minor + (major - 136) * 256}"
    return f"/dev/tty{minor}" if major == 4 else f"/dev/char/{major}:{minor}"


def user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
