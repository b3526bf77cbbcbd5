"""Claim: the memory pool is about as fast as one plain TCP stream, and on one host as a copy in memory.

Everything goes through the pool as a program uses it, with real memory servers in processes of their own. A trial run:
`BENCH_POOL_MIB=64 BENCH_POOL_TIMES=3 BENCH_POOL_WITHOUT=link,ray python -m bench pool`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import shlex
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from bench._measure import Report, Sample, sample_pair, timed
from bench._pool_peers import RAW, Flight, PingPong, RawStream, RayActor, Redis, ray_actor
from distributed_grid.orchestration.distributed_memory_pool import DistributedMemoryPool, SyncMemoryPool
from tests.unit.orchestration.distributed_memory_pool.world import World

MIB = 1024**2
#: The largest block. A trial run may be smaller; the figures count with 1 GiB and five times.
LARGEST = int(os.environ.get("BENCH_POOL_MIB", "1024")) * MIB
TIMES = int(os.environ.get("BENCH_POOL_TIMES", "7"))
CONNECTIONS = 5
WITHOUT = set(os.environ.get("BENCH_POOL_WITHOUT", "").split(","))
SIZES = sorted({min(64 * MIB, LARGEST), min(256 * MIB, LARGEST), LARGEST})
MIDDLE = SIZES[0]
ACTOR_SIZES = (64 * 1024, MIB, *SIZES[:2])
#: Little requests in one turn, and turns: many short ones, so that a noisy neighbour disturbs all of them alike.
ROUNDS, TURNS = 250, 8
BUSY_POLL_S = 60e-6
NODE = "gpu1"
ROOT = Path(__file__).resolve().parents[1]


@contextlib.contextmanager
def _world(shared: bool) -> Iterator[World]:
    home = Path(tempfile.mkdtemp(prefix="gb-", dir="/tmp"))
    before = os.environ.get("GRID_HOME")
    os.environ["GRID_HOME"] = str(home)
    world = World(home, shared=shared, available_bytes=8 * 1024 * MIB)
    try:
        yield world
    finally:
        world.close()
        shutil.rmtree(home, ignore_errors=True)
        os.environ.pop("GRID_HOME")
        if before is not None:
            os.environ["GRID_HOME"] = before


def run(report: Report) -> None:
    parts: dict[str, Callable[[Report, World, SyncMemoryPool], None]] = {
        "stream": _streams, "small": _small, "memory": _extra_memory, "fresh": _fresh, "loop": _loop,
        "random": _random, "redis": _redis, "flight": _flight,
    }  # fmt: skip
    with _world(shared=False) as world, world.pool(compression="off") as pool:
        for name, part in parts.items():
            if name not in WITHOUT:
                part(report, world, pool)
    if "shared" not in WITHOUT:
        with _world(shared=True) as world, world.pool(compression="off") as pool:
            _shared(report, pool)
            if "ray" not in WITHOUT:
                _ray_on_one_host(report, pool)
    if "ray" not in WITHOUT:
        _ray_between_hosts(report)
    if "link" not in WITHOUT:
        _link(report)


def _noise(size: int) -> bytes:
    return os.urandom(MIB) * (size // MIB) + bytes(size % MIB)


def _name(size: int) -> str:
    return f"{size // MIB} MiB" if size >= MIB else f"{size // 1024} KiB"


def _streams(report: Report, world: World, pool: SyncMemoryPool) -> None:
    for size in SIZES:
        _stream(report, world, size)


def _stream(report: Report, world: World, size: int) -> None:
    """Over several connections each: one and the same TCP connection is quick or slow for as long as it lasts."""
    taken: dict[str, tuple[list[float], list[float]]] = {"write": ([], []), "read": ([], [])}
    data, place = memoryview(_noise(size)), memoryview(bytearray(size))
    for _ in range(CONNECTIONS):
        with world.pool(compression="off") as pool, contextlib.closing(RawStream(size)) as raw:
            block = pool.allocate(size, NODE)
            pairs: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
                "write": (functools.partial(pool.write, block, data), functools.partial(raw.write, data)),
                "read": (functools.partial(pool.read_into, block, place), functools.partial(raw.read, place)),
            }
            for what, pair in pairs.items():
                for into, one in zip(taken[what], sample_pair(*pair, times=TIMES), strict=True):
                    into += one.times_s
            pool.deallocate(block)
    for what, limit in (("write", 0.80), ("read", 0.90)):
        ours, peer = map(statistics.median, taken[what])
        report.ratio(f"{what} {_name(size)} / raw TCP", ours, peer, limit=1 / limit)


def _small(report: Report, world: World, pool: SyncMemoryPool) -> None:
    block = pool.allocate(MIB, NODE)
    pool.write(block, _noise(MIB))
    directory = Path(tempfile.mkdtemp(prefix="gb-"))
    peer = PingPong(directory)
    place = memoryview(bytearray(64))
    record = world.record(NODE)
    assert record
    try:
        with world.pool(compression="off", busy_poll_s=BUSY_POLL_S) as polling, _a_core_each(peer, record.pid):
            times: tuple[list[float], ...] = ([], [], [], [])
            for _ in range(TIMES * TURNS):
                times[0].append(timed(_times(ROUNDS, lambda: polling.read_into(block, place))) / ROUNDS)
                times[1].append(timed(_times(ROUNDS, lambda: pool.read_into(block, place))) / ROUNDS)
                times[2].append(peer.seconds(ROUNDS) / ROUNDS)
                times[3].append(asyncio.run(_awaited(world, block, place)))
        spun, slept, bare, awaited = (statistics.median(one) for one in times)
        report.ratio(f"64 B, SyncMemoryPool with busy-poll / {peer.language}", spun, bare, limit=0.7)
        report.ratio(f"64 B, SyncMemoryPool / {peer.language}", slept, bare, limit=1.6)
        report.ratio(f"64 B, DistributedMemoryPool / {peer.language}", awaited, bare, limit=None)
        pieces = [(at * 8192, 4096) for at in range(64)]

        def one_by_one() -> None:
            for offset, size in pieces:
                pool.read(block, size, offset=offset)

        with _a_core_each(peer, record.pid):
            many, single = sample_pair(
                _times(10, lambda: pool.readv(block, pieces)), _times(10, one_by_one), times=TIMES * 3
            )
        report.ratio("64 pieces of 4 KiB in one request / one by one", many.median_s, single.median_s, limit=1 / 15)
    finally:
        peer.close()
        shutil.rmtree(directory, ignore_errors=True)
        pool.deallocate(block)


async def _awaited(world: World, block: str, place: memoryview) -> float:
    async with DistributedMemoryPool(world.config, compression="off") as mine:
        await mine.read_into(block, place)  # finds the block, and opens a connection
        began = time.perf_counter()
        for _ in range(ROUNDS):
            await mine.read_into(block, place)
        return (time.perf_counter() - began) / ROUNDS


@contextlib.contextmanager
def _a_core_each(peer: PingPong, server_pid: int) -> Iterator[None]:
    """Askers on one core, those who answer on another, as two hosts would be."""
    cores = sorted(os.sched_getaffinity(0))
    tasks = {pid: cores[0] for pid in (os.getpid(), *peer.pids[:1])}
    tasks |= {int(task.name): cores[-1] for task in Path(f"/proc/{server_pid}/task").iterdir()}
    tasks |= {pid: cores[-1] for pid in peer.pids[1:]}
    try:
        for task, core in tasks.items():
            os.sched_setaffinity(task, [core])
        yield
    finally:
        for task in tasks:
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(task, cores)


def _extra_memory(report: Report, world: World, pool: SyncMemoryPool) -> None:
    """Beyond the block on the one side and the caller's own buffer on the other, at the highest moment."""
    block = pool.allocate(LARGEST, NODE)
    data = memoryview(bytearray(_noise(LARGEST)))
    pool.write(block, data)
    record = world.record(NODE)
    assert record
    pids = {"client": os.getpid(), "server": record.pid}
    most = dict.fromkeys(pids, 0)
    works: list[Callable[[], object]] = [lambda: pool.write(block, data), lambda: pool.read_into(block, data)]
    for work in works * 2:
        before = {}
        for who, pid in pids.items():
            Path(f"/proc/{pid}/clear_refs").write_text("5")  # the highest mark begins anew
            before[who] = _status_bytes(pid, "VmRSS")
        work()
        for who, pid in pids.items():
            most[who] = max(most[who], _status_bytes(pid, "VmHWM") - before[who])
    pool.deallocate(block)
    for who in pids:
        report.value(f"extra memory of the {who} at {_name(LARGEST)}", most[who] / MIB, limit=8, unit="MiB")


def _status_bytes(pid: int, field: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def _fresh(report: Report, world: World, pool: SyncMemoryPool) -> None:
    size = min(256 * MIB, LARGEST)
    data = memoryview(_noise(size))
    first, again = [], []
    for _ in range(TIMES):
        block = pool.allocate(size, NODE)
        write = functools.partial(pool.write, block, data)
        first.append(timed(write))
        again.append(timed(write))
        pool.deallocate(block)
    ours, peer = Sample(tuple(first)), Sample(tuple(again))
    report.ratio(f"first write of {_name(size)} / a rewrite", ours.median_s, peer.median_s, limit=1 / 0.7)


def _loop(report: Report, world: World, pool: SyncMemoryPool) -> None:
    """How late the loop is for what is due, while a large read runs; and while none does."""

    async def watch(until: asyncio.Event) -> list[float]:
        late = []
        while not until.is_set():
            due = time.perf_counter() + 0.005
            await asyncio.sleep(0.005)
            late.append((time.perf_counter() - due) * 1000)
        return late

    async def measure() -> tuple[float, float]:
        async with DistributedMemoryPool(world.config, compression="off") as mine:
            block = await mine.allocate(LARGEST, NODE)
            await mine.write(block, _noise(LARGEST))
            busy: list[float] = []
            idle: list[float] = []
            while len(busy) < 600:  # in turns, so that a noisy neighbour disturbs both alike
                ended = asyncio.Event()
                asyncio.get_running_loop().call_later(0.5, ended.set)
                idle += await watch(ended)
                ended = asyncio.Event()
                watching = asyncio.ensure_future(watch(ended))
                data = await mine.read(block)
                ended.set()
                busy += await watching
                del data  # 1 GiB given back to the system takes 3 ms of whoever drops it: not the read's
            await mine.deallocate(block)
            return _high(busy), _high(idle)

    busy, idle = asyncio.run(measure())
    report.value(f"event loop late in a {_name(LARGEST)} read, p99", busy, limit=2, unit="ms")
    report.note(f"with nothing to do: {idle:.2f} ms")


def _high(values: list[float]) -> float:
    return statistics.quantiles(values, n=100)[98]


def _random(report: Report, world: World, pool: SyncMemoryPool) -> None:
    """What can't be packed: the probe must find that out cheaply."""
    with world.pool(compression="auto") as auto:
        block = pool.allocate(MIDDLE, NODE)
        data, place = memoryview(os.urandom(MIDDLE)), memoryview(bytearray(MIDDLE))
        ours, peer = sample_pair(lambda: auto.write(block, data), lambda: pool.write(block, data), times=TIMES + 2)
        report.ratio(f"write {_name(MIDDLE)} random, auto / off", ours.median_s, peer.median_s, limit=1 / 0.93)
        ours, peer = sample_pair(
            lambda: auto.read_into(block, place), lambda: pool.read_into(block, place), times=TIMES + 2
        )
        report.ratio(f"read {_name(MIDDLE)} random, auto / off", ours.median_s, peer.median_s, limit=1 / 0.93)
        pool.deallocate(block)


def _redis(report: Report, world: World, pool: SyncMemoryPool) -> None:
    if lacking := Redis.lacking():
        report.note(f"left out: Redis ({lacking})")
        return
    directory = Path(tempfile.mkdtemp(prefix="gb-"))
    block, redis = pool.allocate(MIDDLE, NODE), Redis(directory, _noise(MIDDLE))
    try:
        pool.write(block, _noise(MIDDLE))
        ours, peer = sample_pair(lambda: pool.read(block), redis.read, times=TIMES)
        report.ratio(f"read {_name(MIDDLE)} / Redis (redis-py)", ours.median_s, peer.median_s, limit=1 / 1.7)
    finally:
        redis.close()
        pool.deallocate(block)
        shutil.rmtree(directory, ignore_errors=True)


def _flight(report: Report, world: World, pool: SyncMemoryPool) -> None:
    block, flight = pool.allocate(MIDDLE, NODE), Flight(MIDDLE)
    try:
        pool.write(block, _noise(MIDDLE))
        ours, peer = sample_pair(lambda: pool.read(block), flight.read, times=TIMES)
        report.ratio(f"read {_name(MIDDLE)} / Arrow Flight", ours.median_s, peer.median_s, limit=1 / 1.3)
    finally:
        flight.close()
        pool.deallocate(block)


def _ray_on_one_host(report: Report, pool: SyncMemoryPool) -> None:
    """An actor on this host passes its data through shared memory, as a pool on this host does."""
    with ray_actor() as make:
        for size in ACTOR_SIZES:
            _beside_an_actor(report, pool, make(), size)


def _beside_an_actor(report: Report, pool: SyncMemoryPool, actor: RayActor, size: int) -> None:
    limit, count = _actor_limit(size), _actor_count(size)
    block, data = pool.allocate(size, NODE), os.urandom(size) if size <= MIB else _noise(size)
    ours, peer = sample_pair(
        _times(count, lambda: pool.write(block, data)), _times(count, lambda: actor.write(data)), times=TIMES
    )
    report.ratio(f"write {_name(size)} on one host / Ray actor", ours.median_s, peer.median_s, limit=limit)
    ours, peer = sample_pair(_times(count, lambda: pool.read(block)), _times(count, actor.read), times=TIMES)
    report.ratio(f"read {_name(size)} on one host / Ray actor", ours.median_s, peer.median_s, limit=limit)
    actor.close()
    pool.deallocate(block)


def _actor_limit(size: int) -> float:
    return 1 / 10 if size <= MIB else 1 / 3


def _actor_count(size: int) -> int:
    return 20 if size <= MIB else 1


#: On the head of the lab: an actor on the other host, a block and a bare TCP stream there, in turns.
_BESIDE_AN_ACTOR = """
import json, logging, os, sys, time
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from distributed_grid.orchestration.distributed_memory_pool import SyncMemoryPool
from bench._pool_peers import RawLine
there, times, plan, port = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]), int(sys.argv[4])
raw = RawLine(there, port)
ray.init(log_to_driver=False, logging_level=logging.ERROR)
[node] = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeManagerAddress"] == there]
class Holder:
    def write(self, data): self.data = bytearray(data)
    def read(self): return self.data
Actor = ray.remote(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False))(Holder)
found = {}
with SyncMemoryPool(compression="off") as pool:
    for size, count in plan:
        data, actor, block = os.urandom(size), Actor.remote(), pool.allocate(size, "gpu1", strict=True)
        view, place = memoryview(data), memoryview(bytearray(size))
        works = {
            "write": (
                lambda: pool.write(block, data), lambda: ray.get(actor.write.remote(data)), lambda: raw.write(view)
            ),
            "read": (lambda: pool.read(block), lambda: ray.get(actor.read.remote()), lambda: raw.read(place)),
        }
        for what, trio in works.items():
            taken = ([], [], [])
            for _ in range(times + 1):
                for work, into in zip(trio, taken):
                    began = time.perf_counter()
                    for _ in range(count): work()
                    into.append((time.perf_counter() - began) / count)
            found[f"{what} {size}"] = [one[1:] for one in taken]
        assert pool.read(block) == data == bytes(ray.get(actor.read.remote()))
        ray.kill(actor)
        pool.deallocate(block)
print(json.dumps(found))
"""


def _ray_between_hosts(report: Report) -> None:
    """A block on another host beside an actor there, from the head of a cluster on two hosts."""
    from bench._lab import lab_cluster
    from tests.lab.clusters import PYTHON
    from tests.lab.hosts import missing_tools

    if lacking := missing_tools():
        report.note(f"left out: a Ray actor on another host (no {', '.join(lacking)})")
        return
    plan = [(size, _actor_count(size)) for size in ACTOR_SIZES]
    with lab_cluster("gpu-master", "gpu1", more=f"ray:\n  object_store_bytes: {2048 * MIB}\n") as cluster:
        host = cluster.lab["gpu1"]
        raw = host.popen([str(PYTHON), "-c", RAW, str(max(ACTOR_SIZES)), host.address], stdout=subprocess.PIPE)
        with raw:
            assert raw.stdout
            port = raw.stdout.readline().decode().strip()
            argv = [str(PYTHON), "-c", _BESIDE_AN_ACTOR, host.address, str(TIMES), json.dumps(plan), port]
            shell = f'eval "$({shlex.join(cluster.argv("env"))})" && exec {shlex.join(argv)}'
            env = {"GRID_CONFIG": cluster.config, "PYTHONPATH": str(ROOT)}
            try:
                done = cluster.head.run(["bash", "-c", shell], timeout=900, cwd="/root", env=env)
            finally:
                raw.kill_tree()
        found = json.loads(done.stdout.splitlines()[-1])
    for size in ACTOR_SIZES:
        for what in ("write", "read"):
            ours, peer, bare = (statistics.median(taken) for taken in found[f"{what} {size}"])
            # What is little takes as long as the wire takes: a bare stream there is no ten times as quick itself.
            limit = _actor_limit(size) if size > MIB else None
            report.ratio(f"{what} {_name(size)} between hosts / Ray actor", ours, peer, limit=limit)
            report.ratio(f"{what} {_name(size)} between hosts, a bare TCP stream / Ray actor", bare, peer, limit=None)


def _shared(report: Report, pool: SyncMemoryPool) -> None:
    block, source, place = pool.allocate(MIDDLE, NODE), bytearray(_noise(MIDDLE)), memoryview(bytearray(MIDDLE))
    pool.write(block, source)

    def plain() -> None:
        place[:] = source

    for name, work in (("read", lambda: pool.read_into(block, place)), ("write", lambda: pool.write(block, source))):
        ours, peer = sample_pair(work, plain, times=TIMES + 2)
        report.ratio(f"{name} {_name(MIDDLE)} shared / memcpy", ours.median_s, peer.median_s, limit=1 / 0.5)
    pool.deallocate(block)


#: On the head of the lab; `off` and `auto` in turns, so that both see the same link.
_ON_THE_HEAD = """
import json, os, sys, time
from distributed_grid.orchestration.distributed_memory_pool import SyncMemoryPool
size, times = int(sys.argv[1]), int(sys.argv[2])
row = json.dumps({{"name": "a sample", "value": 1.5, "tags": ["x", "y"]}})
text = "".join(row.replace("1.5", str(i * 7919 % 100003)) for i in range(size // len(row))).encode()
found = {{}}
with SyncMemoryPool(compression="off") as off, SyncMemoryPool(compression="auto") as auto:
    for name, data in (("json", text), ("random", os.urandom(size))):
        block = off.allocate(len(data), "gpu1", strict=True)
        for what in ("write", "read"):
            taken = {{"off": [], "auto": []}}
            for _ in range(times + 1):
                for mode, pool in (("off", off), ("auto", auto)):
                    began = time.perf_counter()
                    if what == "write": pool.write(block, data)
                    else: assert pool.read(block) == data
                    taken[mode].append(time.perf_counter() - began)
            found[name + " " + what] = {{mode: values[1:] for mode, values in taken.items()}}
        off.deallocate(block)
print(json.dumps(found))
""".replace("{{", "{").replace("}}", "}")


def _link(report: Report) -> None:
    """Two hosts with a cable of 1 Gbit/s between them."""
    from bench._lab import lab_cluster
    from tests.lab.clusters import PYTHON
    from tests.lab.hosts import missing_tools

    if lacking := missing_tools():
        report.note(f"left out: the link of 1 Gbit/s (no {', '.join(lacking)})")
        return
    with lab_cluster("gpu-master", "gpu1") as cluster:
        cluster.lab.shape("gpu1", 1000)
        argv = [str(PYTHON), "-c", _ON_THE_HEAD, str(min(MIDDLE, 64 * MIB)), str(TIMES)]
        done = cluster.head.run(argv, timeout=600, cwd="/root", env={"GRID_CONFIG": cluster.config})
        found = json.loads(done.stdout)
    for name, taken in found.items():
        limit = 1 / 2 if name.startswith("json") else 1 / 0.93
        off, auto = (statistics.median(taken[mode]) for mode in ("off", "auto"))
        report.ratio(f"{name} at 1 Gbit/s, auto / off", auto, off, limit=limit)


def _times(count: int, action: Callable[[], object]) -> Callable[[], None]:
    def act() -> None:
        for _ in range(count):
            action()

    return act
