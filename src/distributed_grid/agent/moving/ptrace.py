"""System calls run inside another process (x86_64, ptrace): for its userfaultfd, and for the stub in its place."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import signal
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

SEIZE, INTERRUPT, GETREGS, SETREGS, SYSCALL, CONT, DETACH, SETOPTIONS = 0x4206, 0x4207, 12, 13, 24, 7, 17, 0x4200
GETSIGMASK, SETSIGMASK = 0x420A, 0x420B
O_TRACESYSGOOD, O_SUSPEND_SECCOMP = 1, 1 << 21
AT_SYSCALL = signal.SIGTRAP | 0x80  # what a thread stops with at a call's begin and end
WALL = 0x40000000
ALL_SIGNALS = 2**64 - 1
TRAP = 1 << signal.SIGTRAP - 1
SYS_MMAP, SYS_CLOSE, SYS_EXECVE, SYS_USERFAULTFD, SYS_PIDFD_GETFD = 9, 3, 59, 323, 438
SYS_FCNTL = 72
REGISTERS = (
    "r15", "r14", "r13", "r12", "rbp", "rbx", "r11", "r10", "r9", "r8", "rax", "rcx", "rdx", "rsi", "rdi", "orig_rax",
    "rip", "cs", "eflags", "rsp", "ss", "fs_base", "gs_base", "ds", "es", "fs", "gs",
)  # fmt: skip

libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
libc.ptrace.restype = ctypes.c_long
libc.syscall.restype = ctypes.c_long


class Regs(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in REGISTERS]


def ptrace(request: int, pid: int, address: int = 0, data: int = 0) -> None:
    if libc.ptrace(request, pid, address, data) < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"ptrace {request:#x}: {os.strerror(code)}")


def maps(pid: int) -> Iterator[tuple[int, int, str, int, str]]:
    """`(start, end, permissions, inode, name)` of each mapping."""
    with open(f"/proc/{pid}/maps") as file:
        for line in file:
            parts = line.split(None, 5)
            start, _, end = parts[0].partition("-")
            yield int(start, 16), int(end, 16), parts[1], int(parts[4]), parts[5].strip() if len(parts) > 5 else ""


def syscall_instruction(pid: int) -> int:
    """Where in the process a `syscall` lies; nothing of it needs patching then."""
    with open(f"/proc/{pid}/mem", "rb", 0) as memory:
        for start, end, permissions, _, name in sorted(maps(pid), key=lambda one: one[4] != "[vdso]"):
            if "x" not in permissions or name == "[vsyscall]":
                continue
            try:
                memory.seek(start)
                found = memory.read(end - start).find(b"\x0f\x05")
            except OSError:
                continue
            if found >= 0:
                return start + found
    raise OSError(f"process {pid} has no syscall instruction")


def _wait(tid: int) -> int:
    _, status = os.waitpid(tid, WALL)
    if not os.WIFSTOPPED(status):
        raise ProcessLookupError(f"process {tid} ended")
    return status


def _taken(status: int) -> int:
    """The signal that the thread was about to take when it stopped, which is lost if it is resumed without it; or 0."""
    number = os.WSTOPSIG(status)
    return number if status >> 16 == 0 and number not in (signal.SIGTRAP, AT_SYSCALL) else 0


def get_mask(tid: int) -> int:
    mask = ctypes.c_uint64()
    ptrace(GETSIGMASK, tid, 8, ctypes.addressof(mask))
    return mask.value


def set_mask(tid: int, value: int) -> None:
    mask = ctypes.c_uint64(value)
    ptrace(SETSIGMASK, tid, 8, ctypes.addressof(mask))


class Stopped:
    """A thread held in ptrace: make calls in it one by one."""

    def __init__(self, pid: int, at: int) -> None:
        self.pid = pid
        self.at = at
        try:
            ptrace(SETOPTIONS, pid, 0, O_TRACESYSGOOD | O_SUSPEND_SECCOMP)  # a filter of its own would end it
        except PermissionError:
            ptrace(SETOPTIONS, pid, 0, O_TRACESYSGOOD)
        self.old = Regs()
        ptrace(GETREGS, pid, 0, ctypes.addressof(self.old))
        self.mask = get_mask(pid)
        set_mask(pid, ALL_SIGNALS)  # no signal is taken while its registers are not its own

    def call(self, number: int, *args: int) -> int:
        """The call's result, negative errno on failure; after a good execve the old program is gone.

        Not by a single step: that ends with a SIGTRAP that the kernel forces on it, and where the program blocks or
        ignores that, it throws away what the program does at SIGTRAP.
        """
        regs = Regs.from_buffer_copy(self.old)
        regs.rip, regs.rax, regs.orig_rax = self.at, number, 2**64 - 1
        for name, value in zip(("rdi", "rsi", "rdx", "r10", "r8", "r9"), args, strict=False):
            setattr(regs, name, value % 2**64)
        ptrace(SETREGS, self.pid, 0, ctypes.addressof(regs))
        stops = passed_on = 0  # SIGSTOP cannot be blocked
        while stops < 2:
            ptrace(SYSCALL, self.pid, 0, passed_on)
            status = _wait(self.pid)
            stops, passed_on = stops + (os.WSTOPSIG(status) == AT_SYSCALL), _taken(status)
        ptrace(GETREGS, self.pid, 0, ctypes.addressof(regs))
        return ctypes.c_int64(regs.rax).value

    def restore(self) -> None:
        ptrace(SETREGS, self.pid, 0, ctypes.addressof(self.old))
        set_mask(self.pid, self.mask)


@contextmanager
def traced(tid: int) -> Iterator[bool]:
    """Hold a thread, one that is stopped already too (then it yields True); afterwards it is as it was."""
    ptrace(SEIZE, tid)
    try:
        ptrace(INTERRUPT, tid)
        status = _wait(tid)
        if number := _taken(status):
            status = _put_back(tid, number)
        yield os.WSTOPSIG(status) != signal.SIGTRAP
    finally:
        try:
            ptrace(DETACH, tid)
        except ProcessLookupError:
            pass


def _put_back(tid: int, number: int) -> int:
    """Caught on its way to a signal: that waits, as it was sent, until the thread runs on; the next stop's status.

    The kernel queues a signal again, with all that it carries, if the thread is resumed with it and now blocks it.
    """
    mask = get_mask(tid)
    set_mask(tid, ALL_SIGNALS)
    ptrace(INTERRUPT, tid)  # again: the stop at the signal may have cleared the first
    ptrace(CONT, tid, 0, number)
    status = _wait(tid)  # before any instruction
    set_mask(tid, mask)
    return status


class Guard:
    """Holds every thread of a stopped tree in ptrace as well: a SIGCONT from somebody (`fg`) wakes none of it."""

    def __init__(self, tree: list[int]) -> None:
        self.tree = tree
        #: Whether all of it was still stopped when it was taken hold of.
        self.stopped = True
        with ExitStack() as held:
            for pid in tree:
                for tid in map(int, os.listdir(f"/proc/{pid}/task")):  # noqa: PTH208
                    self.stopped &= held.enter_context(traced(tid))
            self._held = held.pop_all()

    def stay(self) -> None:
        """Until a signal handler raises, or all of it is gone; who ends meanwhile is told to its parent, through us."""
        while True:
            try:
                os.waitpid(-1, WALL)
            except ChildProcessError:
                return

    def close(self) -> None:
        """Stopped it was, stopped it stays."""
        for pid in self.tree:
            try:
                os.kill(pid, signal.SIGSTOP)
            except ProcessLookupError:
                pass
        self._held.close()


@contextmanager
def stopped(pid: int, keep: Callable[[], bool] = lambda: True) -> Iterator[Stopped]:
    """Hold the main thread; its registers are put back at the end while `keep()` says so."""
    at = syscall_instruction(pid)
    with traced(pid):
        held = Stopped(pid, at)
        try:
            yield held
        finally:
            if keep():
                held.restore()


def take_userfaultfd(pid: int, flags: int) -> int:
    """A userfaultfd of that process's memory, as a descriptor of ours; none stays behind in it."""
    pidfd = os.pidfd_open(pid)
    try:
        with stopped(pid) as held:
            theirs = held.call(SYS_USERFAULTFD, flags)
            if theirs < 0:
                raise OSError(-theirs, f"userfaultfd: {os.strerror(-theirs)}")
            try:
                ours = libc.syscall(SYS_PIDFD_GETFD, pidfd, theirs, 0)
                if ours < 0:
                    raise OSError(ctypes.get_errno(), "pidfd_getfd")
            finally:
                held.call(SYS_CLOSE, theirs)
        return int(ours)
    finally:
        os.close(pidfd)


def take_userfaultfd_apart(pid: int, flags: int) -> int:
    """The same by a child of ours (see `apart`)."""
    [fd] = apart(lambda: [take_userfaultfd(pid, flags)])
    return fd


def apart(work: Callable[[], list[int]]) -> list[int]:
    """By a child of ours: if we are killed meanwhile, it still puts the registers back. The fds it made."""
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        try:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            os.setsid()
            socket.send_fds(theirs, [b"0"], work())
        except OSError as error:
            theirs.send(str(error.errno or errno.EIO).encode())
        finally:
            os._exit(0)
    theirs.close()
    with ours:
        data, fds, _, _ = socket.recv_fds(ours, 16, 1)
    os.waitpid(child, 0)
    if data != b"0":
        code = int(data or errno.EIO)
        raise OSError(code, f"in the process: {os.strerror(code)}")
    return fds


def exec_in_place(pid: int, path: str, argv: list[str], env: list[str]) -> None:
    """Replace the program of a process by another: same pid, parent and descriptors; OSError leaves it as it was.

    Its standard streams stay open, also where they were to be closed by an exec (libuv asks for that).
    """
    done = False
    with stopped(pid, lambda: not done) as held:
        blob, base_at = bytearray(), held.call(SYS_MMAP, 0, 1 << 17, 3, 0x22, -1, 0)
        if -4096 < base_at < 0:
            raise OSError(-base_at, "mmap in the process")

        def place(data: bytes) -> int:
            blob.extend(b"\0" * (-len(blob) % 8))
            at = base_at + len(blob)
            blob.extend(data)
            return at

        def vector(words: list[str]) -> int:
            pointers = [place(word.encode() + b"\0") for word in words]
            return place(struct.pack(f"<{len(words) + 1}Q", *pointers, 0))

        path_at, argv_at, env_at = place(path.encode() + b"\0"), vector(argv), vector(env)
        with open(f"/proc/{pid}/mem", "r+b", 0) as memory:
            memory.seek(base_at)
            memory.write(blob)
        flags = {fd: held.call(SYS_FCNTL, fd, fcntl.F_GETFD) for fd in (0, 1, 2)}
        closing = [fd for fd, flag in flags.items() if flag == fcntl.FD_CLOEXEC]
        for fd in closing:
            held.call(SYS_FCNTL, fd, fcntl.F_SETFD, 0)
        result = held.call(SYS_EXECVE, path_at, argv_at, env_at)
        if result < 0:
            for fd in closing:
                held.call(SYS_FCNTL, fd, fcntl.F_SETFD, fcntl.FD_CLOEXEC)
            raise OSError(-result, f"exec of {path}: {os.strerror(-result)}")
        done = True
