"""Open descriptors of a tree: what each is, what is locked, and for pipes and sockets who has the other end."""

from __future__ import annotations

import errno
import os
import re
import select
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from distributed_grid.agent.inspect.origin import is_shim, is_wrapper, parents_of, read_argv, read_environment_raw
from distributed_grid.agent.inspect.plain import from_plain, to_plain
from distributed_grid.agent.inspect.sockets import SocketInfo, read_sockets
from distributed_grid.core.process import read_stat

_DELETED = " (deleted)"
_ANONYMOUS = re.compile(r"anon_inode:\[?([a-z_-]+)\]?")
_NAMES = {"eventpoll": "epoll", "perf_event": "perf", "io_uring": "io_uring", "uffd": "userfaultfd"}
_DEVICE = re.compile(r"\bsdev:([0-9a-f]+)")
_NUMBER = re.compile(r"\[(\d+)\]")
_SHELLS_FIRST_FD = 10


@dataclass(frozen=True, slots=True)
class OpenFile:
    fd: int
    #: regular, directory, device, tty, pipe, fifo, inet, unix, netlink, packet, raw, socket (of
    #: no table: not connected, or of a rare family), memfd, eventfd, epoll, timerfd,
    #: signalfd, inotify, fanotify, io_uring, userfaultfd, pidfd, perf, bpf…, namespace, unknown
    kind: str
    path: str = ""  # as the kernel shows it, without "(deleted)"
    flags: int = 0  # of open(2)
    offset: int = 0
    size_bytes: int = 0
    inode: int = 0
    links: int = 1
    deleted: bool = False
    mounted: bool = True  # False: on a file system that has no place in the process's own tree of directories
    locks: tuple[str, ...] = ()
    watches: tuple[str, ...] = ()  # inotify: the types of file systems on which it watches something
    #: pipe, fifo, unix socket: inside (only the tree has it), shared (the tree has both ends, outsiders have one too),
    #: outside (the other end is elsewhere), none (nobody has the other end), unknown
    peer: str = ""
    peer_pids: tuple[int, ...] = ()
    peer_reads: bool = False  # of a pipe that is standard input: somebody outside of the tree reads from it, too
    stray: bool = False  # a pipe to outsiders that its program neither opened nor was told of: its shell left it open
    end: str = ""  # of a pipe: read, write, both
    protocol: str = ""
    state: str = ""
    local: str = ""
    remote: str = ""

    @property
    def writes(self) -> bool:
        return self.flags & os.O_ACCMODE != os.O_RDONLY

    @property
    def direct(self) -> bool:
        return bool(self.flags & os.O_DIRECT)

    def to_wire(self) -> dict[str, Any]:
        return to_plain(self)

    @staticmethod
    def from_wire(data: Mapping[str, Any]) -> OpenFile:
        return from_plain(OpenFile, data)


@dataclass(slots=True)
class Outsiders:
    """Who outside of a tree has which pipe or socket; looked up once, and only where it is needed."""

    tree: frozenset[int]
    unreadable: bool = False  # some processes' descriptors are not ours to see
    _holders: dict[str, set[int]] | None = field(default=None)

    def holders(self, link: str) -> tuple[int, ...]:
        if self._holders is None:
            self._holders = self._scan()
        return tuple(sorted(pid for pid in self._holders.get(link, ()) if self._is_outside(pid)))

    def _is_outside(self, pid: int) -> bool:
        """Not a child that was born since the tree was looked at, or one that has ended."""
        while stat := read_stat(pid):
            if stat.ppid in self.tree:
                return False
            if stat.ppid <= 1:
                return True
            pid = stat.ppid
        return False

    def reads(self, link: str) -> bool:
        """Whether one of the outsiders has a pipe's reading end."""
        return any(_reads(pid, link) for pid in self.holders(link))

    def _scan(self) -> dict[str, set[int]]:
        found: dict[str, set[int]] = {}
        for name in os.listdir("/proc"):  # noqa: PTH208
            if not name.isdigit() or int(name) in self.tree:
                continue
            base = f"/proc/{name}/fd"
            try:
                for one in os.listdir(base):  # noqa: PTH208
                    try:
                        link = os.readlink(f"{base}/{one}")  # noqa: PTH115
                    except FileNotFoundError:
                        continue
                    if link.startswith(("pipe:", "socket:", "/")):
                        found.setdefault(link, set()).add(int(name))
            except PermissionError:
                self.unreadable = True
            except OSError:
                continue
        return found


def open_files(pid: int) -> tuple[OpenFile, ...]:
    """What one process has open; pipes and sockets are not followed yet, see `with_peers`."""
    try:
        names = sorted(os.listdir(f"/proc/{pid}/fd"), key=int)  # noqa: PTH208
    except OSError:
        return ()
    found = []
    mounts = _mounts(pid)
    for name in names:
        try:
            found.append(_open_file(pid, int(name), mounts))
        except (OSError, ValueError):
            continue  # closed meanwhile
    return tuple(found)


def _reads(pid: int, link: str) -> bool:
    for name in _names(pid):
        try:
            mine = os.readlink(f"/proc/{pid}/fd/{name}") == link  # noqa: PTH115
            if mine and _open_flags(pid, name) & os.O_ACCMODE != os.O_WRONLY:
                return True
        except OSError:
            continue  # closed meanwhile
    return False


def _names(pid: int) -> list[str]:
    try:
        return os.listdir(f"/proc/{pid}/fd")  # noqa: PTH208
    except OSError:
        return []  # it has ended


def _open_flags(pid: int, fd: str) -> int:
    words = Path(f"/proc/{pid}/fdinfo/{fd}").read_text().split()
    return int(words[words.index("flags:") + 1], 8)


def may_read(pid: int) -> bool:
    """Whether its descriptors are ours to see."""
    try:
        os.listdir(f"/proc/{pid}/fd")  # noqa: PTH208
    except PermissionError:
        return False
    except OSError:
        pass
    return True


def _mounts(pid: int) -> frozenset[str]:
    try:
        return frozenset(line.split(" ", 1)[0] for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines())
    except OSError:
        return frozenset()


def _types_of(pid: int, devices: set[int]) -> tuple[str, ...]:
    """Of the file systems with these numbers (the kernel's own form: 20 bits of minor number)."""
    if not devices:
        return ()
    names = {f"{one >> 20}:{one & 0xFFFFF}" for one in devices}
    found = set()
    for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines():
        words = line.split()
        if words[2] in names:
            found.add(words[words.index("-") + 1])
    return tuple(sorted(found))


def _open_file(pid: int, fd: int, mounts: frozenset[str]) -> OpenFile:
    link = os.readlink(f"/proc/{pid}/fd/{fd}")  # noqa: PTH115
    about = os.stat(f"/proc/{pid}/fd/{fd}")  # noqa: PTH116
    flags = offset = 0
    mount = ""
    locks = []
    watched = set()
    for line in Path(f"/proc/{pid}/fdinfo/{fd}").read_text(errors="replace").splitlines():
        name, _, value = line.partition(":")
        if name == "pos":
            offset = int(value)
        elif name == "flags":
            flags = int(value, 8)
        elif name == "mnt_id":
            mount = value.strip()
        elif name == "lock":
            locks.append(" ".join(value.split()[1:4]))  # FLOCK ADVISORY WRITE
        elif name.startswith("inotify ") and (device := _DEVICE.search(line)):
            watched.add(int(device.group(1), 16))
    kind = _kind(link, about.st_mode)
    mode = flags & os.O_ACCMODE
    end = protocol = ""
    if kind in ("pipe", "fifo"):
        end = {os.O_RDONLY: "read", os.O_WRONLY: "write"}.get(mode, "both")
    elif kind == "socket":
        protocol = os.getxattr(f"/proc/{pid}/fd/{fd}", "system.sockprotoname").rstrip(b"\0").decode().lower()
    return OpenFile(
        fd=fd, kind=kind, path=link.removesuffix(_DELETED), flags=flags, offset=offset, inode=about.st_ino,
        size_bytes=about.st_size if stat.S_ISREG(about.st_mode) else 0, links=about.st_nlink,
        deleted=link.startswith("/") and link.endswith(_DELETED) and kind != "memfd", locks=tuple(locks), end=end,
        watches=_types_of(pid, watched), protocol=protocol,
        mounted=kind not in ("regular", "directory") or not mounts or mount in mounts,
    )  # fmt: skip


def _kind(link: str, mode: int) -> str:
    if link.startswith("pipe:["):
        return "pipe"
    if link.startswith("socket:["):
        return "socket"
    if anonymous := _ANONYMOUS.match(link):
        name = anonymous.group(1)
        return _NAMES.get(name, name)
    if link.startswith("/memfd:"):
        return "memfd"
    if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
        if link.endswith("/ptmx"):
            return "device"
        return "tty" if link.startswith(("/dev/pts/", "/dev/tty", "/dev/console")) else "device"
    if stat.S_ISFIFO(mode):
        return "fifo"
    if stat.S_ISDIR(mode):
        return "directory"
    if link.startswith("/"):
        return "regular"
    return "namespace" if _NUMBER.search(link) else "unknown"


def with_peers(files: dict[int, tuple[OpenFile, ...]], outsiders: Outsiders) -> dict[int, tuple[OpenFile, ...]]:
    """The same descriptors of a whole tree, with pipes and sockets followed to their other ends."""
    ends: dict[str, set[str]] = {}
    inside: set[int] = set()
    for each in files.values():
        for one in each:
            if one.kind in ("pipe", "fifo"):
                ends.setdefault(one.path, set()).update({"read", "write"} if one.end == "both" else {one.end})
            elif one.kind == "socket":
                inside.add(one.inode)
    tables: dict[str, dict[int, SocketInfo]] = {}
    done: dict[int, tuple[OpenFile, ...]] = {}
    strays: set[tuple[int, str]] | None = None
    for pid, each in files.items():
        followed = []
        if strays is None:
            strays = _strays(pid, each)
        for one in each:
            if one.kind in ("pipe", "fifo"):
                one = _follow_pipe(pid, one, ends[one.path], outsiders)
                one = replace(one, stray=(one.fd, one.path) in strays)
            elif one.kind == "socket":
                one = _follow_socket(one, _table(pid, tables), inside, outsiders)
            followed.append(one)
        done[pid] = tuple(followed)
    return done


def _table(pid: int, tables: dict[str, dict[int, SocketInfo]]) -> dict[int, SocketInfo]:
    try:
        namespace = os.readlink(f"/proc/{pid}/ns/net")  # noqa: PTH115
    except OSError:
        namespace = ""
    if namespace not in tables:
        tables[namespace] = read_sockets(pid)
    return tables[namespace]


def _follow_pipe(pid: int, one: OpenFile, ends: set[str], outsiders: Outsiders) -> OpenFile:
    holders = outsiders.holders(one.path)
    if ends == {"read", "write"}:
        peer = "shared" if holders else "inside"
    elif holders:
        peer = "outside"
    else:
        peer = "unknown" if outsiders.unreadable and not (one.kind == "pipe" and _is_hung_up(pid, one)) else "none"
    return replace(one, peer=peer, peer_pids=holders, peer_reads=one.fd == 0 and outsiders.reads(one.path))


def _strays(pid: int, files: tuple[OpenFile, ...]) -> set[tuple[int, str]]:
    """Number and name of pipes that a program was handed by its shell, and that it does not know of.

    Terminals in editors, and other programs that run shells, leave such pipes of their own open for all that is started
    there. Neither a program nor a shell's `{name}>` opened them, which take the first free number, and nothing names
    the number to the program.
    """
    above = parents_of(pid)
    if above and is_shim(read_argv(above[0][0])):  # moved before: what is beyond its streams was left behind then
        return {(one.fd, one.path) for one in files if one.kind == "pipe" and one.fd > 2}
    if above and not is_wrapper(above[0][1]) and (above[0][0] != 1 or _program(1) == _program(pid)):
        return set()  # a program's own worker, perhaps, which knows what it was given
    taken = {one.fd for one in files}
    words = [*map(os.fsencode, read_argv(pid)), *read_environment_raw(pid)]
    return {
        (one.fd, one.path)
        for one in files
        if one.kind == "pipe" and not taken.issuperset(range(_SHELLS_FIRST_FD, one.fd))
        and not any(re.search(rb"(?<!\d)%d(?!\d)" % one.fd, word) for word in words)
    }  # fmt: skip


def _program(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/exe")  # noqa: PTH115
    except OSError:
        return ""


def _is_hung_up(pid: int, one: OpenFile) -> bool:
    """Whether nobody at all has the other end of a pipe: the kernel knows, whoever we may look at."""
    try:
        mine = os.open(f"/proc/{pid}/fd/{one.fd}", (os.O_WRONLY if one.end == "write" else os.O_RDONLY) | os.O_NONBLOCK)
    except (FileNotFoundError, ProcessLookupError):
        return True  # it has ended, or closed it
    except OSError as error:
        return error.errno == errno.ENXIO  # nobody reads what it would write
    try:
        ends = select.poll()
        ends.register(mine, 0)
        return bool(ends.poll(0))  # POLLHUP without a writer, POLLERR without a reader
    finally:
        os.close(mine)


def _follow_socket(
    one: OpenFile, table: dict[int, SocketInfo], inside: set[int], outsiders: Outsiders
) -> OpenFile:
    info = table.get(one.inode)
    if info is None:  # never bound or connected, or of a family without a table
        return replace(one, state="CLOSE")
    peer, holders = "", tuple[int, ...]()
    if info.kind == "unix":
        if info.peer_inode is None:
            peer = "unknown" if info.state == "ESTABLISHED" else "none"
        elif info.peer_inode == 0:
            peer = "none"
        elif info.peer_inode in inside:
            peer = "inside"
        else:
            peer, holders = "outside", outsiders.holders(f"socket:[{info.peer_inode}]")
    return replace(
        one, kind=info.kind, protocol=info.protocol, state=info.state, local=info.local, remote=info.remote,
        path=info.local if info.kind == "unix" else one.path, peer=peer, peer_pids=holders,
    )  # fmt: skip
