"""Finding and reading: lookup order, layers, origins, and errors that point at the line."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from distributed_grid.config.find import find_config_file
from distributed_grid.config.loader import load_cluster_config, origins
from distributed_grid.config.models import ClusterConfig
from distributed_grid.config.yaml_source import scalar
from distributed_grid.core.errors import ConfigError


def write(folder: Path, text: str, name: str = "x.yaml") -> Path:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def refusal(folder: Path, text: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_cluster_config(write(folder, text), env={})
    return caught.value


def test_lookup_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRID_HOME", str(tmp_path / "home"))
    places = [
        "home/cluster_config.yaml",
        "cluster_config.yaml",
        "config/cluster_config.yaml",
        "config/my-cluster-enhanced.yaml",
    ]
    assert find_config_file(cwd=tmp_path, env={}) is None
    for place in places:
        file = write(tmp_path, "", place)
        assert find_config_file(cwd=tmp_path, env={}) == file
    by_env = write(tmp_path, "", "env.yaml")
    assert find_config_file(cwd=tmp_path, env={"GRID_CONFIG": str(by_env)}) == by_env
    named = write(tmp_path, "", "flag.yaml")
    assert find_config_file("flag.yaml", cwd=tmp_path, env={"GRID_CONFIG": str(by_env)}) == named


def test_a_named_file_must_be_there(tmp_path: Path) -> None:
    for explicit, env in (("no.yaml", {}), (None, {"GRID_CONFIG": "no.yaml"})):
        with pytest.raises(ConfigError) as caught:
            find_config_file(explicit, cwd=tmp_path, env=env)
        assert "no.yaml" in caught.value.message and "grid init" in caught.value.hint


@pytest.mark.root
def test_a_strangers_file_is_not_taken_by_chance() -> None:
    program = (
        "import os, sys, pathlib; from distributed_grid.config.find import find_config_file\n"
        "from distributed_grid.core.errors import ConfigError\n"
        "os.setgroups([]); os.setgid(4322); os.setuid(4322)\n"
        "here = pathlib.Path(sys.argv[1])\n"
        "assert find_config_file('cluster_config.yaml', cwd=here, env={})\n"
        "try: find_config_file(cwd=here, env={})\n"
        "except ConfigError as err: print(err.message)\n"
    )
    with tempfile.TemporaryDirectory(prefix="grid-stranger-") as name:  # pytest's own is closed to other users
        folder = Path(name)
        folder.chmod(0o755)
        os.chown(write(folder, "", "cluster_config.yaml"), 4321, 4321)
        done = subprocess.run([sys.executable, "-c", program, name], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "belongs to another user (uid 4321)" in done.stdout


def test_layers_and_origins(tmp_path: Path) -> None:
    file = write(tmp_path, "ray:\n  port: 1000\n  dashboard_port: 1001\n  start_timeout_seconds: 7\n")
    env = {"GRID__RAY__DASHBOARD_PORT": "2001", "GRID__RAY__PORT": "2000", "GRID__NODES__1__MEMORY": "16", "HOME": "/"}
    config = load_cluster_config(file, overrides={"ray.port": 3000}, env=env)
    assert (config.ray.port, config.ray.dashboard_port, config.ray.start_timeout_seconds) == (3000, 2001, 7)
    assert [node.memory_gb for node in config.nodes] == [32, 16, 32]
    found = origins(config)
    assert found["ray.port"] == "flag"
    assert found["ray.dashboard_port"] == "GRID__RAY__DASHBOARD_PORT"
    assert found["ray.start_timeout_seconds"] == f"{file}:4"
    assert found["ray.object_store_bytes"] == found["nodes.0.memory_gb"] == "default"
    assert found["nodes.1.memory_gb"] == "GRID__NODES__1__MEMORY"
    assert config.path == file


def test_a_layout_of_the_environment_beats_the_other_layout_in_the_file(tmp_path: Path) -> None:
    file = write(tmp_path, "execution:\n  resource_sharing:\n    policy: balanced\n")
    config = load_cluster_config(file, env={"GRID__RESOURCE_SHARING__POLICY": "aggressive"})
    assert config.resource_sharing.policy == "aggressive"


def test_whole_lists_replace_and_single_keys_amend(tmp_path: Path) -> None:
    file = write(tmp_path, "embedded: true\nnodes:\n- {name: a, role: head}\n- {name: b}\n- {name: c}\n")
    whole = {"GRID__NODES": "[{name: x, role: head}, {name: y}]", "GRID__DAEMON__ALLOW_USERS": "[ann, 1000]"}
    config = load_cluster_config(file, env=whole)
    assert [node.name for node in config.nodes] == ["x", "y"]
    assert config.daemon.allow_users == ["ann", 1000]
    assert [node.name for node in load_cluster_config(file, env={"GRID__NODES__2__NAME": "z"}).nodes] == ["a", "b", "z"]
    with pytest.raises(ConfigError, match=r"GRID__NODES__7__NAME: there is no nodes\.7"):
        load_cluster_config(file, env={"GRID__NODES__7__NAME": "z"})


def test_head_only_origin_is_the_flag_that_won(tmp_path: Path) -> None:
    file = write(tmp_path, "resource_sharing:\n  head_only_mode: false\n  auto_offload:\n    head_only_mode: true\n")
    assert origins(load_cluster_config(file, env={}))["resource_sharing.head_only_mode"] == f"{file}:4"


def test_unknown_key_names_file_line_and_nearest(tmp_path: Path) -> None:
    err = refusal(tmp_path, "name: a\nexecution:\n  resource_sharing:\n    enabled: true\n    rebalance_intervall: 3\n")
    assert err.message == f"{tmp_path / 'x.yaml'}:5: execution.resource_sharing.rebalance_intervall: unknown key"
    assert "rebalance_interval" in err.hint
    assert (err.details["line"], err.details["key"]) == (5, "execution.resource_sharing.rebalance_intervall")


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("nodes:\n- name: a\n  role: head\n- name: b\n  hots: h\n", 5, "nodes.1.hots: unknown key"),
        ("embedded: true\nnodes:\n- name: a\n  role: head\n- name: a\n", 5, "two nodes are called a"),
        ("embedded: true\nnodes:\n- name: a\n  role: head\n- port: 22\n", 5, "nodes.1.name: is missing"),
        ("embedded: true\nnodes:\n- name: a\n", 2, "at least 2 nodes"),
        ("resource_sharing:\n  thresholds:\n    memory_pressure_high: x\n", 3, "memory_pressure_high: must be"),
        ("offload:\n  strategy: teleport\n", 2, "offload.strategy: input should be"),
        ("daemon:\n  allow_users: [[1]]\n", 2, "daemon.allow_users"),
        ("foo: {}\n", 1, "foo: unknown key"),
        ("execution:\n  parallel: 3\n", 1, "execution: unknown key"),
        ("ray: 5\n", 1, "ray: input should be"),
        ("ray:\n  port: 1\n  port: 2\n", 3, "not valid YAML"),
        ("name: a\nray: [1\nx: 2\n", 3, "not valid YAML"),
        ("- a\n", 1, "must be `key: value` lines"),
    ],
)
def test_errors_point_at_the_line(tmp_path: Path, text: str, line: int, words: str) -> None:
    err = refusal(tmp_path, text)
    assert err.message.startswith(f"{tmp_path / 'x.yaml'}:{line}: "), err.message
    assert words in err.message


def test_all_faults_are_told_at_once(tmp_path: Path) -> None:
    err = refusal(tmp_path, "ray:\n  prot: 1\nalerts:\n  memory: much\n")
    assert ":2: ray.prot" in err.message and ":4: alerts.memory" in err.cause


def test_the_same_key_twice_names_both_places(tmp_path: Path) -> None:
    text = "resource_sharing:\n  rebalance_interval: 30\n"
    text += "execution:\n  resource_sharing:\n    rebalance_interval_seconds: {}\n"
    err = refusal(tmp_path, text.format(31))
    assert err.code == "config-twice"
    assert ":2 resource_sharing.rebalance_interval: 30" in err.cause
    assert ":5 execution.resource_sharing.rebalance_interval_seconds: 31" in err.cause
    same = load_cluster_config(write(tmp_path, text.format(30)), env={})
    assert same.resource_sharing.rebalance_interval_seconds == 30


def test_both_layouts_are_merged(tmp_path: Path) -> None:
    text = "resource_sharing:\n  policy: aggressive\nexecution:\n  resource_sharing:\n    check_interval: 9\n"
    sharing = load_cluster_config(write(tmp_path, text), env={}).resource_sharing
    assert (sharing.policy, sharing.check_interval) == ("aggressive", 9)


@pytest.mark.parametrize("text", ["", "# nothing\n", "execution:\nray:\nresource_sharing: {}\n"])
def test_empty_sections_are_the_defaults(tmp_path: Path, text: str) -> None:
    assert load_cluster_config(write(tmp_path, text), env={}) == ClusterConfig()


def test_yaml_anchors_and_merges(tmp_path: Path) -> None:
    text = "nodes:\n- &base {name: a, role: head, host: h, user: u, port: 23}\n- {<<: *base, name: b, role: worker}\n"
    config = load_cluster_config(write(tmp_path, text), env={})
    assert [(node.name, node.user, node.port) for node in config.nodes] == [("a", "u", 23), ("b", "u", 23)]
    assert "nested too deeply" in refusal(tmp_path, f"ray: {'[' * 50}{']' * 50}\n").message


def test_paths_start_at_home_or_at_the_file(tmp_path: Path) -> None:
    text = "nodes:\n- {name: a, role: head, host: h, key: ~/.ssh/k}\n- {name: b, host: i, key: keys/k}\n"
    nodes = load_cluster_config(write(tmp_path, text), env={}).nodes
    assert nodes[0].key == Path.home() / ".ssh/k" and nodes[1].key == tmp_path / "keys/k"


def test_unreadable_and_binary_files_are_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not text"):
        load_cluster_config(tmp_path / "b.yaml", env={})
    with pytest.raises(ConfigError, match="there is no configuration file"):
        load_cluster_config(tmp_path, env={})


def test_importing_the_package_is_cheap() -> None:
    program = "import sys, distributed_grid.config; print({'pydantic', 'ruamel.yaml', 'ray'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "set()", done.stderr


VALUES = ("2024-13-45", "2024-01-01T99:00:00", "!!int x", "!!int ''", "!!bool x", "1" + "0" * 5000)


@pytest.mark.parametrize("value", VALUES)
def test_a_value_that_python_cannot_make_is_told_with_its_line(tmp_path: Path, value: str) -> None:
    told = refusal(tmp_path, f"ray: {{port: 1}}\nname: {value}\n")
    assert told.code == "config-yaml" and "x.yaml:2: not valid YAML" in told.message and "cannot be read" in told.cause
    assert scalar(value) == value, "typed outside a file it is a text"


def test_brackets_without_end_are_told(tmp_path: Path) -> None:
    assert "nested too deeply" in refusal(tmp_path, "x: " + "[" * 1000).message
