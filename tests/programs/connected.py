"""Counts while it holds a TCP connection: `connected.py HOST PORT`."""

import itertools
import socket
import sys
import time

with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as held:
    for number in itertools.count(1):
        print(number, flush=True)
        time.sleep(0.05)
