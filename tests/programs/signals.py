"""Says which of SIGTERM, SIGINT, SIGHUP and SIGUSR1 it gets; the first two end it: `signals.py EXIT_CODE`."""

import os
import signal
import sys
import threading

done = threading.Event()


def got(number: int, _: object) -> None:
    os.write(1, f"got {signal.Signals(number).name}\n".encode())
    if number in (signal.SIGTERM, signal.SIGINT):
        done.set()


for one in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
    signal.signal(one, got)
print("ready", flush=True)
while not done.wait(0.05):
    pass
sys.exit(int(sys.argv[1]))
