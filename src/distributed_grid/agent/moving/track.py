"""Which pages of a running process were written since last asked: userfaultfd (async write-protect) and PAGEMAP_SCAN.

Kernel 6.7 or later. What cannot be tracked counts as written, so an answer may be too big but never too small.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct

from distributed_grid.agent.moving.ptrace import libc, maps, take_userfaultfd, take_userfaultfd_apart
from distributed_grid.agent.moving.ranges import PAGE_BYTES, Range, merge

_UFFD_FLAGS = os.O_CLOEXEC | os.O_NONBLOCK | 1  # UFFD_USER_MODE_ONLY
_UFFDIO_API, _UFFDIO_REGISTER = 0xC018AA3F, 0xC020AA00
_FEATURE_WP_ASYNC, _MODE_WP = 1 << 15, 2
_PAGEMAP_SCAN = 0xC0606610
_PROTECT, _CHECK = 1, 2  # PM_SCAN_WP_MATCHING, PM_SCAN_CHECK_WPASYNC
_WRITTEN, _PRESENT, _SWAPPED, _ZERO, _HUGE = 2, 8, 16, 32, 64
_HUGE_BYTES = 2 << 20
_VECTOR = 1 << 15
_NOT_MEMORY = ("[vvar]", "[vdso]", "[vsyscall]", "[vvar_vclock]")


class _Iovec(ctypes.Structure):
    _fields_ = [("base", ctypes.c_uint64), ("size", ctypes.c_uint64)]


libc.process_vm_readv.restype = ctypes.c_ssize_t
libc.process_vm_readv.argtypes = [
    ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong,
]  # fmt: skip


def program_mark(pid: int) -> tuple[str, ...]:
    """Changes when the pid or its memory is another's: after an exec, what was read before tells nothing."""
    with open(f"/proc/{pid}/stat") as file:
        after_name = file.read().rpartition(")")[2].split()
    return tuple(after_name[19:20] + after_name[23:26] + after_name[43:49])


def anonymous(pid: int) -> list[Range]:
    """Private memory without a file; PROT_NONE too, for what lies there may have been written before."""
    return [
        (start, end)
        for start, end, permissions, inode, name in maps(pid)
        if permissions[3] == "p" and inode == 0 and name not in _NOT_MEMORY
    ]


def has_missing_pages(pid: int) -> bool:
    """Whether some of its memory is registered for faults on missing pages (`um` in smaps)."""
    with open(f"/proc/{pid}/smaps") as file:
        return any(line.startswith("VmFlags:") and " um " in f"{line.strip()} " for line in file)


class Tracker:
    """Write tracking of one process; closing it (or dying) ends the tracking and leaves nothing behind."""

    def __init__(self, pid: int, apart: bool = False) -> None:
        """`apart`: by a forked child, so that nobody who kills us hits the process; not where we have threads."""
        self.pid = pid
        self.mark = program_mark(pid)
        self.uffd = (take_userfaultfd_apart if apart else take_userfaultfd)(pid, _UFFD_FLAGS)
        try:
            fcntl.ioctl(self.uffd, _UFFDIO_API, struct.pack("QQQ", 0xAA, _FEATURE_WP_ASYNC, 0))
            self.pagemap = os.open(f"/proc/{pid}/pagemap", os.O_RDONLY)
        except OSError:
            os.close(self.uffd)
            raise
        self._registered: set[Range] = set()
        self._vector = (ctypes.c_uint64 * (3 * _VECTOR))()
        self._first = True

    def same_program(self) -> bool:
        return program_mark(self.pid) == self.mark

    def written(self) -> list[Range]:
        """What was written since the last call (all there is, the first time), protected anew *before* it is read."""
        found: list[Range] = []
        for start, end in anonymous(self.pid):
            tracked = (start, end) in self._registered or self._register(start, end)
            if tracked:
                try:
                    if self._first:
                        found += self._split_huge(start, end)
                    found += self._scan(start, end, _PROTECT | _CHECK, _WRITTEN)
                    continue
                except PermissionError:
                    # Mapped anew at the same place, or changed under us: next time it is registered again.
                    self._registered.discard((start, end))
            found += self._scan(start, end, 0, 0)
        self._first = False
        return merge(found)

    def _register(self, start: int, end: int) -> bool:
        try:
            fcntl.ioctl(self.uffd, _UFFDIO_REGISTER, struct.pack("QQQQ", start, end - start, _MODE_WP, 0))
        except OSError:
            return False
        self._registered.add((start, end))
        return True

    def _split_huge(self, start: int, end: int) -> list[Range]:
        """Protect one page of each huge page first: that splits it, else dirtiness would be per 2 MiB."""
        found: list[Range] = []
        for low, high in self._scan(start, end, 0, _HUGE):
            for at in range(low, high, _HUGE_BYTES):
                found += self._scan(at, min(at + PAGE_BYTES, high), _PROTECT | _CHECK, _WRITTEN)
        return found

    def _scan(self, start: int, end: int, flags: int, must: int) -> list[Range]:
        found: list[Range] = []
        while start < end:
            request = bytearray(
                struct.pack(
                    "12Q", 96, flags, start, end, 0, ctypes.addressof(self._vector), _VECTOR, 0,
                    _ZERO, must | _ZERO, _PRESENT | _SWAPPED, _PRESENT,
                )
            )  # fmt: skip
            count = fcntl.ioctl(self.pagemap, _PAGEMAP_SCAN, request)
            view = memoryview(self._vector).cast("B")[: count * 24]
            found += [(low, high) for low, high, _ in struct.iter_unpack("QQQ", view)]
            (reached,) = struct.unpack_from("Q", request, 32)
            if reached <= start:
                break
            start = reached
        return found

    def close(self) -> None:
        os.close(self.uffd)
        os.close(self.pagemap)


def self_test() -> str:
    """Empty if this kernel can track writes, else why not; tried on a child of ours."""
    import subprocess
    import sys

    program = (
        "import mmap,sys\n"
        "m=mmap.mmap(-1,1<<20,flags=mmap.MAP_PRIVATE|mmap.MAP_ANONYMOUS)\n"
        "m[:]=b'x'*(1<<20)\n"
        "import ctypes\n"
        "print(ctypes.addressof(ctypes.c_char.from_buffer(m)),flush=True)\n"
        "for line in sys.stdin:\n m[int(line)*4096]=65\n print('k',flush=True)\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdin and child.stdout
    try:
        base = int(child.stdout.readline())
        tracker = Tracker(child.pid)
        try:
            if not any(low <= base < high for low, high in tracker.written()):
                return "a first scan does not show what is there"
            tracker.written()
            child.stdin.write("7\n")
            child.stdin.flush()
            child.stdout.readline()
            inside = [r for r in tracker.written() if r[1] > base and r[0] < base + (1 << 20)]
            if not any(low <= base + 7 * PAGE_BYTES < high for low, high in inside):
                return "a write was not seen"
            return "" if sum(high - low for low, high in inside) < 1 << 19 else "writes are seen too coarsely"
        finally:
            tracker.close()
    except (OSError, ValueError) as error:
        return str(error)
    finally:
        child.kill()
        child.wait()
        child.stdin.close()
        child.stdout.close()


def read_into(pid: int, ranges: list[Range], view: memoryview) -> list[Range]:
    """Copy the ranges one after the other into the view; what is no longer mapped is left out of the answer."""
    base = ctypes.addressof(ctypes.c_char.from_buffer(view))
    size = sum(end - start for start, end in ranges)
    remote = (_Iovec * len(ranges))(*[_Iovec(start, end - start) for start, end in ranges])
    local = _Iovec(base, size)
    if libc.process_vm_readv(pid, ctypes.byref(local), 1, remote, len(ranges), 0) == size:
        return ranges
    done: list[Range] = []
    at = 0
    with open(f"/proc/{pid}/mem", "rb", 0) as memory:  # reads PROT_NONE too
        for start, end in ranges:
            for address in range(start, end, PAGE_BYTES):
                try:
                    if os.preadv(memory.fileno(), [view[at : at + PAGE_BYTES]], address) != PAGE_BYTES:
                        continue
                except OSError:
                    continue
                done.append((address, address + PAGE_BYTES))
                at += PAGE_BYTES
    return merge(done)
