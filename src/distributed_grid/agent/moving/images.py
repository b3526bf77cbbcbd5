"""The few facts we need out of CRIU's image files (lazy pages, pids), and the few that we put right in them."""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Callable
from pathlib import Path

from distributed_grid.agent.moving.ranges import PAGE_BYTES, Range

PARENT, LAZY, PRESENT = 1, 2, 4
_MAGIC_BYTES = 8  # common magic, then the kind


def varint(data: bytes | bytearray, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7


def fields(data: bytes) -> dict[int, list[int | bytes]]:
    """Protobuf without a schema: number -> values, nested messages as bytes."""
    found: dict[int, list[int | bytes]] = {}
    at = 0
    while at < len(data):
        key, at = varint(data, at)
        kind = key & 7
        value: int | bytes
        if kind == 0:
            value, at = varint(data, at)
        elif kind == 2:
            size, at = varint(data, at)
            value, at = data[at : at + size], at + size
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
            value, at = int.from_bytes(data[at : at + size], "little"), at + size
        else:
            raise ValueError(f"unknown wire type {kind}")
        found.setdefault(key >> 3, []).append(value)
    return found


def messages(path: Path) -> list[bytes]:
    data = path.read_bytes()
    found, at = [], _MAGIC_BYTES
    while at < len(data):
        (size,) = struct.unpack_from("<I", data, at)
        found.append(data[at + 4 : at + 4 + size])
        at += 4 + size
    return found


def _number(found: dict[int, list[int | bytes]], *keys: int) -> int | None:
    for key in keys:
        if key in found:
            value = found[key][0]
            assert isinstance(value, int)
            return value
    return None


def pagemap(path: Path) -> list[tuple[int, int, int]]:
    """`(address, pages, flags)` of each extent of pagemap-PID.img."""
    entries = []
    for message in messages(path)[1:]:
        one = fields(message)
        flags = _number(one, 4)
        if flags is None:
            flags = PARENT if _number(one, 3) else PRESENT
        # Field 5 is the 64-bit count of CRIU 4.2; 2 the older 32-bit one.
        entries.append((_number(one, 1) or 0, _number(one, 5, 2) or 0, flags))
    return entries


def lazy_extents(path: Path) -> list[Range]:
    """What the image leaves to be fetched by address, sorted."""
    return sorted(
        (address, address + pages * PAGE_BYTES)
        for address, pages, flags in pagemap(path)
        if flags & LAZY and not flags & PRESENT
    )


def lazy_by_pid(image_dir: Path) -> dict[int, list[Range]]:
    found = {}
    for path in image_dir.glob("pagemap-*.img"):
        name = path.stem.removeprefix("pagemap-")
        if name.isdigit():
            found[int(name)] = lazy_extents(path)
    return found


def pids(image_dir: Path) -> list[int]:
    """The pids of the processes in the image, as they see themselves; the root first."""
    found = []
    for message in messages(image_dir / "pstree.img"):
        pid = _number(fields(message), 1)
        if pid is not None:
            found.append(pid)
    return found


def unblock(image_dir: Path, tids: list[int], signal_bit: int) -> None:
    """Take a signal out of the masks of these threads, in place: one bit, in the last seven of the number."""
    for tid in tids:
        path = image_dir / f"core-{tid}.img"
        data = bytearray(path.read_bytes())
        core = _MAGIC_BYTES + 4, len(data)
        for outer, inner in ((3, 5), (5, 6)):  # task_core_entry.blk_sigset, thread_core_entry.blk_sigset
            for at, end in _places(data, *core, outer):
                for mask_at, _ in _places(data, at, end, inner):
                    data[mask_at] &= ~signal_bit
        path.write_bytes(data)


#: In a core_entry its task_core_entry; in that its sigactions, from signal 1 on; in those the last field that is ours.
_TASK, _ACTIONS, _ACTION_MASK = 3, 15, 4


def put_action(image_dir: Path, pid: int, number: int, action: tuple[int, int, int, int]) -> None:
    """What a signal (below SIGKILL) does in a process: handler, flags, restorer and mask."""
    path = image_dir / f"core-{pid}.img"
    data = path.read_bytes()

    def put(old: bytes) -> bytes:
        [(_, end)] = _places(old, 0, len(old), _ACTION_MASK)
        return b"".join(_varint(key << 3) + _varint(value) for key, value in enumerate(action, 1)) + old[end:]

    core = _replaced(data[_MAGIC_BYTES + 4 :], _TASK, 0, lambda task: _replaced(task, _ACTIONS, number - 1, put))
    path.write_bytes(data[:_MAGIC_BYTES] + struct.pack("<I", len(core)) + core)


def _replaced(message: bytes, wanted: int, index: int, make: Callable[[bytes], bytes]) -> bytes:
    """The message with one value of a field, itself bytes, made anew."""
    begin, end = _places(message, 0, len(message), wanted)[index]
    new = make(message[begin:end])
    return message[: begin - len(_varint(end - begin))] + _varint(len(new)) + new + message[end:]


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])


#: In a core_entry: thread_info, its gpregs, and of those ax and ip.
_THREAD_INFO, _GPREGS, _AX, _IP = 2, 2, 11, 17
_SYSCALL_BYTES = 2


def begin_calls_anew(image_dir: Path, calls: dict[int, int]) -> None:
    """What CRIU would restore as interrupted (EINTR) begins anew: the thread stands before its system call again."""
    for tid, number in calls.items():
        path = image_dir / f"core-{tid}.img"
        data = bytearray(path.read_bytes())
        for info in _places(data, _MAGIC_BYTES + 4, len(data), _THREAD_INFO):
            for regs in _places(data, *info, _GPREGS):
                [ax], [ip] = (_places(data, *regs, one) for one in (_AX, _IP))
                if varint(data, ax[0])[0] == 2**64 - errno.EINTR:
                    _put(data, ax, number)
                    _put(data, ip, varint(data, ip[0])[0] - _SYSCALL_BYTES)
        path.write_bytes(data)


def _put(data: bytearray, place: tuple[int, int], value: int) -> None:
    """A number in the room of another one that is no shorter: nothing moves."""
    at, end = place
    for where in range(at, end):
        data[where] = value & 127 | (128 if where < end - 1 else 0)
        value >>= 7


#: In a file_entry, its regular file; in that, its name, its size and its build id; and a field that nobody knows.
_REGULAR, _NAME, _SIZE, _BUILD_ID, _UNKNOWN = 3, 6, 8, 11, 15


def let_files_grow(image_dir: Path) -> int:
    """CRIU refuses a file whose size differs; one that somebody goes on writing may be longer by then, though."""
    path = image_dir / "files.img"
    data, at, done = bytearray(path.read_bytes()), _MAGIC_BYTES, 0
    while at < len(data):
        (size,) = struct.unpack_from("<I", data, at)
        for begin, end in _places(data, at + 4, at + 4 + size, _REGULAR):
            one = fields(bytes(data[begin:end]))
            [name], told = one[_NAME], _number(one, _SIZE)
            assert isinstance(name, bytes)
            if told is None or _BUILD_ID in one or not _is_as_long(name, told):
                continue
            [(size_at, _)] = _places(data, begin, end, _SIZE)
            data[size_at - 1] = _UNKNOWN << 3
            done += 1
        at += 4 + size
    if done:
        path.write_bytes(data)
    return done


def _is_as_long(name: bytes, size: int) -> bool:
    try:
        return Path("/" + os.fsdecode(name).lstrip("/")).stat().st_size >= size
    except OSError:
        return False


#: In a file_entry, its timerfd; in that, ticks nobody has read, the time left (s, ns) and the interval (s, ns).
_TIMERFD, _TICKS, _LEFT, _INTERVAL = 12, 5, (7, 8), (9, 10)


def rearm_timerfds(image_dir: Path) -> int:
    """A periodic timer that expired and was not read yet has no time left, which CRIU would restore as switched off.

    It is to expire at once instead of having expired: the same number of ticks, and the next ones follow.
    """
    path = image_dir / "files.img"
    if not path.exists():
        return 0
    data = bytearray(path.read_bytes())
    at, done = _MAGIC_BYTES, 0
    while at < len(data):
        (size,) = struct.unpack_from("<I", data, at)
        for begin, end in _places(data, at + 4, at + 4 + size, _TIMERFD):
            one = fields(bytes(data[begin:end]))
            ticks = _number(one, _TICKS) or 0
            if any(_number(one, key) for key in _LEFT) or not any(_number(one, key) for key in _INTERVAL):
                continue
            [(left_at, _)] = _places(data, begin, end, _LEFT[1])
            data[left_at] = 1  # one byte for another: nothing moves
            if 0 < ticks < 128:
                [(ticks_at, _)] = _places(data, begin, end, _TICKS)
                data[ticks_at] = ticks - 1
            done += 1
        at += 4 + size
    if done:
        path.write_bytes(data)
    return done


def _places(data: bytes | bytearray, at: int, end: int, wanted: int) -> list[tuple[int, int]]:
    """Where the values of a field lie in a message."""
    found = []
    while at < end:
        key, at = varint(data, at)
        kind, begin = key & 7, at
        if kind == 0:
            _, at = varint(data, at)
        elif kind == 2:
            size, begin = varint(data, at)
            at = begin + size
        else:
            at += 8 if kind == 1 else 4
        if key >> 3 == wanted:
            found.append((begin, at))
    return found
