"""chain.py that grows: `grow.py END_FILE MOST_MIB [MIB_PER_S]`; ends with 1 if its memory is not what it was."""

# ruff: noqa: PTH110
import hashlib
import os
import sys
import time

end, most_mib = sys.argv[1], int(sys.argv[2])
per_s = float(sys.argv[3]) if len(sys.argv) > 3 else 20.0
held: list[bytearray] = []
number, digest, began = 0, "", time.monotonic()
while not os.path.exists(end):
    if len(held) < min(most_mib, (time.monotonic() - began) * per_s):
        held.append(bytearray(b"%c" % (len(held) % 255 + 1)) * (1 << 20))  # not zeros: every page is really there
    number += 1
    digest = hashlib.sha256(f"{digest}{number}".encode()).hexdigest()[:12]
    print(number, digest, flush=True)
    time.sleep(0.02)
whole = all(part == bytearray(b"%c" % (n % 255 + 1)) * (1 << 20) for n, part in enumerate(held))
sys.exit(0 if whole else 1)
