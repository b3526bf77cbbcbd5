"""The `ray start` command line and environment, as pure functions."""

from __future__ import annotations

import dataclasses

import pytest

from distributed_grid.cluster.ray_node import (
    RayNodeSpec,
    clean_environment,
    node_environment,
    ray_start_options,
    start_argv,
    temp_root,
)
from distributed_grid.core.errors import UsageError

HEAD = RayNodeSpec(
    node="gpu-master", role="head", address="10.0.0.1", head_address="10.0.0.1", cluster_id="abc",
    num_cpus=8, num_gpus=1, memory_bytes=1024, object_store_bytes=80_000_000,
    state_dir="/s", temp_dir="/tmp/t", token_path="/s/ray_token",
)  # fmt: skip
WORKER = dataclasses.replace(HEAD, node="gpu1", role="worker", address="10.0.0.2")


def test_head_options() -> None:
    options = ray_start_options(HEAD)
    assert {"--head", "--port=6379", "--dashboard-host=127.0.0.1", "--labels=grid-host=gpu-master",
            "--num-cpus=8", "--num-gpus=1", "--memory=1024", "--object-store-memory=80000000",
            "--temp-dir=/tmp/t", "--node-ip-address=10.0.0.1"} <= set(options)  # fmt: skip


def test_worker_joins_and_waits_for_the_head() -> None:
    argv = start_argv(WORKER, "/py")
    assert argv[0] == "/py"
    assert "--wait-for=10.0.0.1:6379" in argv
    assert "--address=10.0.0.1:6379" in argv
    assert "--head" not in argv
    assert WORKER.own_ports() == {"dashboard_agent": 52365}


def test_what_is_not_declared_is_left_to_ray() -> None:
    options = ray_start_options(dataclasses.replace(WORKER, num_cpus=None, num_gpus=0, memory_bytes=None))
    assert not any(one.startswith(("--num-cpus", "--memory")) for one in options)
    assert "--num-gpus=0" in options


def test_environment_has_token_and_marker_and_no_other_ray() -> None:
    base = {"PATH": "/bin", "RAY_ADDRESS": "elsewhere", "GRID_TASK": "t1", "GRID_RAY_NODE": "x/y"}
    made = node_environment(WORKER, base)
    assert made["PATH"] == "/bin"
    assert made["RAY_AUTH_MODE"] == "token"
    assert made["RAY_AUTH_TOKEN_PATH"] == "/s/ray_token"
    assert made["GRID_RAY_NODE"] == "abc/gpu1"
    assert "RAY_ADDRESS" not in made
    assert "GRID_TASK" not in made
    assert clean_environment({"RAY_X": "1", "A": "2"}) == {"A": "2"}


def test_temp_root_is_short_and_the_cluster_s_own() -> None:
    assert len(str(temp_root("a" * 200, uid=1000))) < 30
    assert temp_root("a", uid=1000) != temp_root("b", uid=1000)
    assert temp_root("a", uid=1000) != temp_root("a", uid=1001)


def test_wire_round_trip() -> None:
    assert RayNodeSpec.from_wire({**HEAD.to_wire(), "from_the_future": 1}) == HEAD
    with pytest.raises(UsageError):
        RayNodeSpec.from_wire({"node": "a"})
