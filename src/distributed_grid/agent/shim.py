# ruff: noqa: PTH100, PTH120
"""The shim: a tiny process that starts the user's program, outlives everything else of ours, and keeps its exit code.

Run by path, `python -I -S shim.py --launch TASKDIR`, so that it needs nothing but the standard library. The work is in
supervisor.py and program.py beside it: imported, they are compiled once, not at every start. No pathlib there, for the
same reason.
"""

import os
import sys

if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] != "--launch":
        sys.exit("usage: shim.py --launch TASKDIR")
    sys.path.append(os.path.dirname(os.path.abspath(__file__)))
    import supervisor  # type: ignore[import-not-found]  # our package is not on the path here

    os._exit(supervisor.launch(sys.argv[2]))  # without the interpreter's own tidying up
