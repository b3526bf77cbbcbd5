"""Prints `n hash-of-all-before` until a file is there: `chain.py END_FILE [EXIT_CODE] [INTERVAL_S]`.

A lost, repeated or foreign state shows at once: each hash is made from the one before it.
"""

# ruff: noqa: PTH110
import hashlib
import os
import sys
import time

end, exit_code = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 0
interval_s = float(sys.argv[3]) if len(sys.argv) > 3 else 0.02
number, digest = 0, ""
while not os.path.exists(end):
    number += 1
    digest = hashlib.sha256(f"{digest}{number}".encode()).hexdigest()[:12]
    print(number, digest, flush=True)
    time.sleep(interval_s)
sys.exit(exit_code)
