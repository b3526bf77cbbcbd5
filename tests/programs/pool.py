"""A multiprocessing pool squares numbers, a batch at a time, until a file is there: `pool.py END_FILE`."""

# ruff: noqa: PTH110
import multiprocessing
import os
import sys
import time


def square(number: int) -> int:
    time.sleep(0.002)
    return number * number


if __name__ == "__main__":
    multiprocessing.set_start_method("fork")
    with multiprocessing.Pool(2) as pool:
        batch = 0
        while not os.path.exists(sys.argv[1]):
            print(batch, sum(pool.map(square, range(batch * 10, batch * 10 + 10))), flush=True)
            batch += 1
    sys.exit(4)
