# ruff: noqa: PTH208
"""Parks what a tree has on its GPUs in its own memory and gives it back, by the CUDA driver's checkpoint calls.

A parked process holds no GPU and no file of the driver's, so CRIU carries it like any other. The driver starts threads
in whoever calls it, hence a process of its own: `python -I -S gpu.py VERB PID… [OLD=NEW…]`, in the tree's pid
namespace, with its answer as JSON on stdout. Standard library only: the shim of a restored tree runs it too.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
import uuid

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

PARK_LIMIT_S = 600.0
LOCK_LIMIT_MS = 20_000
STOP_LIMIT_S = 20.0
#: States of a process, as the driver counts them.
RUNNING, LOCKED, PARKED = 0, 1, 2
_SEIZE, _INTERRUPT, _CONT, _DETACH, _SETOPTIONS = 0x4206, 0x4207, 7, 17, 0x4200
_EXITKILL = 0x00100000
_TGKILL = 234
_WALL = 0x40000000
_WORDS = {
    1: "a value that the driver does not take", 2: "not enough memory", 3: "the driver is not ready",
    100: "there is no GPU", 401: "it is in a state that does not allow it", 801: "the driver does not support it",
    600: "it did not come to rest in time",
}  # fmt: skip


class GpuError(Exception):
    """What the driver said, in words."""


class _Pair(ctypes.Structure):
    _fields_ = [("old", ctypes.c_ubyte * 16), ("new", ctypes.c_ubyte * 16)]


class _RestoreArgs(ctypes.Structure):
    _fields_ = [
        ("pairs", ctypes.POINTER(_Pair)), ("count", ctypes.c_uint), ("reserved", ctypes.c_char * 44),
        ("reserved1", ctypes.c_uint64),
    ]  # fmt: skip


class _LockArgs(ctypes.Structure):
    _fields_ = [("timeout_ms", ctypes.c_uint), ("reserved0", ctypes.c_uint), ("reserved1", ctypes.c_uint64 * 7)]


class Driver:
    def __init__(self) -> None:
        try:
            self._cuda = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise GpuError(f"there is no CUDA driver here: {error}") from None
        if not hasattr(self._cuda, "cuCheckpointProcessGetRestoreThreadId"):
            raise GpuError("this CUDA driver cannot park processes: 570 or later can")
        self._call("cuInit", 0)

    def _call(self, name: str, *args: Any) -> None:
        code = getattr(self._cuda, name)(*args)
        if code:
            raise GpuError(f"{name}: {_WORDS.get(code, 'it failed')} ({code})")

    def state(self, pid: int) -> int:
        """-1: it does not use CUDA."""
        found = ctypes.c_int()
        return found.value if self._cuda.cuCheckpointProcessGetState(pid, ctypes.byref(found)) == 0 else -1

    def restore_thread(self, pid: int) -> int:
        found = ctypes.c_int()
        self._call("cuCheckpointProcessGetRestoreThreadId", pid, ctypes.byref(found))
        return found.value

    def park(self, pids: list[int]) -> dict[int, int]:
        """All of them or none; those that use CUDA, each with the thread that the driver has in it for this."""
        mine = {pid: self.restore_thread(pid) for pid in pids if self.state(pid) >= 0}
        try:
            for pid in mine:
                if self.state(pid) == RUNNING:
                    self._call("cuCheckpointProcessLock", pid, ctypes.byref(_LockArgs(LOCK_LIMIT_MS)))
            for pid in mine:
                if self.state(pid) == LOCKED:
                    self._call("cuCheckpointProcessCheckpoint", pid, None)
        except GpuError:
            self.unpark(list(mine), {})
            raise
        return mine

    def unpark(self, pids: list[int], pairs: dict[str, str]) -> None:
        """Each goes on with its GPU; may be called again. What is not parked is left alone."""
        args = _restore_args(pairs)
        wrong = []
        for pid in pids:
            try:
                if self.state(pid) == PARKED:
                    self._call("cuCheckpointProcessRestore", pid, args)
                if self.state(pid) == LOCKED:
                    self._call("cuCheckpointProcessUnlock", pid, None)
            except GpuError as error:
                wrong.append(f"process {pid}: {error}")
        if wrong:
            raise GpuError("; ".join(wrong))


def _restore_args(pairs: dict[str, str]) -> Any:
    if all(old == new for old, new in pairs.items()):
        return None
    array = (_Pair * len(pairs))()
    for at, (old, new) in enumerate(pairs.items()):
        for place, name in ((array[at].old, old), (array[at].new, new)):
            ctypes.memmove(place, uuid.UUID(name.removeprefix("GPU-")).bytes, 16)
    args = _RestoreArgs(array, len(pairs))
    args._keep = array  # the structure holds only its address
    return ctypes.byref(args)


# -- a stopped copy: only the driver's own thread may run ------------------------------------------------------------


class _Held:
    """A stopped tree with every thread in ptrace, so that one of each process can run while the others can't.

    Nothing of it may run on by itself: it dies with us until it is stopped again.
    """

    def __init__(self, pids: list[int]) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
        libc.ptrace.restype = ctypes.c_long
        self._libc = libc
        self.pids = pids
        self.threads: list[int] = []
        for pid in pids:
            for tid in map(int, os.listdir(f"/proc/{pid}/task")):
                self._ptrace(_SEIZE, tid, _EXITKILL)
                self._ptrace(_INTERRUPT, tid)
                os.waitpid(tid, _WALL)
                self.threads.append(tid)
        for pid in pids:
            os.kill(pid, signal.SIGCONT)  # the stop of the whole would also stop threads that the driver starts

    def _ptrace(self, request: int, tid: int, data: int = 0) -> None:
        if self._libc.ptrace(request, tid, 0, data) < 0:
            code = ctypes.get_errno()
            raise GpuError(f"ptrace {request:#x} of {tid}: {os.strerror(code)}")

    def let_run(self, tids: list[int], work: subprocess.Popen[bytes]) -> None:
        """These threads and no others, until the work is done."""
        for tid in tids:
            self._ptrace(_CONT, tid)
        deadline = time.monotonic() + PARK_LIMIT_S
        while work.poll() is None:
            if time.monotonic() > deadline:
                work.kill()
                raise GpuError("the driver did not come to an end")
            for tid in tids:
                self._next_stop(tid)
            time.sleep(0.002)

    def _next_stop(self, tid: int) -> bool:
        """Past a stop of that thread, if it is in one; True if it is the stop of its whole process."""
        found, status = os.waitpid(tid, _WALL | os.WNOHANG)
        if not found:
            return False
        if not os.WIFSTOPPED(status):
            raise GpuError("the copy ended")
        event, number = status >> 16, os.WSTOPSIG(status)
        if event and number == signal.SIGSTOP:
            return True
        self._ptrace(_CONT, tid, 0 if event or number == signal.SIGTRAP else number)
        return False

    def stop(self, tids: list[int]) -> None:
        """All of it stopped as before: first the threads that ran, then the rest, which has not moved.

        The signal takes effect in the thread that gets it; only then may the others be let go of.
        """
        deadline = time.monotonic() + STOP_LIMIT_S
        for pid, tid in zip(self.pids, tids, strict=True):
            self._libc.syscall(_TGKILL, pid, tid, signal.SIGSTOP)
            while not self._next_stop(tid):
                if time.monotonic() > deadline:
                    raise GpuError("the copy could not be stopped again")
                time.sleep(0.001)
        for tid in self.threads:
            self._ptrace(_SETOPTIONS, tid)
            self._ptrace(_DETACH, tid)


def unpark_stopped(threads: dict[int, int], pairs: list[str]) -> None:
    """The copy is stopped and stays stopped; only the driver's thread in it runs, until the GPU is its own again.

    The driver would wait for ever for an answer of a process that is stopped, hence the threads, known from parking.
    """
    held = _Held(list(threads))
    argv = [sys.executable, "-I", "-S", os.path.abspath(__file__), "unpark", *map(str, threads), *pairs]  # noqa: PTH100
    with subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as work:
        held.let_run(list(threads.values()), work)
        assert work.stdout
        answer = json.loads(work.stdout.read() or b"{}")
    held.stop(list(threads.values()))
    if answer.get("error") or work.returncode:
        raise GpuError(answer.get("error") or f"it ended with {work.returncode}")


def call(verb: str, *words: str | int) -> dict[int, int]:
    """Have it done by a process of its own; the processes concerned and the driver's thread in each."""
    argv = [sys.executable, "-I", "-S", os.path.abspath(__file__), verb, *map(str, words)]  # noqa: PTH100
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=PARK_LIMIT_S + 60)
        answer = json.loads(done.stdout or b"{}")
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise GpuError(str(error)) from None
    if "threads" not in answer:
        raise GpuError(answer.get("error") or done.stderr.decode(errors="replace")[-300:] or "it ended by itself")
    return {int(pid): int(thread) for pid, thread in answer["threads"].items()}


def libraries() -> dict[str, str]:
    """Where the CUDA driver lies, if not in the usual place."""
    return {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}


def words_of(gpu: dict[str, Any]) -> list[str]:
    """What `unpark-stopped` is told of the threads and GPUs that a move carries."""
    return [
        *(f"{pid}:{thread}" for pid, thread in gpu["threads"].items()),
        *(f"{old}={new}" for old, new in gpu["pairs"].items()),
    ]


def main(verb: str, *words: str) -> int:
    """`check`, `park PID…`, `unpark PID… [OLD=NEW…]`, `unpark-stopped PID:THREAD… [OLD=NEW…]`."""
    pairs = [word for word in words if "=" in word]
    named = [word.partition(":") for word in words if "=" not in word]
    pids = {int(pid): int(thread or 0) for pid, _, thread in named}
    try:
        if verb == "check":
            Driver()
        elif verb == "park":
            pids = Driver().park(list(pids))
        elif verb == "unpark":
            Driver().unpark(list(pids), dict(word.split("=", 1) for word in pairs))
        else:
            unpark_stopped(pids, pairs)
        print(json.dumps({"threads": pids}))
        return 0
    except (GpuError, OSError) as error:
        print(json.dumps({"error": str(error)}))
        return 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
