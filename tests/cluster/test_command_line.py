"""The command line on real clusters: the agents' logs, commands that are broken off as they start, Ray's own tasks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

from tests.lab.clusters import PYTHON, EmbeddedCluster
from tests.lab.waiting import wait_until


def test_the_agents_logs(embedded: EmbeddedCluster, tmp_path: Path) -> None:
    assert "gpu1, version" in embedded.grid("logs", "agent", "-n", "gpu1", "--lines", "100000").stdout
    places = set(embedded.grid("logs", "agent", "--path").stdout.split())
    assert places == {f"{name}:{embedded.home}/nodes/{name}/agent.log" for name in ("gpu-master", "gpu1", "gpu2")}
    said = tmp_path / "said"
    with said.open("wb") as out:
        following = embedded.popen("logs", "agent", "-f", "--lines", "0", stdout=out)

    def told() -> bool:  # it says nothing until something happens: so let things happen until it does
        embedded.grid("execute", "-n", "gpu2", "true")
        return any(line.startswith("[gpu2] ") and "task_start" in line for line in said.read_text().splitlines())

    try:
        wait_until(told, 90, "a line of gpu2's agent")
    finally:
        following.kill()
        following.wait(60)
    for words in (["agent", "-n", "gpu9"], ["daemon", "-n", "gpu1"]):
        done = embedded.grid("logs", *words, check=False)
        assert done.returncode in (2, 3) and "try:" in done.stderr and not done.stdout


def test_json_of_what_is_not_over_and_of_what_failed(embedded: EmbeddedCluster) -> None:
    started = embedded.json("execute", "-n", "gpu1", "--detach", "--", "sleep", "600")
    assert started["exit_code"] is None and started["state"] == "running"
    embedded.grid("jobs", "cancel", started["id"])
    done = embedded.grid("execute", "-n", "gpu9", "--format", "json", "true", check=False)
    told = json.loads(done.stderr)["error"]
    assert (done.returncode, done.stdout) == (3, "") and (told["code"], told["exit_code"]) == ("unknown-node", 3)


def audited(embedded: EmbeddedCluster, word: str) -> bool:
    return word in embedded.grid("logs", "audit", "--lines", "1000").stdout


def test_ctrl_c_while_a_command_is_being_started(embedded: EmbeddedCluster) -> None:
    def jobs() -> list[dict[str, Any]]:
        return [job for job in embedded.json("jobs", "list", "-n", "gpu2") if job["argv"] == argv]

    agent = embedded.pid_of("agent:gpu2")
    argv = ["sleep", "600001"]

    def begun_unanswered() -> subprocess.Popen[str] | None:
        """The command, written down while the node does not answer; None if the node was missed before it came."""
        os.kill(agent, signal.SIGSTOP)
        process = embedded.popen("execute", "-n", "gpu2", *argv, stderr=subprocess.PIPE, text=True)
        wait_until(lambda: jobs() or not embedded.node("gpu2")["online"], 60, "the command to be written down")
        if jobs():
            return process
        process.kill()
        process.communicate(timeout=60)
        os.kill(agent, signal.SIGCONT)
        wait_until(lambda: embedded.node("gpu2")["online"], 60, "gpu2 to be back")
        return None

    try:
        # It is written down, and the node does not answer. On a busy machine a command may take longer to begin than
        # a silent node is waited for.
        process = next(filter(None, (begun_unanswered() for _ in range(5))), None)
        assert process is not None, "the node was always missed first"
        process.send_signal(signal.SIGINT)
        os.kill(agent, signal.SIGCONT)
        said = process.communicate(timeout=120)[1]
        assert process.returncode == 130, said
        assert not jobs()

        # The node is away: nothing is written down yet.
        os.kill(agent, signal.SIGSTOP)
        wait_until(lambda: not embedded.node("gpu2")["online"], 60, "gpu2 to be missed")
        argv = ["sleep", "600002"]
        process = embedded.popen("execute", "-n", "gpu2", *argv, stderr=subprocess.PIPE, text=True)
        wait_until(lambda: audited(embedded, "600002"), 60, "the daemon to have it")
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=120)[1]
        assert process.returncode in (130, 5), said
    finally:
        os.kill(agent, signal.SIGCONT)
    wait_until(lambda: embedded.node("gpu2")["online"], 60, "gpu2 to be back")
    assert not jobs()
    left = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, timeout=60).stdout
    assert "sleep 60000" not in left


RAY_PROGRAM = """
import sys, ray
ray.init(logging_level="error", log_to_driver=False)

@ray.remote(num_cpus=1)
def waits_in_ray():
    import time
    time.sleep(600)

@ray.remote(num_cpus=0)
class HoldsInRay:
    def ping(self):
        return 1

holder = HoldsInRay.remote()
ray.get(holder.ping.remote())
task = waits_in_ray.remote()
print("ready", flush=True)
sys.stdin.read()
"""


def test_distribute_status_shows_rays_own_tasks(embedded: EmbeddedCluster) -> None:
    environment = {**embedded.environment(), **embedded.json("env")}
    program = subprocess.Popen(
        [PYTHON, "-c", RAY_PROGRAM], env=environment, cwd=embedded.cwd, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True,
    )  # fmt: skip

    def running() -> dict[str, Any] | None:
        status = embedded.json("distribute", "status")
        names = {task["name"] for task in status["tasks"] or () if task["state"] == "RUNNING" and task["node"]}
        return status if "waits_in_ray" in names else None

    try:
        assert program.stdout and program.stdout.readline() == "ready\n"
        status = wait_until(running, 120, "the task to run")
        assert status is not None and [one["class"] for one in status["actors"]] == ["HoldsInRay"]
        table = embedded.grid("distribute", "status").stdout
        assert "waits_in_ray" in table and "HoldsInRay" in table and "AgentActor" not in table
    finally:
        program.communicate(timeout=60)
    wait_until(lambda: embedded.json("distribute", "status")["tasks"] == [], 60, "its tasks to be gone")
