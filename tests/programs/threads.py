"""Eight threads count until a file is there; then each one's chain of hashes is printed: `threads.py END_FILE`."""

# ruff: noqa: PTH110
import hashlib
import os
import sys
import threading
import time

counts, digests = [0] * 8, [""] * 8
ended = threading.Event()


def work(me: int) -> None:
    while not ended.is_set():
        counts[me] += 1
        digests[me] = hashlib.sha256(f"{digests[me]}{counts[me]}".encode()).hexdigest()[:12]
        time.sleep(0.01)


threads = [threading.Thread(target=work, args=(me,)) for me in range(8)]
for thread in threads:
    thread.start()
while not os.path.exists(sys.argv[1]):
    print(min(counts), flush=True)
    time.sleep(0.05)
ended.set()
for thread in threads:
    thread.join()
for count, digest in zip(counts, digests, strict=True):
    print("thread", count, digest, flush=True)
