"""`python -m distributed_grid.agent.job TASK_DIR`: what Ray's dashboard shows for a moved process.

It only follows: it ends with the process's own exit code, and stopping it stops nothing else.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from distributed_grid.agent.spool import read_status
from distributed_grid.core.errors import NotFound

POLL_S = 1.0


def main(task_dir: Path) -> int:
    said = False
    while True:
        try:
            status = read_status(task_dir)
        except NotFound:
            return 0  # it was forgotten: there is nothing left to show
        if not said:
            print(f"{status.task_id} on {status.node}, pid {status.pid}: {' '.join(status.argv)}", flush=True)
            said = True
        if status.ended:
            moved = bool(status.error and status.error.get("kind") == "moved")
            print("moved on" if moved else f"{status.state} {status.exit_code}", flush=True)
            return 0 if moved else status.exit_code or 0
        time.sleep(POLL_S)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
