"""Counts while it has something that cannot be carried: `awkward.py KIND [PATH]`; exits 77 where there is none.

Kinds: unix, fifo (PATH: whoever is at the other end), port, device, replaced, lock (PATH: a file to make), sysv,
userfaultfd, perf, network (a namespace), root (PATH: a root directory), traced.
"""

# ruff: noqa: PTH102, PTH108
import ctypes
import fcntl
import itertools
import os
import socket
import struct
import sys
import time

libc = ctypes.CDLL(None, use_errno=True)
kind, path = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else ""
USERFAULTFD, PERF_EVENT_OPEN = 323, 298
CLONE_NEWNET, PTRACE_TRACEME, IPC_CREAT, IPC_RMID = 0x40000000, 0, 0o1000, 0
DEVICES = ("/dev/kmsg", "/dev/fuse", "/dev/net/tun", "/dev/loop-control", "/dev/hpet", "/dev/rtc0")


def must(result: int) -> int:
    if result < 0:
        sys.exit(77)
    return result


def device() -> int:
    for name in DEVICES:
        try:
            return os.open(name, os.O_RDONLY)
        except OSError:
            continue
    sys.exit(77)


def made() -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT)


def replaced() -> int:
    """It is still there, under another name."""
    held = made()
    os.link(path, f"{path}.2")
    os.unlink(path)
    return held


def locked() -> int:
    held = made()
    fcntl.flock(held, fcntl.LOCK_EX)
    return held


def connected() -> object:
    held = socket.socket(socket.AF_UNIX)
    held.connect(path)
    return held


def counters() -> int:
    attributes = bytearray(128)
    struct.pack_into("IIQ", attributes, 0, 1, 128, 0)  # PERF_TYPE_SOFTWARE, its size, PERF_COUNT_SW_CPU_CLOCK
    return must(libc.syscall(PERF_EVENT_OPEN, (ctypes.c_char * 128).from_buffer(attributes), 0, -1, -1, 0))


def shared() -> int:
    libc.shmat.restype = ctypes.c_void_p
    number = must(libc.shmget(0, 4096, IPC_CREAT | 0o600))
    at = int(libc.shmat(number, None, 0))
    libc.shmctl(number, IPC_RMID, None)  # gone with the last that has it
    return at


def child_is_traced() -> int:
    """Its parent, the one that is asked about, counts; a child of it is traced by it."""
    child = os.fork()
    if child == 0:
        libc.ptrace(PTRACE_TRACEME, 0, 0, 0)
        while os.getppid() != 1:
            time.sleep(0.05)
        os._exit(0)
    return child


def rooted() -> None:
    os.mkdir(path)
    os.chroot(path)


SET_UP = {
    "unix": connected, "fifo": lambda: os.open(path, os.O_WRONLY), "port": lambda: socket.create_server(("0.0.0.0", 0)),
    "device": device, "replaced": replaced, "lock": locked, "sysv": shared,
    "userfaultfd": lambda: must(libc.syscall(USERFAULTFD, os.O_CLOEXEC | 1)), "perf": counters,
    "network": lambda: must(libc.unshare(CLONE_NEWNET)), "root": rooted, "traced": child_is_traced,
}  # fmt: skip
kept = SET_UP[kind]()
for number in itertools.count(1):
    print(number, flush=True)
    time.sleep(0.05)
