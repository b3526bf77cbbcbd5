"""What the doctor makes of the facts: each one ok, a note or a problem, in words, with its next step. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from distributed_grid.core.resources import GB, format_bytes

Level = Literal["ok", "note", "problem"]

SKEW_NOTE_S, SKEW_PROBLEM_S = 0.5, 5.0
DISK_NOTE_BYTES, DISK_PROBLEM_BYTES = 5 * GB, GB // 2


@dataclass(frozen=True, slots=True)
class Finding:
    check: str
    level: Level
    text: str
    next: str = ""
    node: str = ""

    def to_wire(self) -> dict[str, str]:
        return {"check": self.check, "node": self.node, "level": self.level, "text": self.text, "next": self.next}


def judge_python(version: tuple[int, ...], executable: str) -> Finding:
    text = f"{'.'.join(str(part) for part in version[:3])} at {executable}"
    if version[:2] < (3, 11):
        return Finding("python", "problem", f"{text}; 3.11 or later is needed", "make setup")
    return Finding("python", "ok", text)


def judge_token(exists: bool, mode: int, ray_mode: str | None) -> Finding:
    """`ray_mode`: RAY_AUTH_MODE of the running head, None where none runs on this machine."""
    if ray_mode is not None and ray_mode != "token":
        return Finding("token", "problem", "the Ray head runs without its token, open to anybody who reaches its port",
                       "grid cluster stop; grid cluster start")  # fmt: skip
    if not exists:
        return Finding("token", "note", "there is no token yet; `grid cluster start` makes it")
    if mode & 0o077:
        return Finding("token", "problem", f"the token's file has mode {mode:03o}, others may read it",
                       'chmod 600 "$GRID_HOME/ray_token" (or ~/.distributed_grid/ray_token)')  # fmt: skip
    return Finding("token", "ok", "on, and only you can read it" if ray_mode else "only you can read it")


def judge_port(what: str, port: int, free: bool, holder: str, embedded: bool) -> Finding:
    """Before a start: whether Ray's wish can be met."""
    if not port:
        return Finding("ports", "ok", f"{what}: any free one")
    if free:
        return Finding("ports", "ok", f"{what}: {port} is free")
    if embedded:
        return Finding("ports", "note", f"{what}: {port} is held by {holder}; another is taken")
    return Finding("ports", "problem", f"{what}: {port} is held by {holder}",
                   f"end that program, or set another port under `ray:` (0: any); holder: {holder}")  # fmt: skip


def judge_disk(where: str, free_bytes: int, node: str = "") -> Finding:
    text = f"{format_bytes(free_bytes)} free at {where}"
    if free_bytes < DISK_PROBLEM_BYTES:
        return Finding("disk", "problem", text, "make room: Ray, spools and images need it", node)
    if free_bytes < DISK_NOTE_BYTES:
        return Finding("disk", "note", text, "images of moved processes need their memory's size here", node)
    return Finding("disk", "ok", text, node=node)


def judge_criu(state: Mapping[str, Any], node: str = "") -> Finding:
    if state["works"]:
        return Finding("criu", "ok", f"{state['version']} works ({state['path']})", node=node)
    without = "running processes can't be moved live, only started again"
    if not state["path"]:
        return Finding("criu", "note", f"{state['why']}: {without}", "make setup, as root for its packages", node)
    if "root" in state["why"] or "privilege" in state["why"].lower() or "CAP_" in state["why"]:
        step = "run the cluster as root"
        if not state.get("is_script"):
            step = f"setcap cap_checkpoint_restore,cap_sys_ptrace+eip {state['path']}, or {step}"
    else:
        step = f"{state['path']} check says what the kernel lacks"
    return Finding("criu", "note", f"{state['version']} does not work: {state['why']}: {without}", step, node)


def judge_gpu(driver: Mapping[str, Any], wanted: int | None, declared: bool, node: str = "") -> Finding:
    """`declared`: the cluster only rehearses GPUs, so that fewer real ones are no fault."""
    if driver["state"] == "broken":
        return Finding("gpu", "problem", f"the driver does not answer: {driver['why']}",
                       "nvidia-smi; a driver updated under a running kernel needs a reboot", node)  # fmt: skip
    count = int(driver["count"])
    text = f"{count} GPU, driver {driver['version']}" if count else "no GPU on this machine"
    if wanted and wanted > count:
        if declared:
            return Finding("gpu", "note", f"{text}; {wanted} declared", node=node)
        return Finding("gpu", "problem", f"{text}, but the configuration says {wanted}",
                       "correct gpu_count of the node, or look at nvidia-smi -L there", node)  # fmt: skip
    return Finding("gpu", "ok", text, node=node)


def judge_versions(node: str, health: Mapping[str, Any], here: Mapping[str, str]) -> list[Finding]:
    """`here`: python, ray and grid on this machine. Ray wants the same Ray and the same Python 3.x everywhere."""
    found = []
    install = f"grid cluster install --node {node}"
    if health["ray_version"] != here["ray"]:
        text = f"{health['ray_version'] or 'none'} there, {here['ray']} here"
        found.append(Finding("ray", "problem", text, install, node))
    else:
        found.append(Finding("ray", "ok", health["ray_version"], node=node))
    if health["python"].split(".")[:2] != here["python"].split(".")[:2]:
        text = f"{health['python']} there, {here['python']} here; Ray needs the same"
        found.append(Finding("python", "problem", text, install, node))
    if health.get("package_version") and health["package_version"] != here["grid"]:
        text = f"grid {health['package_version']} there, {here['grid']} here"
        found.append(Finding("version", "note", text, install, node))
    return found


def judge_clock(node: str, skew_s: float, round_trip_s: float) -> Finding:
    certain = abs(skew_s) - round_trip_s / 2
    text = f"{skew_s * 1000:+.0f} ms from here (answer in {round_trip_s * 1000:.0f} ms)"
    step = f"have both set their clocks by NTP: timedatectl status on {node}"
    if certain > SKEW_PROBLEM_S:
        return Finding("clock", "problem", text, step, node)
    if certain > SKEW_NOTE_S:
        return Finding("clock", "note", text, step, node)
    return Finding("clock", "ok", text, node=node)


def judge_node(
    name: str, facts: Mapping[str, Any], here: Mapping[str, str], wanted_gpus: int | None, embedded: bool
) -> list[Finding]:
    """Everything about one node that answers, or why it does not."""
    if not facts["online"]:
        return [Finding("agent", "problem", str(facts["reason"]), "grid events --node " + name, name)]
    health = facts["health"]
    found = [Finding("agent", "ok", f"answers in {facts['round_trip_s'] * 1000:.0f} ms", node=name)]
    found += judge_versions(name, health, here)
    found.append(judge_clock(name, facts["skew_s"], facts["round_trip_s"]))
    found.append(judge_disk(health["state_dir"], health["disk_free_bytes"], name))
    found.append(judge_disk("/tmp", health["tmp_free_bytes"], name))
    shares = "sees the files of the head" if facts["shares_files"] else "has files of its own; they are copied"
    found.append(Finding("files", "ok", shares, node=name))
    found.append(judge_criu(health["criu_state"], name))
    found.append(judge_gpu(health["gpu_driver"], wanted_gpus, embedded, name))
    return found
