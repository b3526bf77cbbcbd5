"""Pre-flight against CRIU itself: what the one refuses, the other refuses too, for real programs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from distributed_grid.agent.inspect.facts import inspect_tree
from distributed_grid.agent.inspect.target import target_facts
from distributed_grid.agent.moving import criu
from distributed_grid.core.process import tree_of
from distributed_grid.orchestration.offloading.preflight import MoveOptions, preflight, used_paths
from tests.lab.waiting import wait_until

PROGRAMS = {
    "plain": ("", []),
    "open files and a ghost": ("g = open('g', 'wb'); k = open('k', 'w'); os.unlink('g')", []),
    "listener": ("l = socket.socket(); l.bind(('127.0.0.1', 0)); l.listen()", []),
    "inner pipes and sockets": ("p = os.pipe(); s = socket.socketpair(); os.fork()", []),
    "closed peer": ("a, b = socket.socketpair(); b.close()", []),
    "connection": (
        "l = socket.socket(); l.bind(('127.0.0.1', 0)); l.listen(); c = socket.create_connection(l.getsockname())",
        ["tcp"],
    ),
    "renamed": ("os.close(os.open('a', 65)); os.link('a', 'b'); f = open('a'); os.unlink('a')", ["renamed-file"]),
}


@pytest.mark.root
@pytest.mark.criu
@pytest.mark.parametrize("name", PROGRAMS)
def test_criu_and_we_agree(name: str, tmp_path: Path) -> None:
    script, expected = PROGRAMS[name]
    work, images = tmp_path / "work", tmp_path / "images"
    work.mkdir()
    images.mkdir()
    whole = f"import os, signal, socket\n{script}\nopen('ready', 'w').close()\nsignal.pause()\n"
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", whole], cwd=work, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        wait_until((work / "ready").exists, 60, "the program")
        facts = inspect_tree(process.pid)
        paths = used_paths(facts)
        source, target = target_facts("gpu-master", paths=paths, uid=0), target_facts("gpu1", paths=paths, uid=0)
        found = preflight(facts, source, replace(target, network="another"), MoveOptions())
        assert [one.code for one in found.stops("live")] == expected
        done = subprocess.run(
            [criu.require(), "dump", "-t", str(process.pid), "-D", str(images), "--leave-running", "-o", "dump.log",
             "-v1", "--manage-cgroups=ignore", "--file-locks"],
            stdin=subprocess.DEVNULL, capture_output=True, timeout=120,
        )  # fmt: skip
        assert (done.returncode != 0) == bool(expected), criu.errors_in(images / "dump.log")
    finally:
        for pid in reversed(tree_of(process.pid)):
            os.kill(pid, signal.SIGKILL)
        process.wait(30)

