"""Processes grouped into jobs, the agent's answers about them, and what a node tells about itself."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from distributed_grid.agent.inspect.candidates import Identity, TreeSample, group_trees
from distributed_grid.agent.inspect.facts import TreeFacts
from distributed_grid.agent.inspect.origin import origin_of
from distributed_grid.agent.inspect.service import InspectService
from distributed_grid.agent.inspect.target import TargetFacts, file_facts, target_facts
from distributed_grid.agent.node import AgentNode
from distributed_grid.agent.services import NodeService
from distributed_grid.core.errors import NotFound, Refused, UsageError
from distributed_grid.monitoring.snapshot import ProcessSample
from distributed_grid.wire.rpc import CallContext, RpcServer

CONTEXT = CallContext()


def sample(pid: int, ppid: int, comm: str, *, session: int = 100, uid: int = 1000) -> ProcessSample:
    return ProcessSample(
        pid=pid, start_ticks=pid, ppid=ppid, uid=uid, comm=comm, state="S", cpu_cores=0, cpu_cores_1m=0, cpu_time_s=0,
        rss_bytes=1, peak_rss_bytes=1, threads=1, age_s=100, session=session,
    )  # fmt: skip


def trees(*samples: ProcessSample, **argv: list[str]) -> dict[int, list[int]]:
    identities = {}
    for one in samples:
        words = argv.get(f"p{one.pid}", [one.comm])
        identities[one.pid] = Identity(one.comm, tuple(words), origin_of(one.comm, words))
    return {root.pid: sorted(one.pid for one in members) for root, members in group_trees(samples, identities)}


def test_a_job_is_what_a_shell_started_with_all_its_workers() -> None:
    found = trees(
        sample(1, 0, "systemd", uid=0), sample(90, 1, "tmux: server"), sample(100, 90, "bash"),
        sample(101, 100, "python"), sample(102, 101, "python"), sample(103, 102, "python"), sample(110, 100, "python"),
    )  # fmt: skip
    assert found[101] == [101, 102, 103]
    assert found[110] == [110]
    assert found[100] == [100]


def test_what_leads_a_session_is_a_job_of_its_own_except_below_a_launcher() -> None:
    rows = [sample(100, 1, "bash"), sample(101, 100, "python"), sample(102, 101, "python", session=102)]
    assert trees(*rows)[102] == [102]
    assert trees(*rows, p101=["python", "/venv/bin/torchrun", "train.py"])[101] == [101, 102]


def test_other_users_and_what_has_the_grid_below_it_stand_apart() -> None:
    found = trees(
        sample(100, 1, "bash"), sample(101, 100, "pytest"), sample(102, 101, "python", session=102),
        sample(103, 101, "work"), sample(104, 102, "work"), sample(105, 103, "setuid", uid=0),
        p102=["python", "-m", "distributed_grid.daemon"],
    )  # fmt: skip
    assert 102 not in found
    assert found[101] == [101] and found[103] == [103] and found[104] == [104] and found[105] == [105]


@pytest.mark.parametrize(
    ("comm", "argv", "environment", "origin"),
    [
        ("python", ["python", "-m", "distributed_grid.daemon"], [], "grid"),
        ("python", ["python", "-I", "-S", "/v/distributed_grid/agent/shim.py", "--launch", "d"], [], "grid"),
        ("raylet", ["/v/ray/core/src/ray/raylet/raylet"], [], "ray"),
        ("ray::train", ["ray::train"], [], "ray"),
        ("python", ["python", "x.py"], [b"GRID_RAY_NODE=c/gpu1"], "ray"),
        ("python", ["python", "x.py"], [b"GRID_RAY_NODE=c/gpu1", b"GRID_TASK=t"], "user"),
        ("python", ["python", "/home/u/distributed_grid_test.py"], [], "user"),
        ("python", ["python", "train.py", "--gpu", "1"], [b"PATH=/bin"], "user"),
    ],
)
def test_origin(comm: str, argv: list[str], environment: list[bytes], origin: str) -> None:
    assert origin_of(comm, argv, environment) == origin


@pytest.fixture
def busy() -> Iterator[subprocess.Popen[bytes]]:
    script = "import os, sys\nr, w = os.pipe()\nif os.fork() == 0:\n os.close(w); os.read(r, 1); os._exit(0)\n" \
             "os.write(1, b'r')\nwhile True: pass\n"  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", script], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL,
        start_new_session=True, env={**os.environ, "GRID_OFFLOAD": "Never"},
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.read(1) == b"r"
    yield process
    process.kill()
    process.wait(30)
    process.stdout.close()


async def test_calls(busy: subprocess.Popen[bytes], tmp_path: Path) -> None:
    node = AgentNode("gpu1", "worker", "127.0.0.1", tmp_path, embedded=False, declared=None)
    try:
        service = InspectService(node)
        RpcServer(NodeService(node), service, hello=dict)  # no name is taken twice
        found = [TreeSample.from_wire(one) for one in await service.candidates(CONTEXT)]
        tree = next(one for one in found if one.pid == busy.pid)
        assert len(tree.pids) == 2 and tree.uid == os.getuid() and tree.memory_bytes > 1 << 20
        assert tree.argv[0] == sys.executable and not tree.tty and tree.session_leader
        assert tree.parents and tree.exe and tree.mark == "never"
        alone = await service.candidates(CONTEXT, pid=busy.pid)
        assert [one["pid"] for one in alone] == [busy.pid]
        assert await service.candidates(CONTEXT, min_cpu_cores=1e6, min_memory_bytes=1 << 60) == []
        facts = TreeFacts.from_wire(await service.inspect(CONTEXT, pid=busy.pid, start_ticks=tree.start_ticks))
        assert set(facts.pids) == set(tree.pids)
        with pytest.raises(NotFound):
            await service.inspect(CONTEXT, pid=busy.pid, start_ticks=1)
        values = await service.environment(CONTEXT, pid=busy.pid, start_ticks=tree.start_ticks)
        assert values["GRID_TEST_RUN"]
    finally:
        await asyncio.to_thread(node.sampler.close)


async def test_nonce_is_seen_where_the_file_system_is_the_same(tmp_path: Path) -> None:
    node = AgentNode("gpu1", "worker", "127.0.0.1", tmp_path / "node", embedded=False, declared=None)
    try:
        service = InspectService(node)
        nonce = await service.write_nonce(CONTEXT, directory=str(tmp_path))
        assert await NodeService(node).read_nonce(CONTEXT, path=nonce["path"]) == nonce["text"]
        await service.remove_nonce(CONTEXT, path=nonce["path"])
        assert not Path(nonce["path"]).exists()
        with pytest.raises(UsageError):
            await service.remove_nonce(CONTEXT, path="/etc/passwd")
        with pytest.raises(Refused):
            await service.write_nonce(CONTEXT, directory=str(tmp_path / "missing"))
    finally:
        await asyncio.to_thread(node.sampler.close)


def test_a_node_tells_what_it_has(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("one")
    paths = [str(tmp_path / "data"), "/none", sys.executable, str(tmp_path)]
    facts = target_facts("gpu1", paths=paths, uid=os.getuid())
    assert facts.kernel == os.uname().release and facts.machine == os.uname().machine
    assert facts.memory_available_bytes > 0 and facts.cpu_flags and facts.runs_as_uid == os.geteuid()
    assert not target_facts("gpu1", uid=54321).user
    missing, there = facts.file("/none"), facts.file(sys.executable)
    assert missing is not None and not missing.exists and there is not None and there.exists
    assert TargetFacts.from_wire(facts.to_wire()) == facts


def test_files_are_compared_by_what_is_in_them(tmp_path: Path) -> None:
    for name, text in (("a", "one"), ("b", "one"), ("c", "two")):
        (tmp_path / name).write_text(text)
    a, b, c = (file_facts(str(tmp_path / name)) for name in "abc")
    assert a.same_as(b) and not a.same_as(c)
    assert not a.same_as(file_facts(str(tmp_path / "none"))) and not a.same_as(file_facts(str(tmp_path)))
    assert file_facts(sys.executable).same_as(file_facts(str(Path(sys.executable).resolve())))


@pytest.mark.criu
def test_criu_is_found_and_checked() -> None:
    facts = target_facts("gpu1")
    assert facts.criu and facts.criu_version[0].isdigit()
