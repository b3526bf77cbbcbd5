"""Awkward files that a job is sent: links, and what can't be read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from distributed_grid.agent.lease_jobs import JobFiles
from distributed_grid.core.errors import Refused
from distributed_grid.orchestration.resource_sharing import staging
from distributed_grid.orchestration.resource_sharing.staging import files_for, packed


def names(cwd: Path, *argv: str) -> list[str]:
    return [str(one.relative_to(cwd)) for one in files_for(argv, cwd)]


def test_links_are_sent_as_what_they_lead_to(tmp_path: Path) -> None:
    """Absolute ones too: the archive's reader takes no link that leads out of the job's directory."""
    outside, cwd = tmp_path / "outside", tmp_path / "here"
    (outside / "deep").mkdir(parents=True)
    (outside / "x.csv").write_text("far")
    (cwd / "data" / "v3").mkdir(parents=True)
    (cwd / "data" / "v3" / "a").write_text("near")
    (cwd / "data" / "x.csv").symlink_to(outside / "x.csv")
    (cwd / "data" / "latest").symlink_to("v3")
    (cwd / "data" / "v3" / "around").symlink_to("..")
    (cwd / "data" / "elsewhere").symlink_to(outside)
    (cwd / "data" / "broken").symlink_to("no-such-file")
    (cwd / "named").symlink_to(outside)
    assert names(cwd, "wc", "data") == ["data/latest/a", "data/v3/a", "data/x.csv"]
    assert names(cwd, "wc", "named") == ["named/x.csv"], "what the user names is meant"

    files = JobFiles(tmp_path / "jobs", "gpu1")
    archive = b"".join(packed(files_for(["wc", "data"], cwd), cwd))
    files.put("t", "", archive, first=True, last=True)
    place = files.find("t")
    assert place is not None
    assert (place / "data" / "x.csv").read_text() == "far" and (place / "data" / "latest" / "a").read_text() == "near"
    assert not any(one.is_symlink() for one in place.rglob("*"))


def test_what_links_lead_to_counts_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "LIMIT_BYTES", 10)
    (tmp_path / "here").mkdir()
    (tmp_path / "large").write_bytes(b"x" * 11)
    (tmp_path / "here" / "link").symlink_to(tmp_path / "large")
    with pytest.raises(staging.UsageError):
        files_for(["cat", "link"], tmp_path / "here")


def test_what_cannot_be_read_is_told_unless_nobody_named_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("job.py", "beside.py", "secret.py"):
        (tmp_path / name).write_text("")
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "secret.py")
    assert names(tmp_path, "python", "job.py") == ["beside.py", "job.py"]
    gone = files_for(["cat", "job.py"], tmp_path)
    (tmp_path / "job.py").unlink()
    with pytest.raises(Refused) as caught:
        list(packed(gone, tmp_path))
    assert caught.value.code == "staging" and "job.py can't be sent" in caught.value.message
