"""The files of a moved process, between hosts that share none: there when it needs them, home when it ends."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.lab.clusters import PYTHON, EmbeddedCluster, LabCluster
from tests.lab.hosts import Host
from tests.lab.waiting import wait_until

pytestmark = [pytest.mark.root, pytest.mark.criu]

USER, UID = "filer", "4321"
STOP = "/tmp/grid-test-stop"

# Reads its settings, appends to one file all the time, makes new ones, and works in the same directory all along.
WORKER = """
    import itertools, os, sys, time
    here = os.uname().nodename
    data = open("data.log", "a")
    for number in itertools.count():
        now = os.uname().nodename
        word = open("settings.txt").read().strip()
        data.write(f"{number} {word}\\n")
        data.flush()
        print(number, flush=True)
        with open("last.txt.new", "w") as file:
            file.write(str(number))
        os.rename("last.txt.new", "last.txt")
        if now != here:
            with open("notes.txt", "a") as file:
                file.write("theirs\\n")
            os.makedirs("made", exist_ok=True)
            with open(f"made/{now}.new", "w") as file:
                file.write("new\\n")
            os.rename(f"made/{now}.new", f"made/{now}.txt")
        if os.path.exists(sys.argv[1]):
            raise SystemExit(7)
        time.sleep(0.05)
"""

# Waits on the head; elsewhere it tells how it was started, and ends.
STARTER = """
    import json, os, resource, sys, time
    from beside import VALUE
    while os.uname().nodename == "gpu-master":
        print("waiting", flush=True)
        time.sleep(0.2)
    mask = os.umask(0)
    told = {"argv": sys.argv[1:], "cwd": os.getcwd(), "umask": mask, "nice": os.nice(0), "value": VALUE,
            "mark": os.environ.get("MARK"), "extra": os.environ.get("EXTRA"), "input": open(sys.argv[2]).read(),
            "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0]}
    os.umask(mask)
    with open("told.json", "w") as file:
        json.dump(told, file)
    print("done", flush=True)
    raise SystemExit(3)
"""


def write(host: Host, path: str, text: str) -> None:
    host.write(path, textwrap.dedent(text).lstrip("\n"), user=USER)


def start(host: Host, cwd: str, words: list[str], user: str, first: str = "", env: dict[str, str] | None = None) -> int:
    """Run a script in a session of its own, its output in `log`; its pid on the host."""
    script = f'{first} setsid {PYTHON} "$@" >log 2>&1 </dev/null & echo $!'
    return int(host.run(["/bin/sh", "-c", script, "start", *words], user=user, cwd=cwd, env=env).stdout)


def move(cluster: LabCluster, pid: int, *options: str) -> dict[str, Any]:
    done = cluster.json("offload", "execute", str(pid), "--target-node", "gpu1", *options, timeout=120)
    assert isinstance(done, dict)
    return done


def ended(cluster: LabCluster, move_id: str) -> dict[str, Any]:
    def found() -> dict[str, Any] | None:
        finished = cluster.json("offload", "status")["finished"]
        return next((one for one in finished if one["id"] == move_id), None)

    return wait_until(found, 60, f"the end of {move_id}", every_s=0.5)  # type: ignore[return-value]


def owner(host: Host, path: str) -> str:
    return str(host.run(["stat", "-c", "%U", path]).stdout.strip())


@pytest.fixture
def people(lab_cluster: LabCluster) -> Iterator[LabCluster]:
    """The cluster with an ordinary user on its hosts, whose processes and files are gone afterwards."""
    hosts = list(lab_cluster.lab.hosts.values())
    for host in hosts:
        if host.run(["id", "-u", USER], check=False).returncode != 0:
            host.run(["useradd", "--create-home", "--uid", UID, "--shell", "/bin/sh", "--password", "*", USER])
    yield lab_cluster
    for host in hosts:
        for pid in host.pids("counts_files.py") + host.pids("tells_start.py"):
            host.run(["kill", "-9", str(pid)], check=False)
        host.run(["rm", "-rf", f"/home/{USER}/work", f"/home/{USER}/start", STOP])


def test_what_a_moved_program_changes_comes_home(people: LabCluster) -> None:
    head, gpu1 = people.head, people.lab["gpu1"]
    base = f"/home/{USER}/work"
    write(head, f"{base}/counts_files.py", WORKER)
    write(head, f"{base}/settings.txt", "red\n")
    write(head, f"{base}/notes.txt", "ours\n")
    write(head, f"{base}/data.log", "")
    # As root: CRIU needs a right that a container's root may lack to carry another user's process.
    pid = start(head, base, ["counts_files.py", STOP], "root")
    wait_until(lambda: "3\n" in head.read(f"{base}/log"), 60, "the program to count")
    done = move(people, pid)
    assert done["strategy"] == "live"
    wait_until(lambda: gpu1.exists(f"{base}/made/gpu1.txt"), 60, "the program to go on there")
    assert owner(gpu1, base) == owner(gpu1, f"{base}/settings.txt") == USER
    assert not head.exists(f"{base}/made/gpu1.txt")

    write(head, f"{base}/notes.txt", "changed at home\n")
    synced = people.json("offload", "sync", done["id"], timeout=120)
    assert {f"{base}/made/gpu1.txt", f"{base}/data.log"} <= set(synced["files"])
    assert synced["conflicts"] == [f"{base}/notes.txt"]
    assert (owner(head, f"{base}/made/gpu1.txt"), owner(head, f"{base}/data.log")) == ("root", USER)
    assert head.read(f"{base}/notes.txt") == "changed at home\n"
    assert head.read(f"{base}/notes.txt.from-gpu1").startswith("ours\ntheirs\n")

    gpu1.write(STOP, "")
    row = ended(people, done["id"])
    assert row["exit_code"] == 7
    lines = head.read(f"{base}/data.log").splitlines()
    assert lines == [f"{number} red" for number in range(len(lines))] and len(lines) > 4
    assert head.read(f"{base}/last.txt") == str(len(lines) - 1)
    assert head.read(f"{base}/log").split() == [str(number) for number in range(len(lines))]
    assert head.read(f"{base}/notes.txt") == "changed at home\n"
    assert head.read(f"{base}/notes.txt.from-gpu1") == gpu1.read(f"{base}/notes.txt")
    assert not head.exists(f"{base}/notes.txt.from-gpu1.2")
    assert owner(head, f"{base}/data.log") == USER
    assert "home" in people.json("offload", "sync", done["id"])["text"]


def test_files_follow_from_node_to_node_and_home(people: LabCluster) -> None:
    head, gpu1, gpu2 = people.head, people.lab["gpu1"], people.lab["gpu2"]
    base = f"/home/{USER}/work"
    write(head, f"{base}/counts_files.py", WORKER)
    write(head, f"{base}/settings.txt", "blue\n")
    pid = start(head, base, ["counts_files.py", STOP], "root")
    wait_until(lambda: "3\n" in head.read(f"{base}/log"), 60, "the program to count")
    move(people, pid)
    wait_until(lambda: gpu1.exists(f"{base}/made/gpu1.txt"), 60, "the program to go on there")
    (there,) = gpu1.pids("counts_files.py", STOP)
    hop = people.json("offload", "execute", f"gpu1:{there}", "--target-node", "gpu2", timeout=120)
    wait_until(lambda: gpu2.exists(f"{base}/made/gpu2.txt"), 60, "the program to go on at its next place")
    back = people.json("offload", "return", hop["id"], timeout=120)
    assert back["target"] == "gpu-master"
    assert head.read(f"{base}/made/gpu1.txt") == head.read(f"{base}/made/gpu2.txt") == "new\n"
    before = len(head.read(f"{base}/data.log").splitlines())
    wait_until(lambda: len(head.read(f"{base}/data.log").splitlines()) > before + 3, 60, "the program to go on at home")
    head.write(STOP, "")
    assert ended(people, back["id"])["exit_code"] == 7
    lines = head.read(f"{base}/data.log").splitlines()
    assert lines == [f"{number} blue" for number in range(len(lines))]
    assert head.read(f"{base}/last.txt") == str(len(lines) - 1)
    assert not people.head.run(["find", base, "-name", "*.from-*"]).stdout


def test_a_relaunch_has_its_files_and_circumstances(people: LabCluster) -> None:
    head = people.head
    base = f"/home/{USER}/start"
    write(head, f"{base}/tells_start.py", STARTER)
    write(head, f"{base}/beside.py", "VALUE = 42\n")
    write(head, f"{base}/in.txt", "input\n")
    words = ["tells_start.py", "--input", "in.txt"]
    pid = start(head, base, words, USER, "umask 027; ulimit -n 512; nice -n 5", {"MARK": "kept"})
    wait_until(lambda: "waiting" in head.read(f"{base}/log"), 60, "the program to run")
    plan = people.json("offload", "plan", str(pid), "--target-node", "gpu1", "--strategy", "relaunch")
    assert any("from its beginning" in text for text in plan["notices"])

    nowhere = json.dumps({"working_dir": "/nowhere"})
    refused = people.grid(
        "offload", "execute", str(pid), "--target-node", "gpu1", "--runtime-env", nowhere, check=False, timeout=120
    )
    assert refused.returncode != 0 and "/nowhere" in refused.stderr
    before = head.read(f"{base}/log").count("waiting")
    wait_until(lambda: head.read(f"{base}/log").count("waiting") > before, 60, "the program to run on at home")

    extra = json.dumps({"env_vars": {"EXTRA": "added"}})
    done = move(people, pid, "--strategy", "relaunch", "--runtime-env", extra)
    assert done["strategy"] == "relaunch"
    assert ended(people, done["id"])["exit_code"] == 3
    told = json.loads(head.read(f"{base}/told.json"))
    assert told == {
        "argv": ["--input", "in.txt"], "cwd": base, "umask": 0o027, "nice": 5, "value": 42, "mark": "kept",
        "extra": "added", "input": "input\n", "files": 512,
    }  # fmt: skip
    assert owner(head, f"{base}/told.json") == USER
    assert head.read(f"{base}/log").endswith("done\n")


def test_one_machine_copies_nothing(embedded: EmbeddedCluster, tmp_path: Path) -> None:
    (tmp_path / "settings.txt").write_text("red\n")
    (tmp_path / "counts_files.py").write_text(textwrap.dedent(WORKER))
    with (tmp_path / "log").open("w") as log:
        program = subprocess.Popen(
            [sys.executable, "counts_files.py", "stop"], cwd=tmp_path, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
    try:
        wait_until(lambda: "3\n" in (tmp_path / "log").read_text(), 60, "the program to count")
        done = embedded.json("offload", "execute", str(program.pid), "--target-node", "gpu1", timeout=120)
        assert "share" in embedded.json("offload", "sync", done["id"])["text"]
        assert not list(embedded.home.rglob("cache/*"))
        (tmp_path / "stop").touch()
        assert program.wait(60) == 7
    finally:
        program.kill()
        program.wait()
    lines = (tmp_path / "data.log").read_text().splitlines()
    assert lines == [f"{number} red" for number in range(len(lines))]
