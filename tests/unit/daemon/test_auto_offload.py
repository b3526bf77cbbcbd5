"""The daemon's loop around the policy, with a mover of the test's own and a clock that moves when told to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from distributed_grid.agent.inspect.candidates import TreeSample
from distributed_grid.config.models import ClusterConfig, DetectConfig
from distributed_grid.core.clock import ManualClock
from distributed_grid.core.errors import GridError, NoResources, NotFound, Refused, TimedOut, Unavailable
from distributed_grid.daemon import auto_record
from distributed_grid.daemon.auto_offload import AutoOffloadService
from distributed_grid.daemon.auto_world import World
from distributed_grid.monitoring.resource_metrics import ResourceMetricsCollector
from distributed_grid.monitoring.snapshot import NodeSnapshot
from distributed_grid.orchestration.auto_offload.replay import replay
from distributed_grid.orchestration.auto_offload.signals import Inputs, Settings
from distributed_grid.orchestration.offloading.detector import too_small
from distributed_grid.wire.rpc import CallContext

GB = 1024**3
ROOT = CallContext(uid=0)


def row(pid: int, memory_gb: float = 20, **more: Any) -> dict[str, Any]:
    return {
        "pid": pid, "node": "gpu-master", "host_pid": pid, "start_ticks": 7, "user": "ann", "uid": 1000,
        "command": f"python hog{pid}.py", "type": "Training", "confidence": 0.9, "cpu_cores": 1.0,
        "memory_bytes": int(memory_gb * GB), "gpu_memory_bytes": 0, "age_s": 500.0, "reasons": [], "movable": True,
        "why_not": "", **more,
    }  # fmt: skip


class FakeMover:
    def __init__(self) -> None:
        self.rows = [row(100)]
        self.plans: dict[Any, Any] = {}
        self.moves: list[dict[str, Any]] = []
        self.executed: list[dict[str, Any]] = []
        self.planned: list[tuple[Any, Any]] = []
        self.scans = 0
        self.scan_error: GridError | None = None
        #: What a person does while it plans.
        self.meanwhile: Callable[[], None] = lambda: None
        self.error: GridError | None = None
        #: While set, a move stays in flight.
        self.held: asyncio.Event | None = None

    async def offload_scan(self, *, node: str | None = None, everything: bool = False) -> list[dict[str, Any]]:
        self.scans += node == "gpu-master"
        if self.scan_error:
            raise self.scan_error
        return self.rows if node == "gpu-master" else []

    async def offload_plan(
        self, *, pid: int | str, target_node: str | None = None, options: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        self.planned.append((pid, target_node))
        self.meanwhile()
        fine = {"strategy": "live", "why": "", "target": target_node, "blocking": []}
        plan = self.plans.get((pid, target_node)) or self.plans.get(pid, fine)
        if isinstance(plan, GridError):
            raise plan
        found: dict[str, Any] = plan
        return found

    async def offload_execute(self, *, pid: int | str, **more: Any) -> AsyncIterator[dict[str, Any]]:
        self.executed.append({"pid": pid, **more})
        yield {"state": "PLANNED", "step": "x"}
        if self.held:
            await self.held.wait()
        if self.error:
            raise self.error
        yield {"done": {"state": "RUNNING", "target": more["target_node"]}}

    async def offload_status(self, *, limit: int = 20, brief: bool = False) -> dict[str, Any]:
        return {"statistics": {}, "active": self.moves, "finished": []}


class Events:
    def __init__(self) -> None:
        self.rows: list[tuple[str, str]] = []

    def publish(self, kind: str, text: str, *, node: str = "", **data: Any) -> None:
        json.dumps(data)
        self.rows.append((kind, text))

    def of(self, kind: str) -> list[str]:
        return [text for one, text in self.rows if one == kind]


class Store(dict[str, Any]):
    def put(self, key: str, value: Any) -> None:
        self[key] = json.loads(json.dumps(value))


class Bench:
    def __init__(self, path: Path) -> None:
        self.clock = ManualClock(1_700_000_000.0)
        self.config = make_config()
        self.collector = ResourceMetricsCollector(clock=self.clock, head_node_id="gpu-master", head_only_mode=True)
        self.mover, self.events, self.store, self.path = FakeMover(), Events(), Store(), path
        self.lent: dict[str, int] = {}
        self.boosted: list[str] = []
        self.online = {"gpu-master": True, "gpu1": True, "gpu2": True}
        self.service = self.make()

    def make(self) -> AutoOffloadService:
        world = World(
            config=lambda: self.config, collector=self.collector, link=lambda node: (self.online[node], 0.0),
            bandwidth=lambda _a, _b: None, lent=lambda node: {"cpu": 0.0, "memory_bytes": self.lent.get(node, 0)},
            boosted=lambda: self.boosted, events=self.events, store=self.store, state_path=lambda: self.path,
        )  # fmt: skip
        return AutoOffloadService(world, self.mover, clock=self.clock, look_again_s=0.0)

    async def run(self, seconds: int, memory: float) -> None:
        for second in range(1, seconds + 1):
            self.clock.advance(1)
            for node, level in (("gpu-master", memory), ("gpu1", 0.2), ("gpu2", 0.3)):
                used = int(64 * GB * level)
                self.collector.feed(NodeSnapshot(node, self.clock.time(), 16, 1.0, 64 * GB, used, 64 * GB - used))
            if second % 5 == 0:
                await self.service.check()
                await self.settle()

    async def settle(self) -> None:
        """Let a move that was begun come to its end, unless it is held."""
        for _ in range(20):
            await asyncio.sleep(0)

    @property
    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.path.read_text())
        return found


def make_config(enabled: bool = True, memory: float = 70, **more: Any) -> ClusterConfig:
    auto = {"enabled": enabled, "thresholds": {"memory": memory}}
    return ClusterConfig.model_validate({"resource_sharing": {"auto_offload": auto}, **more})


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path / "grid_offload_state.json")


async def test_enable_pressure_move_disable(bench: Bench) -> None:
    """The acceptance of the design: on, pressure, it fires; off, it does not."""
    await bench.run(20, 0.4)
    assert bench.mover.executed == []
    await bench.run(10, 0.8)
    assert [one["pid"] for one in bench.mover.executed] == [100]
    assert bench.mover.executed[0]["target_node"] == "gpu1" and bench.mover.executed[0]["automatic"]
    assert "memory 80%" in bench.mover.executed[0]["reason"]
    assert len(bench.events.of("auto.move")) == 1 and bench.events.of("auto.moved")
    assert [one.resource.value for one in bench.collector.active_pressure()] == ["memory"]  # told by the collector
    bench.config = make_config(enabled=False)
    bench.mover.rows = [row(200)]
    await bench.run(120, 0.9)
    assert len(bench.mover.executed) == 1
    assert bench.state["enabled"] is False


async def test_a_changed_configuration_holds_at_the_next_check(bench: Bench) -> None:
    await bench.run(30, 0.6)
    assert bench.mover.executed == []
    bench.config = make_config(memory=50)
    await bench.run(5, 0.6)
    assert [one["pid"] for one in bench.mover.executed] == [100]


async def test_one_in_flight_then_the_cooldown_from_its_end(bench: Bench) -> None:
    bench.mover.held = asyncio.Event()
    bench.mover.rows = [row(100), row(101)]
    await bench.run(60, 0.95)
    assert len(bench.mover.executed) == 1
    bench.mover.held.set()
    await bench.settle()
    bench.mover.rows = [row(101)]
    await bench.run(25, 0.9)
    assert len(bench.mover.executed) == 1
    await bench.run(10, 0.9)
    assert [one["pid"] for one in bench.mover.executed] == [100, 101]


async def test_a_move_by_hand_counts_as_one_in_flight(bench: Bench) -> None:
    bench.mover.moves = [
        {"id": "offload_1_9", "pid": 9, "node": "gpu-master", "target": "gpu1", "state": "FROZEN", "command": "x"}
    ]
    await bench.run(60, 0.9)
    assert bench.mover.executed == []


async def test_a_refused_plan_leads_to_the_next_best(bench: Bench) -> None:
    bench.mover.rows = [row(100, 22), row(101, 21), row(102, 20)]
    bench.mover.plans = {
        100: {"strategy": "refuse", "why": "a device", "blocking": ["/dev/kvm"]},
        101: {"strategy": "relaunch", "why": "no CRIU", "blocking": []},
    }
    for pid in (100, 101):
        bench.mover.rows[pid - 100]["memory_bytes"] = 22 * GB
    bench.mover.plans[102] = bench.mover.plans.get(102, {"strategy": "live", "blocking": []})
    await bench.run(10, 0.9)
    assert [one["pid"] for one in bench.mover.executed] == [102]


async def test_relaunch_where_the_configuration_allows_it(bench: Bench) -> None:
    bench.mover.plans = {100: {"strategy": "relaunch", "why": "no CRIU", "blocking": []}}
    bench.config = make_config(offload={"auto_relaunch": True})
    await bench.run(10, 0.9)
    assert [one["pid"] for one in bench.mover.executed] == [100]


async def test_a_failed_move_is_told_and_not_tried_again_soon(bench: Bench) -> None:
    bench.mover.error = GridError("could not be restored", cause="no room")
    await bench.run(200, 0.8)
    assert len(bench.mover.executed) == 1
    assert bench.events.of("auto.failed") == [
        "Automatic offload of PID 100 to gpu1 failed: could not be restored: no room"
    ]
    assert len(bench.events.of("auto.cannot_help")) == 1


async def test_a_worker_that_dies_meanwhile_is_not_the_processs_fault(bench: Bench) -> None:
    bench.mover.error = Unavailable("gpu1 is not online")
    await bench.run(10, 0.8)
    bench.mover.error = None
    await bench.run(40, 0.8)
    assert [one["target_node"] for one in bench.mover.executed] == ["gpu1", "gpu2"]


def moving(state: str, pid: int = 100, **more: Any) -> dict[str, Any]:
    return {
        "id": f"offload_1_{pid}", "pid": pid, "node": "gpu-master", "target": "gpu1", "state": state,
        "command": f"python hog{pid}.py", "automatic": True, "created": 2_000_000_000.0, **more,
    }  # fmt: skip


def pids(bench: Bench) -> list[int]:
    return [one["pid"] for one in bench.mover.executed]


async def test_what_a_person_calls_off_stays(bench: Bench) -> None:
    bench.mover.error = Refused("the move was called off", code="cancelled")
    await bench.run(200, 0.8)
    assert pids(bench) == [100]
    [told] = bench.events.of("auto.failed")
    assert "called off by hand" in told and "called off by hand" in bench.events.of("auto.cannot_help")[0]
    bench.mover.error, bench.mover.rows = None, [row(200)]  # its worker was innocent
    await bench.run(10, 0.8)
    assert [one["target_node"] for one in bench.mover.executed] == ["gpu1", "gpu1"]


async def test_what_the_planner_refuses_is_never_moved_and_the_sixth_is(bench: Bench) -> None:
    bench.mover.rows = [row(pid, 22) for pid in range(100, 105)] + [row(105, 5)]
    bench.mover.plans = {pid: {"strategy": "refuse", "why": "a device"} for pid in range(100, 105)}
    await bench.run(5, 0.95)
    assert pids(bench) == []
    assert "5 moves were refused, the last because: a device" in bench.events.of("auto.nothing")[-1]
    assert not bench.events.of("auto.move") and not bench.events.of("auto.failed")
    await bench.run(5, 0.95)
    assert pids(bench) == [105] and bench.mover.executed[0]["target_node"] == "gpu1"


async def test_a_refusal_does_not_use_up_the_batch(bench: Bench) -> None:
    bench.mover.rows = [row(pid, 8) for pid in range(100, 106)]
    bench.mover.plans = {pid: Refused("it has the device /dev/kvm open") for pid in (100, 101)}
    bench.config = make_config(resource_sharing={"auto_offload": {"enabled": True, "cooldown_seconds": 600}})
    for _ in range(3):  # three must go, one after the other, and only then there is a cooldown
        await bench.run(5, 0.95)
        bench.mover.rows = [one for one in bench.mover.rows if one["pid"] not in pids(bench)]
    assert pids(bench) == [102, 103, 104]


async def test_live_only_unless_the_configuration_allows_more(bench: Bench) -> None:
    await bench.run(10, 0.8)
    assert bench.mover.executed[0]["options"] == {"automatic": True, "strategy": "live"}


@pytest.mark.parametrize(
    "fault",
    [
        NoResources("gpu1 has no room for it", code="full"), Unavailable("gpu1 is not online", code="node-offline"),
        TimedOut("gpu1 did not answer"), Refused("gpu1 takes nothing in", code="target-refuses"),
        {"strategy": "refuse", "why": "CRIU is not installed on gpu1", "cannot_carry": [{"code": "no-criu"}]},
    ],
)  # fmt: skip
async def test_a_fault_of_the_target_leads_to_the_other_worker(bench: Bench, fault: Any) -> None:
    bench.mover.plans = {(100, "gpu1"): fault}
    await bench.run(5, 0.8)
    assert [one["target_node"] for one in bench.mover.executed] == ["gpu2"]


async def test_a_fault_of_the_process_is_not_tried_elsewhere(bench: Bench) -> None:
    bench.mover.plans = {
        100: {"strategy": "refuse", "why": "both", "cannot_carry": [{"code": "no-criu"}, {"code": "device"}]}
    }
    await bench.run(60, 0.8)
    assert pids(bench) == [] and bench.mover.planned == [(100, "gpu1")]


async def test_what_is_lent_is_not_free_and_a_boost_is_preferred(bench: Bench) -> None:
    bench.lent = {"gpu1": 40 * GB}
    await bench.run(5, 0.8)
    assert bench.mover.planned == [(100, "gpu2")]  # not even asked for
    other = Bench(bench.path)
    other.boosted = ["gpu2"]
    await other.run(5, 0.8)
    assert other.mover.planned == [(100, "gpu2")]


@pytest.mark.parametrize("error", [NotFound("there is no process 100"), Refused("somebody woke it", code="woken")])
async def test_a_process_that_is_gone_is_not_its_workers_fault(bench: Bench, error: GridError) -> None:
    bench.mover.error = error
    await bench.run(5, 0.8)
    bench.mover.error, bench.mover.rows = None, [row(200)]
    await bench.run(40, 0.8)
    assert [one["target_node"] for one in bench.mover.executed] == ["gpu1", "gpu1"]


async def test_a_line_that_breaks_after_the_move_did_makes_it_the_workers_fault(bench: Bench) -> None:
    looks = 0

    def link(node: str) -> tuple[bool, float]:
        nonlocal looks
        looks += node == "gpu1" and bench.mover.error is not None and bool(bench.mover.executed)
        return looks <= 3, 0.0

    object.__setattr__(bench.service._world, "link", link)
    bench.mover.error = GridError("the move broke off", code="mover-lost")
    await bench.run(5, 0.8)
    assert looks > 3
    looks, bench.mover.error = 0, None
    await bench.run(40, 0.8)
    assert [one["target_node"] for one in bench.mover.executed] == ["gpu1", "gpu2"]


async def test_a_move_in_doubt_does_not_stop_the_next(bench: Bench) -> None:
    bench.mover.held = asyncio.Event()
    await bench.run(5, 0.9)
    bench.mover.moves = [moving("IN_DOUBT")]
    bench.mover.rows, bench.online["gpu1"] = [row(200)], False
    await bench.run(5, 0.9)
    assert "grid offload resolve offload_1_100" in bench.events.of("auto.failed")[0]
    bench.mover.held = None
    await bench.run(40, 0.9)
    assert [(one["pid"], one["target_node"]) for one in bench.mover.executed] == [(100, "gpu1"), (200, "gpu2")]


async def test_switched_off_while_it_plans(bench: Bench) -> None:
    def off() -> None:
        bench.config = make_config(enabled=False)

    bench.mover.meanwhile = off
    await bench.run(60, 0.8)
    assert bench.mover.planned and pids(bench) == [] and not bench.events.of("auto.move")


async def test_a_move_by_hand_that_begins_while_it_plans(bench: Bench) -> None:
    def by_hand() -> None:
        bench.mover.moves = [moving("FROZEN", 9)]

    bench.mover.meanwhile = by_hand
    await bench.run(5, 0.8)
    assert bench.mover.planned and pids(bench) == []
    bench.mover.meanwhile, bench.mover.moves = lambda: None, []
    await bench.run(5, 0.8)
    assert pids(bench) == [100]


async def test_a_scan_that_fails_is_a_decision(bench: Bench) -> None:
    bench.mover.scan_error = TimedOut("the processes of gpu-master were not listed within 30 s")
    await bench.run(60, 0.8)
    [told] = bench.events.of("auto.cannot_help")
    assert "can't be seen: the processes of gpu-master were not listed" in told and "grid doctor" in told
    status = await bench.service.auto_status(ROOT)
    assert status["levels"]["memory"] == 0.8 and status["decision"]["action"] == "cannot_help"
    bench.mover.scan_error = None
    await bench.run(5, 0.8)
    assert pids(bench) == [100]


async def test_a_scan_that_hangs_is_a_decision_too(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    async def hang(**_: Any) -> list[dict[str, Any]]:
        await asyncio.Event().wait()
        return []

    monkeypatch.setattr(bench.mover, "offload_scan", hang)
    for limit in ("SCAN_LIMIT_S", "RECORD_SCAN_LIMIT_S"):
        monkeypatch.setattr(f"distributed_grid.daemon.auto_offload.{limit}", 0.01)
    await bench.run(10, 0.8)
    assert "were not listed within" in bench.events.of("auto.cannot_help")[0]


@pytest.mark.parametrize(
    ("found", "moved", "told"),
    [
        ([], 1, "the daemon was started anew"),
        ([moving("ABORTED", reason="out of memory")], 1, "out of memory"),
        ([moving("CLEANED")], 2, ""),
        ([moving("FROZEN")], 1, "-"),
        ([moving("IN_DOUBT")], 1, "grid offload resolve"),
    ],
    ids=["no trace", "aborted", "arrived", "under way", "in doubt"],
)
async def test_a_restart_in_mid_move(bench: Bench, found: list[dict[str, Any]], moved: int, told: str) -> None:
    """What was begun counts: a failure leaves the process alone, a success does not, and what flies is waited for."""
    bench.mover.held = asyncio.Event()
    await bench.run(5, 0.8)
    await bench.service.close()
    bench.mover.held, bench.mover.moves = None, found
    bench.service = bench.make()
    await bench.run(60, 0.8)
    assert pids(bench) == [100] * moved
    if told == "-":
        assert not bench.events.of("auto.failed") and not bench.events.of("auto.moved")
    elif told:
        assert told in bench.events.of("auto.failed")[0]
    else:
        assert not bench.events.of("auto.failed") and bench.events.of("auto.moved")


async def test_the_record_holds_processes_without_pressure_and_each_point_once(bench: Bench) -> None:
    bench.config = make_config(enabled=False)
    await bench.run(300, 0.65)
    records = [one async for one in bench.service.auto_record(ROOT)]
    times = [point["at"] for record in records for point in record["points"]]
    assert len(times) == len(set(times)) == 300
    assert 5 <= sum(record["candidates"] is not None for record in records) <= 6 and bench.mover.scans <= 6
    history = [Inputs.from_wire(record) for record in records]
    assert replay(history, Settings()).moves == []
    lower = Settings(thresholds={"cpu": 0.8, "memory": 0.6, "gpu": 0.9})
    assert [one.candidate.pid for one in replay(history, lower).moves] == [100]


async def test_the_record_is_small(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.mover.rows = [row(pid, 0.01, movable=False, why_not="not yours") for pid in range(200)]
    await bench.run(600, 0.9)
    records = bench.service._records
    assert len(records) == 120 and records.size_bytes < 120 * 8192
    monkeypatch.setattr(auto_record, "MOST_BYTES", 50_000)
    await bench.run(5, 0.9)
    assert records.size_bytes <= 50_000 and len(list(records)) == len(records) > 1


async def test_a_preview_asks_the_planner(bench: Bench) -> None:
    bench.config = make_config(enabled=False)
    bench.mover.rows = [row(100, 22), row(101, 20)]
    bench.mover.plans = {100: Refused("it has the device /dev/kvm open")}
    await bench.run(20, 0.8)
    assert (await bench.service.auto_preview(ROOT))["pid"] == 101
    bench.mover.plans[101] = bench.mover.plans[100]
    found = await bench.service.auto_preview(ROOT)
    assert found["action"] == "cannot_help" and "/dev/kvm" in found["reason"]
    assert not bench.service._state.left_alone


async def test_what_was_brought_back_stays(bench: Bench) -> None:
    bench.mover.moves = [{
        "id": "offload_1_9", "pid": 9, "node": "gpu1", "target": "gpu-master", "state": "RUNNING",
        "command": "python hog100.py",
    }]  # fmt: skip
    await bench.run(60, 0.8)
    assert bench.mover.executed == [] and "brought back" in bench.events.of("auto.cannot_help")[0]


async def test_marks_in_the_environment(bench: Bench) -> None:
    bench.mover.rows = [row(100, mark="never"), row(101, mark="avoid"), row(102)]
    await bench.run(10, 0.8)
    assert [one["pid"] for one in bench.mover.executed] == [102]


async def test_small_processes_fill_a_small_head(bench: Bench) -> None:
    tree = TreeSample(100, 7, (100,), 0, (0,), "ann", "python", ("python",), age_s=500, memory_bytes=3 * GB)
    small, young = too_small(tree, DetectConfig(min_memory_gb=4)), too_small(replace(tree, age_s=5), DetectConfig())
    bench.mover.rows = [row(100, 3, movable=False, why_not=small), row(101, 9, age_s=5, movable=False, why_not=young)]
    await bench.run(10, 0.75)
    assert [one["pid"] for one in bench.mover.executed] == [100]


async def test_a_dry_run_says_and_moves_nothing(bench: Bench) -> None:
    await bench.service.auto_apply(ROOT, dry_run=True)
    await bench.run(60, 0.8)
    assert bench.mover.executed == [] and bench.state["dry_run"]
    assert bench.events.of("auto.move")[0].startswith("Dry run, nothing is moved: memory 80%")
    assert len(bench.events.of("auto.move")) == 1


async def test_state_file_and_status(bench: Bench) -> None:
    bench.mover.moves = [{
        "id": "offload_1_9", "pid": 9, "node": "gpu-master", "target": "gpu1", "state": "RUNNING", "command": "x",
        "secret": "not for the file",
    }]  # fmt: skip
    await bench.run(10, 0.3)
    state = bench.state
    assert state["enabled"] and state["head"] == "gpu-master" and state["thresholds"]["memory"] == 0.7
    assert state["active_offloads"][0]["id"] == "offload_1_9" and "secret" not in state["active_offloads"][0]
    assert state["history"][0]["text"].startswith("No pressure")
    written = bench.path.stat().st_mtime_ns
    await bench.run(30, 0.3)
    assert bench.path.stat().st_mtime_ns == written  # nothing new, nothing written
    bench.path.write_text("damaged")
    bench.path.unlink()
    await bench.run(5, 0.3)
    assert bench.state["enabled"]
    status = await bench.service.auto_status(ROOT)
    assert status["levels"]["memory"] == 0.3 and status["decision"]["action"] == "nothing"


async def test_a_restart_remembers_what_to_leave_alone(bench: Bench) -> None:
    bench.mover.error = GridError("no")
    await bench.run(10, 0.8)
    bench.service = bench.make()
    await bench.run(100, 0.8)
    assert len(bench.mover.executed) == 1


async def test_memory_alert_once_per_crossing(bench: Bench, tmp_path: Path) -> None:
    bench.config = make_config(enabled=False, alerts={"memory": 75})
    for level in (0.5, 0.8, 0.8, 0.74, 0.8, 0.6, 0.8):
        await bench.run(10, level)
    assert len(bench.events.of("alert.memory")) == 2


async def test_preview_and_record_change_nothing(bench: Bench) -> None:
    bench.config = make_config(enabled=False)
    await bench.run(20, 0.8)
    found = await bench.service.auto_preview(ROOT)
    assert found["action"] == "move" and found["pid"] == 100 and bench.mover.executed == []
    assert len([one async for one in bench.service.auto_record(ROOT)]) == 4
    with pytest.raises(Refused):
        await bench.service.auto_apply(CallContext(uid=4_000_000), dry_run=False)


async def test_no_figures_no_decision(bench: Bench) -> None:
    assert await bench.service.check() is None
    with pytest.raises(Unavailable):
        await bench.service.auto_preview(ROOT)


async def test_the_loop_survives_a_bad_check_and_ends_when_told(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    checks = 0

    async def bad() -> None:
        nonlocal checks
        checks += 1
        bench.clock.advance(10)
        raise RuntimeError("a fault") if checks % 2 else GridError("an error")

    monkeypatch.setattr(bench.service, "check", bad)
    task = asyncio.create_task(bench.service.run())
    async with asyncio.timeout(30):
        while checks < 4:
            await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
