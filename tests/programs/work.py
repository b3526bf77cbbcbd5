"""A fixed amount of work for one core: `work.py MILLIONS [ANYTHING]` of additions, then their sum.

Not measured in CPU time, which begins anew when a process is restored somewhere else.
"""

import sys

total = 0
for _ in range(int(sys.argv[1])):
    for number in range(1_000_000):
        total += number & 7
print(total, flush=True)
