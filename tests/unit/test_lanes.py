"""`make test` itself: what it tries a second time, and what it never does."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "test_lanes.py"
# Each goes wrong the first time only, as what fails in a crowd does, and as a leak of another test would seem to.
ONCE = """
from pathlib import Path
import pytest

def first():
    mark = Path(__file__).with_suffix(".mark")
    seen = mark.exists()
    mark.touch()
    return not seen
"""
IN_THE_TEST = "def test_one(): assert not first()"
AFTER_IT = """
@pytest.fixture(autouse=True)
def around():
    yield
    assert not first()

def test_one(): pass
"""
BEFORE_IT = AFTER_IT.replace("    yield\n    assert not first()", "    assert not first()")


@pytest.fixture
def lanes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("lanes_of_make_test", SCRIPT)
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # quicker
    monkeypatch.setattr(found, "ROOT", tmp_path)
    monkeypatch.setattr(found, "lanes", lambda: [["test_here.py"]])
    return found


LEAKS = """
@pytest.fixture(scope="module", autouse=True)
def whole():
    yield
    assert not left

left = []
def test_leaks(): left.append(1)
def test_last(): pass
"""


@pytest.mark.parametrize(
    ("text", "code"), [(IN_THE_TEST, 0), (AFTER_IT, 0), (BEFORE_IT, 0), (LEAKS, 1), ("def test_one(): assert 0", 1)],
    ids=["in", "after", "before", "leak", "always"],
)  # fmt: skip
def test_what_fails_once_is_tried_again_with_all_that_may_have_caused_it(
    lanes: ModuleType, tmp_path: Path, text: str, code: int
) -> None:
    (tmp_path / "test_here.py").write_text(ONCE + text)
    assert lanes.main(["-q"]) == code


def test_results_that_are_not_there_are_an_error(
    lanes: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(_results: Path) -> list[str]:
        raise OSError("gone")

    monkeypatch.setattr(lanes, "errors", none)
    (tmp_path / "test_here.py").write_text("def test_one(): pass")
    assert lanes.main(["-q"]) == 3
