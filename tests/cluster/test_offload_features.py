"""What moving has beyond the plain way: other users' processes, Ray's view of a moved one."""

from __future__ import annotations

import json
import os
import pwd
import socket
import subprocess
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.offloads import LIMIT_S, Started, found, move, moves, until_over
from tests.lab.clusters import PYTHON, EmbeddedCluster
from tests.lab.waiting import wait_until

pytestmark = [pytest.mark.root, pytest.mark.criu]

OTHER = "daemon"
#: Of the shell alone: the virtual environment's Python may be closed to other users.
COUNTER = 'n=0; while [ ! -e "$1" ]; do n=$((n + 1)); echo $n; sleep 0.02; done; id -un; exit 4'


def test_root_moves_another_users_process_and_it_stays_that_users(
    embedded: EmbeddedCluster, started: Started
) -> None:
    about = pwd.getpwnam(OTHER)
    end = Path("/tmp") / f"grid-test-end-{os.getpid()}"  # where that user can look
    argv = ["/bin/sh", "-c", COUNTER, "sh", str(end)]
    who = started.spawn(argv, user=about.pw_uid, group=about.pw_gid, extra_groups=[], cwd="/")
    try:
        plan = embedded.json("offload", "plan", str(who.pid), timeout=LIMIT_S)
        assert (plan["strategy"], plan["user"]) == ("live", OTHER), plan
        done = move(embedded, who.pid, "-t", "gpu1")
        there = found(embedded, done["id"])["target_pid"]
        assert Path(f"/proc/{there}").stat().st_uid == about.pw_uid
        assert who.is_alive() and Path(f"/proc/{who.pid}").stat().st_uid == about.pw_uid  # its stub
        size = started.size()
        wait_until(lambda: started.size() > size, LIMIT_S, "more output at home")
        home = embedded.json("offload", "return", done["id"], timeout=LIMIT_S)
        size = started.size()
        wait_until(lambda: started.size() > size, LIMIT_S, "output from home again")
        end.touch()
        assert started.processes[0].wait(LIMIT_S) == 4
        assert until_over(embedded, home["id"])["exit_code"] == 4
    finally:
        end.unlink(missing_ok=True)
    *numbers, last = started.log.read_text().split()
    assert numbers == [str(n) for n in range(1, len(numbers) + 1)] and last == OTHER


def dashboard(cluster: EmbeddedCluster, path: str, method: str = "GET") -> Any:
    """What Ray's dashboard answers."""
    env = cluster.json("env", timeout=LIMIT_S)
    token = Path(env["RAY_AUTH_TOKEN_PATH"]).read_text().strip()
    url, headers = f"{env['RAY_API_SERVER_ADDRESS']}{path}", {"Authorization": f"Bearer {token}"}
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers, method=method), timeout=LIMIT_S) as answer:
        return json.load(answer)


def test_o19_a_moved_process_is_a_ray_job_on_its_target(embedded: EmbeddedCluster, started: Started) -> None:
    who = started.chain(code=3)
    done = move(embedded, who.pid, "-t", "gpu2")

    def running() -> dict[str, Any] | None:
        jobs = [one for one in dashboard(embedded, "/api/jobs/") if one["submission_id"] == done["id"]]
        known = jobs and jobs[0]["status"] == "RUNNING" and jobs[0]["driver_agent_http_address"]
        return jobs[0] if known else None

    job = wait_until(running, LIMIT_S, "Ray to show it as running", every_s=0.5)
    assert job and job["metadata"]["pid"] == str(who.pid) and "chain.py" in job["metadata"]["command"]
    assert urllib.parse.urlparse(job["driver_agent_http_address"]).hostname == embedded.node("gpu2")["address"]
    env = {**os.environ, **embedded.json("env", timeout=LIMIT_S)}
    listed = subprocess.run(
        [str(PYTHON.with_name("ray")), "job", "list"], env=env, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert listed.returncode == 0 and done["id"] in listed.stdout + listed.stderr

    dashboard(embedded, f"/api/jobs/{done['id']}/stop", "POST")  # the job follows; it owns nothing
    wait_until(lambda: running() is None, LIMIT_S, "the job to be stopped", every_s=0.5)
    size = started.size()
    wait_until(lambda: started.size() > size + 100, LIMIT_S, "the process to go on without its job")
    started.end.touch()
    assert started.processes[0].wait(LIMIT_S) == 3
    assert until_over(embedded, done["id"])["exit_code"] == 3


# What cannot be carried

#: What a program has (tests/programs/awkward.py) -> what the plan calls it, and a word of the reason.
AWKWARD = {
    "unix": ("unix-socket", "unix socket"), "fifo": ("fifo", "named pipe"), "port": ("port-taken", "one machine"),
    "device": ("device", "the device /dev/"), "replaced": ("renamed-file", "renamed"), "lock": ("lock-shared", "lock"),
    "sysv": ("sysv", "System V"), "userfaultfd": ("userfaultfd", "page faults"), "perf": ("perf", "performance"),
    "network": ("namespaces", "namespaces of its own (net)"), "root": ("chroot", "another root directory"),
    "traced": ("traced", "traced"),
}  # fmt: skip


@pytest.mark.timeout(600)
def test_each_thing_that_cannot_be_carried_is_told_by_the_plan_and_runs_on(
    embedded: EmbeddedCluster, started: Started
) -> None:
    paths = {name: started.directory / f"{name}.path" for name in AWKWARD}
    os.mkfifo(paths["fifo"])
    fifo = os.open(paths["fifo"], os.O_RDONLY | os.O_NONBLOCK)
    moves_before = [one["id"] for one in moves(embedded)]
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(paths["unix"]))
        server.listen()
        running = {}
        for name in AWKWARD:
            who = started.run("awkward.py", name, paths[name], log=name)
            if started.processes[-1].poll() is None:
                running[name] = who
        server.settimeout(LIMIT_S)
        held, _ = server.accept()
        assert len(running) >= len(AWKWARD) - 2  # a machine may give no device, no counters
        wrong = {}
        for name, who in running.items():
            plan = embedded.grid(
                "offload", "plan", str(who.pid), "--strategy", "live", "--format", "json", check=False, timeout=LIMIT_S
            )
            told = json.loads(plan.stdout)
            code, text = AWKWARD[name]
            codes = [one["code"] for one in told["cannot_carry"]]
            if plan.returncode != 4 or code not in codes or text not in told["why"]:
                wrong[name] = (plan.returncode, told["why"], codes)
        assert not wrong
        for name, who in running.items():
            started.goes_on(who, name)
        assert [one["id"] for one in moves(embedded)] == moves_before
    held.close()
    os.close(fifo)


def test_a_connection_is_closed_with_consent_and_the_program_sees_it(
    embedded: EmbeddedCluster, started: Started
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(LIMIT_S)
        who = started.run("hears.py", "127.0.0.1", str(server.getsockname()[1]), wait=False)
        held, _ = server.accept()
        with held:
            wait_until(started.size, LIMIT_S, "it to count")
            done = move(embedded, who.pid, "--tcp-close")
            assert started.processes[0].wait(LIMIT_S) == 6
    assert until_over(embedded, done["id"])["exit_code"] == 6
    *numbers, last = started.log.read_text().split()
    assert numbers == [str(n) for n in range(1, len(numbers) + 1)] and last == "closed"


# What bad input gets

#: What is added to `grid offload execute PID`, the exit code, and a word of the one error.
BAD_OPTIONS = [
    (["--target-node", "gpu9"], 3, "there is no node 'gpu9'"),
    (["--target-node", "gpu-master"], 4, "already runs on gpu-master"),
    (["--runtime-env", "[1]"], 2, "--runtime-env must be"),
    (["--runtime-env", '{"pip": ["torch"]}'], 2, "--runtime-env must be"),
    (["--runtime-env", '{"working_dir": "/no/such/place"}', "-t", "gpu1"], 3, "/no/such/place"),
    (["--capture-state=perhaps"], 2, "perhaps"),
    (["--strategy", "magic"], 2, "magic"),
]


@pytest.mark.timeout(600)
def test_bad_options_get_one_error_and_the_process_runs_on(embedded: EmbeddedCluster, started: Started) -> None:
    who = started.chain()
    wrong = []
    for options, code, text in BAD_OPTIONS:
        done = embedded.grid("offload", "execute", str(who.pid), *options, check=False, timeout=LIMIT_S)
        said = done.stderr.lower()
        if done.returncode != code or text not in done.stderr or said.count("error:") != 1 or "traceback" in said:
            wrong.append((options, done.returncode, done.stderr))
    assert not wrong
    started.goes_on(who)


def test_a_process_is_moved_once_however_many_ask(embedded: EmbeddedCluster, started: Started) -> None:
    who = started.run("matrix.py", "100", started.end)
    asked = [
        embedded.popen(
            "offload", "execute", str(who.pid), "-t", node, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for node in ("gpu1", "gpu2")
    ]  # fmt: skip
    said = [process.communicate(timeout=LIMIT_S)[1] for process in asked]
    assert sorted(process.returncode for process in asked) == [0, 4], said
    [refused] = [text for text, process in zip(said, asked, strict=True) if process.returncode]
    assert "is being moved already" in refused or "was moved to" in refused
    started.end.touch()
    assert started.processes[0].wait(LIMIT_S) == 0
    assert started.log.read_text().endswith("sum right\n")
