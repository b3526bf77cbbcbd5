"""Which files go along and which come home; and the task of a relaunch: decisions only."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
from offload_facts import process, tree

from distributed_grid.agent.inspect.descriptors import OpenFile
from distributed_grid.agent.staging.beneath import Entry
from distributed_grid.agent.staging.names import Agreed
from distributed_grid.core.errors import ConfigError, Refused
from distributed_grid.orchestration.offloading.relaunch import relaunch_task, save_signal
from distributed_grid.orchestration.offloading.staging import Agreement, agree, changed_there, decide_home, fit

WORK = "/home/ann/work"
DATA = OpenFile(5, "regular", f"{WORK}/data.csv", flags=os.O_RDONLY, size_bytes=5 << 20)
STATE = OpenFile(6, "regular", "/scratch/run/state.bin", flags=os.O_RDWR, size_bytes=5 << 20)
LOG = OpenFile(1, "regular", f"{WORK}/log", flags=os.O_WRONLY)
SPOT = OpenFile(7, "regular", "/tmp/spot", flags=os.O_WRONLY)
FILES = [DATA.path, STATE.path, SPOT.path]


def agreement(**changes: Any) -> Agreement:
    facts = tree(LOG, DATA, STATE, SPOT, argv=("python", "/home/ann/code/train.py", "--config=run.yaml", "-v"))
    return agree(facts, **{"strategy": "live", "files": FILES, "shared": lambda path: False, **changes})


def test_what_goes_along_and_what_may_come_home() -> None:
    found = agreement()
    assert found.home == Agreed(("/home/ann/work", "/scratch/run"), ("/tmp/spot",))
    assert found.sent.trees == ("/home/ann/code", "/home/ann/work")
    assert found.sent.files == (DATA.path, "/home/ann/code/train.py", f"{WORK}/run.yaml")
    assert found.frozen == (STATE.path, SPOT.path)  # written to: as they are once it stands still
    assert set(found.directories) == {WORK, "/scratch/run", "/tmp"}
    assert found.output == (LOG.path,)
    assert Agreement.from_wire(found.to_wire()) == found


def test_a_relaunch_sends_every_file_by_itself() -> None:
    found = agreement(strategy="relaunch")
    assert found.frozen == () and set(FILES) <= set(found.sent.files)


def test_nothing_of_what_is_shared() -> None:
    assert not agreement(shared=lambda path: True, files=[])
    found = agreement(shared=lambda path: path.startswith("/home/"), files=[STATE.path])
    assert found.home.trees == ("/scratch/run",) and found.sent.trees == ()


@pytest.mark.parametrize("cwd", ["/", "/tmp", "/home", "/etc/app", "/usr/share/x"])
def test_everybodys_directories_are_not_a_process_own(cwd: str) -> None:
    found = agree(tree(cwd=cwd, argv=("python",)), strategy="live", files=[], shared=lambda path: False)
    assert not found.home.trees and not found.sent.trees


def test_limits_are_kept_and_said() -> None:
    found = agreement()
    entries = [Entry(f"{WORK}/{number}", 100, 1, 0o644, 1000, 1000) for number in range(3)]
    fitted, notices, refusal = fit(found, entries, [], 1000)
    assert fitted.sent.trees == found.sent.trees and not refusal and any("3 files" in text for text in notices)
    fitted, notices, refusal = fit(found, entries, [], 200)
    assert "300" in refusal and not any("copied along" in text for text in notices)
    fitted, notices, refusal = fit(found, entries, [], 200, large=False)
    assert fitted.sent.trees == () and fitted.home == found.home and not refusal
    assert any("only files that it has open or names" in text for text in notices)
    fitted, notices, refusal = fit(found, entries, [], 200, large=True)
    assert fitted.sent.trees == found.sent.trees and not refusal and fitted.max_files > found.max_files
    _, _, refusal = fit(found, [], [WORK], 1000)
    assert "more than" in refusal
    fitted, notices, refusal = fit(found, [], [WORK], 1000, large=False)
    assert fitted.sent.trees == ("/home/ann/code",) and any("more than" in text for text in notices) and not refusal
    assert Agreement.from_wire(fitted.to_wire()) == fitted


def entry(path: str, size: int = 1, uid: int = 1000, link: str = "") -> dict[str, Any]:
    return {"path": path, "size": size, "mtime_ns": 7, "uid": uid, "link": link}


def test_only_what_was_changed_comes_home_and_only_from_where_it_may() -> None:
    home = Agreed(("/w",), ("/tmp/spot",))
    known = {"/w/same": [1, 7], "/w/grown": [0, 7], "/w/roots": [0, 7]}
    entries = [
        entry("/w/same"), entry("/w/grown"), entry("/w/new"), entry("/tmp/spot"), entry("/w/link", link="x"),
        entry("/w/others", uid=0), entry("/w/roots", uid=0), entry("/w/../etc/x"), entry("/etc/x"), entry("../../x"),
    ]  # fmt: skip
    found, outside = changed_there(entries, known, home, 1000)
    assert found == ["/w/grown", "/w/new", "/tmp/spot", "/w/roots"]
    assert outside == ["/w/../etc/x", "/etc/x", "../../x"]


def test_a_file_changed_on_both_sides_is_kept_as_both() -> None:
    here = Entry("/w/x", 4, 7, 0o644, 1000, 1000, digest="aa")
    assert decide_home(None, None, "bb") == "write"
    assert decide_home([4, 7], here, "bb") == "write"
    assert decide_home([4, 6], here, "bb") == "both"
    assert decide_home(None, here, "bb") == "both"
    assert decide_home([4, 6], here, "aa") == "same"
    assert decide_home([4, 7], Entry("/w/x", 4, 7, 0o644, 1000, 1000, link="?"), "bb") == "both"


def test_a_relaunch_is_the_process_as_it_was_started() -> None:
    stdin = OpenFile(0, "regular", f"{WORK}/in.txt")
    limits = {"RLIMIT_NOFILE": (512, 1024), "RLIMIT_UNHEARD_OF": (1, 1)}
    root = replace(process(nice=5, umask=0o027, limits=limits), files=(stdin,))
    task = relaunch_task(root, {"A": "1", "B": "2"}, {"env_vars": {"B": "3"}}, user="ann")
    assert task == {
        "argv": ["python", "train.py"], "exe": root.exe, "env": {"A": "1", "B": "3"}, "user": "ann", "cwd": WORK,
        "nice": 5, "umask": 0o027, "stdin": f"{WORK}/in.txt", "rlimits": {"RLIMIT_NOFILE": [512, 1024]},
    }  # fmt: skip
    bare = relaunch_task(root, {"A": "1"}, {"working_dir": "/w"}, user="ann", capture=False)
    assert bare == {"argv": ["python", "train.py"], "exe": root.exe, "env": {}, "user": "ann", "cwd": "/w"}


def test_a_title_is_no_command_to_start_again() -> None:
    def command(*argv: str, exe: str = "/usr/bin/python3.12") -> list[str]:
        found: list[str] = relaunch_task(process(argv=argv, exe=exe), {}, {}, user="ann")["argv"]
        return found

    for title in ("worker 3: epoch 7", "ray::train", "run: /srv/data 5%"):
        with pytest.raises(Refused):
            command(title)
    for argv in (("python",), ("python", "my title"), ("./link-to-it",), ("-python3",)):
        assert command(*argv) == list(argv)


def test_the_signal_to_save_has_a_name() -> None:
    assert save_signal(None) == 0 and save_signal("usr1") == save_signal("SIGUSR1") == 10
    with pytest.raises(ConfigError):
        save_signal("SIGNOTHING")
