"""The project's own files agree with each other: lock, build script, version, console script."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from importlib import metadata
from pathlib import Path

import distributed_grid

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _locked() -> dict[str, str]:
    """Each locked package's name and its whole entry."""
    text = (ROOT / "requirements.lock").read_text()
    entries = re.split(r"\n(?=[A-Za-z0-9])", text)
    return {_normal(match.group(1)): entry for entry in entries if (match := re.match(r"([\w.-]+)==", entry))}


def test_lock_names_no_address() -> None:
    text = (ROOT / "requirements.lock").read_text()
    assert "://" not in text
    assert not re.search(r"^\s*(-|--)[a-z]", re.sub(r"^\s+--hash=", "", text, flags=re.M), flags=re.M)


def test_lock_has_every_dependency_with_hashes() -> None:
    locked = _locked()
    wanted = [*PROJECT["project"]["dependencies"], *PROJECT["dependency-groups"]["dev"]]
    names = {_normal(re.match(r"[\w.-]+", line).group(0)) for line in wanted}  # type: ignore[union-attr]
    assert not names - locked.keys(), "run `make lock`"
    assert not [name for name, entry in locked.items() if "--hash=sha256:" not in entry]


def test_build_script_runs_make_test() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "make test" in script.read_text()


def test_make_knows_the_documented_targets() -> None:
    targets = ["setup", "demo", "test", "lint", "bench", "chaos", "clean"]
    done = subprocess.run(
        ["make", "--dry-run", "--no-print-directory", *targets], cwd=ROOT, capture_output=True, text=True, timeout=60,
        env={"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for tool in ("setup.sh", "grid demo", "-m pytest", "ruff check", "mypy", "lint-imports", "-m bench", "-m chaos"):
        assert tool in done.stdout


def test_one_version_everywhere() -> None:
    version = PROJECT["project"]["version"]
    assert distributed_grid.__version__ == version
    assert metadata.version("distributed-grid") == version


def test_console_script() -> None:
    assert PROJECT["project"]["scripts"]["grid"] == "distributed_grid.cli:main"
    (entry,) = metadata.entry_points(group="console_scripts", name="grid")
    assert callable(entry.load())


def test_no_two_test_files_of_one_name() -> None:
    """pytest takes them for one and the same module when both are collected, as `make chaos` does."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert not {name for name in names if names.count(name) > 1}
