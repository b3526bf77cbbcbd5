"""Counts, then checks what it held: `holds.py END_FILE LOCKED_FILE MIB`: a lock, and a file without a name."""

# ruff: noqa: PTH110
import fcntl
import hashlib
import os
import sys
import tempfile
import time

end, locked, mib = sys.argv[1], sys.argv[2], int(sys.argv[3])
lock = os.open(locked, os.O_RDWR | os.O_CREAT)
fcntl.flock(lock, fcntl.LOCK_EX)
with tempfile.TemporaryFile(dir=os.path.dirname(locked)) as nameless:  # noqa: PTH120
    digest = hashlib.blake2b()
    for number in range(mib):
        data = hashlib.sha256(str(number).encode()).digest() * (1 << 15)
        nameless.write(data)
        digest.update(data)
    nameless.flush()
    number = 0
    while not os.path.exists(end):
        number += 1
        print(number, flush=True)
        time.sleep(0.05)
    nameless.seek(0)
    print("whole" if hashlib.file_digest(nameless, "blake2b").digest() == digest.digest() else "TORN", flush=True)
other = os.open(locked, os.O_RDWR)
try:
    fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    print("LOCK LOST", flush=True)
except BlockingIOError:
    print("locked", flush=True)
