"""`grid config` and `grid init`, by their command objects."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from distributed_grid.commands import config as config_command
from distributed_grid.commands import init as init_command
from distributed_grid.config.loader import load_cluster_config
from distributed_grid.core.errors import ConfigError, GridError, Refused


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GRID_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("GRID_CONFIG", raising=False)


def call(command: click.Command, *args: str, error: type[GridError] | None = None, obj: Any = None) -> Result:
    result = CliRunner().invoke(command, args, obj=obj, standalone_mode=True)
    if error is None:
        assert result.exit_code == 0, (result.output, result.exception)
    else:
        assert isinstance(result.exception, error), (result.output, result.exception)
    return result


def config(*args: str, **more: Any) -> Result:
    return call(config_command.command, *args, **more)


def init(*args: str, **more: Any) -> Result:
    return call(init_command.command, *args, **more)


def test_init_then_config(tmp_path: Path) -> None:
    assert "none: the embedded cluster" in config("path").output
    init()
    assert config("path").output.strip() == str(tmp_path / "cluster_config.yaml")
    init(error=Refused)
    before = Path("cluster_config.yaml").read_text()
    Path("cluster_config.yaml").write_text("name: mine\n")
    init("--force")
    assert Path("cluster_config.yaml").read_text() == before
    init("--real-hosts", "sub/lab.yaml")
    assert not load_cluster_config("sub/lab.yaml", env={}).embedded


def test_a_path_is_checked_and_its_nodes_listed() -> None:
    init("--real-hosts", "lab.yaml")
    lines = config("lab.yaml").output.splitlines()
    assert lines[0] == "✓ lab.yaml: valid, 3 nodes"
    assert any(line.split()[:3] == ["gpu1", "worker", "192.168.1.11"] for line in lines)
    data = json.loads(config("validate", "lab.yaml", "--format", "json").output)
    assert data["valid"] and [node["name"] for node in data["nodes"]] == ["gpu-master", "gpu1", "gpu2"]
    Path("lab.yaml").write_text("nope: 1\n")
    assert "lab.yaml:1: nope: unknown key" in str(config("lab.yaml", error=ConfigError).exception)


def test_a_word_that_is_no_path_is_a_wrong_command() -> None:
    assert CliRunner().invoke(config_command.command, ["shwo"]).exit_code == 2


def test_show_with_origins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("x.yaml").write_text("ray:\n  port: 7\nalerts:\n  webhook: https://hooks.example/T0/secret\n")
    monkeypatch.setenv("GRID__RAY__DASHBOARD_PORT", "8")
    rows = [line.split() for line in config("show", "--origin", "--config", "x.yaml").output.splitlines()]
    shown = {row[0]: row[1:] for row in rows}
    assert shown["ray.port"] == ["7", "x.yaml:2"]
    assert shown["ray.dashboard_port"] == ["8", "GRID__RAY__DASHBOARD_PORT"]
    assert shown["ray.start_timeout_seconds"] == ["120", "default"]
    data = json.loads(config("show", "--config", "x.yaml", "--format", "json").output)
    assert data["ray"]["port"] == 7 and "secret" not in json.dumps(data)
    listed = json.loads(config("show", "--origin", "--config", "x.yaml", "--format", "json").output)
    assert listed["ray.port"] == {"value": 7, "origin": "x.yaml:2"}


def test_the_roots_option_counts(tmp_path: Path) -> None:
    Path("y.yaml").write_text("name: by-root\n")

    class Settings:
        config_path = "y.yaml"

    assert json.loads(config("show", "--format", "json", obj=Settings()).output)["name"] == "by-root"
