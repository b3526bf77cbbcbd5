"""Who may use the daemon: its owner, those it allows, and nobody else; each does things as itself."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.lab.clusters import EMBEDDED_CONFIG, PYTHON, EmbeddedCluster
from tests.lab.waiting import wait_until

pytestmark = pytest.mark.root
ALLOWED, STRANGER = "daemon", "nobody"


def as_user(cluster: EmbeddedCluster, user: str, call: str, **arguments: Any) -> dict[str, Any]:
    script = Path(__file__).with_name("other_user.py")
    uid = pwd.getpwnam(user).pw_uid
    argv = [str(PYTHON), str(script), str(uid), str(cluster.home / "grid_daemon.sock"), call, json.dumps(arguments)]
    done = subprocess.run(argv, env=cluster.environment(), capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def audited(cluster: EmbeddedCluster, user: str) -> list[dict[str, Any]]:
    uid = pwd.getpwnam(user).pw_uid
    lines = [json.loads(line) for line in (cluster.home / "audit.log").read_text().splitlines()]
    return [line for line in lines if line["uid"] == uid]


def test_a_stranger_is_refused_and_audited_and_an_allowed_user_acts_as_itself(
    make_embedded: Callable[..., EmbeddedCluster],
) -> None:
    cluster = make_embedded(EMBEDDED_CONFIG + f"daemon:\n  allow_users: [{ALLOWED}]\n")
    cluster.start()

    refused = as_user(cluster, STRANGER, "status")
    assert refused["error"]["code"] == "not-allowed"
    assert [line["outcome"] for line in audited(cluster, STRANGER)] == ["refused"]

    task = as_user(cluster, ALLOWED, "task_start", node="gpu1", argv=["id", "-un"], cwd="/")["answer"]["task_id"]
    assert as_user(cluster, ALLOWED, "task_follow", task_id=task)["answer"] == f"{ALLOWED}\n"
    assert [line["method"] for line in audited(cluster, ALLOWED)] == ["task_start", "task_follow"]

    boost = {"amounts": {"cpu": 1}, "kind": "boost", "duration_s": 600.0}
    wait_until(lambda: cluster.json("shared-status")["offers"], 90, "the workers to offer", every_s=0.5)
    theirs_id = as_user(cluster, ALLOWED, "lease_request", **boost)["answer"]["id"]
    assert [one["user"] for one in cluster.json("boost", "status")["boosts"]] == [ALLOWED]
    ran = as_user(cluster, ALLOWED, "lease_run", lease=theirs_id, argv=["id", "-un"], task_id="", cwd="/")
    assert as_user(cluster, ALLOWED, "task_follow", task_id=ran["answer"])["answer"] == f"{ALLOWED}\n"
    for left in Path("/tmp").glob(f"grid-gpu?-{ran['answer']}"):
        shutil.rmtree(left)  # its directory, which is not ours, lies there
    ours_id = cluster.json("boost", "request", "gpu-master", "cpu", "1")["id"]
    assert as_user(cluster, ALLOWED, "lease_release", lease_id=ours_id)["error"]["code"] == "not-yours"
    assert as_user(cluster, ALLOWED, "lease_release", lease_id=theirs_id, force=True)["answer"]["state"] == "released"
    cluster.grid("boost", "release", ours_id)

    roots = cluster.grid("execute", "-n", "gpu1", "--detach", "sleep", "600").stdout.strip()
    assert as_user(cluster, ALLOWED, "task_cancel", task_id=roots)["error"]["code"] == "not-yours"
    assert roots not in [row["id"] for row in as_user(cluster, ALLOWED, "task_list")["answer"]]
    assert as_user(cluster, ALLOWED, "daemon_stop")["error"]["code"] == "not-owner"
    cluster.grid("jobs", "cancel", roots)

    uid = pwd.getpwnam(ALLOWED).pw_uid
    with subprocess.Popen(["sleep", "600"]) as ours, subprocess.Popen(["sleep", "600"], user=uid, group=uid) as theirs:
        try:
            assert as_user(cluster, ALLOWED, "offload_plan", pid=ours.pid)["error"]["code"] == "not-owner"
            assert as_user(cluster, ALLOWED, "offload_plan", pid=theirs.pid)["answer"]["user"] == ALLOWED
        finally:
            ours.kill()
            theirs.kill()


def test_the_socket_and_the_state_are_closed_to_others(embedded: EmbeddedCluster) -> None:
    names = ("", "grid_daemon.sock", "ray_token", "audit.log", "journal.sqlite3")
    modes = [(embedded.home / name).stat().st_mode & 0o777 for name in names]
    assert modes == [0o700, 0o600, 0o600, 0o600, 0o600]
    assert as_user(embedded, STRANGER, "status")["error"]["code"] == "no-daemon"
    assert os.geteuid() == 0
