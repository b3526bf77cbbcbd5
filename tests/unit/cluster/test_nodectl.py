"""One real Ray head by nodectl: started twice, stopped twice, with its neighbours untouched."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from distributed_grid.cluster.nodectl import resolve
from distributed_grid.cluster.ports import choose_ports
from distributed_grid.cluster.ray_node import RayNodeSpec
from distributed_grid.core.errors import GridError
from distributed_grid.core.process import process_id


def nodectl(verb: str, payload: dict[str, Any]) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "distributed_grid.cluster.nodectl", verb],
        input=json.dumps(payload), capture_output=True, text=True, timeout=170,
    )  # fmt: skip
    answer = json.loads(done.stdout)
    if "error" in answer:
        assert done.returncode != 0
        raise GridError.from_wire(answer["error"])
    assert done.returncode == 0
    return dict(answer["ok"])


def sleeper(**environment: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", "600"], env={**os.environ, **environment})


def spec_at(home: Path, **changes: Any) -> RayNodeSpec:
    ports = choose_ports({"gcs": 0, "dashboard": 0, "client": 0, "dashboard_agent": 0})
    settings: dict[str, Any] = {
        "node": "h", "role": "head", "address": "127.0.0.10", "head_address": "127.0.0.10", "cluster_id": f"t{home}",
        "ports": ports, "num_cpus": 2, "num_gpus": 0, "object_store_bytes": 80_000_000, "state_dir": str(home),
    }  # fmt: skip
    return RayNodeSpec(**{**settings, **changes})


@pytest.fixture
def spec(tmp_path: Path) -> Iterator[RayNodeSpec]:
    made = spec_at(tmp_path)
    nodectl("put-token", {"state_dir": str(tmp_path), "token": "c2VjcmV0LXNlY3JldC1zZWNyZXQtc2VjcmV0"})
    yield made
    nodectl("stop", {"spec": made.to_wire()})


def test_start_twice_stop_twice(spec: RayNodeSpec, tmp_path: Path) -> None:
    payload = {"spec": spec.to_wire()}
    with sleeper(GRID_RAY_NODE=f"other/{spec.node}") as foreign, \
         sleeper(GRID_RAY_NODE=spec.marker, GRID_TASK="t1") as task, \
         sleeper(GRID_RAY_NODE=spec.marker) as stray:  # fmt: skip
        try:
            first = nodectl("start", payload)
            assert not first["already"]
            assert len(first["ray_node_id"]) == 56
            temp_dir = Path(first["temp_dir"])
            assert stat.S_IMODE(temp_dir.parent.stat().st_mode) == 0o700  # Ray opens its own directory to all
            assert stray.wait(30) != 0  # a leftover with our marker went before the start
            assert nodectl("status", payload)["up"]
            again = nodectl("start", payload)
            assert again["already"]
            assert again["ray_node_id"] == first["ray_node_id"]
            pids = [int(pid) for pid in again["processes"]]
            assert not {foreign.pid, task.pid} & set(pids)

            ids = [found for pid in pids if (found := process_id(pid))]

            assert nodectl("stop", payload)["ended"] >= len(pids)
            assert [one for one in ids if one.is_alive()] == []
            assert not temp_dir.exists()
            assert not (tmp_path / "nodes" / "h" / "ray.json").exists()
            assert nodectl("stop", payload)["ended"] == 0
            assert not nodectl("status", payload)["up"]
            assert foreign.poll() is None
            assert task.poll() is None
        finally:
            for one in (foreign, task, stray):
                one.kill()


#: Keeps an agent of Ray's from saying its port for longer than its raylet waits (15 s), the first time only.
SLOW_ONCE = """
import os, time
if "dashboard/agent.py" in open("/proc/self/cmdline").read() and not os.path.exists({mark!r}):
    open({mark!r}, "w").close()
    time.sleep(600)
"""


def test_a_raylet_that_a_busy_machine_ended_is_started_again(
    spec: RayNodeSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(SLOW_ONCE.format(mark=str(tmp_path / "slept")))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert not nodectl("start", {"spec": spec.to_wire()})["already"]
    assert nodectl("status", {"spec": spec.to_wire()})["up"]
    names = list(nodectl("status", {"spec": spec.to_wire()})["processes"].values())
    assert (tmp_path / "slept").exists() and names.count("gcs_server") == names.count("raylet") == 1


def test_port_in_use_is_told_with_its_holder(spec: RayNodeSpec) -> None:
    with socket.create_server(("127.0.0.1", spec.ports["dashboard"])), pytest.raises(GridError) as caught:
        nodectl("start", {"spec": spec.to_wire()})
    assert caught.value.code == "port-in-use"
    assert f"pid {os.getpid()}" in caught.value.cause
    assert not Path(resolve(spec).temp_dir).exists()


def test_another_ray_version_is_refused(spec: RayNodeSpec) -> None:
    with pytest.raises(GridError) as caught:
        nodectl("start", {"spec": {**spec.to_wire(), "ray_version": "1.0"}})
    assert caught.value.code == "ray-version"


def test_no_token(tmp_path: Path) -> None:
    with pytest.raises(GridError) as caught:
        nodectl("start", {"spec": spec_at(tmp_path).to_wire()})
    assert caught.value.code == "token-missing"


def test_wrong_words() -> None:
    for verb, payload in (("start", {}), ("dance", {})):
        with pytest.raises(GridError) as caught:
            nodectl(verb, payload)
        assert caught.value.code == "usage"


@pytest.mark.root
def test_temp_dir_of_another_user_is_refused(spec: RayNodeSpec) -> None:
    place = Path(resolve(spec).temp_dir).parent
    place.mkdir()
    os.chown(place, 65534, 65534)
    try:
        with pytest.raises(GridError) as caught:
            nodectl("start", {"spec": spec.to_wire()})
        assert caught.value.code == "temp-dir-owner"
    finally:
        place.rmdir()
