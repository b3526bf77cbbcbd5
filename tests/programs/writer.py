"""Appends a numbered line to a file and prints it too, each 0.1 s: `writer.py FILE COUNT [EXIT_CODE]`."""

import sys
import time

path, count = sys.argv[1], int(sys.argv[2])
exit_code = int(sys.argv[3]) if len(sys.argv) > 3 else 0
with open(path, "a") as file:
    for number in range(1, count + 1):
        file.write(f"line {number}\n")
        file.flush()
        print(f"line {number}", flush=True)
        time.sleep(0.1)
sys.exit(exit_code)
