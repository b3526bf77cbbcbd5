"""Where bytes lie: new bytes objects to receive into, not cleared first and on huge pages, and plain copies."""

from __future__ import annotations

import ctypes
import mmap

HUGE_BYTES = 2 * 1024 * 1024
#: Where the bytes of a bytes object begin; its size without them counts the closing zero.
_START = bytes.__basicsize__ - 1

_new = ctypes.pythonapi.PyBytes_FromStringAndSize
_new.argtypes, _new.restype = [ctypes.c_char_p, ctypes.c_ssize_t], ctypes.py_object
_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes, _madvise.restype = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int], ctypes.c_int


def fresh_bytes(size: int) -> tuple[bytes, memoryview]:
    """A new bytes object and a view to fill it through, before anybody else sees it."""
    if size < 2:  # the interpreter shares these
        raise ValueError("too small")
    made: bytes = _new(None, size)
    address = id(made) + _START
    if size >= 2 * HUGE_BYTES:
        start = -(-address // HUGE_BYTES) * HUGE_BYTES
        end = (address + size) // HUGE_BYTES * HUGE_BYTES
        _madvise(start, end - start, mmap.MADV_HUGEPAGE)  # only advice: no harm where it fails
    view = memoryview((ctypes.c_char * size).from_address(address)).cast("B")
    return made, view


class _PyBuffer(ctypes.Structure):
    """Of the stable ABI; only `buf` is looked at."""

    _fields_ = (
        ("buf", ctypes.c_void_p), ("obj", ctypes.c_void_p), ("len", ctypes.c_ssize_t), ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int), ("ndim", ctypes.c_int), ("format", ctypes.c_void_p), ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p), ("suboffsets", ctypes.c_void_p), ("internal", ctypes.c_void_p),
    )  # fmt: skip


_get_buffer = ctypes.pythonapi.PyObject_GetBuffer
_get_buffer.argtypes, _get_buffer.restype = [ctypes.py_object, ctypes.POINTER(_PyBuffer), ctypes.c_int], ctypes.c_int
_release = ctypes.pythonapi.PyBuffer_Release
_release.argtypes, _release.restype = [ctypes.POINTER(_PyBuffer)], None


def address_of(buffer: object) -> int:
    """Of anything with the buffer protocol, read-only too; it holds as long as the caller keeps the object."""
    found = _PyBuffer()
    _get_buffer(buffer, ctypes.byref(found), 0)
    try:
        return int(found.buf or 0)
    finally:
        _release(ctypes.byref(found))


def copy(target: int, source: int, size: int) -> None:
    """From address to address; other threads run meanwhile."""
    ctypes.memmove(target, source, size)
