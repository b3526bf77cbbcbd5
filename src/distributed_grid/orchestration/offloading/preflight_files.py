"""The part of pre-flight that looks at files: what the target has, what differs there, what must be sent along."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass

from distributed_grid.agent.inspect.facts import TreeFacts
from distributed_grid.agent.inspect.mapped import MappedFile
from distributed_grid.agent.inspect.target import FileFacts, TargetFacts
from distributed_grid.orchestration.offloading.model import Finding

#: What belongs to a node's own system is never overwritten from another.
_SYSTEM = ("/usr/", "/lib", "/bin/", "/sbin/", "/etc/", "/opt/", "/boot/", "/var/lib/", "/snap/", "/nix/", "/gnu/")
_NOT_FILES = ("/dev/", "/proc/", "/sys/", "/memfd:", "/SYSV", "/run/", "/anon_hugepage", "/[")


#: Where a shim has the output of what it runs.
_SPOOLED = re.compile(r"/spool/[^/]+/std(out|err)$")


@dataclass(frozen=True, slots=True)
class Staged:
    findings: tuple[Finding, ...] = ()
    files: tuple[str, ...] = ()
    bytes: int = 0


def _is_file(path: str) -> bool:
    return path.startswith("/") and (not path.startswith(_NOT_FILES) or path.startswith(("/dev/shm/", "/run/user/")))


def used_paths(facts: TreeFacts) -> list[str]:
    names: dict[str, None] = {}
    for process in facts.processes:
        if process.exe and not process.exe_deleted:
            names[process.exe] = None
        if process.cwd and not process.cwd_deleted:
            names[process.cwd] = None
        for mapped in process.mapped:
            if not mapped.deleted and _is_file(mapped.path):
                names[mapped.path] = None
        for one in process.files:
            if one.kind in ("regular", "directory") and not one.deleted and _is_file(one.path):
                names[one.path] = None
    return list(names)


def used_directories(facts: TreeFacts) -> list[str]:
    names: dict[str, None] = {}
    for process in facts.processes:
        if process.cwd and not process.cwd_deleted:
            names[process.cwd] = None
        for one in process.files:
            if one.kind == "regular" and not one.deleted and _is_file(one.path) and not _is_system(one.path):
                names[os.path.dirname(one.path)] = None  # noqa: PTH120
    return list(names)


def output_files(facts: TreeFacts) -> set[str]:
    """Files that are its standard output or error and are only written: they stay here, and the stub writes them.

    Its own, not those of its children: theirs the stub does not have. Of what an earlier move brought here: what its
    shim passes on, whoever of the tree has it.
    """
    only_written: dict[str, bool] = {}
    for process in facts.processes:
        for one in process.files:
            if one.kind == "regular" and not one.deleted:
                written = one.flags & os.O_ACCMODE == os.O_WRONLY
                only_written[one.path] = only_written.get(one.path, True) and written
    first: dict[str, int] = {}
    for one in sorted(facts.root.files, key=lambda file: file.fd):
        first.setdefault(one.path, one.fd)
    own = [path for path, number in first.items() if number in (1, 2)]
    spooled = [path for path in only_written if _SPOOLED.search(path)]
    return {path for path in (spooled if facts.moved else own) if only_written.get(path)}


def _is_system(path: str) -> bool:
    return path.startswith(_SYSTEM)


def same_files(
    source: TargetFacts, target: TargetFacts, shared: Callable[[str], bool]
) -> Callable[[str], bool]:
    """Tells whether a path is the very same file on both nodes, so that there is nothing to copy."""
    one_kernel = bool(source.boot_id) and source.boot_id == target.boot_id
    there_by_name = {one.path: one for one in target.files}
    here_by_name = {one.path: one for one in source.files}

    def same(path: str) -> bool:
        if shared(path):
            return True
        # Device and inode prove it only within one kernel; between machines a nonce does.
        here, there = here_by_name.get(path), there_by_name.get(path)
        return bool(one_kernel and here and there and here.identity and here.identity == there.identity)

    return same


def check_files(
    facts: TreeFacts, source: TargetFacts, target: TargetFacts, same: Callable[[str], bool]
) -> Staged:
    """What the target lacks or has otherwise."""
    found: list[Finding] = []
    send: dict[str, int] = {}
    output = output_files(facts)
    for process in facts.processes:
        if process.cwd_deleted:
            text = f"its working directory {process.cwd} was deleted"
            found.append(Finding("cwd-deleted", "blocks", text, "", "relaunch"))
            found.append(Finding("cwd-deleted-live", "notice", text))
        elif process.cwd and not same(process.cwd):
            found += _cwd(process.cwd, target)
        for mapped in process.mapped:
            found += _mapped(mapped, source, target, same, send)
        for one in process.files:
            if one.kind != "regular" or one.deleted or not _is_file(one.path):
                continue
            if one.path in output:
                text = f"what it writes to {one.path} goes on in that file here"
                found.append(Finding("output-file", "notice", text))
                continue
            if same(one.path):
                continue
            if _is_system(one.path):
                found += _system(one.path, source.file(one.path), target.file(one.path), target)
            else:
                send[one.path] = one.size_bytes  # as it is once frozen, also where there is one of that name
    return Staged(tuple(found), tuple(send), sum(send.values()))


def _cwd(path: str, target: TargetFacts) -> list[Finding]:
    there = target.file(path)
    if there is None or (there.exists and there.directory):
        return []
    if there.exists:
        return [Finding("cwd", "blocks", f"{path} is not a directory on {target.node}", "", "both")]
    if _is_system(path + "/"):
        return [Finding("cwd", "blocks", f"{path} is not on {target.node}", "install there what is here", "both")]
    return [Finding("cwd-made", "notice", f"{path} is made on {target.node}", "", "both")]


def _mapped(
    one: MappedFile, source: TargetFacts, target: TargetFacts, same: Callable[[str], bool], send: dict[str, int]
) -> list[Finding]:
    if one.path.startswith("/SYSV"):
        return [Finding("sysv", "blocks", "it uses System V shared memory")]
    if one.path.startswith("/dev/") and not one.path.startswith(("/dev/shm/", "/dev/zero", "/dev/nvidia", "/dev/dri/")):
        return [Finding("mapped-device", "blocks", f"it has the device {one.path} in its memory")]
    if one.deleted:
        if one.links and one.path.startswith("/dev/shm/sem."):
            text = "it has a named semaphore (sem_open) that other programs can still find by its name"
            help = "multiprocessing's have no name where it forks: set_start_method('fork')"
            return [Finding("named-semaphore", "blocks", text, help)]
        if one.links and _is_file(one.path):
            text = f"{one.path}, which it has in memory, was replaced since"
            return [Finding("replaced-file", "blocks", text, "restart the program, or undo the upgrade")]
        return []
    if not _is_file(one.path) or same(one.path):
        return []
    found = []
    if one.shared_write:
        text = f"it writes to {one.path} through memory: processes that stay here no longer see that"
        found.append(Finding("shared-mapping", "notice", text))
    here, there = source.file(one.path), target.file(one.path)
    if there is None or here is None or there.same_as(here):
        return found
    if _is_system(one.path):
        return [*found, *_system(one.path, here, there, target)]
    if there.exists and one.executable:
        text = f"{one.path} differs on {target.node}"
        return [*found, Finding("file-differs", "blocks", text, "use the same version on both nodes")]
    send[one.path] = here.size_bytes
    return found


def _system(path: str, here: FileFacts | None, there: FileFacts | None, target: TargetFacts) -> list[Finding]:
    if here is None or there is None or there.same_as(here):
        return []
    if not there.exists:
        text, code = f"{path} is not on {target.node}", "file-missing"
    else:
        text, code = f"{path} differs on {target.node}", "file-differs"
    return [Finding(code, "blocks", text, f"install the same package on {target.node}")]
