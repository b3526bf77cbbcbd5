"""A numpy array that changes all the time, checked now and then: `matrix.py MIB END_FILE [CHANGED_SHARE_PER_S]`.

Every page has its own numbers; each round changes some and prints how many, at the end the sum of all is compared with
what it must be after so many rounds, after the longest time in which it did nothing.
"""

# ruff: noqa: PTH110
import os
import sys
import time

import numpy as np

count = (int(sys.argv[1]) << 20) // 8
share_per_s = float(sys.argv[3]) if len(sys.argv) > 3 else 0.01
data = np.arange(count, dtype=np.int64)
page, round_s, ticks = 512, 0.1, 20
step = max(1, int(count // page * share_per_s * round_s))
# The wall clock: CRIU sets the monotonic one back, so that a program does not see the pause in it.
total, at, rounds, late_s, last = int(data.sum()), 0, 0, 0.0, time.time()
print("filled", flush=True)
while not os.path.exists(sys.argv[2]):
    pages = (at + np.arange(step)) % (count // page)
    data[pages * page] += 1
    total += step
    at = (at + step) % (count // page)
    rounds += 1
    print(rounds, flush=True)
    for _ in range(ticks):
        time.sleep(round_s / ticks)
        now = time.time()
        late_s, last = max(late_s, now - last), now
print("longest", round(max(0.0, late_s - round_s / ticks), 4), flush=True)
print("sum", "right" if int(data.sum()) == total else "WRONG", flush=True)
