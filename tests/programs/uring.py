"""Counts while it holds an io_uring; exits 77 where the kernel gives none."""

import ctypes
import itertools
import sys
import time

IO_URING_SETUP = 425
libc = ctypes.CDLL(None, use_errno=True)
parameters = ctypes.create_string_buffer(120)
if libc.syscall(IO_URING_SETUP, 4, parameters) < 0:
    sys.exit(77)
for number in itertools.count(1):
    print(number, flush=True)
    time.sleep(0.05)
