"""Puts a frozen tree right again when CRIU died in the middle of its dump.

While it dumps, CRIU runs code of its own in the process: registers, signal masks and a few bytes of the program are not
the program's. Killed then, it leaves them so, and the process would die as soon as it runs on. So they are written down
before the dump (`save`), in a file that outlives the mover, and put back if CRIU did not come to its end (`cure`).
Only a thread that stands in foreign code gets its registers back: one that somebody woke runs on from where it is.

Between the system calls that CRIU has the process make, each thread stands at a SIGTRAP of CRIU's, which the kernel
would deliver, deadly, when CRIU is killed. So from `save` to `cure` SIGTRAP is blocked, then it stays pending; and it
is handled, for CRIU lets it through while its code runs: then the thread, as it belongs to a stopped process, stops
before the first instruction of a handler that is nowhere, and gets its registers back from there, and what the kernel
wrote over below its stack pointer. `images.unblock` and `images.put_action` take both out of the images.
"""

from __future__ import annotations

import ctypes
import os
import signal
import struct
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from distributed_grid.agent.moving.ptrace import (
    CONT,
    GETREGS,
    REGISTERS,
    SETREGS,
    TRAP,
    WALL,
    Regs,
    Stopped,
    apart,
    get_mask,
    maps,
    ptrace,
    set_mask,
    stopped,
    syscall_instruction,
    traced,
)
from distributed_grid.agent.moving.state import identity, named, read_json, write_json
from distributed_grid.core.process import ProcessId

NAME = "before.json"  # beside the images
_GETREGSET, _SETREGSET, _POKEUSER = 0x4204, 0x4205, 6
_XSTATE, _XSTATE_BYTES = 0x202, 1 << 15
_DEBUG_CONTROL = 848 + 7 * 8  # u_debugreg[7]: a breakpoint that CRIU set would end the process
_CODE_BYTES = 16  # what CRIU writes at the start of the first executable mapping
_PARASITE = "memfd:CRIUMFD"
_SYS_CLOSE, _SYS_MPROTECT, _SYS_MUNMAP, _SYS_SIGACTION = 3, 10, 11, 13
_ACTION = struct.Struct("<QQQQ")  # handler, flags, restorer, mask
_NOWHERE = 0xF00  # below what may be mapped
_HANDLED = _ACTION.pack(_NOWHERE, 0x0400_0000, _NOWHERE, 0)  # SA_RESTORER, without which the kernel refuses
_RED_ZONE_BYTES = 128  # below the stack pointer, and still the program's
_FRAME_BYTES = 1 << 14  # more than what the kernel writes there for a handler
_CODE_64 = 0x33  # the cs of 64-bit code
#: -ERESTART_RESTARTBLOCK and -ERESTARTNOHAND: the kernel will go on with a call by its own note, or begin it anew; if
#: there is a signal with a handler it breaks it off, both times.
#: That note is gone once CRIU's code ran in the process, and the program would see EINTR, which it need not expect.
_RESTART_BLOCK, _RESTART, _EINTR = 2**64 - 516, 2**64 - 514, 2**64 - 4
_TIMED_CALLS = (7, 35, 202, 230)  # poll, nanosleep, futex, clock_nanosleep
_SCRATCH = ("rax", "orig_rax", "rcx", "r11")  # what a system call may change
_SYS_RESTART = 219
_SYSCALL_BYTES = 2
_LOAD_AND_CALL_BYTES = 7  # mov eax, NUMBER; syscall
_ALL_SIGNALS = 2**64 - 1 & ~(1 << 8 | 1 << 18)  # but SIGKILL and SIGSTOP, as the kernel keeps it


class _Iovec(ctypes.Structure):
    _fields_ = [("base", ctypes.c_uint64), ("size", ctypes.c_uint64)]


def save(tree: list[int], path: Path) -> None:
    """Write down what each stopped process looks like, then handle and block SIGTRAP; OSError if one is gone."""
    processes = [_describe(pid) for pid in tree]
    write_json(path, {"processes": processes})
    us = os.getpid()
    apart(lambda: _handle_traps(processes, path, us))
    for process in processes:
        for tid, before in process["threads"].items():
            with traced(int(tid)):
                set_mask(int(tid), before["mask"] | TRAP)


def _handle_traps(processes: list[dict[str, Any]], path: Path, parent: int) -> list[int]:
    """First what SIGTRAP did in each is written down as well, then it is handled; where that can't be, it is not."""
    with ExitStack() as stack:
        held = [(process, stack.enter_context(stopped(process["pid"]))) for process in processes]
        if os.getppid() != parent:
            return []  # it was killed before we had hold of them: they may run on already
        held = [(process, one) for process, one in held if one.old.cs == _CODE_64]
        for process, one in held:
            try:
                process["trap"] = (_trap_action(one) if _minds_traps(one.pid) else bytes(_ACTION.size)).hex()
            except OSError:
                continue  # no room for that on its stack
        write_json(path, {"processes": processes})
        for process, one in held:
            with suppress(OSError):
                if "trap" in process:
                    _trap_action(one, _HANDLED)
    return []


def _minds_traps(pid: int) -> bool:
    """Whether it handles or ignores SIGTRAP."""
    text = Path(f"/proc/{pid}/status").read_text()
    return any(int(text.split(f"{name}:")[1].split()[0], 16) & TRAP for name in ("SigIgn", "SigCgt"))


def _trap_action(held: Stopped, new: bytes = b"") -> bytes:
    """What SIGTRAP did in it until now; `new` is what it does from now on."""
    at = (held.old.rsp - _RED_ZONE_BYTES - 2 * _ACTION.size) & ~15
    memory = os.open(f"/proc/{held.pid}/mem", os.O_RDWR | os.O_CLOEXEC)
    try:
        lay_there = os.pread(memory, 2 * _ACTION.size, at)
        os.pwrite(memory, new or lay_there, at)
        result = held.call(_SYS_SIGACTION, signal.SIGTRAP, at if new else 0, at + _ACTION.size, 8)
        old = os.pread(memory, _ACTION.size, at + _ACTION.size)
        os.pwrite(memory, lay_there, at)
    finally:
        os.close(memory)
    if result < 0:
        raise OSError(-result, "what a signal does")
    return old


def trap_actions(path: Path) -> dict[int, tuple[int, int, int, int]]:
    """By process, where it is handled by us: handler, flags, restorer and mask of its own for SIGTRAP."""
    processes = (read_json(path) or {}).get("processes", [])
    return {one["pid"]: _ACTION.unpack(bytes.fromhex(one["trap"])) for one in processes if "trap" in one}


def interrupted(path: Path) -> dict[int, int]:
    """The threads that stood in a call which the kernel would go on with by its own note: that call's number.

    Not those that a signal waits for which they handle: that breaks the call off.
    """
    processes = (read_json(path) or {}).get("processes", [])
    threads = {int(tid): before for one in processes for tid, before in one["threads"].items()}
    return {tid: before["call"] for tid, before in threads.items()
            if before.get("call") and not _has_signal(tid, before["mask"])}  # fmt: skip


def _has_signal(tid: int, mask: int) -> bool:
    text = Path(f"/proc/{tid}/status").read_text()
    pending, shared, caught = (int(text.split(f"{name}:")[1].split()[0], 16) for name in ("SigPnd", "ShdPnd", "SigCgt"))
    return bool((pending | shared) & caught & ~mask)


def unblocked(path: Path) -> list[int]:
    """The threads that did not block SIGTRAP by themselves."""
    processes = (read_json(path) or {}).get("processes", [])
    return [int(tid) for one in processes for tid, before in one["threads"].items() if not before["mask"] & TRAP]


def cure(path: Path) -> list[str]:
    """Put right what a dead CRIU left; what was done, empty if nothing was amiss. The file goes."""
    told: list[str] = []
    for before in (read_json(path) or {}).get("processes", []):
        who = named(before)
        if who and who.is_alive():
            told += _cure_one(who, before)
    path.unlink(missing_ok=True)
    return told


def _describe(pid: int) -> dict[str, Any]:
    areas = [(start, end, permissions) for start, end, permissions, _, _ in maps(pid)]
    code_at = next(start for start, _, permissions in areas if "x" in permissions)
    threads = {str(tid): _registers(tid) for tid in _threads(pid)}
    return {
        **identity(pid), "areas": areas, "code_at": code_at, "code": _peek(pid, code_at).hex(), "fds": _fds(pid),
        "threads": threads, "below": _below_stack(pid, bytes.fromhex(threads[str(pid)]["regs"]), areas),
    }  # fmt: skip


def _below_stack(pid: int, regs: bytes, areas: list[tuple[int, int, str]]) -> tuple[int, str]:
    """Where, and what lies there: of the main thread, in which CRIU runs its calls on the program's own stack."""
    top = int(Regs.from_buffer_copy(regs).rsp) - _RED_ZONE_BYTES
    start = next((max(start, top - _FRAME_BYTES) for start, end, permissions in areas
                  if start < top <= end and permissions.startswith("rw")), top)  # fmt: skip
    with open(f"/proc/{pid}/mem", "rb", 0) as memory:
        memory.seek(start)
        return start, memory.read(top - start).hex() if top > start else ""


def _threads(pid: int) -> list[int]:
    return sorted(int(one.name) for one in Path(f"/proc/{pid}/task").iterdir())


def _fds(pid: int) -> list[int]:
    return sorted(int(one.name) for one in Path(f"/proc/{pid}/fd").iterdir())


def _peek(pid: int, at: int) -> bytes:
    with open(f"/proc/{pid}/mem", "rb", 0) as memory:
        memory.seek(at)
        return memory.read(_CODE_BYTES)


def _registers(tid: int) -> dict[str, Any]:
    with traced(tid):
        regs = Regs()
        ptrace(GETREGS, tid, 0, ctypes.addressof(regs))
        space = ctypes.create_string_buffer(_XSTATE_BYTES)
        vector = _Iovec(ctypes.addressof(space), _XSTATE_BYTES)
        ptrace(_GETREGSET, tid, _XSTATE, ctypes.addressof(vector))
        return {
            "regs": bytes(regs).hex(), "xstate": space.raw[: vector.size].hex(), "mask": get_mask(tid),
            "call": _interrupted_call(tid, regs),
        }  # fmt: skip


def _interrupted_call(tid: int, regs: Regs) -> int:
    """0: it stood in none, or nobody can tell in which: once the kernel went on with it, it forgets the number.

    The C library loads that just before it makes the call.
    """
    if regs.rax != _RESTART_BLOCK:
        return 0
    if regs.orig_rax != _SYS_RESTART:
        return int(regs.orig_rax)
    try:
        code = _peek(tid, regs.rip - _LOAD_AND_CALL_BYTES)
    except OSError:
        return 0
    number = int.from_bytes(code[1:5], "little")
    return number if code[:1] + code[5:7] == b"\xb8\x0f\x05" and number in _TIMED_CALLS else 0


# What is amiss


def _cure_one(who: ProcessId, before: dict[str, Any]) -> list[str]:
    pid, told = who.pid, []
    code, code_at = bytes.fromhex(before["code"]), before["code_at"]
    patched = _peek(pid, code_at) != code
    own = [(start, end) for start, end, permissions, _, name in maps(pid)
           if "x" in permissions and _PARASITE not in name]  # fmt: skip

    def foreign(ip: int) -> bool:
        return not any(start <= ip < end for start, end in own) or (patched and code_at <= ip < code_at + _CODE_BYTES)

    moved = [tid for tid in _threads(pid) if str(tid) in before["threads"]
             and _put_back(tid, before["threads"][str(tid)], foreign)]  # fmt: skip
    if moved:
        told.append(f"registers of {len(moved)} threads of process {pid}")
    if patched:
        with open(f"/proc/{pid}/mem", "r+b", 0) as memory:
            memory.seek(code_at)
            memory.write(code)
        told.append(f"code of process {pid}")
    left = _left_over(pid, before, everything=bool(moved))
    if moved and before.get("below"):
        start, data = before["below"]
        with open(f"/proc/{pid}/mem", "r+b", 0) as memory:
            memory.seek(start)
            memory.write(bytes.fromhex(data))
    if left or "trap" in before:
        apart(lambda: _take_out(pid, left, before.get("trap", "")))
    if left:
        told.append(f"{len(left)} leftovers in process {pid}")
    return told


def _take_out(pid: int, left: list[tuple[int, ...]], trap: str) -> list[int]:
    with stopped(pid) as held:
        for call in left:
            held.call(*call)
        with suppress(OSError):  # no room on its stack: then it is not handled
            if trap and _trap_action(held) == _HANDLED:
                _trap_action(held, bytes.fromhex(trap))
    return []


def _put_back(tid: int, before: dict[str, Any], foreign: Callable[[int], bool]) -> bool:
    """Whether the thread stood in foreign code, or with every signal blocked; it is as it was now."""
    with traced(tid):
        regs = Regs()
        ptrace(GETREGS, tid, 0, ctypes.addressof(regs))
        old = Regs.from_buffer_copy(bytes.fromhex(before["regs"]))
        mask = get_mask(tid)
        all_blocked = mask | TRAP == _ALL_SIGNALS and before["mask"] | TRAP != _ALL_SIGNALS
        # Or in a call that a process of ours made in it, and was killed.
        astray = foreign(regs.rip) or (all_blocked and regs.rip - syscall_instruction(tid) in (0, _SYSCALL_BYTES))
        call = before.get("call", 0)
        anew = call and not astray and regs.rax in (_RESTART_BLOCK, _EINTR) and all(
            getattr(regs, name) == getattr(old, name) for name in REGISTERS if name not in _SCRATCH
        )  # as it was: nobody woke it
        for one in (regs, old) if call else ():
            one.rax, one.orig_rax = _RESTART, call
        if astray:
            ptrace(_POKEUSER, tid, _DEBUG_CONTROL, 0)
            xstate = ctypes.create_string_buffer(bytes.fromhex(before["xstate"]))
            vector = _Iovec(ctypes.addressof(xstate), len(xstate) - 1)
            ptrace(_SETREGSET, tid, _XSTATE, ctypes.addressof(vector))
        if astray or anew:
            ptrace(SETREGS, tid, 0, ctypes.addressof(old if astray else regs))
        astray = astray or all_blocked
        if not before["mask"] & TRAP:
            _discard_trap(tid)
        set_mask(tid, before["mask"] if astray else mask & ~TRAP | before["mask"] & TRAP)
        return bool(astray)


def _discard_trap(tid: int) -> None:
    """A SIGTRAP of CRIU's that is pending is taken here and not delivered; no instruction runs meanwhile."""
    while _pending(tid) & TRAP:
        set_mask(tid, _ALL_SIGNALS & ~TRAP)
        ptrace(CONT, tid)
        _, status = os.waitpid(tid, WALL)
        if not os.WIFSTOPPED(status):
            raise ProcessLookupError(f"thread {tid} ended")


def _pending(tid: int) -> int:
    return int(Path(f"/proc/{tid}/status").read_text().split("SigPnd:")[1].split()[0], 16)


def _left_over(pid: int, before: dict[str, Any], everything: bool) -> list[tuple[int, ...]]:
    """System calls that remove what CRIU made in the process; without `everything` only what bears its name."""
    calls: list[tuple[int, ...]] = []
    had = {(start, end): permissions for start, end, permissions in before["areas"]}
    for start, end, permissions, _, name in maps(pid):
        if _PARASITE in name:
            calls.append((_SYS_MUNMAP, start, end - start))
        elif everything and had.get((start, end), permissions) != permissions:
            calls.append((_SYS_MPROTECT, start, end - start, _protection(had[start, end])))
    for fd in _fds(pid):
        if fd not in before["fds"] and (everything or _PARASITE in str(Path(f"/proc/{pid}/fd/{fd}").readlink())):
            calls.append((_SYS_CLOSE, fd))
    return calls


def _protection(permissions: str) -> int:
    return sum(bit for letter, bit in (("r", 1), ("w", 2), ("x", 4)) if letter in permissions)
