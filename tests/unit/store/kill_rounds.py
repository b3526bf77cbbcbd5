"""Kills a journal writer at random moments and looks at what it left."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

from distributed_grid.store.journal import Journal

WRITER = Path(__file__).with_name("journal_writer.py")
WRITES = 200


def kill_rounds(path: Path, rounds: int, *, seed: int, wal: bool = True) -> None:
    """Each round ends by kill -9 after a random number of acknowledgements; the journal must hold every one."""
    chance = random.Random(seed)
    mode = "wal" if wal else "truncate"
    before = 0
    texts: list[str] = []
    for number in range(rounds):
        acknowledged = _write_until_killed(path, f"r{number}", mode, chance.randrange(WRITES))
        with Journal.open(path, wal=wal) as journal:
            assert journal.recovered is None
            # A round's rows are the newest; the kill may fall between a commit and its acknowledgement, so one more
            # than acknowledged may be there.
            events = journal.events.list(after_seq=before, limit=WRITES + 1)
            before = journal.events.last_seq()
        assert [event.text for event in events][: len(acknowledged)] == acknowledged
        assert len(events) - len(acknowledged) in (0, 1)
        texts += [event.text for event in events]
    with Journal.open(path, wal=wal) as journal:
        rows = journal.tasks.list()
    assert all(row.detail == {"whole": True} for row in rows)
    assert sorted(row.id for row in rows) == sorted(texts)


def _write_until_killed(path: Path, mark: str, mode: str, after: int) -> list[str]:
    argv = [sys.executable, str(WRITER), str(path), mark, str(WRITES), mode]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        try:
            seen = b""
            while seen.count(b"\n") <= after:
                part = writer.stdout.read1(4096)
                if not part:
                    break
                seen += part
        finally:
            writer.kill()
        seen += writer.stdout.read()
        writer.wait(60)
    lines = seen.decode().splitlines()
    assert lines, "the writer ended before its first write"
    assert all(line.startswith("ack ") for line in lines)
    return [line.removeprefix("ack ") for line in lines]
