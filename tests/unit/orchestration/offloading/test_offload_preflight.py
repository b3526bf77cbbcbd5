"""Pre-flight knows every case in which a move would fail before anything is frozen, and says it in words."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
from offload_facts import LIBC, PYTHON, node, process, tree, with_file, without

from distributed_grid.agent.inspect.descriptors import OpenFile
from distributed_grid.agent.inspect.facts import TreeFacts
from distributed_grid.agent.inspect.mapped import MappedFile
from distributed_grid.agent.inspect.target import FileFacts, GpuFacts, TargetFacts
from distributed_grid.core.errors import Refused
from distributed_grid.core.resources import GB
from distributed_grid.orchestration.offloading.matcher import Target
from distributed_grid.orchestration.offloading.model import Finding, Need
from distributed_grid.orchestration.offloading.planner import PastMove, Plan, make_plan
from distributed_grid.orchestration.offloading.preflight import MoveOptions, Preflight, choose, preflight


def check(
    facts: TreeFacts, target: TargetFacts | None = None, source: TargetFacts | None = None, **options: Any
) -> Preflight:
    return preflight(
        facts, source or node("gpu-master", facts), target or node("gpu1", facts), MoveOptions(**options)
    )


def finding(found: Preflight, code: str) -> Finding:
    return next(one for one in found.findings if one.code == code)


def test_a_plain_program_goes_live() -> None:
    found = check(tree())
    assert found.stops("live") == [] and choose(found, MoveOptions())[0] == "live"
    assert {one.severity for one in found.findings} == {"notice"}


BLOCKED = [
    (OpenFile(5, "inotify", watches=("ext4", "overlay")), "inotify-overlay"),
    (OpenFile(5, "io_uring"), "io-uring"),
    (OpenFile(5, "unix", "/run/x", state="ESTABLISHED", peer="outside", peer_pids=(400,)), "unix-socket"),
    (OpenFile(5, "unix", state="ESTABLISHED", peer="unknown"), "unix-socket"),
    (OpenFile(5, "inet", protocol="tcp", state="LISTEN", local="10.0.0.5:80"), "bound-address"),
    (OpenFile(5, "inet", protocol="udp", state="CLOSE", local="10.0.0.5:53"), "bound-address"),
    (OpenFile(5, "inet", protocol="udp", state="ESTABLISHED", local="10.0.0.5:4", remote="8.8.8.8:9"), "udp-connected"),
    (OpenFile(5, "regular", "/queue", deleted=True, links=0, mounted=False), "hidden-file"),
    (OpenFile(5, "socket", protocol="alg"), "socket-family"),
    (OpenFile(5, "device", "/dev/fuse"), "device"),
    (OpenFile(5, "device", "/dev/nvidia0"), "gpu"),
    (OpenFile(5, "fifo", "/home/ann/f", peer="outside", end="write"), "fifo"),
    (OpenFile(5, "userfaultfd"), "userfaultfd"),
    (OpenFile(5, "perf"), "perf"),
    (OpenFile(5, "bpf-map"), "descriptor"),
    (OpenFile(5, "tty", "/dev/tty2"), "console"),
    (OpenFile(5, "regular", "/home/ann/x", deleted=True, links=1), "renamed-file"),
]


@pytest.mark.parametrize(("file", "code"), BLOCKED, ids=[f"{code}-{file.kind}" for file, code in BLOCKED])
def test_what_cannot_be_carried(file: OpenFile, code: str) -> None:
    found = check(tree(file))
    assert [one.code for one in found.stops("live")] == [code]
    assert found.stops("relaunch") == []
    strategy, why = choose(found, MoveOptions())
    assert strategy is None and finding(found, code).text in why
    assert choose(found, MoveOptions(relaunch_allowed=True))[0] == "relaunch"
    assert choose(found, MoveOptions(strategy="live", relaunch_allowed=True))[0] is None


NOTICED = [
    (OpenFile(5, "inet", protocol="tcp", state="LISTEN", local="0.0.0.0:80"), "listens"),
    (OpenFile(5, "inet", protocol="tcp6", state="LISTEN", local="[::]:80"), "listens"),
    (OpenFile(5, "unix", "/tmp/s", state="LISTEN"), "unix-listens"),
    (OpenFile(5, "unix", state="ESTABLISHED", protocol="stream", peer="none"), "unix-half"),
    (OpenFile(1, "pipe", "pipe:[9]", flags=os.O_WRONLY, peer="outside", peer_pids=(400,), end="write"), "pipe-out"),
    (OpenFile(5, "regular", "/home/ann/l", locks=("FLOCK ADVISORY WRITE",)), "file-locks"),
    (OpenFile(5, "regular", "/tmp/g", deleted=True, links=0, size_bytes=GB), "deleted-file"),
    (OpenFile(1, "tty", "/dev/pts/4"), "terminal"),
    (OpenFile(5, "inotify"), "inotify"),
    (OpenFile(5, "raw", protocol="raw"), "raw"),
    (OpenFile(5, "regular", "/home/ann/d", flags=os.O_DIRECT), "pinned-memory"),
]


@pytest.mark.parametrize(("file", "code"), NOTICED, ids=[code for _, code in NOTICED])
def test_what_is_only_told(file: OpenFile, code: str) -> None:
    found = check(tree(file))
    assert found.stops("live") == []
    assert finding(found, code).severity == "notice"


@pytest.mark.parametrize("kind", ["eventfd", "epoll", "timerfd", "signalfd", "memfd", "netlink", "directory"])
def test_what_needs_no_word(kind: str) -> None:
    assert {one.code for one in check(tree(OpenFile(5, kind))).findings} == {"from-beginning"}


def test_inner_pipes_and_sockets_are_nobodys_business() -> None:
    facts = tree(
        OpenFile(5, "pipe", "pipe:[9]", peer="inside", end="read"),
        OpenFile(6, "unix", state="ESTABLISHED", peer="inside"), OpenFile(7, "socket", protocol="tcp", state="CLOSE"),
    )  # fmt: skip
    assert {one.code for one in check(facts).findings} == {"from-beginning"}


CUT = [
    (OpenFile(3, "pipe", "pipe:[9]", peer="outside", peer_pids=(400,), end="read"), "pipe-in"),
    (OpenFile(0, "pipe", "pipe:[9]", peer="outside", peer_pids=(400,), peer_reads=True, end="read"), "pipe-in"),
    (OpenFile(7, "pipe", "pipe:[9]", flags=os.O_WRONLY, peer="outside", peer_pids=(400,), end="write"), "pipe-other"),
    (OpenFile(7, "pipe", "pipe:[9]", peer="shared", peer_pids=(400,), end="both"), "pipe-shared"),
]


def test_input_from_who_stays_is_passed_on() -> None:
    file = OpenFile(0, "pipe", "pipe:[9]", peer="outside", peer_pids=(400,), end="read")
    found = check(tree(file))
    assert found.stops("live") == [] and found.mover["feed"]
    told = finding(found, "pipe-in")
    assert told.severity == "notice" and "400" in told.text and "passed on" in told.text
    assert finding(check(tree(file), feed=False), "pipe-in").severity == "asks", "what no stub can give it"
    assert not check(tree(file), feed=False).mover["feed"] and not check(tree()).mover["feed"]


@pytest.mark.parametrize(("file", "code"), CUT)
def test_pipes_are_cut_only_with_consent(file: OpenFile, code: str) -> None:
    found = check(tree(file))
    asked = finding(found, code)
    assert [one.code for one in found.stops("live")] == [code] and found.stops("relaunch") == []
    assert (asked.severity, asked.option) == ("asks", "--cut-pipes") and "400" in asked.text
    assert check(tree(file), cut_pipes=True).stops("live") == []


@pytest.mark.parametrize("end", ["read", "write"])
def test_a_pipe_that_its_shell_left_open_is_only_told_of(end: str) -> None:
    file = OpenFile(250, "pipe", "pipe:[9]", peer="outside", peer_pids=(400,), end=end, stray=True)
    found = check(tree(file))
    assert found.stops("live") == [] and finding(found, "pipe-stray").severity == "notice"
    asked = finding(check(tree(replace(file, stray=False))), {"read": "pipe-in", "write": "pipe-other"}[end])
    assert asked.severity == "asks" and "250>&-" in asked.help


def test_connections_are_closed_only_with_consent() -> None:
    facts = tree(OpenFile(5, "inet", protocol="tcp", state="ESTABLISHED", local="10.0.0.5:4", remote="10.0.0.9:80"))
    asked = finding(check(facts), "tcp")
    assert (asked.severity, asked.option) == ("asks", "--tcp-close") and "10.0.0.9:80" in asked.text
    agreed = check(facts, tcp_close=True)
    assert agreed.stops("live") == [] and agreed.mover["tcp_close"] and "closed" in finding(agreed, "tcp").text


def test_options_for_the_mover() -> None:
    ghost = OpenFile(5, "regular", "/tmp/g", deleted=True, links=0, size_bytes=GB)
    assert check(tree(ghost)).mover["ghost_limit_bytes"] > GB
    assert check(tree(pinned_bytes=4096)).mover["precopy"] is False
    assert "precopy" not in check(tree()).mover


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"tracer_pid": 9}, "traced"),
        ({"readable": False}, "not-readable"),
        ({"root_dir": "/srv/jail"}, "chroot"),
        ({"other_namespaces": ("net",)}, "namespaces"),
        ({"other_namespaces": ("mnt", "pid")}, "namespaces"),
        ({"mapped": (MappedFile("/SYSV00000000", deleted=True),)}, "sysv"),
        ({"mapped": (MappedFile("/dev/infiniband/uverbs0"),)}, "mapped-device"),
        ({"mapped": (MappedFile(LIBC, deleted=True, links=1),)}, "replaced-file"),
        ({"mapped": (MappedFile("/dev/shm/sem.dMuahB", deleted=True, links=1),)}, "named-semaphore"),
        ({"mapped": (MappedFile("/dev/nvidia-uvm"),)}, "gpu"),
    ],
)
def test_trees_that_cannot_be_carried(changes: dict[str, Any], code: str) -> None:
    assert [one.code for one in check(tree(**changes)).stops("live")] == [code]


def test_sessions_and_containers() -> None:
    assert finding(check(replace(tree(), session_leader="beyond")), "session").severity == "blocks"
    assert finding(check(replace(tree(), session_leader="outside")), "session-outside").severity == "notice"
    contained = check(replace(tree(other_namespaces=("mnt", "pid", "net")), container="/docker/abc"))
    assert [one.code for one in contained.stops("relaunch")] == ["container"]
    moved_before = replace(tree(other_namespaces=("mnt", "pid")), under_shim=True)
    assert check(moved_before).stops("live") == []


def test_a_childs_obstacle_counts() -> None:
    facts = tree()
    facts = replace(facts, processes=(*facts.processes, process(OpenFile(5, "io_uring"), pid=501, ppid=500)))
    assert [one.code for one in check(facts).stops("live")] == ["io-uring"]


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"criu": ""}, "no-criu"),
        ({"criu_check": "no vDSO"}, "criu-check"),
        ({"criu_version": "3.17"}, "criu-older"),
        ({"may_checkpoint": False}, "rights"),
        ({"cpu_flags": ("sse4_2",)}, "cpu"),
        ({"machine": "aarch64"}, "machine"),
        ({"memory_available_bytes": 2 * GB - 1}, "memory"),
        ({"tmpfs_free_bytes": GB - 1}, "tmpfs"),
        ({"user": "bob", "user_matches": False}, "user-differs"),
        ({"runs_as_uid": 1001}, "target-rights"),
    ],
)
def test_what_a_target_lacks(changes: dict[str, Any], code: str) -> None:
    facts = tree()
    found = check(facts, node("gpu1", facts, **changes))
    assert [one.code for one in found.stops("live")] == [code]
    assert "gpu1" in finding(found, code).text


def test_what_does_not_matter_on_a_target() -> None:
    facts = tree()
    found = check(facts, node("gpu1", facts, cpu_flags=("avx2", "sse4_2"), kernel="6.1.0", criu_version="4.2.2"))
    assert found.stops("live") == [] and finding(found, "kernel").severity == "notice"


def test_old_criu_and_sockets_on_a_new_kernel() -> None:
    facts = tree(OpenFile(5, "inet", protocol="tcp", state="LISTEN", local="0.0.0.0:80"))
    sides = [node(name, facts, criu_version="4.1.1") for name in ("gpu1", "gpu-master")]
    assert [one.code for one in check(facts, *sides).stops("live")] == ["criu-sockets"]


def test_files_on_the_target() -> None:
    data, log = "/home/ann/work/data.bin", "/home/ann/work/log"
    mapped = (MappedFile(PYTHON, executable=True), MappedFile("/home/ann/v/torch.so", executable=True))
    facts = tree(OpenFile(5, "regular", data, size_bytes=50), OpenFile(1, "regular", log, flags=os.O_WRONLY),
                 mapped=mapped)  # fmt: skip
    there = node("gpu1", facts)
    found = check(facts, there)
    # Open files follow, whatever is there by that name; output goes on in its own file here.
    assert found.files == (data,) and found.file_bytes == 50 and finding(found, "output-file")
    assert check(facts, there, shared_dirs=("/home/ann",)).files == ()
    # Libraries: a system's own must be the same, others can follow, but never over a different one.
    assert check(facts, without(there, PYTHON)).stops("live")[0].code == "file-missing"
    other = with_file(there, FileFacts(PYTHON, True, 10, 1, build_id="cd"))
    assert check(facts, other).stops("live")[0].code == "file-differs"
    assert "/home/ann/v/torch.so" in check(facts, without(there, "/home/ann/v/torch.so")).files
    differs = with_file(there, FileFacts("/home/ann/v/torch.so", True, 10, 1, digest="e"))
    assert check(facts, differs).stops("live")[0].code == "file-differs"
    assert finding(check(facts, without(there, "/home/ann/work")), "cwd-made").severity == "notice"
    large = check(facts, there, staging_limit_bytes=10)
    assert finding(large, "staging-limit").option == "--stage-large" and large.stops("live")
    assert not check(facts, there, staging_limit_bytes=10, stage_large=True).stops("live")


def test_two_nodes_on_one_machine_have_the_same_files() -> None:
    data = "/home/ann/work/data.bin"
    facts = tree(OpenFile(5, "regular", data, size_bytes=50))
    same = [replace(with_file(node(name, facts), FileFacts(data, True, 50, 1, digest="d", identity="1:2")), boot_id="b")
            for name in ("gpu1", "gpu-master")]  # fmt: skip
    assert check(facts, *same).files == ()
    # On different machines the same numbers mean nothing.
    assert check(facts, replace(same[0], boot_id="c"), same[1]).files == (data,)


def test_what_two_nodes_on_one_machine_cannot_both_have() -> None:
    lock = "/home/ann/work/lock"
    held = OpenFile(5, "regular", lock, locks=("FLOCK ADVISORY WRITE",))
    assert [one.code for one in check(tree(held), shared_dirs=("/home",)).stops("live")] == ["lock-shared"]
    for file in (
        OpenFile(5, "inet", protocol="tcp", state="LISTEN", local="0.0.0.0:80"),
        OpenFile(5, "inet", protocol="udp", state="CLOSE", local="0.0.0.0:80"),
        OpenFile(5, "unix", "@name", state="LISTEN", local="@name"),
    ):
        facts = tree(file)
        sides = [node(name, facts, network="n") for name in ("gpu1", "gpu-master")]
        found = check(facts, *sides)
        assert [one.code for one in found.stops("live")] == ["port-taken"] and found.stops("relaunch") == []


def test_relaunch_has_obstacles_of_its_own() -> None:
    facts = tree()
    there = node("gpu1", facts)
    for target, code in ((without(there, PYTHON), "interpreter"), (replace(there, user=""), "user")):
        assert [one.code for one in check(facts, target).stops("relaunch")] == [code]
    assert [one.code for one in check(tree(argv=())).stops("relaunch")] == ["no-command"]
    assert [one.code for one in check(tree(cwd_deleted=True)).stops("relaunch")] == ["cwd-deleted"]
    why = "asked for: it starts from its beginning"
    assert choose(check(facts), MoveOptions(strategy="relaunch")) == ("relaunch", why)


def plan(facts: TreeFacts, past: list[PastMove] | None = None, **options: Any) -> Plan:
    return make_plan(
        facts, node="gpu-master", need=Need(1.0, GB), target=Target("gpu1", 1.0, ("room",), ("0.2 cores free",)),
        source_facts=node("gpu-master", facts), target_facts=node("gpu1", facts), options=MoveOptions(**options),
        past=past or [],
    )  # fmt: skip


def test_plan_says_it_all() -> None:
    facts = tree(OpenFile(5, "regular", "/home/ann/work/d", size_bytes=100), OpenFile(1, "tty", "/dev/pts/1"))
    wire = plan(facts).to_wire("gpu-master")
    assert (wire["pid"], wire["target"], wire["strategy"]) == (500, "gpu1", "live")
    assert wire["bytes"] == GB + 100 and wire["expected_pause_s"] > 0 and wire["cannot_carry"] == []
    assert {"terminal", "shortage"} <= {one["code"] for one in wire["will_notice"]}
    assert "from-beginning" not in {one["code"] for one in wire["will_notice"]}
    again = plan(facts, strategy="relaunch").to_wire("gpu-master")
    assert again["strategy"] == "relaunch" and again["bytes"] == 100
    assert "from-beginning" in {one["code"] for one in again["will_notice"]}


def test_a_plan_that_refuses_has_one_clear_error() -> None:
    refused = plan(tree(OpenFile(5, "io_uring"), tracer_pid=3))
    assert refused.to_wire()["strategy"] == "refuse"
    with pytest.raises(Refused, match="cannot be moved to gpu1") as caught:
        refused.require()
    assert "io_uring" in caught.value.cause and "traced" in caught.value.cause
    assert {one["code"] for one in caught.value.details["reasons"]} == {"io-uring", "traced"}
    good = plan(tree())
    assert good.require() is good


def test_the_pause_is_learnt_from_past_moves() -> None:
    past = [PastMove("live", GB, 0.4), PastMove("live", GB, 0.6), PastMove("live", 100 * GB, 9.0),
            PastMove("relaunch", GB, 5.0)]  # fmt: skip
    found = plan(tree(), past)
    assert found.expected_pause_s == pytest.approx(0.5) and "2 past moves" in found.pause_basis
    assert "estimate" in plan(tree(), past[2:]).pause_basis


# GPUs


def with_gpu(facts: TreeFacts, name: str, **changes: Any) -> TargetFacts:
    mine = facts.pids if name == "gpu-master" else ()
    gpus = (GpuFacts(0, "GPU-other", "A100"), GpuFacts(1, f"GPU-{name}", "H200", mine, (4 * GB,) * len(mine)))
    return replace(node(name, facts, gpus=gpus, gpu_parking="", tmpfs_free_bytes=16 * GB), **changes)


def gpu_check(chosen: tuple[int, ...] = (1,), device: str = "/dev/nvidia0", **changes: Any) -> Preflight:
    facts = tree(OpenFile(5, "device", device))
    here, there = changes.pop("here", {}), changes.pop("there", {})
    return preflight(
        facts, with_gpu(facts, "gpu-master", **here), with_gpu(facts, "gpu1", **there), MoveOptions(), chosen
    )


def test_what_is_on_a_gpu_is_parked_and_taken_up_by_the_same_kind() -> None:
    found = gpu_check()
    assert found.stops("live") == [] and finding(found, "gpu").severity == "notice"
    assert found.mover["gpu_pairs"] == {"GPU-gpu-master": "GPU-gpu1"}
    assert "gpu_pairs" not in check(tree()).mover


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"chosen": (0,)}, "no such GPU free"),
        ({"chosen": ()}, "no such GPU free"),
        ({"here": {"gpu_parking": "570 or later can"}}, "570 or later can"),
        ({"there": {"gpu_parking": "it has no GPU"}}, "on gpu1"),
        ({"here": {"memory_available_bytes": GB}}, "of memory free for the"),
        ({"device": "/dev/kfd"}, "only NVIDIA"),
    ],
)  # fmt: skip
def test_what_on_a_gpu_cannot_be_parked(changes: dict[str, Any], said: str) -> None:
    [stop] = gpu_check(**changes).stops("live")
    assert stop.code == "gpu" and said in stop.text and "relaunch" in stop.help


def test_what_comes_off_a_gpu_needs_room_twice() -> None:
    stops = gpu_check(there={"memory_available_bytes": 9 * GB}).stops("live")
    assert [one.code for one in stops] == ["memory"]
