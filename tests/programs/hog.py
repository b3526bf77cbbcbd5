"""Takes memory, 10 MiB each 0.1 s, and says how much it holds: `hog.py MIB [HOLD_S]`; ends after holding it."""

import sys
import time

limit_mib = int(sys.argv[1]) if len(sys.argv) > 1 else 200
hold_s = float(sys.argv[2]) if len(sys.argv) > 2 else 3600.0
held: list[bytearray] = []
while 10 * len(held) < limit_mib:
    held.append(bytearray(b"x") * (10 << 20))  # not zeros: every page is really there
    print(10 * len(held), flush=True)
    time.sleep(0.1)
time.sleep(hold_s)
