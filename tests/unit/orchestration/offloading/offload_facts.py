"""Made-up facts for the pure tests: a plain program on one node, and another node just like it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from distributed_grid.agent.inspect.candidates import TreeSample
from distributed_grid.agent.inspect.descriptors import OpenFile
from distributed_grid.agent.inspect.facts import ProcessFacts, TreeFacts
from distributed_grid.agent.inspect.mapped import MappedFile
from distributed_grid.agent.inspect.target import FileFacts, TargetFacts
from distributed_grid.core.resources import GB
from distributed_grid.monitoring.snapshot import NodeSnapshot
from distributed_grid.orchestration.offloading.matcher import NodeState
from distributed_grid.orchestration.offloading.preflight import used_paths

PYTHON, LIBC = "/usr/bin/python3.11", "/usr/lib/libc.so.6"


def process(*files: OpenFile, **changes: Any) -> ProcessFacts:
    base = ProcessFacts(
        pid=500, start_ticks=77, ppid=400, pgid=500, sid=500, comm="python", state="R", argv=("python", "train.py"),
        exe=PYTHON, cwd="/home/ann/work", uid=1000, euid=1000, gid=1000, user="ann", inner_pid=500, inner_sid=500,
        rss_bytes=GB, mapped=(MappedFile(PYTHON, executable=True), MappedFile(LIBC, executable=True)),
    )  # fmt: skip
    return replace(base, files=(OpenFile(0, "device", "/dev/null"), *files), **changes)


def tree(*files: OpenFile, **changes: Any) -> TreeFacts:
    return TreeFacts((process(*files, **changes),), parents=((400, "bash"), (1, "systemd")), memory_bytes=GB)


def node(name: str, facts: TreeFacts, **changes: Any) -> TargetFacts:
    """A node with everything that the tree uses."""
    files = [FileFacts(path, True, 10, 1, build_id="ab" if path in (PYTHON, LIBC) else "", digest="d")
             for path in used_paths(facts)]  # fmt: skip
    files = [replace(one, directory=True) if one.path == facts.root.cwd else one for one in files]
    base = TargetFacts(
        node=name, boot_id=f"boot-{name}", criu="/usr/sbin/criu", criu_version="4.2.1", kernel="6.18.4",
        machine="x86_64", cpu_flags=("avx2", "sse4_2", "vmx"), memory_available_bytes=16 * GB,
        tmpfs_free_bytes=8 * GB, user="ann", files=tuple(files),
    )  # fmt: skip
    return replace(base, **changes)


def without(facts: TargetFacts, path: str) -> TargetFacts:
    return with_file(facts, FileFacts(path, False))


def with_file(facts: TargetFacts, file: FileFacts) -> TargetFacts:
    return replace(facts, files=(*(one for one in facts.files if one.path != file.path), file))


def sample(command: str = "python train.py", **changes: Any) -> TreeSample:
    argv = tuple(command.split())
    base = TreeSample(
        pid=500, start_ticks=77, pids=(500,), uid=1000, uids=(1000,), user="ann", comm=argv[0][:15], argv=argv,
        age_s=600, cpu_cores=1.0, cpu_cores_1m=1.0, memory_bytes=3 * GB, peak_memory_bytes=4 * GB,
    )  # fmt: skip
    return replace(base, **changes)


def worker(name: str, *, used_cores: float = 0.0, used_bytes: int = 0, **changes: Any) -> NodeState:
    shot = NodeSnapshot(
        node=name, at=0.0, cpu_cores_total=8, cpu_cores_used=used_cores, memory_total_bytes=32 * GB,
        memory_used_bytes=used_bytes, memory_available_bytes=32 * GB - used_bytes, cpu_cores_real=8,
        memory_real_bytes=32 * GB, gpus=changes.pop("gpus", ()),
    )  # fmt: skip
    return replace(NodeState(name, False, True, shot), **changes)
