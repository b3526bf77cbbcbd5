"""Fixtures for all tests: state directories of their own, clusters that serve many tests, and the check for leaks."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests import leaks
from tests.cluster.offloads import Started
from tests.lab.clusters import EMBEDDED_CONFIG, GRID, Cluster, EmbeddedCluster, LabCluster
from tests.lab.hosts import HostSpec, Lab, missing_tools
from tests.lab.waiting import wait_until

__all__ = ["wait_until"]

_numbers = itertools.count(1)


def pytest_configure(config: pytest.Config) -> None:
    """Nothing of the user's own settings or state reaches a test, and all that tests start carries a mark."""
    for name in [name for name in os.environ if name.startswith(("GRID_", "RAY_"))]:
        if name != "GRID_FUZZ_S":  # how long `make chaos` looks for bad frames
            del os.environ[name]
    os.environ.setdefault("UV_CACHE_DIR", str(Path("~/.cache/uv").expanduser()))
    os.environ["GRID_TEST_RUN"] = leaks.MARK
    # A runner in the background of a shell has these ignored, and all that tests start would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    home = leaks.RUN_DIRECTORY / "user"
    home.mkdir(mode=0o700, parents=True)
    os.environ["HOME"] = str(home)
    os.environ["GRID_HOME"] = str(leaks.RUN_DIRECTORY / "none")


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(leaks.RUN_DIRECTORY, ignore_errors=True)


# What a machine must have


def _lack(reason: str) -> None:
    if os.environ.get("CI", "").lower() in ("1", "true", "yes"):
        pytest.fail(f"{reason}, and here it must not be left out", pytrace=False)
    pytest.skip(reason)


@cache
def _no_criu() -> str:
    criu = shutil.which("criu", path=f"{Path(sys.prefix) / 'criu'}:{os.environ.get('PATH', '')}:/usr/sbin")
    if criu is None:
        return "needs CRIU (`make setup` brings it)"
    done = subprocess.run([criu, "--version"], capture_output=True, text=True, timeout=30)
    return "" if done.returncode == 0 else f"{criu} does not run: {done.stderr.strip()}"


@cache
def _no_strace() -> str:
    if shutil.which("strace") is None:
        return "needs strace"
    done = subprocess.run(["strace", "-o", os.devnull, "true"], capture_output=True, text=True, timeout=30)
    return "" if done.returncode == 0 else f"strace may not trace here: {done.stderr.strip()}"


@pytest.fixture
def strace() -> str:
    """A working strace; who wants it on a machine without is skipped."""
    if reason := _no_strace():
        _lack(reason)
    return str(shutil.which("strace"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("root") and os.geteuid() != 0:
        _lack("needs root")
    if item.get_closest_marker("criu") and (reason := _no_criu()):
        _lack(reason)
    _renew_suspects(item)


def need_lab() -> None:
    if missing := missing_tools():
        _lack(f"needs {', '.join(missing)} for hosts out of namespaces")


# Leaks


@pytest.fixture(scope="session", autouse=True)
def _session_leaves_nothing() -> Iterator[None]:
    before = leaks.snapshot(with_kept=True)
    yield
    leaks.KEPT.clear()
    left = leaks.left_since(before, with_kept=True)
    assert not left, "left behind at the end of the session:\n  " + "\n  ".join(left)


@pytest.fixture(scope="module", autouse=True)
def _module_leaves_nothing(request: pytest.FixtureRequest, _session_leaves_nothing: None) -> Iterator[None]:
    before = leaks.snapshot()
    yield
    left = leaks.left_since(before)
    assert not left, f"left behind by {request.node.name}:\n  " + "\n  ".join(left)


# State directories


def short_directory() -> Path:
    """A name for a directory of this run, short enough for Ray's sockets below it; not made yet."""
    return leaks.RUN_DIRECTORY / str(next(_numbers))


@pytest.fixture(autouse=True)
def grid_home(monkeypatch: pytest.MonkeyPatch, _module_leaves_nothing: None) -> Iterator[Path]:
    """`GRID_HOME` of this test alone; gone after it."""
    home = short_directory()
    monkeypatch.setenv("GRID_HOME", str(home))
    yield home
    shutil.rmtree(home, ignore_errors=True)


@pytest.fixture(scope="session")
def grid_command() -> str:
    """The real `grid` of this virtual environment."""
    return str(GRID)


# Clusters

#: The session's clusters on which a test went wrong, by fixture: the next test gets them anew, not what that one left.
_SUSPECT: dict[str, Cluster] = {}
_SHARED = ("embedded", "lab_cluster")


def _start(cluster: Cluster) -> None:
    """A start that fails must not fail every test that follows: once more, from nothing."""
    try:
        cluster.start()
    except AssertionError as error:
        print(f"the cluster of all tests did not start, and is started anew: {error}")
        cluster.renew()


def _renew_suspects(item: pytest.Item) -> None:
    for name in _SHARED:
        if name in _SUSPECT and name in getattr(item, "fixturenames", ()):
            _SUSPECT.pop(name).renew()


def _end(cluster: Cluster) -> None:
    """Stop a cluster; say so if it did not stop by its own commands."""
    try:
        cluster.stop()
    except AssertionError as error:
        pytest.fail(f"{error}\n{cluster.describe()}", pytrace=False)


@pytest.fixture(scope="session")
def lab(_session_leaves_nothing: None) -> Iterator[Lab]:
    """Three hosts, gpu-master, gpu1 and gpu2, for all tests; who changes a host or a link puts it right again."""
    need_lab()
    made = Lab()
    leaks.KEPT.keep(fds=made.fds(), pids=lambda: made.pids, names=[f"gridlab-{made.id}"])
    yield made
    made.close()


@pytest.fixture(scope="session")
def lab_cluster(lab: Lab) -> Iterator[LabCluster]:
    """A running cluster over SSH on the lab's hosts, for all tests."""
    cluster = LabCluster(lab)
    _start(cluster)
    yield cluster
    _end(cluster)


@pytest.fixture(scope="session")
def embedded(_session_leaves_nothing: None) -> Iterator[EmbeddedCluster]:
    """A running embedded cluster, for all tests."""
    home = leaks.RUN_DIRECTORY / "e"
    cluster = EmbeddedCluster(home, mark=leaks.KEPT_MARK)
    leaks.KEPT.keep(names=[str(home)])
    try:
        _start(cluster)
        yield cluster
    finally:
        _end(cluster)
        cluster.remove()


@pytest.fixture
def started(embedded: EmbeddedCluster, tmp_path: Path) -> Iterator[Started]:
    """Programs beside the cluster of all tests, to be moved."""
    made = Started(embedded, tmp_path)
    yield made
    made.close()


@pytest.fixture
def make_lab() -> Iterator[Callable[..., Lab]]:
    """`make_lab(*names_or_specs, **options)`: hosts of a test's own, gone after it."""
    need_lab()
    made: list[Lab] = []

    def make(*names: str | HostSpec, **options: Any) -> Lab:
        made.append(Lab(names=names or ("gpu-master", "gpu1", "gpu2"), **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def make_embedded() -> Iterator[Callable[..., EmbeddedCluster]]:
    """`make_embedded(config=TEXT)`: an embedded cluster of a test's own, not started; stopped after it."""
    made: list[EmbeddedCluster] = []

    def make(config: str | None = EMBEDDED_CONFIG) -> EmbeddedCluster:
        made.append(EmbeddedCluster(short_directory(), config))
        return made[-1]

    yield make
    for cluster in made:
        if cluster.home.exists():
            _end(cluster)
        cluster.remove()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """A failed test shows its cluster's log, and leaves nobody a cluster that it may have broken."""
    report = yield
    if report.failed:
        for name, value in getattr(item, "funcargs", {}).items():
            if isinstance(value, Cluster):
                if name in _SHARED:
                    _SUSPECT[name] = value
                try:
                    report.sections.append((f"cluster of {name}", value.describe()))
                except (OSError, RuntimeError, AssertionError) as error:
                    report.sections.append((f"cluster of {name}", f"no log: {error}"))
    return report
