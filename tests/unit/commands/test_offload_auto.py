"""`grid offload auto` and `watch` at the command line: every spelling, the messages, the bad input."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
from click.testing import CliRunner, Result

from bench._histories import history, scenes
from distributed_grid.commands import offload_auto, offload_watch
from distributed_grid.commands.offload_auto import parse_thresholds
from distributed_grid.config.models import ClusterConfig
from distributed_grid.core.errors import ConfigError, GridError, Refused, UsageError
from distributed_grid.orchestration.auto_offload.replay import write_history

CONFIG = """# my cluster
execution:
  resource_sharing:
    enabled: true   # lend
    auto_offload:
      enabled: false                    # toggled
      thresholds:
        cpu: 80
        memory: 70
"""


def auto(*words: str) -> Result:
    return CliRunner().invoke(offload_auto.command, list(words), catch_exceptions=True)


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["70"], {"memory": 0.7}),
        (["70%"], {"memory": 0.7}),
        (["0.7"], {"memory": 0.7}),
        (["cpu=80", "memory=65", "gpu=90"], {"cpu": 0.8, "memory": 0.65, "gpu": 0.9}),
        (["cpu=80,memory=65"], {"cpu": 0.8, "memory": 0.65}),
        (["CPU=99.5"], {"cpu": 0.995}),
        (["100"], {"memory": 1.0}),
    ],
)
def test_thresholds(words: list[str], wanted: dict[str, float]) -> None:
    assert parse_thresholds(words) == pytest.approx(wanted)


@pytest.mark.parametrize(
    "words",
    [
        ["--enable", "--threshold", "0"], ["--enable", "--threshold", "101"], ["--enable", "--threshold", "lots"],
        ["--enable", "--threshold", "disk=5"], ["--enable", "--threshold", "70", "memory=60"],
        ["--enable", "--threshold", "nan"], ["--enable", "--threshold", "-5"], ["--enable", "--disable"],
        ["--enable", "--status"], ["--disable", "--threshold", "70"], ["--enable", "stray"],
        ["--replay", "/no/such/file"],
    ],
)  # fmt: skip
def test_bad_input_is_one_clear_error(words: list[str]) -> None:
    error = auto(*words).exception
    assert isinstance(error, UsageError) and error.message


@pytest.mark.parametrize("interval", ["0", "-1", "nan", "soon", "1e9"])
def test_bad_intervals(interval: str) -> None:
    result = CliRunner().invoke(offload_watch.command, ["--interval", interval])
    assert isinstance(result.exception, UsageError) and "interval" in result.exception.message


def test_no_configuration_and_no_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    error = auto("--enable").exception
    assert isinstance(error, ConfigError) and "no configuration and no cluster" in error.message
    assert auto("--disable").output == "✓ Auto-offload disabled\n"


def test_disable_without_a_daemon_keeps_the_comments(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(CONFIG.replace("enabled: false ", "enabled: true  "))
    assert auto("--disable", "--config", str(file)).output == "✓ Auto-offload disabled\n"
    assert file.read_text() == CONFIG


def test_a_fault_in_the_file_is_refused_before_anything(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("execution: {resource_sharing: {auto_offload: {enabld: true}}}\n")
    assert isinstance(auto("--enable", "--config", str(file)).exception, GridError)
    assert "enabld" in file.read_text()


@pytest.mark.parametrize("flag", ["--enable", "--disable"])
def test_a_daemon_that_refuses_the_file_leaves_it_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: str
) -> None:
    class Client:
        hello: ClassVar[dict[str, str]] = {}

        async def __aenter__(self) -> Client:
            return self

        async def __aexit__(self, *_: object) -> None:
            pass

        async def call(self, name: str, **_: object) -> dict[str, str]:
            if name == "config_use":
                raise Refused("the cluster that is up was not started from it", code="other-config")
            return {"state": "up"}

    async def connect(*_: object, **__: object) -> Client:
        return Client()

    monkeypatch.setattr("distributed_grid.daemon.client.connect", connect)
    file = tmp_path / "other.yaml"
    file.write_text(CONFIG)
    assert isinstance(auto(flag, "--config", str(file)).exception, Refused)
    assert file.read_text() == CONFIG


def test_what_is_written_fresh_is_valid(tmp_path: Path) -> None:
    file = tmp_path / "cluster_config.yaml"
    offload_auto._write_fresh(file, {"memory": 0.655})
    found = ClusterConfig.from_yaml(file).resource_sharing
    assert found.auto_offload.enabled and found.head_only_mode and found.auto_offload.thresholds.memory == 0.655
    assert "cpu: 80\n" in file.read_text()


def test_replay_prints_decisions_and_a_table(tmp_path: Path) -> None:
    file = tmp_path / "h.jsonl"
    write_history(file, [record.to_wire() for record in history(next(s for s in scenes() if s.name == "fast leak"))])
    text = auto("--replay", str(file)).output
    assert "moving PID 100 (python leak.py) to gpu1" in text and "useless" in text.lower()
    found = json.loads(auto("--replay", str(file), "--format", "json").output)
    assert found["moves"] == 1 and found["useless"] == 0
    later = json.loads(auto("--replay", str(file), "--threshold", "99", "--format", "json").output)
    assert later["moves"] == 0


def test_a_replay_without_processes_says_that_it_does_not_know(tmp_path: Path) -> None:
    file = tmp_path / "h.jsonl"
    made = history(next(s for s in scenes() if s.name == "fast leak"))
    write_history(file, [replace(record, candidates=None).to_wire() for record in made])
    text = auto("--replay", str(file)).output
    assert "no processes are recorded" in text and "can't help" not in text and "UNKNOWN" in text.upper()


def test_watch_once_without_a_daemon(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(offload_watch.command, ["--once", "--format", "json"])
    found = json.loads(result.output)
    assert found["source"] == "local" and found["nodes"][0]["name"] == "gpu-master"
    assert 0 < found["nodes"][0]["levels"]["memory"] <= 1
    assert "Auto: ○ READ-ONLY" in CliRunner().invoke(offload_watch.command, ["--once"]).output


def test_watch_needs_a_terminal() -> None:
    error = CliRunner().invoke(offload_watch.command, []).exception
    assert isinstance(error, UsageError) and "--once" in error.hint
