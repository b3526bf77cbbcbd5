"""Writing keys into a file: comments stay, only the lines meant change, a wrong value changes nothing."""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest

from distributed_grid.config.edit import set_values
from distributed_grid.config.loader import load_cluster_config
from distributed_grid.core.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]
ENABLE = {
    "resource_sharing.auto_offload.enabled": True,
    "resource_sharing.auto_offload.head_only_mode": True,
    "resource_sharing.auto_offload.thresholds.memory": 65,
}


def changed(before: str, after: str) -> list[str]:
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=0)
    return [line for line in lines if line[:1] in "+-" and line[:3] not in ("+++", "---")]


@pytest.mark.parametrize("name", ["my-cluster-enhanced.yaml", "cluster_config.yaml"])
def test_only_the_lines_meant_change(tmp_path: Path, name: str) -> None:
    before = (ROOT / "config" / name).read_text()
    file = tmp_path / name
    file.write_text(before)
    file.chmod(0o640)
    set_values(file, ENABLE)
    lines = [line.split("#")[0].split() for line in changed(before, file.read_text())]
    assert lines == [
        ["-", "enabled:", "false"], ["+", "enabled:", "true"], ["-", "memory:", "70"], ["+", "memory:", "65"],
    ]  # fmt: skip
    auto = load_cluster_config(file, env={}).resource_sharing.auto_offload
    assert auto.enabled and auto.thresholds.memory == 0.65
    assert file.stat().st_mode & 0o777 == 0o640
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_new_keys_do_not_tear_comments_off(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text("# ours\nresource_sharing:\n  enabled: true  # yes\n\n# Ray's own\nray:\n  port: 1\n")
    set_values(file, ENABLE)
    text = file.read_text()
    assert text.startswith("# ours\nresource_sharing:\n") and "enabled: true  # yes\n\n# Ray's own\nray:\n" in text
    assert load_cluster_config(file, env={}).resource_sharing.auto_offload.enabled


@pytest.mark.parametrize("text", ["", "# only a comment\n", "execution:\n", "execution:\n  resource_sharing:\n"])
def test_missing_sections_are_made_where_the_documents_have_them(tmp_path: Path, text: str) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(text)
    set_values(file, {"resource_sharing.auto_offload.enabled": True})
    assert "execution:\n  resource_sharing:\n    auto_offload:\n      enabled: true\n" in file.read_text()
    assert load_cluster_config(file, env={}).resource_sharing.auto_offload.enabled


def test_a_key_in_both_layouts_is_set_in_both(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    text = "resource_sharing:\n  rebalance_interval: 30\n"
    text += "execution:\n  resource_sharing:\n    rebalance_interval_seconds: 30\n"
    file.write_text(text)
    set_values(file, {"resource_sharing.rebalance_interval_seconds": 9})
    assert file.read_text() == text.replace("30", "9")


def test_a_wrong_value_or_file_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text("ray:\n  port: 1\n")
    for values in ({"ray.port": "many"}, {"ray.prot": 1}, {"nodes.9.name": "x"}, {"ray.port.deep": 1}):
        with pytest.raises(ConfigError):
            set_values(file, values)
        assert file.read_text() == "ray:\n  port: 1\n"
    with pytest.raises(ConfigError):
        set_values(tmp_path / "none.yaml", {"ray.port": 1})
    assert [path.name for path in tmp_path.iterdir()] == ["x.yaml"]


def test_quotes_flow_and_order_stay(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    text = "name: 'lab'\nray: {port: 1, dashboard_port: 2}   # both\n"
    text += "alerts:\n    webhook: null\n    command: [a, \"b\"]\n"
    file.write_text(text)
    set_values(file, {"ray.port": 10, "alerts.memory": 0.5})
    after = text.replace("port: 1,", "port: 10,").replace("alerts:\n", "alerts:\n    memory: 0.5\n")
    assert file.read_text().split() == after.split()
    assert load_cluster_config(file, env={}).alerts.memory == 0.5


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    target, link = tmp_path / "real.yaml", tmp_path / "link.yaml"
    target.write_text("ray:\n  port: 1\n")
    link.symlink_to(target)
    set_values(link, {"ray.port": 2})
    assert link.is_symlink() and target.read_text() == "ray:\n  port: 2\n"
