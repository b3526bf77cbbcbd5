"""What a tree has open that a move must treat with care: output files, pipes to outsiders, a terminal, its session."""

from __future__ import annotations

import base64
import ctypes
import fcntl
import os
import select
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distributed_grid.agent.feed import unread_bytes
from distributed_grid.core.errors import Refused
from distributed_grid.core.process import read_stat

_STREAMS = {1: "stdout", 2: "stderr"}
_libc = ctypes.CDLL(None, use_errno=True)
_SPLICE_NONBLOCK = 2
#: What goes in one message of the move; a pipe holds 64 KiB unless somebody made it larger.
_LEFT_LIMIT_BYTES = 512 * 1024


@dataclass
class TreeFacts:
    #: What the stub can go on with: the root's own output and input. Each: key (CRIU's name), stream (file name in the
    #: spool), kind ("file" or "pipe"), write, path, position; of a pipe that it reads: fed (what comes into it at home
    #: is passed on), at (a process and a descriptor of it)
    streams: list[dict[str, Any]] = field(default_factory=list)
    terminal: str = ""
    shell_job: bool = False
    uid: int = 0
    gid: int = 0
    argv: list[str] = field(default_factory=list)
    cwd: str = "/"


def descriptors(pid: int) -> list[tuple[int, str, int, int]]:
    """`(number, link, open flags, position)` of each open descriptor."""
    found = []
    try:
        entries = list(Path(f"/proc/{pid}/fd").iterdir())
    except (FileNotFoundError, ProcessLookupError):
        return []  # a child that ended meanwhile
    for entry in entries:
        name = entry.name
        try:
            link = str(entry.readlink())
            info = Path(f"/proc/{pid}/fdinfo/{name}").read_text().split()
        except OSError:
            continue
        found.append((int(name), link, int(info[info.index("flags:") + 1], 8), int(info[info.index("pos:") + 1])))
    return sorted(found)


def tree_facts(pids: list[int], *, redirect: bool = True, feed: str = "", moved: bool = False) -> TreeFacts:
    """Read off /proc; `pids` parents first. Refuses a tree whose session cannot be carried.

    `feed`: the pipe that is its standard input and is to be passed on. `moved`: an earlier move brought it here.
    """
    facts = TreeFacts()
    root = pids[0]
    writers: dict[str, bool] = {}  # path -> every open of it is write-only
    pipes: dict[str, set[int]] = {}
    #: link -> (process, descriptor, position): of the root, else of the first that has it
    first: dict[str, tuple[int, int, int]] = {}
    for pid in pids:
        for number, link, flags, position in descriptors(pid):
            mode = flags & os.O_ACCMODE
            if link.startswith("pipe:["):
                pipes.setdefault(link, set()).update({0, 1} if mode == os.O_RDWR else {mode})
                first.setdefault(link, (pid, number, position))
            elif link.startswith(("/dev/pts/", "/dev/tty")) and not facts.terminal:
                facts.terminal = link
            elif link.startswith("/") and not link.endswith(" (deleted)"):
                writers[link] = writers.get(link, True) and mode == os.O_WRONLY
                first.setdefault(link, (pid, number, position))
    for link, (pid, number, position) in first.items():
        if link.startswith("pipe:["):
            if pipes[link] != {0, 1}:
                name = _STREAMS.get(number, "") if pid == root or moved else ""  # its children's the stub does not have
                stream = {"key": link, "stream": name or f"fd{number}", "kind": "pipe", "write": 1 in pipes[link]}
                if not stream["write"]:
                    stream |= {"fed": link == feed, "at": [pid, number]}
                    if link == feed and (pid, number) != (root, 0):  # a shell puts it aside for a moment
                        text = "its standard input is not what it was just now"
                        raise Refused(text, hint="try again", code="stdin-changed")
                facts.streams.append(stream)
        elif redirect and writers[link] and _is_plain_file(pid, number):
            name = _spooled(link) if moved else _STREAMS.get(number, "") if pid == root else ""
            if not name:
                continue
            facts.streams.append(
                {"key": link.lstrip("/"), "stream": name, "kind": "file", "write": True, "path": link,
                 "position": position}
            )  # fmt: skip
    about = read_stat(root)
    if about is None:
        raise Refused(f"process {root} is gone", code="gone")
    if about.session == 0:
        raise Refused(
            "its session leader is outside of its pid namespace", hint="start it with setsid", code="criu-session"
        )
    facts.shell_job = bool(facts.terminal) or about.session not in pids
    owner = Path(f"/proc/{root}").stat()
    facts.uid, facts.gid = owner.st_uid, owner.st_gid
    facts.argv = Path(f"/proc/{root}/cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
    facts.cwd = str(Path(f"/proc/{root}/cwd").readlink())
    return facts


def _spooled(link: str) -> str:
    """The stream that a file is of a shim's, whoever of the tree has it: that is what is passed on to the stub."""
    path = Path(link)
    return path.name if path.name in _STREAMS.values() and path.with_name("shim.json").exists() else ""


def left_in_pipes(streams: list[dict[str, Any]]) -> dict[str, str]:
    """By pipe, in base64: what nobody at home would read for the tree any more."""
    found = {one["key"]: _left_in_pipe(*one["at"]) for one in streams if "at" in one and not one["fed"]}
    if sum(map(len, found.values())) > _LEFT_LIMIT_BYTES:
        text = "too much lies unread in the pipes that it reads"
        raise Refused(text, hint="wait until it has read on", code="pipe-left")
    return {key: base64.b64encode(data).decode() for key, data in found.items() if data}


def _left_in_pipe(pid: int, fd: int) -> bytes:
    """What lies unread in a pipe that nobody writes to any more; it stays there, for a tree that stays after all."""
    theirs = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY | os.O_NONBLOCK)
    reading, writing = os.pipe()
    try:
        ends = select.poll()
        ends.register(theirs, select.POLLIN)
        size = unread_bytes(theirs)
        if not size or not any(event & select.POLLHUP for _, event in ends.poll(0)):
            return b""
        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, fcntl.fcntl(theirs, fcntl.F_GETPIPE_SZ))
        if _libc.tee(theirs, writing, ctypes.c_size_t(size), _SPLICE_NONBLOCK) != size:
            raise Refused("what is left in a pipe that it reads cannot be carried", code="pipe-left")
        found = b""
        while len(found) < size:
            found += os.read(reading, size)
        return found
    finally:
        for one in (theirs, reading, writing):
            os.close(one)


def _is_plain_file(pid: int, number: int) -> bool:
    try:
        return stat.S_ISREG(Path(f"/proc/{pid}/fd/{number}").stat().st_mode)
    except OSError:
        return False
