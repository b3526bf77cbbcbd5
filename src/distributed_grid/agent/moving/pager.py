# ruff: noqa: PTH110
"""Fills the memory of a restored tree: pages asked for first, all others in the background, then it ends.

Run by path without our package: standard library only. The restored shim hands it each process's userfaultfd and keeps
a duplicate, so if this dies a missing page waits for the next pager instead of reading as zeros. What a process did to
its mappings meanwhile is kept in a log beside the pages, for the next pager.

Page of address V of process P lies at offset V of P.pages (sparse, in tmpfs); P.extents lists what there is.
"""

from __future__ import annotations

import bisect
import ctypes
import errno
import os
import select
import shutil
import socket
import struct
import sys

ADD, START, DONE, FORKED = b"A", b"S", b"D", b"F"
MESSAGE = struct.Struct("<cII")  # what, key of the memory, pid or key of the parent
EVENT_FAULT, EVENT_FORK, EVENT_REMAP, EVENT_REMOVE, EVENT_UNMAP = 0x12, 0x13, 0x14, 0x15, 0x16
COPY, ZERO, WAKE, UNREGISTER = 0xC028AA03, 0xC020AA04, 0x8010AA02, 0x8010AA01
PAGE = 4096
MIB = 1 << 20
JOIN_BYTES = 64 * MIB  # extents nearer than this share one mapping of the store

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.ioctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p]


def load(store: str, pid: int) -> list[tuple[int, int, int]]:
    """`(start, end, where it is mapped here)` of each extent, sorted."""
    with open(f"{store}/{pid}.extents", "rb") as file:
        extents = list(struct.iter_unpack("<QQ", file.read()))
    windows: list[list[int]] = []
    for start, end in extents:
        if windows and start - windows[-1][1] < JOIN_BYTES:
            windows[-1][1] = end
        else:
            windows.append([start, end])
    fd = os.open(f"{store}/{pid}.pages", os.O_RDONLY)
    try:
        for window in windows:
            at = libc.mmap(None, window[1] - window[0], 1, 1, fd, window[0])
            if at in (None, 2**64 - 1):
                raise OSError(ctypes.get_errno(), "mmap of the page store")
            window.append(at)
    finally:
        os.close(fd)
    out, k = [], 0
    for start, end in extents:
        while windows[k][1] < end:
            k += 1
        out.append((start, end, windows[k][2] + start - windows[k][0]))
    return out


class Memory:
    """One process's memory: what is still to come, and the descriptor to put it in with."""

    def __init__(self, key: int, fd: int, extents: list[tuple[int, int, int]]) -> None:
        self.key, self.fd = key, fd
        self.gone = False
        self.at = 0  # everything below is in
        self.set_extents(extents)

    def set_extents(self, extents: list[tuple[int, int, int]]) -> None:
        self.extents = extents
        self.starts = [one[0] for one in extents]

    def find(self, address: int) -> tuple[int, int, int] | None:
        i = bisect.bisect_right(self.starts, address) - 1
        return self.extents[i] if i >= 0 and address < self.extents[i][1] else None

    def drop(self, low: int, high: int) -> None:
        out = []
        for start, end, source in self.extents:
            if end <= low or start >= high:
                out.append((start, end, source))
                continue
            if start < low:
                out.append((start, low, source))
            if end > high:
                out.append((high, end, source + high - start))
        self.set_extents(out)

    def remap(self, old: int, new: int, size: int) -> None:
        moved = [
            (max(start, old) - old + new, min(end, old + size) - old + new, source + max(start, old) - start)
            for start, end, source in self.extents
            if end > old and start < old + size
        ]
        self.drop(old, old + size)
        self.set_extents(sorted(self.extents + moved))
        self.at = 0

    def apply(self, kind: int, a: int, b: int, c: int) -> None:
        if kind == EVENT_REMAP:
            self.remap(a, b, c)
        elif kind in (EVENT_REMOVE, EVENT_UNMAP):
            self.drop(a, b)

    def copy(self, to: int, source: int, size: int) -> int | None:
        """Bytes put in; 0: it is there already; -1: nothing is mapped there; None: try again after the events."""
        request = (ctypes.c_uint64 * 5)(to, source, size, 0, 0)
        if libc.ioctl(self.fd, COPY, request) == 0:
            return size
        code, done = ctypes.get_errno(), ctypes.c_int64(request[4]).value
        if done > 0:
            return done
        if code == errno.EEXIST:
            return 0
        if code in (errno.ESRCH, errno.ENOSPC):
            self.gone = True  # the process ended
            return None
        if code == errno.ENOENT:
            return -1
        if code == errno.EAGAIN:
            return None
        raise OSError(code, f"UFFDIO_COPY: {os.strerror(code)}")

    def fault(self, address: int) -> bool:
        """Serve one page; False: the mappings are changing, ask again."""
        address &= ~(PAGE - 1)
        found = self.find(address)
        if found is None:
            result = libc.ioctl(self.fd, ZERO, (ctypes.c_uint64 * 4)(address, PAGE, 0, 0))
            if result and ctypes.get_errno() == errno.EAGAIN:
                return False
            if result and ctypes.get_errno() == errno.EEXIST:
                libc.ioctl(self.fd, WAKE, (ctypes.c_uint64 * 2)(address, PAGE))
            return True
        done = self.copy(address, found[2] + address - found[0], PAGE)
        if done == 0:
            libc.ioctl(self.fd, WAKE, (ctypes.c_uint64 * 2)(address, PAGE))
        return done is not None or self.gone

    def fill(self, size: int) -> bool:
        """One piece in the background; True when nothing is left."""
        i = max(bisect.bisect_right(self.starts, self.at) - 1, 0)
        while i < len(self.extents) and self.extents[i][1] <= self.at:
            i += 1
        if i >= len(self.extents):
            return True
        start, end, source = self.extents[i]
        at = max(start, self.at)
        source += at - start
        size = min(size, end - at)
        if source % (8 * MIB) < MIB or at == start:
            libc.madvise(source & ~(PAGE - 1), min(8 * MIB, end - at), 22)  # MADV_POPULATE_READ
        done = self.copy(at, source, size)
        while done == -1 and size > PAGE:  # it spans two mappings, or some of it is gone
            size = (size >> 1) & ~(PAGE - 1)
            done = self.copy(at, source, size)
        if done is None:
            return self.gone
        self.at = at + (done if done > 0 else PAGE)
        return False


class Pager:
    def __init__(self, store: str, control: socket.socket) -> None:
        self.store, self.control = store, control
        self.memories: dict[int, Memory] = {}  # by descriptor
        self.poll = select.poll()
        self.poll.register(control, select.POLLIN)
        self.started = False
        self.waiting: list[tuple[Memory, int]] = []
        self.size = 128 * 1024
        self.next_key = 0

    def run(self) -> None:
        while not (self.started and not self.memories):
            busy = self.started and bool(self.memories)
            for fd, _ in self.poll.poll(0 if busy else 1000):
                if fd == self.control.fileno():
                    self.command()
                elif fd in self.memories:
                    self.events(self.memories[fd])
            again, self.waiting = self.waiting, []
            for memory, address in again:
                if not memory.gone and not memory.fault(address):
                    self.waiting.append((memory, address))
            if self.started and self.memories:
                self.size = min(self.size + 64 * 1024, 4 * MIB)
                memory = next(iter(self.memories.values()))
                if memory.gone or (memory.fill(self.size) and not self.waiting):
                    self.finish(memory)

    def command(self) -> None:
        data, fds, _, _ = socket.recv_fds(self.control, MESSAGE.size, 1)
        if not data:
            sys.exit(1)  # the shim is gone, and with it the tree
        what, key, pid = MESSAGE.unpack(data)
        self.next_key = max(self.next_key, key + 1)
        if what == START:
            self.started = True
        elif what == ADD:
            self.add(Memory(key, fds[0], load(self.store, pid)))

    def add(self, memory: Memory) -> None:
        for record in read_log(self.log_of(memory.key)):
            memory.apply(*record)
        self.memories[memory.fd] = memory
        self.poll.register(memory.fd, select.POLLIN)

    def log_of(self, key: int) -> str:
        return f"{self.store}/events-{key}"

    def finish(self, memory: Memory) -> None:
        self.poll.unregister(memory.fd)
        del self.memories[memory.fd]
        self.control.send(MESSAGE.pack(DONE, memory.key, 0))
        os.close(memory.fd)

    def events(self, memory: Memory) -> None:
        try:
            data = os.read(memory.fd, 32 * 64)
        except BlockingIOError:
            return
        except OSError:
            memory.gone = True
            return
        for offset in range(0, len(data), 32):
            kind = data[offset]
            a, b, c = struct.unpack_from("<QQQ", data, offset + 8)
            if kind == EVENT_FAULT:
                self.size = 128 * 1024
                if not memory.fault(b):
                    self.waiting.append((memory, b))
            elif kind == EVENT_FORK:
                self.forked(memory, a & 0xFFFFFFFF)
            else:
                with open(self.log_of(memory.key), "ab", 0) as log:
                    log.write(struct.pack("<QQQQ", kind, a, b, c))
                if kind == EVENT_REMOVE:
                    libc.ioctl(memory.fd, UNREGISTER, (ctypes.c_uint64 * 2)(a, b - a))
                memory.apply(kind, a, b, c)

    def forked(self, parent: Memory, fd: int) -> None:
        child = Memory(self.next_key, fd, list(parent.extents))
        child.at = parent.at
        self.next_key += 1
        if os.path.exists(self.log_of(parent.key)):
            shutil.copyfile(self.log_of(parent.key), self.log_of(child.key))
        socket.send_fds(self.control, [MESSAGE.pack(FORKED, child.key, parent.key)], [fd])
        self.memories[fd] = child
        self.poll.register(fd, select.POLLIN)


def read_log(path: str) -> list[tuple[int, int, int, int]]:
    try:
        with open(path, "rb") as file:
            return list(struct.iter_unpack("<QQQQ", file.read()))
    except FileNotFoundError:
        return []


if __name__ == "__main__":
    Pager(sys.argv[1], socket.socket(fileno=0)).run()
