"""Twenty-two histories of a head and its workers, made by rule and seed: what automatic offload must do no harm in."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from distributed_grid.orchestration.auto_offload.signals import Candidate, Inputs, NodeSignals, Point

GB = 1024**3
STEP_S = 5.0
START = 1_700_000_000.0
Shape = Callable[[float], float]


def flat(value: float) -> Shape:
    return lambda _t: value


def ramp(start: float, per_s: float, most: float = 1e9) -> Shape:
    return lambda t: min(most, start + per_s * t)


def step(low: float, high: float, at: float) -> Shape:
    return lambda t: low if t < at else high


def saw(low: float, high: float, period_s: float) -> Shape:
    return lambda t: low + (high - low) * ((t % period_s) / period_s)


def bursts(low: float, high: float, period_s: float, length_s: float) -> Shape:
    return lambda t: high if t % period_s < length_s else low


def wave(low: float, high: float, period_s: float) -> Shape:
    return lambda t: low + (high - low) * (0.5 - 0.5 * math.cos(2 * math.pi * t / period_s))


@dataclass(frozen=True, slots=True)
class Program:
    """A process on the head: memory in GB and cores, by its own age."""

    name: str
    memory: Shape
    cores: Shape = field(default_factory=lambda: flat(0.5))
    starts: float = -600.0
    ends: float = 1e9
    movable: bool = True
    kind: str = "compute intensive"


@dataclass(frozen=True, slots=True)
class Scene:
    name: str
    programs: tuple[Program, ...] = ()
    base_memory: Shape = field(default_factory=lambda: flat(8.0))
    base_cores: Shape = field(default_factory=lambda: flat(1.0))
    worker_memory: float = 0.2
    worker_cpu: float = 0.1
    #: Online by time, for each worker.
    workers: tuple[Callable[[float], bool], ...] = (lambda _t: True, lambda _t: True)
    seconds: float = 900.0
    noise: float = 0.004
    total_gb: float = 64.0
    cores: float = 16.0
    #: Moves that a good policy makes: at least, at most.
    expected: tuple[int, int] = (0, 0)


def _flap(t: float) -> bool:
    return t % 40 < 25


def scenes() -> list[Scene]:
    def p(name: str, memory: Shape, **more: object) -> Program:
        return Program(name, memory, **more)  # type: ignore[arg-type]

    busy = flat(4.0)
    small = [p(f"small{i}", flat(0.3), cores=flat(0.05)) for i in range(30)]
    late = p("hog", flat(40.0), starts=120.0)
    return [
        Scene("idle"),
        Scene("idle, full to the brim but steady below", (p("cache", flat(36.0)),)),
        Scene("bursty memory, seconds long", (p("burst", bursts(4, 48, 60, 3)),)),
        Scene("bursty cores", (p("make", flat(2.0), cores=bursts(1, 15, 30, 8)),)),
        Scene("sawtooth below the threshold", (p("gc", saw(4, 34, 60)),)),
        Scene("sawtooth across the threshold", (p("gc", saw(10, 46, 120)),), expected=(1, 1)),
        Scene("wave below the threshold", (p("tide", wave(4, 32, 300)),)),
        Scene("slow leak", (p("leak", ramp(10, 0.05)),), expected=(1, 1)),
        Scene("fast leak", (p("leak", ramp(5, 1.0, 40)),), expected=(1, 1)),
        Scene("one hog appears", (p("hog", ramp(0.1, 5, 40), starts=120.0),), expected=(1, 1)),
        Scene("a hog that ends by itself soon", (p("short", ramp(0.1, 20, 40), starts=120.0, ends=134.0),)),
        Scene("a hog that goes down again", (p("peak", bursts(10, 50, 450, 4)),)),
        Scene(
            "two hogs", (p("first", ramp(20, 0.2, 26)), p("second", ramp(20, 0.2, 26), starts=100.0)), expected=(1, 2)
        ),
        Scene(
            "two hogs and many small ones",
            (p("first", flat(22.0)), p("second", flat(20.0)), *small),
            expected=(1, 2),
        ),
        Scene("cores taken for good", (p("spin", flat(1.0), cores=flat(13.0)), p("mild", flat(1.0))), expected=(1, 1)),
        Scene("workers as full as the head", (p("hog", flat(45.0)),), worker_memory=0.75),
        Scene("workers as busy as the head", (p("spin", flat(1.0), cores=flat(14.5)),), worker_cpu=0.95),
        Scene("both links flap", (late,), workers=(_flap, _flap)),
        Scene("one link flaps", (late,), workers=(_flap, lambda _t: True), expected=(1, 1)),
        Scene(
            "eighty jobs of one core on 64 cores",
            tuple(p(f"job{i}", flat(0.5), cores=flat(0.8)) for i in range(80)),
            cores=64.0, total_gb=256.0, expected=(15, 25),
        ),
        Scene(
            "forty processes of 2.3 %",
            tuple(p(f"part{i}", flat(6.0), cores=flat(0.5)) for i in range(38)),
            base_memory=flat(15.0), cores=64.0, total_gb=256.0, expected=(10, 16),
        ),
        Scene(
            "nothing may be moved",
            (p("shell", flat(44.0), kind="interactive"), p("root", flat(4.0), cores=busy, movable=False)),
        ),
    ]


def history(scene: Scene, seed: int = 1) -> list[Inputs]:
    """One record per check, with the seconds between as points."""
    total_gb, cores = scene.total_gb, scene.cores
    chance = random.Random(f"{scene.name}:{seed}")
    found: list[Inputs] = []
    points: list[Point] = []

    def levels(t: float) -> tuple[float, float]:
        memory, used = scene.base_memory(t), scene.base_cores(t)
        for program in scene.programs:
            if program.starts <= t < program.ends:
                memory += program.memory(t - max(0.0, program.starts))
                used += program.cores(t - max(0.0, program.starts))
        shake = chance.gauss(0, scene.noise)
        return min(0.99, max(0.0, used / cores + shake)), min(0.99, max(0.0, memory / total_gb + shake / 4))

    online_since = [-1000.0 if up(0.0) else None for up in scene.workers]
    steps = int(scene.seconds / STEP_S)
    for number_of_step in range(steps):
        t = number_of_step * STEP_S
        for second in range(int(STEP_S)):
            at = t - STEP_S + 1 + second
            cpu, memory = levels(max(0.0, at))
            points.append(Point(START + at, cpu, memory, 0.0))
        head = NodeSignals(
            "gpu-master", cpu=points[-1].cpu, memory=points[-1].memory, cpu_cores=cores,
            memory_bytes=int(total_gb * GB), memory_available_bytes=int((1 - points[-1].memory) * total_gb * GB),
        )  # fmt: skip
        workers = []
        for number, up in enumerate(scene.workers):
            online = up(t)
            since = online_since[number]
            online_since[number] = (t if since is None else since) if online else None
            workers.append(
                NodeSignals(
                    f"gpu{number + 1}", online=online, online_s=t - (online_since[number] or 0.0) if online else 0.0,
                    age_s=0.0 if online else 20.0, cpu=scene.worker_cpu, memory=scene.worker_memory, cpu_cores=cores,
                    memory_bytes=int(total_gb * GB),
                    memory_available_bytes=int((1 - scene.worker_memory) * total_gb * GB),
                )
            )  # fmt: skip
        candidates = tuple(
            Candidate(
                key=f"gpu-master:{100 + number}:1", pid=100 + number, node="gpu-master",
                command=f"python {one.name}.py", type=one.kind, cpu_cores=one.cores(t - max(0.0, one.starts)),
                memory_bytes=int(one.memory(t - max(0.0, one.starts)) * GB), age_s=t - one.starts, movable=one.movable,
                why_not="" if one.movable else "not yours",
            )
            for number, one in enumerate(scene.programs)
            if one.starts <= t < one.ends
        )  # fmt: skip
        speed = {f"gpu{number + 1}": 1e9 for number in range(len(scene.workers))}
        found.append(Inputs(START + t, head, tuple(workers), tuple(points), candidates, bandwidth=speed))
        points = []
    return found
