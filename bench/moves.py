"""Claim: a live move pauses a program for a fraction of what dump, copy and restore with plain CRIU do.

Programs of 200 MB and 2 GB that change 1 % and 5 % of their memory each second, between two hosts, both ways in one
run. The pause is the program's own longest time of doing nothing. `BENCH_SIZES_MIB=50,100` tries smaller ones.
"""

from __future__ import annotations

import itertools
import os
import time
from typing import Any

from bench._lab import Program, lab_cluster, wait_for
from bench._measure import Report
from distributed_grid.agent.moving import criu
from tests.lab.clusters import LabCluster
from tests.lab.host import Host

SIZES_MIB = [int(word) for word in os.environ.get("BENCH_SIZES_MIB", "200,2048").split(",")]
SHARES = (0.01, 0.05)
LIMITS = (0.4, 0.1)  # of the small and the large program, encryption off
STRICT_LIMIT = 0.2
SLOW_LIMIT = 0.05
SLOW_MBIT = 1000.0
OWN_LIMIT_S = 0.5
SOURCE, TARGET = "gpu-master", "gpu1"
_numbers = itertools.count(1)


def run(report: Report) -> None:
    with lab_cluster(SOURCE, TARGET, more="offload:\n  encrypt: false\n") as cluster:
        _warm_up(cluster)
        for size, limit in zip(SIZES_MIB, LIMITS, strict=False):
            for share in SHARES:
                peer = _plain(cluster, size, share)
                _compare(report, cluster, size, share, peer, limit, "encryption off")
                if size == SIZES_MIB[-1] and share == SHARES[0]:
                    _compare(report, cluster, size, share, peer, STRICT_LIMIT, "strict", "--strict")
                _encrypted(report, cluster, size, share, peer)
        _slow(report, cluster)


def _warm_up(cluster: LabCluster) -> None:
    """The first move tries what the kernel can; that is not part of any pause."""
    _ours(cluster, 10, 0.01)


def _compare(
    report: Report, cluster: LabCluster, size: int, share: float, peer: float, limit: float | None, how: str, *more: str
) -> None:
    pause, move = _ours(cluster, size, share, *more)
    report.ratio(f"pause, {size} MiB, {share:.0%}/s, {how} / plain", pause, peer, limit=limit)
    report.note(_where(move))
    report.value(f"our own time, {size} MiB, {share:.0%}/s, {how}", _own_s(move), limit=OWN_LIMIT_S, unit="s")


def _encrypted(report: Report, cluster: LabCluster, size: int, share: float, peer: float) -> None:
    _set_encryption(cluster, True)
    try:
        _compare(report, cluster, size, share, peer, None, "encrypted")
    finally:
        _set_encryption(cluster, False)


def _set_encryption(cluster: LabCluster, on: bool) -> None:
    before = _reloads(cluster)
    text = cluster.head.read(cluster.config)
    was, wanted = f"encrypt: {str(not on).lower()}", f"encrypt: {str(on).lower()}"
    cluster.head.write(cluster.config, text.replace(was, wanted), mode=0o600)
    wait_for(lambda: _reloads(cluster) - before, 60, "the configuration to be read again", every_s=0.3)


def _reloads(cluster: LabCluster) -> set[float]:
    return {one["at"] for one in cluster.json("events", "--limit", "50") if one["kind"] == "config.reloaded"}


def _slow(report: Report, cluster: LabCluster) -> None:
    """The large one, over a link of 1 Gbit/s."""
    size, share = SIZES_MIB[-1], SHARES[0]
    cluster.lab.shape(TARGET, SLOW_MBIT)
    try:
        peer = _plain(cluster, size, share)
        _compare(report, cluster, size, share, peer, SLOW_LIMIT, "1 Gbit/s")
    finally:
        cluster.lab.shape(TARGET, None)


def _ours(cluster: LabCluster, size: int, share: float, *more: str) -> tuple[float, dict[str, Any]]:
    """The pause of a move by our command, as the program saw it, and what the command says of the move."""
    source, target = cluster.lab[SOURCE], cluster.lab[TARGET]
    program = Program(source, size, share, next(_numbers))
    began = time.time()
    move: dict[str, Any] = cluster.json("offload", "execute", str(program.pid), "-t", TARGET, *more, timeout=600)
    move["began"] = began
    at = program.rounds()
    wait_for(lambda: program.rounds() > at + 5, 300, "the program to go on")
    pause = program.finish(target, source)
    program.process.wait(60)
    return pause, move


def _own_s(move: dict[str, Any]) -> float:
    """From `execute` until it runs on the target, without pre-copy and pause: the command's start, the plan, movers."""
    [running] = [step["at"] for step in move["steps"] if step["state"] == "RUNNING"]
    figures = move.get("figures") or {}
    return float(running - move["began"] - (figures.get("precopy_s") or 0.0) - (move["pause_s"] or 0.0))


def _where(move: dict[str, Any]) -> str:
    """The steps of the pause, each with the time from the freeze to its end."""
    figures = move.get("figures") or {}
    names = ("stopped_s", "dumped_s", "pages_s", "images_s", "files_s", "copied_s")
    told = ", ".join(f"{name[:-2]} {figures[name]:.3f}" for name in names if name in figures)
    steps = {step["state"]: step["at"] for step in move["steps"]}
    begun = figures.get("frozen_at") or steps.get("FROZEN", 0.0)
    after = [name for name in ("STAGED", "COMMITTED", "RUNNING") if name in steps]
    rest = ", ".join(f"{name.lower()} {steps[name] - begun:.3f}" for name in after)
    late, total = figures.get("late_bytes", 0) / 1e6, (move["bytes"] or 0) / 1e6
    return f"from the freeze, in s: {told}, {rest}; {late:.1f} MB of {total:.0f} MB travelled in the pause"


def _plain(cluster: LabCluster, size: int, share: float) -> float:
    """`criu dump`, copy by SSH, `criu restore`: the program's longest time of doing nothing."""
    source, target = cluster.lab[SOURCE], cluster.lab[TARGET]
    program = Program(source, size, share, next(_numbers))
    tool = criu.require()
    place = f"{program.directory}/images"
    for host in (source, target):
        host.run(["mkdir", "-p", place])
    # Left stopped until it is copied: its shell would write "Killed" into the very log.
    source.run([tool, "dump", "-t", str(program.pid), "-D", place, "-o", "dump.log", "--leave-stopped"], timeout=300)
    copy = f"tar -C / -cf - {place[1:]} {program.log[1:]} | ssh -o BatchMode=yes {TARGET} tar -C / -xf -"
    source.run(["sh", "-c", copy], timeout=600)
    source.run(["kill", "-9", str(program.pid)])
    restore = f"{tool} restore -D {place} -o restore.log -d"
    stay = f"while kill -0 {program.pid} 2>/dev/null; do sleep 0.1; done"
    # In pids of its own, as any restore on another machine needs; its first process stays as long as the program.
    spaces = ["unshare", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc"]
    restored = target.popen([*spaces, "sh", "-c", f"{restore} && {stay}"])
    at = program.rounds(target)
    wait_for(lambda: program.rounds(target) > at + 5, 300, "the restored program to go on")
    pause = program.finish(target, target)
    restored.wait(60)
    _clear(program, source, target)
    return pause


def _clear(program: Program, *hosts: Host) -> None:
    for host in hosts:
        host.run(["rm", "-rf", program.directory])
    program.process.wait(60)
