"""Whose a process is: the kernel's, the grid's own, Ray's, or a user's; and what merely wraps a user's job."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from distributed_grid.cluster.ray_node import MARKER, TASK_MARKER
from distributed_grid.core.process import read_stat

_OURS = re.compile(r"distributed_grid[./](agent|daemon|cluster|cli|commands|tui)\b|/bin/grid$")
_RAY_COMMS = frozenset({"raylet", "gcs_server", "plasma_store"})
_RAY = re.compile(r"^ray::|/ray/(_private|dashboard|core|autoscaler|util/client)/|/bin/ray$")
_SHIM = re.compile(r"/agent/(shim|moving/restored)\.py$")
_CONTAINER = re.compile(r"docker|kubepods|containerd|libpod|lxc|crio|machine\.slice")
#: Words of a command line that can tell whose it is; what follows are the program's own arguments.
_WORDS = 6



def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


SHELLS = _names("sh bash dash zsh fish ksh mksh tcsh csh ash busybox")
#: Programs that start jobs of others and are no part of them.
WRAPPERS = SHELLS | _names(
    "init systemd sshd sshd-session login su sudo doas tmux screen zellij cron crond atd anacron make ninja xargs "
    "parallel timeout time nohup setsid watch script expect supervisord containerd-shim conmon dumb-init tini runsv "
    "slurmstepd slurmd pbs_mom sge_execd gnome-terminal- konsole xterm alacritty kitty code node jupyter-lab "
    "jupyter-noteboo jupyter-server jupyterhub jupyterhub-sing nsenter unshare"
)
_JUPYTER = re.compile(r"/jupyter(-lab|-notebook|-server|hub)?$")
#: Programs whose children are the job even where they lead sessions of their own.
JOB_LAUNCHERS = re.compile(r"\b(torchrun|torch\.distributed|accelerate|deepspeed|horovodrun|mpirun|mpiexec)\b")


def origin_of(comm: str, argv: Sequence[str], environment: Sequence[bytes] = (), *, kernel: bool = False) -> str:
    """"kernel", "grid", "ray" or "user"."""
    if kernel:
        return "kernel"
    words = [word for word in argv[:_WORDS] if word]
    if any(_OURS.search(word) for word in words):
        return "grid"
    if comm in _RAY_COMMS or comm.startswith("ray::") or any(_RAY.search(word) for word in words):
        return "ray"
    names = {part.partition(b"=")[0] for part in environment}
    if MARKER.encode() in names and TASK_MARKER.encode() not in names:
        return "ray"
    return "user"


def is_wrapper(comm: str, argv: Sequence[str] = ()) -> bool:
    """Whether it only starts what others asked for: a shell, a login, a terminal, a service manager."""
    return comm.lstrip("-") in WRAPPERS or any(_JUPYTER.search(word) for word in argv[:2])


def is_shim(argv: Sequence[str]) -> bool:
    return any(_SHIM.search(word) for word in argv[:_WORDS])


def container_of(pid: int) -> str:
    """The control group that names a container; empty where the process is in none, or in the same one as we."""
    try:
        theirs = Path(f"/proc/{pid}/cgroup").read_text()
        ours = Path("/proc/self/cgroup").read_text()
    except OSError:
        return ""
    known = {line.partition(":")[2] for line in ours.splitlines()}
    for line in theirs.splitlines():
        path = line.split(":", 2)[-1]
        if line.partition(":")[2] not in known and _CONTAINER.search(path):
            return path
    return ""


def parents_of(pid: int, limit: int = 32) -> list[tuple[int, str]]:
    """`(pid, name)` of each process above it, nearest first."""
    found: list[tuple[int, str]] = []
    stat = read_stat(pid)
    while stat is not None and stat.ppid > 0 and len(found) < limit:
        stat = read_stat(stat.ppid)
        if stat is not None:
            found.append((stat.pid, stat.comm))
    return found


def read_argv(pid: int) -> tuple[str, ...]:
    """Its command line; empty for a kernel thread, or where it is gone."""
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return ()
    parts = raw.split(b"\0")
    if parts and not parts[-1]:
        parts.pop()
    return tuple(os.fsdecode(part).encode("utf-8", "replace").decode() for part in parts)


def read_environment_raw(pid: int) -> list[bytes]:
    try:
        return [part for part in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") if part]
    except OSError:
        return []
