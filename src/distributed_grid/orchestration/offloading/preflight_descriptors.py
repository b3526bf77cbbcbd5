"""The part of pre-flight that looks at open descriptors: sockets, terminals, pipes, locks, devices and rarer things."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from distributed_grid.agent.inspect.descriptors import OpenFile
from distributed_grid.agent.inspect.facts import ProcessFacts, TreeFacts
from distributed_grid.agent.inspect.target import TargetFacts
from distributed_grid.core.resources import format_bytes
from distributed_grid.orchestration.offloading.model import Finding

#: Devices that are the same everywhere.
_PLAIN_DEVICES = frozenset(
    {"/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/ptmx", "/dev/pts/ptmx"}
)
_FINE = frozenset({"regular", "directory", "memfd", "eventfd", "epoll", "timerfd", "signalfd", "netlink"})
_REFUSED = {
    "io_uring": ("it uses io_uring", "many libraries have a setting that turns io_uring off"),
    "userfaultfd": ("it handles its own page faults (userfaultfd)", ""),
    "perf": ("it measures performance counters", "end the profiler"),
    "namespace": ("it holds a namespace open", ""),
}
_CONNECTIONLESS = frozenset({"tcp", "tcpv6", "udp", "udpv6", "unix", "unix-stream", "netlink"})
_PIDFD_CRIU = (4, 1)
_BIG_GHOST_BYTES = 64 << 20


def check_descriptors(
    facts: TreeFacts, source: TargetFacts, same: Callable[[str], bool], *, tcp_close: bool, cut_pipes: bool,
    feed: bool, one_network: bool,
) -> list[Finding]:  # fmt: skip
    """`same`: whether a path is one file for both nodes; `one_network`: whether they share every port."""
    found: list[Finding] = []
    names = {pid: name for pid, name in facts.parents}
    locked = 0
    passed_on = fed(facts)
    writers = facts.processes if facts.moved else facts.processes[:1]
    outputs = {one.path for process in writers for one in process.files if one.fd in (1, 2)}
    if feed and passed_on:
        whom = "home" if facts.under_shim else f"{_whom(passed_on, names)}, which stays here"
        text = f"its standard input comes from {whom}: what is written there is passed on"
        found.append(Finding("pipe-in", "notice", text, option="--inherit-fd"))
    for process in facts.processes:
        for one in process.files:
            # What an earlier move's shim opened for it comes from outside of its namespace; a shim holds it again.
            if not one.mounted and not facts.under_shim:
                text = f"it has {one.path} open, which is on no file system that it can see"
                help = "a message queue, or handed to it by a program in another mount namespace"
                found.append(Finding("hidden-file", "blocks", text, help))
                continue
            if feed and passed_on and one.path == passed_on.path:
                continue
            found += _one(one, process, source, tcp_close, cut_pipes, names, outputs)
            locked += len(one.locks)
            if one.locks and same(one.path):
                # Tried: the restore waits for the lock without end, as the frozen source still has it.
                text = f"it holds a lock on {one.path}, which is the same file on both nodes"
                help = "it cannot have the lock there while it is held here"
                found.append(Finding("lock-shared", "blocks", text, help))
            if one_network and _holds_name(one):
                text = f"both nodes are one machine, and {one.local.strip()} is taken until the source is gone"
                found.append(Finding("port-taken", "blocks", text, "relaunch it (--strategy relaunch)"))
    if locked:
        text = "its file locks go with it; processes that stay here no longer see them"
        found.append(Finding("file-locks", "notice", text, option="--file-locks"))
    found += _terminals(facts)
    return found


def fed(facts: TreeFacts) -> OpenFile | None:
    """Its standard input, if that is a pipe from somebody who stays, and nobody else's."""
    for one in facts.root.files:
        mine = one.kind == "pipe" and one.fd == 0 and one.end == "read" and one.peer == "outside" and not one.direct
        if mine and (facts.under_shim or not one.peer_reads):
            return one
    return None


def _holds_name(one: OpenFile) -> bool:
    """A port or an abstract unix name that only one socket of a network can have."""
    if one.kind == "inet":
        bound = one.state == "LISTEN" or one.protocol.startswith("udp")
        return bound and not one.local.endswith(":0")
    return one.kind == "unix" and one.local.startswith("@")


def _one(
    one: OpenFile, process: ProcessFacts, source: TargetFacts, tcp_close: bool, cut_pipes: bool, names: dict[int, str],
    outputs: set[str],
) -> Iterator[Finding]:  # fmt: skip
    if one.kind in _REFUSED:
        yield Finding(one.kind.replace("_", "-"), "blocks", *_REFUSED[one.kind])
    elif one.kind == "inet":
        yield from _inet(one, tcp_close)
    elif one.kind == "unix":
        yield from _unix(one, names)
    elif one.kind == "socket":
        if one.protocol and one.protocol not in _CONNECTIONLESS:
            yield Finding("socket-family", "blocks", f"it has a socket that CRIU does not know ({one.protocol})")
    elif one.kind in ("pipe", "fifo"):
        yield from _pipe(one, names, cut_pipes, outputs)
    elif one.kind == "device":
        if one.path not in _PLAIN_DEVICES and not one.path.startswith(("/dev/nvidia", "/dev/dri/", "/dev/kfd")):
            yield Finding("device", "blocks", f"it has the device {one.path} open")
    elif one.kind in ("pidfd", "[pidfd]"):
        if tuple(int(part) for part in source.criu_version.split(".")[:2] if part.isdigit()) < _PIDFD_CRIU:
            yield Finding("pidfd", "blocks", "it holds a handle on a process (pidfd)", "CRIU 4.1 or later can carry it")
    elif one.kind in ("raw", "packet"):
        yield Finding(one.kind, "notice", "what it hears of the network, it hears on the target from then on, not here")
    elif "overlay" in one.watches:
        text = "it watches files on an overlay file system (inotify), and CRIU cannot tell which"
        yield Finding("inotify-overlay", "blocks", text, "--strategy relaunch starts it again there")
    elif one.kind in ("inotify", "fanotify"):
        yield Finding("inotify", "notice", "what it watches is watched on the target from then on, not here")
    elif one.kind.startswith("bpf") or one.kind == "unknown" or (one.kind not in _FINE and one.kind != "tty"):
        yield Finding("descriptor", "blocks", f"it has something open that CRIU does not know ({one.kind or one.path})")
    if one.kind == "regular" and one.deleted:
        yield from _deleted(one)


def _inet(one: OpenFile, tcp_close: bool) -> Iterator[Finding]:
    host, _, port = one.local.rpartition(":")
    everywhere = host in ("0.0.0.0", "[::]", "")
    loopback = host.startswith("127.") or host == "[::1]"
    if one.protocol.startswith("udp"):
        if one.state == "ESTABLISHED" and not loopback:
            text = f"it has a UDP socket to {one.remote}, bound to this node's address {host}"
            yield Finding("udp-connected", "blocks", text, "a socket bound to the old address cannot be restored")
        elif not everywhere and not loopback:
            text = f"it has a UDP socket bound to this node's address {one.local}"
            yield Finding("bound-address", "blocks", text, "bind it to 0.0.0.0 instead")
        elif port != "0":
            yield Finding("udp", "notice", f"it answers UDP port {port} on the target from then on, not here")
    elif one.state == "LISTEN":
        if not everywhere and not loopback:
            text = f"it listens on this node's address {one.local}, which the target does not have"
            yield Finding("bound-address", "blocks", text, "let it listen on 0.0.0.0 instead")
        else:
            yield Finding("listens", "notice", f"it listens on port {port} of the target from then on, not here")
    elif one.state != "CLOSE":
        whom = one.remote if one.remote and not one.remote.endswith(":0") else "another program"
        if tcp_close:
            yield Finding("tcp", "notice", f"its connection to {whom} is closed, and the program sees that")
        else:
            yield Finding(
                "tcp", "asks", f"it has an open TCP connection to {whom}",
                "--tcp-close moves it all the same: the program sees the connection closed", option="--tcp-close",
                details={"remote": one.remote, "local": one.local, "state": one.state},
            )  # fmt: skip


def _unix(one: OpenFile, names: dict[int, str]) -> Iterator[Finding]:
    if one.state == "LISTEN":
        text = f"its unix socket {one.path or '(no name)'} is reached on the target from then on, not here"
        yield Finding("unix-listens", "notice", text)
    elif one.peer == "outside":
        text = f"it has a unix socket to {_whom(one, names)}, which stays here"
        help = "close that connection, or move both"
        yield Finding("unix-socket", "blocks", text, help, details={"pids": list(one.peer_pids)})
    elif one.peer == "unknown" and one.state == "ESTABLISHED":
        yield Finding("unix-socket", "blocks", "it has a unix socket, and to whom cannot be told")
    elif one.peer == "none" and one.state == "ESTABLISHED" and one.protocol != "dgram":
        yield Finding("unix-half", "notice", "a unix socket of it that nobody holds the other end of is closed there")


def _pipe(one: OpenFile, names: dict[int, str], cut: bool, outputs: set[str]) -> Iterator[Finding]:
    whom = _whom(one, names)
    stream = {0: "standard input", 1: "standard output", 2: "standard error"}.get(one.fd, f"descriptor {one.fd}")
    details = {"fd": one.fd, "pipe": one.path}
    if one.kind == "fifo" and one.peer in ("outside", "shared", "unknown"):
        yield Finding("fifo", "blocks", f"it shares the named pipe {one.path} with {whom}, which stays here")
    elif one.stray and one.peer in ("outside", "shared", "unknown"):
        then = "it stays open here, and nothing comes or goes by it there"
        text = f"its shell left descriptor {one.fd} open for it, a pipe of {whom}: {then}"
        yield Finding("pipe-stray", "notice", text, option="--inherit-fd", details=details)
    elif one.peer == "shared":
        yield _cut("pipe-shared", f"it shares a pipe with {whom}, which stays here", "it is cut in two", cut, details)
    elif one.peer in ("outside", "unknown"):
        if one.end == "read":
            text, then = f"its {stream} comes from {whom}, which stays here", "that input ends with the move"
            yield _cut("pipe-in", text, then, cut, details)
        elif one.path in outputs:
            text = f"its {stream} is a pipe to {whom}: what it writes is passed on there"
            yield Finding("pipe-out", "notice", text, option="--inherit-fd", details=details)
        else:
            text, then = f"it writes to {whom} by {stream}", "what it writes there is lost"
            yield _cut("pipe-other", text, then, cut, details)


def _cut(code: str, text: str, then: str, cut: bool, details: dict[str, Any]) -> Finding:
    """A pipe that cannot be carried: agreed to, or asked for, because whoever is at its ends would wait for ever."""
    if cut:
        return Finding(code, "notice", f"{text}; {then}", option="--inherit-fd", details=details)
    help = f"--cut-pipes moves it all the same: {then}"
    if details["fd"] > 2:
        help += f"; or, if it does not need that, start it with {details['fd']}>&-"
    return Finding(code, "asks", text, help, option="--cut-pipes", details=details)


def _whom(one: OpenFile, names: dict[int, str]) -> str:
    if not one.peer_pids:
        return "another process"
    pid = next((pid for pid in one.peer_pids if pid in names), one.peer_pids[0])
    return f"process {pid} ({names[pid]})" if pid in names else f"process {pid}"


def _deleted(one: OpenFile) -> Iterator[Finding]:
    if one.links:
        text = f"{one.path} was renamed or replaced while it has it open"
        yield Finding("renamed-file", "blocks", text, "such a file cannot be found again on the target")
    elif one.size_bytes > _BIG_GHOST_BYTES:
        text = f"its deleted file {one.path} ({format_bytes(one.size_bytes)}) travels during the pause"
        yield Finding("deleted-file", "notice", text, option="--ghost-limit", details={"bytes": one.size_bytes})


def _terminals(facts: TreeFacts) -> list[Finding]:
    open_ttys = {one.path for process in facts.processes for one in process.files if one.kind == "tty"}
    if not open_ttys:
        return []
    controlling = {process.tty for process in facts.processes if process.tty}
    names = {name for name in open_ttys | controlling if name != "/dev/tty"}
    if len(names) > 1:
        text = f"it uses more than one terminal ({', '.join(sorted(names))})"
        return [Finding("terminals", "blocks", text)]
    name = next(iter(names), "/dev/tty")
    if name != "/dev/tty" and not name.startswith("/dev/pts/"):
        return [Finding("console", "blocks", f"it is tied to the console {name}", "start it in tmux or over ssh")]
    text = f"its terminal {name} is replaced by one of its own there; what it prints goes on here, keys do not reach it"
    return [Finding("terminal", "notice", text, option="--own-pty")]
