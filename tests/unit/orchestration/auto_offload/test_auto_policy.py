"""The policy, check by check, with made-up signals and no clock but theirs."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from distributed_grid.core.errors import GridError, NoResources, NotFound, Refused, TimedOut, Unavailable
from distributed_grid.core.resources import ResourceType
from distributed_grid.orchestration.auto_offload.faults import fault_of
from distributed_grid.orchestration.auto_offload.forecast import reach_s, trend
from distributed_grid.orchestration.auto_offload.policy import Decision, decide, printable, short
from distributed_grid.orchestration.auto_offload.signals import Candidate, Inputs, NodeSignals, Point, Settings
from distributed_grid.orchestration.auto_offload.state import PolicyState, leave_alone, move_ended, refused

GB = 1024**3
SETTINGS = Settings()


def node(name: str, *, memory: float = 0.2, cpu: float = 0.1, **more: Any) -> NodeSignals:
    return NodeSignals(
        name, cpu=cpu, memory=memory, cpu_cores=16, memory_bytes=64 * GB,
        memory_available_bytes=int(64 * GB * (1 - memory)), **more,
    )  # fmt: skip


def hog(pid: int = 100, memory_gb: float = 20, **more: Any) -> Candidate:
    told = {"command": f"python hog{pid}.py", "type": "training", "cpu_cores": 1.0, "age_s": 500.0, **more}
    return Candidate(f"gpu-master:{pid}:1", pid, "gpu-master", memory_bytes=int(memory_gb * GB), **told)


class Head:
    """A head whose levels a test sets second by second; `check` decides as the loop does."""

    def __init__(self, settings: Settings = SETTINGS, **state: Any) -> None:
        self.settings = settings
        self.state = PolicyState(**state)
        self.at = 1000.0
        self.points: list[Point] = []
        self.workers = [node("gpu1"), node("gpu2", memory=0.3)]
        self.candidates = [hog()]
        self.more: dict[str, Any] = {}
        self.scans = 0
        self.said: list[Decision] = []

    def run(
        self, seconds: int, memory: float = 0.3, cpu: float = 0.1, gpu: float = 0.0, *, slope: float = 0.0
    ) -> Decision:
        """Some seconds, with a check each five; the last decision."""
        for _ in range(seconds):
            self.at += 1
            memory += slope
            self.points.append(Point(self.at, cpu, memory, gpu))
            if self.at % 5 == 0:
                self.said.append(self.check(memory, cpu, gpu))
                if self.said[-1].action == "move":
                    break
        return self.said[-1]

    def check(self, memory: float, cpu: float, gpu: float) -> Decision:
        head = node("gpu-master", memory=memory, cpu=cpu, gpu=gpu, gpu_memory_bytes=8 * GB, **self.more)
        inputs = Inputs(self.at, head, tuple(self.workers), tuple(self.points[-600:]))
        self.state, decision = decide(self.state, inputs, self.settings)
        if decision.action == "scan":
            self.scans += 1
            self.state, second = decide(self.state, replace(inputs, candidates=tuple(self.candidates)), self.settings)
            decision = replace(second, changes=decision.changes + second.changes)
        return decision

    def ended(self, **more: Any) -> None:
        self.state = move_ended(self.state, self.at, self.settings, "gpu-master:100:1", "gpu1", **more)


def test_calm_looks_at_no_process_and_says_so_once() -> None:
    head = Head()
    first = head.run(5)
    assert first.action == "nothing" and first.key == "calm" and first.news
    assert not head.run(300).news and head.scans == 0
    assert first.figures["levels"]["memory"] == 0.3


def test_a_level_that_lasts_moves_the_process_within_two_checks() -> None:
    head = Head()
    head.run(30)
    crossed = head.at
    decision = head.run(30, memory=0.8)
    assert decision.action == "move" and head.at - crossed <= 2 * SETTINGS.check_interval_s
    assert decision.move is not None and decision.move.target.node == "gpu1"
    assert decision.figures["pid"] == 100 and "memory 80% (threshold 70%)" in decision.reason
    assert "frees 20.0 GB (31%)" in decision.reason


def test_a_blink_is_watched_only() -> None:
    head = Head()
    head.run(30)
    head.run(4)
    assert head.run(1, memory=0.95).key == "watching"
    assert head.run(30).action == "nothing" and head.scans == 0


def test_cores_must_be_taken_for_longer_unless_others_wait() -> None:
    head = Head()
    head.candidates = [hog(memory_gb=1, cpu_cores=12.0)]
    head.run(10)
    assert head.run(10, cpu=0.95).action == "nothing"
    assert head.run(10, cpu=0.95).action == "move"
    waiting = Head()
    waiting.candidates = head.candidates
    waiting.run(10)
    waiting.more = {"cpu_some": 60.0}
    assert waiting.run(10, cpu=0.95).action == "move"


def test_falling_fast_is_left_to_fall() -> None:
    head = Head()
    head.candidates = []
    head.run(10, memory=0.8)
    head.candidates = [hog()]
    decision = head.run(5, memory=0.8, slope=-0.015)
    assert decision.key == "falling" and decision.action == "nothing"


def test_a_stall_is_hard_pressure_below_the_hard_level() -> None:
    head = Head()
    head.run(30)
    head.more = {"memory_full": 25.0}
    decision = head.run(5, memory=0.69)
    assert decision.action == "move" and "stalled 25% of the time" in decision.reason
    assert [change.hard for change in decision.changes] == [True]


def test_the_forecast_acts_before_the_threshold() -> None:
    head = Head()
    decision = head.run(120, memory=0.4, slope=0.005)
    assert decision.action == "move" and decision.figures["level"] < 0.7
    assert "memory reaches 90% in" in decision.reason


def test_a_slow_leak_is_told_of_and_left_until_the_threshold() -> None:
    head = Head()
    decision = head.run(120, memory=0.4, slope=0.001)
    assert decision.action == "nothing" and "memory reaches 90% in" in decision.reason


def test_pressure_ends_at_the_lower_level_after_a_while() -> None:
    head = Head()
    head.candidates = []
    head.run(10, memory=0.8)
    assert "memory" in head.state.pressed
    head.run(10, memory=0.68)  # below the threshold, above the clear level
    assert "memory" in head.state.pressed
    head.run(5, memory=0.6)
    assert "memory" in head.state.pressed
    decision = head.run(15, memory=0.6)
    assert not head.state.pressed and decision.key == "calm"


def test_use_that_settles_between_the_levels_is_no_pressure() -> None:
    head = Head()
    head.candidates = []
    head.run(10, memory=0.8)
    head.run(90, memory=0.68)
    assert not head.state.pressed


def test_one_move_at_a_time_then_a_cooldown_from_its_end() -> None:
    head = Head()
    head.candidates = [hog(100, 20), hog(101, 18)]
    assert head.run(20, memory=0.95).action == "move"
    inputs = Inputs(head.at, node("gpu-master", memory=0.95), tuple(head.workers), busy="PID 100 to gpu1")
    assert decide(head.state, inputs, SETTINGS)[1].key == "busy"
    head.run(3, memory=0.95)
    head.ended()
    ended = head.at
    head.candidates = [hog(101, 18)]
    decision = head.run(60, memory=0.8)
    assert decision.action == "move" and head.at - ended >= SETTINGS.cooldown_s


def test_what_failed_or_came_back_is_left_alone() -> None:
    head = Head()
    assert head.run(20, memory=0.8).action == "move"
    head.ended(failed="no room")
    assert head.run(120, memory=0.8).action == "cannot_help"
    head.at += 700
    assert head.run(30, memory=0.8).action == "move"
    home = Head()
    home.state = leave_alone(home.state, home.at, "python hog100.py", "it was brought back", 1800)
    decision = home.run(20, memory=0.8)
    assert decision.action == "cannot_help" and "it was brought back" in decision.reason


def test_a_lost_target_is_shunned_and_the_process_goes_elsewhere() -> None:
    head = Head()
    head.run(20, memory=0.8)
    head.ended(failed="gpu1 is offline", fault="target")
    decision = head.run(60, memory=0.8)
    assert decision.move is not None and decision.move.target.node == "gpu2"


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"mark": "never"}, "marked never"),
        ({"command": "python precious.py"}, "marked never"),
        ({"type": "interactive"}, "interactive processes stay"),
        ({"type": "Daemon"}, "daemon processes stay"),
        ({"movable": False, "why_not": "it belongs to eve"}, "it belongs to eve"),
    ],
)
def test_what_may_not_be_moved_is_said_once_with_what_would_help(more: dict[str, Any], why: str) -> None:
    head = Head(replace(SETTINGS, never=("*precious*",)))
    head.candidates = [hog(**more)]
    decision = head.run(10, memory=0.8)
    assert decision.action == "cannot_help" and why in decision.reason and decision.remedies
    head.run(60, memory=0.8)
    assert [one.action for one in head.said if one.news].count("cannot_help") == 1


def test_no_worker_fits_is_said_with_the_reason_of_each() -> None:
    head = Head()
    head.workers = [node("gpu1", memory=0.8), node("gpu2", online=False), node("gpu3", online_s=3.0)]
    decision = head.run(10, memory=0.8)
    assert decision.action == "cannot_help"
    assert "gpu1: its memory would be at 111%" in decision.reason and "gpu2: offline" in decision.reason
    assert "gpu3: back for only 3s" in decision.reason
    assert any("boost" in remedy for remedy in decision.remedies)


def test_prefer_goes_first_and_avoid_last() -> None:
    settings = replace(SETTINGS, prefer=("*small*",), avoid=("*big*",))
    head = Head(settings)
    head.candidates = [hog(1, 30, command="big"), hog(2, 20, command="plain"), hog(3, 5, command="small")]
    decision = head.run(10, memory=0.95)
    assert decision.figures["batch"] == [3, 2]
    head.candidates = head.candidates[:1]
    head.state = PolicyState()
    assert head.run(10, memory=0.95).figures["pid"] == 1


def test_one_that_suffices_beats_cheap_ones_that_do_not_and_costly_ones() -> None:
    head = Head()
    head.candidates = [hog(1, 3), hog(2, 11), hog(3, 40)]
    assert head.run(10, memory=0.8).figures["pid"] == 2


def test_nothing_is_moved_to_the_head_or_from_elsewhere() -> None:
    head = Head()
    head.workers = [node("gpu-master", memory=0.1)]
    assert head.run(10, memory=0.8).action == "cannot_help"
    head = Head()
    head.candidates = [replace(hog(), node="gpu2")]
    assert head.run(10, memory=0.8).action == "cannot_help"


def test_old_figures_of_the_head_are_not_acted_on() -> None:
    head = Head()
    head.more = {"age_s": 40.0}
    assert head.run(30, memory=0.95).key == "stale"


def test_disabled_does_nothing() -> None:
    head = Head(replace(SETTINGS, enabled=False))
    assert head.run(60, memory=0.95).key == "disabled" and head.scans == 0


def test_gpu_memory_moves_to_a_worker_with_a_free_gpu() -> None:
    head = Head()
    head.candidates = [hog(1, 1, gpu_memory_bytes=6 * GB)]
    head.workers = [node("gpu1"), node("gpu2", gpu_count=1, gpu_memory_bytes=8 * GB, gpu_memory_free_bytes=7 * GB)]
    decision = head.run(30, gpu=0.97)
    assert decision.move is not None and decision.move.target.node == "gpu2"


def test_the_state_survives_a_restart_and_rubbish() -> None:
    head = Head()
    head.run(20, memory=0.8)
    head.ended(failed="x")
    kept = replace(head.state, batch_left=2, below={"memory": 1.0}, said_at={"calm": 5.0})
    assert PolicyState.from_wire(json.loads(json.dumps(kept.to_wire()))) == kept
    assert PolicyState.from_wire({"pressed": 7}) == PolicyState()


def test_the_slope_is_not_bent_by_a_few_odd_points() -> None:
    series = [(float(t), 0.1 + 0.002 * t) for t in range(60)]
    series[10], series[40] = (10.0, 0.9), (40.0, 0.0)
    going = trend(series)
    assert going is not None and abs(going.per_s - 0.002) < 2e-4
    assert abs((reach_s(0.5, 0.9, going) or 0) - 200) < 25
    assert trend(series[:2]) is None and reach_s(0.5, 0.9, None) is None


def test_levels_of_the_settings_are_ordered() -> None:
    for value in (0.05, 0.5, 0.7, 0.97, 1.0):
        one = Settings(thresholds={"cpu": value, "memory": value, "gpu": value})
        assert one.clear_level(ResourceType.MEMORY) < value <= one.hard_level(ResourceType.MEMORY)
        assert one.limit(ResourceType.MEMORY) >= one.hard_level(ResourceType.MEMORY)


def test_what_is_young_stays_until_memory_runs_out() -> None:
    head = Head()
    head.candidates = [hog(age_s=20.0)]
    head.run(60)
    decision = head.run(20, 0.75)
    assert decision.key == "young" and "not run for long enough" in decision.reason
    rising = Head()
    rising.candidates = [hog(age_s=20.0)]
    rising.run(100, 0.4)
    decision = rising.run(40, 0.4, slope=0.012)  # a fast rise shows long before the last two minutes agree on it
    assert decision.action == "move" and "reaches 90% in" in decision.reason
    full = Head()
    full.candidates = [hog(age_s=20.0)]
    full.run(60)
    assert full.run(10, 0.9).action == "move"


def test_where_only_some_are_named_all_others_stay() -> None:
    head = Head(Settings(only=("*hog7*",)))
    assert head.run(10, 0.8).action == "cannot_help" and "not one of offload.only (1)" in head.said[-1].reason
    head = Head(Settings(only=("*hog7*",)))
    head.candidates = [hog(100, 30), hog(7, 10)]
    move = head.run(10, 0.8).move
    assert move is not None and move.candidate.pid == 7


def test_what_its_owner_prefers_to_go_may_be_small() -> None:
    head = Head()
    head.candidates = [hog(memory_gb=0.5)]
    assert head.run(10, 0.8).action == "cannot_help"
    head = Head()
    head.candidates = [hog(memory_gb=0.5, mark="prefer")]
    assert head.run(10, 0.8).action == "move"


def test_busy_jobs_are_spread_until_the_workers_are_as_crowded() -> None:
    """Twelve that each take all they get, on three nodes of half a core: level tells nothing, the head stays full."""
    here, there = 12, {"gpu1": 0, "gpu2": 0}
    settings = Settings(cooldown_s=0.0)

    def half(name: str, busy: int) -> NodeSignals:
        return replace(node(name, cpu=1.0 if busy else 0.02), cpu_cores=0.5)

    state, at = PolicyState(), 1000.0
    for _ in range(40):
        at += 5
        points = tuple(Point(at - 60 + n, 1.0, 0.3, 0.0) for n in range(61))
        jobs = tuple(hog(n, 0.1, cpu_cores=0.5 / here) for n in range(here))
        crowds = {"gpu-master": here, **there}
        workers = tuple(half(name, busy) for name, busy in there.items())
        inputs = Inputs(at, half("gpu-master", here), workers, points, jobs, crowds=crowds)
        state, decision = decide(state, inputs, settings)
        if decision.move is None:
            continue
        here, there = here - 1, {**there, decision.move.target.node: there[decision.move.target.node] + 1}
        state = move_ended(state, at, settings, decision.move.candidate.key, decision.move.target.node)
    assert (here, there) == (4, {"gpu1": 4, "gpu2": 4}) and decision.key == "crowded"


def test_those_that_have_to_go_go_one_after_the_other_and_the_cooldown_follows_the_last() -> None:
    head = Head()
    head.candidates = [hog(1, 8), hog(2, 8), hog(3, 8)]
    head.run(30)
    first = head.run(10, 0.85)
    assert len(first.batch) == 2
    head.ended()
    head.candidates = [hog(2, 8), hog(3, 8)]
    second = head.run(5, 0.85 - 0.125)
    assert second.action == "move", second
    head.ended()
    head.candidates = [hog(3, 8)]
    assert head.run(10, 0.75).key == "cooldown"


def test_memory_that_runs_out_does_not_wait_for_idle_cores() -> None:
    head = Head()
    head.workers = [node("gpu1", cpu=1.0), node("gpu2", cpu=1.0)]
    head.run(30)
    assert head.run(10, 0.75).action == "cannot_help"
    head = Head()
    head.workers = [node("gpu1", cpu=1.0), node("gpu2", cpu=0.5, memory=0.4)]
    head.run(30)
    move = head.run(10, 0.9).move
    assert move is not None and move.target.node == "gpu2"
    head = Head()
    head.workers = [node("gpu1", cpu=1.0)]
    head.run(30)
    assert head.run(10, 0.9).action == "move"


def big(name: str, **more: Any) -> NodeSignals:
    """64 cores and 256 GB."""
    told = {"memory": 0.2, "cpu": 0.1, **more}
    free = int(256 * GB * (1 - told["memory"]))
    return NodeSignals(name, cpu_cores=64, memory_bytes=256 * GB, memory_available_bytes=free, **told)


@pytest.mark.parametrize(
    ("head", "jobs", "must_go"),
    [
        (big("gpu-master", cpu=1.0), [hog(n, 0.1, cpu_cores=0.8) for n in range(80)], 20),
        (big("gpu-master", memory=0.95), [hog(n, 6) for n in range(38)], 13),
        (big("gpu-master", memory=0.95), [hog(n, 3) for n in range(60)], 26),
    ],
    ids=["80 jobs of 0.8 cores on 64", "38 of 2.3 % of the memory", "60 of 1.2 %"],
)
def test_many_that_are_small_go_together(head: NodeSignals, jobs: list[Candidate], must_go: int) -> None:
    points = tuple(Point(1000.0 + n, head.cpu, head.memory, 0.0) for n in range(60))
    inputs = Inputs(1060.0, head, (big("gpu1"), big("gpu2")), points, tuple(jobs))
    decision = decide(PolicyState(), inputs, SETTINGS)[1]
    assert decision.action == "move" and len(decision.batch) == must_go


def test_small_ones_stay_where_large_ones_do_or_all_of_them_would_not_help() -> None:
    head = Head()
    head.candidates = [hog(1, 20), *(hog(n, 1) for n in range(10, 40))]
    decision = head.run(10, 0.9)
    assert decision.figures["pid"] == 1 and decision.figures["ranked"] == 1
    head = Head()
    head.candidates = [hog(n, 0.1) for n in range(10, 40)]  # 3 of 16 GB
    assert head.run(10, 0.9).action == "cannot_help"


def test_what_is_preferred_goes_however_small_if_it_frees_anything() -> None:
    head = Head()
    head.candidates = [hog(memory_gb=0.01, mark="prefer")]
    assert head.run(10, 0.8).action == "move"
    head = Head()
    head.candidates = [hog(memory_gb=0.01, mark="prefer", cpu_cores=0.0)]
    assert head.run(30, cpu=0.95).action == "cannot_help"


def test_a_busy_gpu_is_its_users_whatever_memory_they_have() -> None:
    head = Head()
    head.candidates = [hog(1, 1, gpu_memory_bytes=GB // 20)]
    head.workers = [node("gpu1", gpu_count=1, gpu_memory_bytes=8 * GB, gpu_memory_free_bytes=7 * GB)]
    decision = head.run(30, gpu=0.97)
    assert decision.action == "move" and "frees 51.2 MB (97%)" in decision.reason


def test_what_is_lent_or_needed_at_the_peak_is_not_free() -> None:
    head = Head()
    head.workers = [node("gpu1", lent_memory_bytes=40 * GB), node("gpu2", memory=0.3, lent_memory_bytes=40 * GB)]
    decision = head.run(10, 0.8)
    assert decision.action == "cannot_help" and "(40.0 GB are lent)" in decision.reason
    head = Head()
    head.candidates = [hog(need_bytes=60 * GB)]
    assert "only 51.2 GB of memory are free there" in head.run(10, 0.8).reason
    head = Head()
    head.candidates = [hog(memory_gb=1, cpu_cores=12.0)]
    head.workers = [node("gpu1", lent_cpu_cores=14.0), node("gpu2", memory=0.3)]
    move = head.run(30, cpu=0.95).move
    assert move is not None and move.target.node == "gpu2"


def test_where_the_head_holds_a_boost_is_preferred() -> None:
    head = Head()
    head.workers = [node("gpu1"), node("gpu2", memory=0.3, boosted=True)]
    move = head.run(10, 0.8).move
    assert move is not None and move.target.node == "gpu2"


def test_a_worker_that_does_not_suit_one_process_suits_another() -> None:
    head = Head()
    head.workers = [node("gpu1")]
    head.state = refused(head.state, head.at, hog().key, "gpu1", "no CRIU", "target")
    decision = head.run(10, 0.8)
    assert decision.action == "cannot_help" and "gpu1: no CRIU" in decision.reason
    head.candidates = [hog(), hog(101)]
    move = head.run(10, 0.8).move
    assert move is not None and move.candidate.pid == 101


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (Unavailable("x"), "target"), (TimedOut("x"), "target"), (NoResources("x", code="full"), "target"),
        (GridError("x", code="target-failed"), "target"), (NotFound("x"), "process"), (Refused("x"), "process"),
        (Refused("x", code="woken"), "process"), (TimedOut("x", code="stalled"), "unclear"),
        (GridError("x", code="mover-lost"), "unclear"), (Refused("x", code="cancelled"), "user"),
    ],
)  # fmt: skip
def test_whose_fault_it_was(error: GridError, fault: str) -> None:
    assert fault_of(error) == fault


@pytest.mark.parametrize(("fault", "alone", "shunned"), [
    ("process", True, False), ("target", False, True), ("unclear", True, True), ("user", True, False),
])  # fmt: skip
def test_only_whose_fault_it_was_is_left_out(fault: Any, alone: bool, shunned: bool) -> None:
    state = move_ended(PolicyState(batch_left=3), 1000.0, SETTINGS, "a", "gpu1", failed="no", fault=fault)
    assert ("a" in state.left_alone, "gpu1" in state.shunned) == (alone, shunned)
    assert state.cooldown_until == 1030.0 and state.batch_left == 0
    assert (fault in ("target", "user")) == (not state.failures)


def test_a_command_line_is_one_line_that_no_terminal_obeys() -> None:
    assert short("python -c import\x1b[31m\ntime") == "python -c import [31m time"
    assert printable("ärger → 50 %") == "ärger → 50 %"


def test_a_command_is_told_by_its_names_not_its_directories() -> None:
    assert short("/venv/bin/python /home/ann/train.py --data /data") == "python train.py --data /data"
    assert short("/usr/bin/python3 /home/ann/train.py", 12) == "python3 tra…"
