"""Prints 1, 2, 3 ... one each 0.1 s: `counter.py COUNT [EXIT_CODE]`; a count of 0 goes on for ever."""

import itertools
import sys
import time

count = int(sys.argv[1]) if len(sys.argv) > 1 else 100
exit_code = int(sys.argv[2]) if len(sys.argv) > 2 else 0
for number in itertools.count(1):
    print(number, flush=True)
    if number == count:
        break
    time.sleep(0.1)
sys.exit(exit_code)
