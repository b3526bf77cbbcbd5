"""Snapshots and the audit log."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from distributed_grid.core.clock import ManualClock
from distributed_grid.core.errors import GridError
from distributed_grid.store.audit import AuditLog, read_audit
from distributed_grid.store.snapshot import read_json, write_json_atomically


def test_snapshot_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "grid_offload_state.json"
    write_json_atomically(path, {"enabled": True})
    with pytest.raises(ValueError, match="JSON"):
        write_json_atomically(path, {"bad": float("nan")})
    assert read_json(path) == {"enabled": True}
    write_json_atomically(path, [1])
    assert json.loads(path.read_text()) == [1]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    with pytest.raises(GridError):
        write_json_atomically(tmp_path / "none" / "x.json", {})


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe\x00", b"[" * 100_000])
def test_damaged_snapshot_harms_nothing(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "resource_boosts.json"
    assert read_json(path, default={}) == {}
    path.write_bytes(content)
    assert read_json(path, default={}) == {}


def test_audit_log(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    log = AuditLog(path, clock=ManualClock(5.0), max_bytes=2000)
    try:
        log.record(uid=1000, pid=42, method="task_start", target={"node": "gpu1\n"}, outcome="ok")
        expected = {"at": 5.0, "uid": 1000, "pid": 42, "method": "task_start", "target": {"node": "gpu1\n"}}
        assert json.loads(path.read_text()) == {**expected, "outcome": "ok"}
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        log.record(uid=1, pid=2, method="m", target={"huge": "x" * 10_000, "odd": tmp_path}, outcome="refused")
        assert read_audit(path)[-1]["target"]["too_long_bytes"] > 10_000
        for number in range(40):
            log.record(uid=number, pid=1, method="status", target={}, outcome="ok")
            assert path.stat().st_size <= 2000
        assert (tmp_path / "audit.log.1").exists()
        assert [entry["uid"] for entry in read_audit(path, 30)] == list(range(10, 40))
        path.unlink()
        log.record(uid=99, pid=1, method="status", target={}, outcome="ok")
        assert json.loads(path.read_text())["uid"] == 99
    finally:
        log.close()
