"""Keeps a core busy: `spin.py SECONDS` of its own CPU time, then prints the sum it made."""

import sys
import time

cpu_s = float(sys.argv[1]) if len(sys.argv) > 1 else 3600.0
rounds = 0
while time.process_time() < cpu_s:
    for _ in range(10_000):
        rounds += 1
print(rounds, flush=True)
