"""A fixed amount of work for one core: `work.py MILLIONS [ANYTHING]` of additions, then their sum.

Not measured in CPU time, which begins anew when a process is restored somewhere else.
"""

import sys


def add(millions: int) -> int:
    total = 0
    for _ in range(millions):
        for number in range(1_000_000):
            total += number & 7
    return total


if __name__ == "__main__":
    print(add(int(sys.argv[1])), flush=True)
