"""Threads that move much data let others go first, so that an event loop on busy cores is not late.

From Linux 6.12 on a thread that wakes takes the core from one with a longer slice at once, instead of waiting for the
end of that slice. A longer slice costs no throughput; older kernels take no notice.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import threading

SLICE_NS = 10_000_000
#: size, policy, flags, nice, priority, runtime (of an ordinary thread: its slice), deadline, period
_ATTRIBUTES = struct.Struct("@IIQiIQQQ")
_KEEP_POLICY = 0x08
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
_syscall = ctypes.CDLL(None, use_errno=True).syscall


def let_others_go_first() -> bool:
    """For the thread that calls it; whether the kernel took it. Refused, nothing is different."""
    number = _SCHED_SETATTR.get(platform.machine())
    if number is None or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return False
    nice = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    wanted = _ATTRIBUTES.pack(_ATTRIBUTES.size, os.SCHED_OTHER, _KEEP_POLICY, nice, 0, SLICE_NS, 0, 0)
    return bool(_syscall(number, 0, wanted, 0) == 0)
