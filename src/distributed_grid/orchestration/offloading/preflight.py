"""What stands in the way of a move, found before anything is frozen: every case in which CRIU or a relaunch would fail.

Pure: facts of the tree, of its own node and of the target in; findings in plain words out.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from distributed_grid.agent.inspect.facts import ProcessFacts, TreeFacts
from distributed_grid.agent.inspect.target import TargetFacts
from distributed_grid.core.resources import format_bytes
from distributed_grid.orchestration.offloading import preflight_descriptors, preflight_files, preflight_gpu
from distributed_grid.orchestration.offloading.model import Finding, Strategy

#: Instruction sets that a program may have chosen at its start; what else a CPU has is the kernel's business.
_INSTRUCTIONS = re.compile(
    r"^(sse|ssse|avx|amx|bmi|fma|f16c|aes|vaes|sha_ni|pclmul|vpclmul|gfni|movbe|popcnt|abm|adx|rdrand|rdseed|rdpid|"
    r"fsgsbase|xsave|pku|ospke|rtm|hle|erms|fsrm|clwb|clflushopt|movdir|3dnow|mmx|cx16|asimd|sve|crc32|atomics|fp)"
)
#: Namespaces in which a task of the grid may live apart from the agent: we made them, and can enter them.
_TASK_NAMESPACES = frozenset({"pid", "mnt", "cgroup", "time"})
#: From this kernel on, older CRIU cannot dump any inet socket.
_SOCKET_KERNEL, _SOCKET_CRIU = (6, 16), (4, 2)


@dataclass(frozen=True, slots=True)
class MoveOptions:
    """What the person asked for or agreed to."""

    strategy: Literal["auto", "live", "relaunch"] = "auto"
    relaunch_allowed: bool = False  # for `auto`; asking for `relaunch` allows it
    tcp_close: bool = False
    cut_pipes: bool = False
    #: Its standard input can come from its stub: of what an earlier move brought here, only if that feeds it already.
    feed: bool = True
    stage_large: bool | None = None  # files beyond the limit: copied, left behind, or (None) a reason to ask
    capture_state: bool = True  # False: a relaunch with nothing of the old environment
    staging_limit_bytes: int = 2 << 30
    #: Directories that both nodes share, proven by a nonce: nothing below them is copied.
    shared_dirs: tuple[str, ...] = ()

    def shared(self, path: str) -> bool:
        return any(path == one or path.startswith(one.rstrip("/") + "/") for one in self.shared_dirs)


@dataclass(frozen=True, slots=True)
class Preflight:
    findings: tuple[Finding, ...]
    #: Files to send after the freeze, and their size together.
    files: tuple[str, ...] = ()
    file_bytes: int = 0
    #: Options for the mover, as its `options`.
    mover: dict[str, Any] = field(default_factory=dict)

    def stops(self, strategy: Strategy) -> list[Finding]:
        return [one for one in self.findings if one.stops(strategy)]


def used_paths(facts: TreeFacts) -> list[str]:
    """Every file that the tree must find on a target: ask `target_facts` of both nodes for these."""
    return preflight_files.used_paths(facts)


def used_directories(facts: TreeFacts) -> list[str]:
    """Directories worth a nonce: where it works and where its open files are."""
    return preflight_files.used_directories(facts)


def preflight(
    facts: TreeFacts, source: TargetFacts, target: TargetFacts, options: MoveOptions, gpus: Sequence[int] = ()
) -> Preflight:
    """`gpus`: those of the target that would be its own."""
    same = preflight_files.same_files(source, target, options.shared)
    staged = preflight_files.check_files(facts, source, target, same)
    one_network = bool(source.network) and source.network == target.network
    found = [
        *_sides(facts, source, target),
        *_owners(facts, source),
        *_tree(facts),
        *preflight_descriptors.check_descriptors(
            facts, source, same, tcp_close=options.tcp_close, cut_pipes=options.cut_pipes, feed=options.feed,
            one_network=one_network,
        ),
        *staged.findings,
        *preflight_gpu.check_gpus(facts, source, target, gpus),
        *_room(facts, target, preflight_gpu.gpu_bytes(facts, source)),
        *_size(staged.bytes, options),
        *_relaunch(facts, target, options),
    ]
    fed = preflight_descriptors.fed(facts) if options.feed else None
    mover: dict[str, Any] = {"tcp_close": options.tcp_close, "feed": fed.path if fed else "", "moved": facts.moved}
    if pairs := preflight_gpu.gpu_pairs(facts, source, target, gpus):
        mover["gpu_pairs"] = pairs
    ghosts = [one.size_bytes for process in facts.processes for one in process.files if one.deleted]
    ghosts += [one.size_bytes for process in facts.processes for one in process.mapped if one.deleted]
    if ghosts:
        mover["ghost_limit_bytes"] = max(64 << 20, max(ghosts) + 4096)
    pinned = any(process.pinned_bytes for process in facts.processes)
    if pinned or any(one.direct and one.kind == "regular" for process in facts.processes for one in process.files):
        mover["precopy"] = False
        found.append(
            Finding(
                "pinned-memory", "notice",
                "devices write to its memory behind the kernel's back, so all of it is sent while it stands still",
            )
        )  # fmt: skip
    return Preflight(tuple(_once(found)), staged.files, staged.bytes, mover)


def choose(checked: Preflight, options: MoveOptions) -> tuple[Strategy | None, str]:
    """The strategy and why; None where neither can be, with the reasons."""
    live, again = checked.stops("live"), checked.stops("relaunch")
    if options.strategy == "live":
        return (None, _said(live)) if live else ("live", "asked for, and nothing stands in the way")
    if options.strategy == "relaunch":
        return (None, _said(again)) if again else ("relaunch", "asked for: it starts from its beginning")
    if not live:
        return "live", "everything it has can be carried"
    if options.relaunch_allowed and not again:
        return "relaunch", f"it cannot be moved live: {_said(live)}"
    return None, _said(live if not options.relaunch_allowed else [*live, *(one for one in again if one not in live)])


def _said(found: Iterable[Finding]) -> str:
    return "; ".join(one.text for one in found)


def _once(found: Iterable[Finding]) -> list[Finding]:
    """Each thing once, what blocks first."""
    order = {"blocks": 0, "asks": 1, "notice": 2}
    seen: dict[tuple[str, str], Finding] = {}
    for one in found:
        seen.setdefault((one.code, one.text), one)
    return sorted(seen.values(), key=lambda one: order[one.severity])


def version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


def _sides(facts: TreeFacts, source: TargetFacts, target: TargetFacts) -> list[Finding]:
    found: list[Finding] = []
    for side in (source, target):
        if not side.criu:
            help = f"grid cluster install -n {side.node}"
            found.append(Finding("no-criu", "blocks", f"CRIU is not installed on {side.node}", help))
        elif side.criu_check:
            found.append(
                Finding("criu-check", "blocks", f"CRIU does not work on {side.node}: {side.criu_check}", "grid doctor")
            )
        if not side.may_checkpoint:
            found.append(
                Finding(
                    "rights", "blocks", f"the grid may not freeze and restore processes on {side.node}",
                    f"start the cluster as root on {side.node}, or give criu CAP_CHECKPOINT_RESTORE",
                )
            )  # fmt: skip
    if source.criu and target.criu and version(source.criu_version)[:2] > version(target.criu_version)[:2]:
        found.append(
            Finding(
                "criu-older", "blocks",
                f"CRIU on {target.node} ({target.criu_version}) is older than on {source.node} ({source.criu_version})",
                f"grid cluster install -n {target.node}",
            )
        )  # fmt: skip
    inet = any(one.kind == "inet" for process in facts.processes for one in process.files)
    old = version(source.criu_version) and version(source.criu_version) < _SOCKET_CRIU
    if inet and old and version(source.kernel) >= _SOCKET_KERNEL:
        found.append(
            Finding(
                "criu-sockets", "blocks",
                f"CRIU {source.criu_version} cannot carry network sockets on kernel {source.kernel}",
                "CRIU 4.2 or later can",
            )
        )  # fmt: skip
    if source.machine != target.machine:
        text = f"{target.node} is a {target.machine}, {source.node} a {source.machine}"
        found.append(Finding("machine", "blocks", text, "choose a node of the same kind", "both"))
        return found
    missing = sorted(name for name in set(source.cpu_flags) - set(target.cpu_flags) if _INSTRUCTIONS.match(name))
    if missing:
        text = f"{target.node}'s CPU lacks {', '.join(missing[:6])}, which the program may be using"
        found.append(Finding("cpu", "blocks", text, "choose a node with the same or a newer CPU"))
    if version(target.kernel)[:2] < version(source.kernel)[:2]:
        text = f"{target.node} has an older kernel ({target.kernel}) than {source.node} ({source.kernel})"
        found.append(Finding("kernel", "notice", text))
    return found


def _owners(facts: TreeFacts, source: TargetFacts) -> list[Finding]:
    """Without CAP_SYS_RESOURCE CRIU is run as the tree's own user, and a tree of several users has none."""
    ids = {(one.uid, one.gid) for one in facts.processes} | {(one.euid, one.gid) for one in facts.processes}
    if source.may_read_limits or len(ids) == 1:
        return []
    text = f"its processes belong to several users, and the grid's root on {source.node} lacks CAP_SYS_RESOURCE"
    return [Finding("owners", "blocks", text, f"give the grid CAP_SYS_RESOURCE on {source.node} (docker: --cap-add)")]


def _tree(facts: TreeFacts) -> list[Finding]:
    found: list[Finding] = []
    root = facts.root
    if facts.container:
        found.append(Finding("container", "blocks", "it runs in a container", "move the container by its own means",
                             "both", details={"cgroup": facts.container}))  # fmt: skip
    allowed = _TASK_NAMESPACES if facts.under_shim else frozenset({"cgroup"})
    apart = sorted({kind for one in facts.processes for kind in one.other_namespaces} - allowed)
    if apart and not facts.container:
        text = f"it lives in namespaces of its own ({', '.join(apart)})"
        found.append(Finding("namespaces", "blocks", text, "move what made them by its own means"))
    if facts.session_leader == "beyond":
        text = "the leader of its session is outside of its pid namespace"
        found.append(Finding("session", "blocks", text, "start it with setsid"))
    elif facts.session_leader == "outside":
        found.append(Finding("session-outside", "notice", "it leaves the session of the shell that started it"))
    for one in facts.processes:
        found += _process(one, one is root)
    if not found and len(facts.processes) > 1:
        found.append(Finding("tree", "notice", f"its {len(facts.processes) - 1} child processes go with it"))
    return found


def _process(one: ProcessFacts, is_root: bool) -> list[Finding]:
    who = "it" if is_root else f"its child {one.pid} ({one.comm})"
    found = []
    if one.tracer_pid:
        text = f"{who} is being traced by process {one.tracer_pid}"
        found.append(Finding("traced", "blocks", text, "end the debugger, or strace"))
    if not one.readable:
        found.append(Finding("not-readable", "blocks", f"what {who} has open is not ours to see",
                             "start the cluster as root", "both" if is_root else "live"))  # fmt: skip
    if one.root_dir != "/":
        found.append(Finding("chroot", "blocks", f"{who} has another root directory, {one.root_dir}", "", "both"))
    if one.state in "Tt" and is_root:
        found.append(Finding("stopped", "notice", "it is stopped, and arrives stopped"))
    if one.locked_bytes:
        text = f"{who} keeps {format_bytes(one.locked_bytes)} from being swapped"
        found.append(Finding("locked-memory", "notice", text))
    return found


def _room(facts: TreeFacts, target: TargetFacts, parked_bytes: int) -> list[Finding]:
    """Images and process are both there for a moment: its memory counts twice, and so does what comes off a GPU."""
    found = []
    memory = facts.memory_bytes + sum(one.swap_bytes for one in facts.processes) + parked_bytes
    if target.memory_available_bytes < 2 * memory:
        found.append(
            Finding(
                "memory", "blocks",
                f"{target.node} has {format_bytes(target.memory_available_bytes)} free, and a live move needs "
                f"{format_bytes(2 * memory)} there for a moment: its memory twice",
                "choose a node with more memory",
            )
        )  # fmt: skip
    if target.tmpfs_free_bytes < memory:
        text = f"/dev/shm on {target.node} has {format_bytes(target.tmpfs_free_bytes)} free for {format_bytes(memory)}"
        found.append(Finding("tmpfs", "blocks", text, f"make room in /dev/shm on {target.node}"))
    if target.memory_available_bytes < memory - parked_bytes:
        own = format_bytes(memory - parked_bytes)
        text = f"{target.node} has {format_bytes(target.memory_available_bytes)} free for {own}"
        found.append(Finding("memory-relaunch", "blocks", text, "choose a node with more memory", "relaunch"))
    return found


def _size(file_bytes: int, options: MoveOptions) -> list[Finding]:
    if file_bytes <= options.staging_limit_bytes:
        return []
    severity: Literal["notice", "asks"] = "notice" if options.stage_large else "asks"
    text = f"{format_bytes(file_bytes)} of files would have to be copied"
    return [Finding("staging-limit", severity, text, "--stage-large copies them", "both", "--stage-large")]


def _relaunch(facts: TreeFacts, target: TargetFacts, options: MoveOptions) -> list[Finding]:
    root = facts.root
    found = [
        Finding("from-beginning", "notice", "it starts again from its beginning: what is in its memory is lost", "",
                "relaunch")
    ]  # fmt: skip
    if not root.argv:
        found.append(Finding("no-command", "blocks", "its command line is gone", "", "relaunch"))
    if root.exe_deleted:
        text = f"its program {root.exe} has been deleted or replaced"
        found.append(Finding("program-deleted", "blocks", text, "start it anew by hand", "relaunch"))
    exe = target.file(root.exe)
    if exe is not None and not exe.exists:
        text = f"{root.exe} is not on {target.node}"
        found.append(Finding("interpreter", "blocks", text, "install it there, or use a shared directory", "relaunch"))
    if not target.user and target.runs_as_uid == 0:
        text = f"there is no user {root.user} (uid {root.uid}) on {target.node}"
        found.append(Finding("user", "blocks", text, f"create the account on {target.node}", "relaunch"))
        found.append(Finding("user-live", "notice", f"{text}: it keeps the number"))
    elif target.user and not target.user_matches:
        text = f"uid {root.uid} is {target.user} on {target.node}, not {root.user}"
        found.append(Finding("user-differs", "blocks", text, "give the user the same uid on all nodes", "both"))
    if target.runs_as_uid not in (0, root.uid):
        text = f"the grid runs as uid {target.runs_as_uid} on {target.node} and cannot run {root.user}'s processes"
        found.append(Finding("target-rights", "blocks", text, f"start the cluster as root on {target.node}", "both"))
    stdin = next((one for one in root.files if one.fd == 0), None)
    if stdin is not None and stdin.kind not in ("device", "regular") and options.capture_state:
        found.append(Finding("stdin", "notice", "its standard input is empty there", "", "relaunch"))
    if os.path.basename(root.exe) in ("sh", "bash", "dash", "zsh") and "-c" in root.argv[:3]:  # noqa: PTH119
        text = "its whole shell line runs again, what is finished of it too"
        found.append(Finding("shell-line", "notice", text, "", "relaunch"))
    return found
