"""What a node offers to a process that would come to it, or lacks: CRIU, kernel, CPU, memory, files, accounts."""

from __future__ import annotations

import hashlib
import os
import platform
import pwd
import re
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from distributed_grid.agent.inspect.mapped import build_id
from distributed_grid.agent.inspect.plain import from_plain, to_plain
from distributed_grid.agent.moving import criu, gpu
from distributed_grid.core.process import boot_id
from distributed_grid.monitoring.snapshot import GpuSnapshot

_CHECK_LIMIT_S = 20.0
_CHECK_KEPT_S = 300.0
_HASH_LIMIT_BYTES = 64 << 20
_CAP_SYS_ADMIN, _CAP_CHECKPOINT_RESTORE = 21, 40


@dataclass(frozen=True, slots=True)
class FileFacts:
    """A file by what can tell it from its namesake on another node."""

    path: str
    exists: bool
    size_bytes: int = 0
    mtime_ns: int = 0
    build_id: str = ""
    digest: str = ""  # of small files without a build id
    directory: bool = False
    #: Device and inode: two nodes that name the same are perhaps one machine; a nonce decides.
    identity: str = ""

    def same_as(self, other: FileFacts) -> bool:
        """Whether CRIU and the program would take one for the other."""
        if not (self.exists and other.exists) or self.directory != other.directory:
            return False
        if self.directory:
            return True
        if self.build_id or other.build_id:
            return self.build_id == other.build_id
        if self.digest and other.digest:
            return self.digest == other.digest
        return (self.size_bytes, self.mtime_ns) == (other.size_bytes, other.mtime_ns)

    def to_wire(self) -> dict[str, Any]:
        return to_plain(self)

    @staticmethod
    def from_wire(data: Mapping[str, Any]) -> FileFacts:
        return from_plain(FileFacts, data)


@dataclass(frozen=True, slots=True)
class GpuFacts:
    index: int
    uuid: str
    name: str
    #: Who has memory on it, and how much each.
    pids: tuple[int, ...] = ()
    used_bytes: tuple[int, ...] = ()

    def used_by(self, pids: Sequence[int]) -> int:
        return sum(used for pid, used in zip(self.pids, self.used_bytes, strict=True) if pid in pids)

    @staticmethod
    def of(found: GpuSnapshot) -> GpuFacts:
        holders = found.processes
        return GpuFacts(
            found.index, found.uuid, found.name, tuple(one.pid for one in holders),
            tuple(one.memory_used_bytes or 0 for one in holders),
        )  # fmt: skip

    def to_wire(self) -> dict[str, Any]:
        return to_plain(self)

    @staticmethod
    def from_wire(data: Mapping[str, Any]) -> GpuFacts:
        return from_plain(GpuFacts, data)


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """One side of a move: asked of the source as well, to compare."""

    node: str
    boot_id: str = ""
    criu: str = ""  # path; empty: none
    criu_version: str = ""
    criu_check: str = ""  # empty: all well; else what `criu check` complains of
    may_checkpoint: bool = True  # root, or the capability for it
    may_read_limits: bool = True  # CAP_SYS_RESOURCE: without it CRIU takes one user's processes at a time
    kernel: str = ""
    machine: str = ""
    cpu_flags: tuple[str, ...] = ()
    memory_available_bytes: int = 0
    tmpfs_free_bytes: int = 0
    disk_free_bytes: int = 0
    user: str = ""  # the account of that uid; empty: none
    user_matches: bool = True  # it has the name that was asked for
    runs_as_uid: int = 0
    files: tuple[FileFacts, ...] = ()
    network: str = ""  # network namespace: two nodes with the same one share every port
    gpus: tuple[GpuFacts, ...] = ()
    gpu_parking: str = "it has no GPU"  # empty: what a process has on a GPU can be parked in its memory

    def file(self, path: str) -> FileFacts | None:
        return next((one for one in self.files if one.path == path), None)

    def to_wire(self) -> dict[str, Any]:
        return to_plain(self)

    @staticmethod
    def from_wire(data: Mapping[str, Any]) -> TargetFacts:
        return from_plain(TargetFacts, data, files=FileFacts, gpus=GpuFacts)


def target_facts(
    node: str, *, paths: Sequence[str] = (), uid: int = -1, user: str = "", gpus: Sequence[GpuSnapshot] = ()
) -> TargetFacts:
    """What this machine has; `paths`: what the process uses and must find here too."""
    program, version, complaint = criu_facts()
    name, matches = _account(uid, user)
    return TargetFacts(
        node=node, boot_id=boot_id(), criu=program, criu_version=version, criu_check=complaint,
        may_checkpoint=_may_checkpoint(), may_read_limits=criu.may_read_limits(),
        kernel=platform.release(), machine=platform.machine(), cpu_flags=_cpu_flags(),
        memory_available_bytes=_available_bytes(), tmpfs_free_bytes=_free_bytes("/dev/shm"),
        disk_free_bytes=_free_bytes(str(Path.home())), user=name, user_matches=matches, runs_as_uid=os.geteuid(),
        files=tuple(file_facts(path) for path in dict.fromkeys(paths)),
        network=f"{boot_id()} {os.readlink('/proc/self/ns/net')}",  # noqa: PTH115
        gpus=tuple(map(GpuFacts.of, gpus)), gpu_parking=gpu_parking() if gpus else "it has no GPU",
    )  # fmt: skip


def file_facts(path: str) -> FileFacts:
    try:
        about = os.stat(path)  # noqa: PTH116
    except (OSError, ValueError):
        return FileFacts(path, False)
    identity = f"{about.st_dev:x}:{about.st_ino:x}"
    if os.path.isdir(path):  # noqa: PTH112
        return FileFacts(path, True, directory=True, identity=identity)
    found, digest = _content(path, about.st_size, about.st_mtime_ns)
    return FileFacts(path, True, about.st_size, about.st_mtime_ns, found, digest, identity=identity)


@lru_cache(maxsize=8192)
def _content(path: str, size_bytes: int, mtime_ns: int) -> tuple[str, str]:
    """Build id, else a digest where it is small enough; remembered for as long as size and time stay the same."""
    found = build_id(path)
    if found or size_bytes > _HASH_LIMIT_BYTES or not os.path.isfile(path):  # noqa: PTH113
        return found, ""
    try:
        with open(path, "rb") as file:
            return "", hashlib.file_digest(file, "blake2b").hexdigest()[:32]
    except OSError:
        return "", ""


_checked: dict[str, tuple[float, str, str]] = {}


def criu_facts() -> tuple[str, str, str]:
    """`(path, version, complaint)`; the check is kept for minutes, as what it looks at hardly ever changes."""
    program = criu.find()
    if not program:
        return "", "", "not installed"
    known = _checked.get(program)
    if known and time.monotonic() - known[0] < _CHECK_KEPT_S:
        return program, known[1], known[2]
    version, complaint = "", ""
    told = _run([program, "--version"])
    if match := re.search(r"Version:\s*([\d.]+)", told[1]):
        version = match.group(1)
    code, text = _run([program, "check"])
    if code != 0:
        lines = [line for line in text.splitlines() if line.strip()]
        wrong = [line for line in lines if "Error" in line] or lines or ["`criu check` failed"]
        complaint = wrong[-1].split("): ", 1)[-1][:300]
    _checked[program] = (time.monotonic(), version, complaint)
    return program, version, complaint


_parking: list[tuple[float, str]] = []


def gpu_parking() -> str:
    """Why the CUDA driver here cannot park processes, empty if it can; kept for minutes."""
    if not _parking or time.monotonic() - _parking[-1][0] > _CHECK_KEPT_S:
        try:
            gpu.call("check")
            said = ""
        except gpu.GpuError as error:
            said = str(error)
        _parking[:] = [(time.monotonic(), said)]
    return _parking[-1][1]


def _run(command: list[str]) -> tuple[int, str]:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_CHECK_LIMIT_S, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        return 1, str(error)
    return done.returncode, done.stdout + done.stderr


def _may_checkpoint() -> bool:
    try:
        text = Path("/proc/self/status").read_text()
    except OSError:
        return False
    match = re.search(r"^CapEff:\s*([0-9a-f]+)", text, re.MULTILINE)
    held = int(match.group(1), 16) if match else 0
    return bool(held >> _CAP_SYS_ADMIN & 1 or held >> _CAP_CHECKPOINT_RESTORE & 1)


@lru_cache(maxsize=1)
def _cpu_flags() -> tuple[str, ...]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return ()
    match = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", text, re.MULTILINE)
    return tuple(sorted(match.group(1).split())) if match else ()


def _available_bytes() -> int:
    try:
        match = re.search(r"^MemAvailable:\s*(\d+)", Path("/proc/meminfo").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(match.group(1)) * 1024 if match else 0


def _free_bytes(path: str) -> int:
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return 0


def _account(uid: int, user: str) -> tuple[str, bool]:
    if uid < 0:
        return "", True
    try:
        name = pwd.getpwuid(uid).pw_name
    except KeyError:
        return "", False
    return name, not user or name == user

