"""Counts until its connection is closed, then says so and exits 6: `hears.py HOST PORT`."""

import itertools
import socket
import sys
import time

with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as held:
    held.setblocking(False)
    for number in itertools.count(1):
        print(number, flush=True)
        time.sleep(0.05)
        try:
            if not held.recv(100):
                break
        except BlockingIOError:
            continue
        except OSError:
            break
print("closed", flush=True)
sys.exit(6)
