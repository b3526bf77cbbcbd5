"""What is read about real processes: pipes, sockets, deleted and locked files, terminals, threads, sessions."""

from __future__ import annotations

import os
import pty
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgpack
import pytest

from distributed_grid.agent.inspect.descriptors import OpenFile
from distributed_grid.agent.inspect.facts import TreeFacts, inspect_tree, read_environment
from distributed_grid.agent.inspect.mapped import build_id
from distributed_grid.core.errors import NotFound
from distributed_grid.core.process import read_stat, tree_of
from tests.lab.waiting import wait_until

Start = Callable[..., subprocess.Popen[bytes]]
READY = "import sys, os, signal\nprint('ready', file=sys.stderr, flush=True)\nsignal.pause()\n"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """`start(SCRIPT, **popen)`: a Python program that has said on stderr that it is ready."""
    started: list[subprocess.Popen[bytes]] = []

    def run(script: str, **options: object) -> subprocess.Popen[bytes]:
        options.setdefault("stdin", subprocess.DEVNULL)
        options.setdefault("stdout", subprocess.DEVNULL)
        options.setdefault("start_new_session", True)
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", script + READY], stderr=subprocess.PIPE, cwd=tmp_path, **options
        )  # type: ignore[call-overload]
        started.append(process)
        assert process.stderr is not None
        line = process.stderr.readline()
        assert line == b"ready\n", line + process.stderr.read()
        return process

    yield run
    for process in started:
        for one in reversed(_pids(process)):
            try:
                os.kill(one, signal.SIGKILL)
            except ProcessLookupError:
                pass
        process.wait(30)
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream:
                stream.close()


def _pids(process: subprocess.Popen[bytes]) -> list[int]:
    return tree_of(process.pid) if process.poll() is None else []


def look(process: subprocess.Popen[bytes]) -> TreeFacts:
    stat = read_stat(process.pid)
    assert stat is not None
    return inspect_tree(process.pid, stat.start_ticks)


def file_at(facts: TreeFacts, path: str) -> OpenFile:
    return next(one for one in facts.root.files if one.path == path)


def test_process_itself(start: Start, tmp_path: Path) -> None:
    process = start("import os; os.umask(0o027); os.nice(3)\n", env={"SECRET": "hunter2", "PLAIN": "x"})
    facts = look(process)
    root = facts.root
    assert (root.pid, root.ppid, root.sid, root.pgid) == (process.pid, os.getpid(), process.pid, process.pid)
    assert root.argv[0] == sys.executable and root.argv[1:4] == ("-I", "-S", "-c")
    assert (root.cwd, root.umask, root.nice) == (str(tmp_path), 0o027, min(19, os.getpriority(os.PRIO_PROCESS, 0) + 3))
    assert Path(root.exe).samefile(sys.executable)
    assert root.uid == os.getuid() and root.origin == "user" and root.readable
    assert root.limits["RLIMIT_NOFILE"] == resource.getrlimit(resource.RLIMIT_NOFILE)
    assert root.rss_bytes > 1 << 20 and facts.memory_bytes >= root.rss_bytes - root.shared_bytes
    assert facts.session_leader == "inside" and not root.tty and not root.other_namespaces
    assert facts.parents[0][0] == os.getpid()
    assert any(one.path == root.exe and one.executable for one in root.mapped)
    # Names of variables travel, values do not.
    assert {"SECRET", "PLAIN"} <= set(root.env_names)
    assert "hunter2" not in repr(facts)
    assert read_environment(process.pid, root.start_ticks)["SECRET"] == "hunter2"
    assert TreeFacts.from_wire(msgpack.unpackb(msgpack.packb(facts.to_wire()))) == facts


def test_pipe_between_parent_and_child_and_to_an_outsider(start: Start) -> None:
    script = (
        "import os, signal\nr, w = os.pipe()\n"
        "if os.fork() == 0:\n os.close(w)\n os.read(r, 1)\n os._exit(0)\nos.close(r)\n"
    )
    process = start(script, stdout=subprocess.PIPE)
    facts = look(process)
    assert len(facts.processes) == 2
    pipes = {one.fd: one for one in facts.root.files if one.kind == "pipe"}
    assert (pipes[1].peer, pipes[1].end) == ("outside", "write")
    assert os.getpid() in pipes[1].peer_pids
    inner = [one for one in pipes.values() if one.fd > 2]
    assert [(one.peer, one.end) for one in inner] == [("inside", "write")]
    child = facts.processes[1]
    assert ("inside", "read") in {(one.peer, one.end) for one in child.files if one.kind == "pipe"}


@pytest.mark.parametrize(("line", "stray"), [
    ("exec 250>&$1; sleep 60; true", True),  # which the shell's own parent, a terminal, would have done
    ("exec 250>&$1 {v}>&$1; sleep 60 $v; true", True),
    ("exec 250>&$1; sleep 60 250; true", False),  # it was told
    ("exec 250>&$1; ROOM=/dev/fd/250 sleep 60; true", False),
    ("exec 7>&$1; sleep 60; true", False),  # as people write it
    ("exec {v}>&$1; sleep 60; true", False),
], ids=lambda value: "" if isinstance(value, str) else str(value))  # fmt: skip  (else the name is in the environment)
def test_a_pipe_that_a_shell_leaves_open(tmp_path: Path, line: str, stray: bool) -> None:
    reading, writing = os.pipe()
    shell = subprocess.Popen(["bash", "-c", line, "sh", str(writing)], pass_fds=[writing], start_new_session=True)
    try:
        [_, child] = wait_until(lambda: found if len(found := tree_of(shell.pid)) == 2 else [], 30, "the child")
        wait_until(lambda: Path(f"/proc/{child}/comm").read_text() == "sleep\n", 30, "its exec")
        mine = [one for one in inspect_tree(child).root.files if one.kind == "pipe" and one.fd != writing]
        assert [one.stray for one in mine if one.fd == max(one.fd for one in mine)] == [stray]
        assert not any(one.stray for one in mine if one.fd < 20)
    finally:
        for pid in reversed(tree_of(shell.pid)):
            os.kill(pid, signal.SIGKILL)
        shell.wait(30)
        os.close(reading)
        os.close(writing)


def test_a_pipe_of_a_programs_own_worker_is_not_stray(start: Start) -> None:
    made = start("import os\nr, w = os.pipe(); os.dup2(w, 50)\nif os.fork(): os.close(w)\n")
    [_, child] = tree_of(made.pid)
    [own] = [one for one in inspect_tree(child).root.files if one.fd == 50]
    assert (own.kind, own.stray) == ("pipe", False)


def test_sockets(start: Start) -> None:
    script = (
        "import socket\nl = socket.socket(); l.bind(('127.0.0.1', 0)); l.listen()\n"
        "c = socket.create_connection(l.getsockname()); s, _ = l.accept()\n"
        "a, b = socket.socketpair()\nu = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); u.bind(('0.0.0.0', 0))\n"
        "free = socket.socket()\n"
    )
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = start(script, pass_fds=[theirs.fileno()])
        theirs.close()
        files = look(process).root.files
    inet = [one for one in files if one.kind == "inet"]
    listening = next(one for one in inet if one.state == "LISTEN")
    assert listening.local.startswith("127.0.0.1:") and listening.protocol == "tcp"
    connected = [one for one in inet if one.state == "ESTABLISHED"]
    assert {one.remote for one in connected} & {listening.local} and len(connected) == 2
    assert any(one.protocol == "udp" and one.local.startswith("0.0.0.0:") for one in inet)
    assert sorted(one.peer for one in files if one.kind == "unix") == ["inside", "inside", "outside"]
    assert next(one for one in files if one.kind == "unix" and one.peer == "outside").peer_pids == (os.getpid(),)
    assert [one.protocol for one in files if one.kind == "socket"] == ["tcp"]


def test_files_deleted_locked_and_others(start: Start, tmp_path: Path) -> None:
    script = (
        "import fcntl, os, select, mmap\nk = open('kept', 'w+'); k.write('hello'); k.flush()\n"
        "fcntl.flock(k, fcntl.LOCK_EX)\ng = open('gone', 'wb'); g.write(b'x' * 5000); g.flush(); os.unlink('gone')\n"
        "m = open('mapped', 'wb+'); m.truncate(8192); mm = mmap.mmap(m.fileno(), 8192)\n"
        "e = select.epoll(); v = os.eventfd(0); z = os.open('/dev/zero', os.O_RDONLY); mf = os.memfd_create('x')\n"
        "os.mkfifo('f'); ff = os.open('f', os.O_RDWR)\n"
    )
    root = (facts := look(start(script))).root
    kept = file_at(facts, str(tmp_path / "kept"))
    assert (kept.kind, kept.offset, kept.size_bytes, kept.writes) == ("regular", 5, 5, True)
    assert kept.locks == ("FLOCK ADVISORY WRITE",)
    gone = file_at(facts, str(tmp_path / "gone"))
    assert (gone.deleted, gone.size_bytes, gone.links) == (True, 5000, 0)
    mapped = next(one for one in root.mapped if one.path == str(tmp_path / "mapped"))
    assert (mapped.shared_write, mapped.size_bytes) == (True, 8192)
    kinds = {one.kind for one in root.files}
    assert {"epoll", "eventfd", "device", "memfd", "fifo"} <= kinds
    assert file_at(facts, str(tmp_path / "f")).peer == "inside"


def test_terminal_of_a_session_and_of_a_child(start: Start) -> None:
    script = (
        "import os, signal\nprint(os.getpid(), flush=True)\nchild = os.fork()\n"
        "if child == 0:\n signal.pause()\nos.write(1, b'ready\\n')\nsignal.pause()\n"
    )
    pid, master = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-I", "-S", "-c", script])
    try:
        text = b""
        while b"ready" not in text:
            text += os.read(master, 100)
        facts = inspect_tree(pid)
        name = str(Path(f"/proc/{pid}/fd/0").readlink())
        assert facts.root.tty == name and facts.root.foreground and facts.session_leader == "inside"
        assert {one.kind for one in facts.root.files if one.fd < 3} == {"tty"}
        child = inspect_tree(facts.processes[1].pid)
        assert child.session_leader == "outside" and child.root.tty == name
    finally:
        for one in reversed(tree_of(pid)):
            os.kill(one, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(master)


def test_threads(start: Start) -> None:
    script = "from threading import *\nfor _ in range(4): Thread(target=Event().wait, daemon=True).start()\n"
    assert look(start(script)).root.threads == 5


def test_gone_and_reused(start: Start) -> None:
    process = start("")
    stat = read_stat(process.pid)
    assert stat is not None
    with pytest.raises(NotFound, match="not found") as caught:
        inspect_tree(process.pid, stat.start_ticks + 1)
    assert "another process" in caught.value.cause
    process.kill()
    process.wait(30)
    with pytest.raises(NotFound):
        inspect_tree(process.pid, stat.start_ticks)
    with pytest.raises(NotFound):
        read_environment(process.pid, stat.start_ticks)


def test_a_process_that_keeps_changing_is_read_all_the_same(start: Start) -> None:
    script = (
        "import os, signal\nif os.fork() == 0:\n while True:\n"
        "  child = os.fork()\n  if child == 0: os._exit(0)\n  r, w = os.pipe(); os.close(r); os.close(w)\n"
        "  os.waitpid(child, 0)\n"
    )
    process = start(script)
    for _ in range(30):
        assert look(process).root.pid == process.pid


def test_build_id() -> None:
    maps = Path("/proc/self/maps").read_text()
    library = next(line.split()[-1] for line in maps.splitlines() if "libc.so" in line)
    found = build_id(library)
    assert len(found) >= 16 and int(found, 16)
    assert build_id(__file__) == "" and build_id("/nonexistent") == ""


@pytest.mark.root
def test_kernel_thread_is_told() -> None:
    thread = 2
    stat = read_stat(thread)
    if stat is None or stat.comm != "kthreadd":
        pytest.skip("kernel threads cannot be seen from this namespace")
    assert inspect_tree(thread).root.origin == "kernel"
