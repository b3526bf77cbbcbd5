"""A program that writes to a journal and says so, line by line, after each write has returned."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from distributed_grid.store.journal import Journal
from distributed_grid.store.tasks import TaskRow


def main() -> None:
    path, mark, count, mode = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
    with Journal.open(path, wal=mode == "wal") as journal:
        for number in range(count):
            task_id = f"{mark}-{number:04}"
            with journal.transaction():
                row = TaskRow(task_id, "gpu1", 1000, ["sleep", "x" * 300], "running", float(number))
                journal.tasks.put(row)
                journal.events.add("task-started", task_id, node="gpu1")
                journal.tasks.update(task_id, detail={"whole": True})
            os.write(1, f"ack {task_id}\n".encode())


if __name__ == "__main__":
    main()
