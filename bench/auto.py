"""Claims: automatic offload reacts within two checks, does as well as a person, and never moves what did not help.

`BENCH_CPU_S=2` tries the overloaded head with less work.
"""

from __future__ import annotations

import json
from dataclasses import replace

from bench import overload
from bench._histories import history, scenes, step
from bench._lab import PROGRAMS, lab_cluster, on_disk, wait_for
from bench._measure import Report
from distributed_grid.orchestration.auto_offload.replay import Outcome, replay
from distributed_grid.orchestration.auto_offload.signals import Settings
from tests.lab.clusters import PYTHON, LabCluster
from tests.lab.hosts import HostSpec

#: Checks, from the first moment above the threshold to the move begun.
REACTION_LIMIT = 2.0
BY_HAND_LIMIT = 1.15
HEAD_MIB = 2048
ROUNDS = 3
QUICK = """
resource_sharing:
  auto_offload: {thresholds: {cpu: 80, memory: 95, gpu: 100}, check_interval_seconds: 1, cooldown_seconds: 2}
offload:
  detect: {min_age_seconds: 5}
"""


def outcomes(settings: Settings) -> list[Outcome]:
    return [replay(history(scene), settings, scene.name) for scene in scenes()]


def replayed_reaction(settings: Settings) -> float:
    """The slowest of some hogs that cross the threshold at different moments between two checks."""
    scene = next(one for one in scenes() if one.name == "one hog appears")
    slowest = 0.0
    for shift in (0.0, 1.0, 2.0, 3.0, 4.0):
        hog = replace(scene.programs[0], starts=-600.0, memory=step(4.0, 40.0, 200.0 + shift))
        records = history(replace(scene, programs=(hog,)))
        crossed = next(
            point.at for record in records for point in record.points
            if point.memory > settings.thresholds["memory"]
        )  # fmt: skip
        moved = replay(records, settings).moves[0].began
        slowest = max(slowest, (moved - crossed) / settings.check_interval_s)
    return slowest


def real_reactions() -> list[float]:
    """On three hosts, with the default interval: a program grows on a head of 2 GiB, until it is moved."""
    found = []
    with lab_cluster(HostSpec("gpu-master", memory_mb=HEAD_MIB), "gpu1", "gpu2") as cluster:
        cluster.grid("offload", "auto", "--enable", "--threshold", "cpu=100", "memory=70")
        for number in range(ROUNDS):
            found.append(_reaction(cluster, f"/root/grown{number}"))
            # Until its cooldown is over and the head is calm again.
            wait_for(lambda: not _status(cluster)["pressure"], 120, "the pressure to end", 1.0)
            wait_for(lambda: not _status(cluster)["cooldown_left_s"], 120, "the cooldown to end", 1.0)
    return found


def _status(cluster: LabCluster) -> dict[str, object]:
    told: dict[str, object] = cluster.json("offload", "auto", "--status")
    return told


def _reaction(cluster: LabCluster, directory: str) -> float:
    head = cluster.head
    head.run(["mkdir", "-p", directory])
    command = f"{PYTHON} {PROGRAMS}/grow.py {directory}/end {HEAD_MIB} 25 > {directory}/log 2>&1"
    known = {one["id"] for one in cluster.json("offload", "status")["active"]}
    process = head.popen(["setsid", "--wait", "sh", "-c", f"{command}; echo rc $? > {directory}/rc"])

    def away() -> dict[str, float]:
        active = [one for one in cluster.json("offload", "status")["active"] if one["id"] not in known]
        return next((one for one in active if one["state"] in ("RUNNING", "CLEANED")), {})

    move = wait_for(away, 180, "the program to be moved by itself", 0.5)
    cluster.grid("offload", "auto", "--record", "/root/checks.jsonl")
    records = [json.loads(line) for line in on_disk(head, "/root/checks.jsonl").read_text().splitlines()]
    points = {point["at"]: point["memory"] for record in records for point in record["points"]}
    crossed = move["created"]
    for at in sorted((at for at in points if at < move["created"]), reverse=True):
        if points[at] <= 0.7:
            break
        crossed = at
    for host in cluster.lab.hosts.values():
        host.write(f"{directory}/end", "")
    process.wait(120)
    if head.read(f"{directory}/rc").strip() != "rc 0":
        raise RuntimeError("the program did not survive")
    return float(move["created"] - crossed) / Settings().check_interval_s


def by_itself_and_by_hand() -> tuple[float, float]:
    with lab_cluster("gpu-master", *overload.WORKERS, more=QUICK) as cluster:
        for host in cluster.lab.hosts.values():
            host.cgroups.limit(overload.QUOTA_CORES, None)

        def limited() -> bool:
            nodes = cluster.json("cluster", "status", timeout=120)["nodes"]
            return all(node["use"]["cpu_cores_real"] <= overload.QUOTA_CORES for node in nodes)

        wait_for(limited, 120, "the nodes to know their limits", 1.0)
        by_hand = overload._all_done_s(cluster, "by-hand", move=True)
        cluster.grid("offload", "auto", "--enable", timeout=120)
        by_itself = overload._all_done_s(cluster, "by-itself", move=False)
        cluster.grid("offload", "auto", "--disable", timeout=120)
    return by_itself, by_hand


def run(report: Report) -> None:
    settings = Settings()
    report.value("reaction to a memory hog, replayed", replayed_reaction(settings), limit=REACTION_LIMIT, unit="checks")
    found = outcomes(settings)
    report.note(f"{'history':40} moves useless ping-pong can't help  s over  with moves")
    for one in found:
        report.note(
            f"{one.name:40} {len(one.moves):>5} {one.useless:>7} {one.ping_pong:>9} {one.cannot_help:>10} "
            f"{one.over_s:>7.0f} {one.over_with_s:>11.0f}"
        )
    useless, twice = sum(one.useless for one in found), sum(one.ping_pong for one in found)
    report.value(f"moves that did not help, {len(found)} histories", useless, limit=0, unit="moves")
    report.value(f"processes moved twice, {len(found)} histories", twice, limit=0, unit="moves")
    report.value(
        "reaction to a memory hog, three hosts", max(real_reactions()), limit=REACTION_LIMIT, unit="checks"
    )
    by_itself, by_hand = by_itself_and_by_hand()
    report.ratio("overloaded head, by itself / by hand", by_itself, by_hand, limit=BY_HAND_LIMIT)
