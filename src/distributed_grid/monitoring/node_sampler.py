"""One node's figures, once per second: what it has, how much what belongs to it uses, and its processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from dataclasses import replace

from distributed_grid.core.clock import Clock, SystemClock
from distributed_grid.monitoring.capacity import (
    Capacity,
    CgroupLimits,
    binding,
    capacity_of,
    group_cpu_s,
    group_memory_bytes,
    group_pids,
    own_limits,
    usable_cpus,
)  # fmt: skip
from distributed_grid.monitoring.gpu import GpuReader
from distributed_grid.monitoring.machine import Counters, MachineReader
from distributed_grid.monitoring.proc_sampler import Proc, ProcSampler, memory_shares
from distributed_grid.monitoring.psi import read_psi
from distributed_grid.monitoring.snapshot import GpuSnapshot, NodeSnapshot, ProcessSample

#: Closer looks than this would be noise: the kernel counts CPU time in steps of 10 ms.
MIN_STEP_S = 0.2
_LIMITS_EVERY_S = 30.0


class NodeSampler:
    """Measures a node.

    A node with a machine of its own is that machine (or its cgroup). Nodes that share a kernel are told apart by
    `belongs`: the root pids of the worker's shims, whose trees are the node's; with `everything_else` (the head)
    they are the roots of all *other* nodes, and the node is what is left.

    `sample()` takes milliseconds, but a GPU driver may take its time: run it in a thread beside an event loop.
    """

    def __init__(
        self,
        node: str,
        *,
        declared: Capacity | None = None,
        belongs: Callable[[], set[int]] | None = None,
        everything_else: bool = False,
        clock: Clock | None = None,
        processes: ProcSampler | None = None,
        gpus: GpuReader | None = None,
        limits: Callable[[], CgroupLimits] = own_limits,
    ) -> None:
        self._node = node
        self._declared = declared
        self._belongs = belongs
        self._everything_else = everything_else
        self._clock = clock or SystemClock()
        self._procs = processes or ProcSampler(clock=self._clock)
        self._gpus = gpus or GpuReader(clock=self._clock)
        self._machine = MachineReader()
        self._read_limits = limits
        self._limits_at = self._clock.monotonic()
        #: pid -> start of those in the trees. Once in, a process stays: it may outlive its parents.
        self._members: dict[int, int] = {}
        self._lock = threading.Lock()
        self._procs.tick()
        self._follow_members()
        self._at = self._clock.monotonic()
        self._busy_s = self._machine.cpu_busy_s()
        self._limits = self._binding_limits()
        self._counters = self._machine.counters()
        self._group_s = self._group_cpu_s()
        self._last = self._snapshot(0.0, 0.0, 0.0, self._counters)

    @property
    def latest(self) -> NodeSnapshot:
        return self._last

    def sample(self) -> NodeSnapshot:
        """Look anew; a look right after the last one gives the last one's figures."""
        with self._lock:
            return self._sample()

    def _sample(self) -> NodeSnapshot:
        now = self._clock.monotonic()
        step_s = now - self._at
        if step_s < MIN_STEP_S:
            return self._last
        self._at = now
        if now - self._limits_at >= _LIMITS_EVERY_S:
            limits, self._limits_at = self._binding_limits(), now
            if limits.cpu_account != self._limits.cpu_account:
                self._group_s = None
            self._limits = limits
        self._procs.tick()
        ended = self._follow_members()
        busy_s, counters = self._machine.cpu_busy_s(), self._machine.counters()
        group_s = self._group_cpu_s()
        cpus = usable_cpus(self._limits, frozenset(busy_s))
        whole = sum(max(0.0, busy_s[cpu] - self._busy_s.get(cpu, busy_s[cpu])) for cpu in cpus) / step_s
        if self._limits.cpu_group is not None:
            whole = min(whole, self._group_cores(group_s, step_s))
        members = self._procs.tree_cores(self._in_tree(), ended) if self._belongs else 0.0
        self._busy_s, self._group_s = busy_s, group_s
        before, self._counters = self._counters, counters
        self._last = self._snapshot(whole, members, step_s, before)
        return self._last

    def processes(self) -> list[ProcessSample]:
        """The processes that belong to the node, as of the last sample."""
        with self._lock:
            if self._belongs is None:
                return self._procs.samples()
            if self._everything_else:
                return self._procs.samples(self._procs.procs.keys() - self._members.keys())
            return self._procs.samples(self._members)

    def close(self) -> None:
        with self._lock:
            self._procs.close()
            self._machine.close()
            self._gpus.close()

    def _snapshot(self, whole: float, members: float, step_s: float, before: Counters) -> NodeSnapshot:
        memory = self._machine.memory()
        machine_total = memory.get("MemTotal", 0)
        available = memory.get("MemAvailable", memory.get("MemFree", 0))
        used = max(0, machine_total - available)
        gpus = self._gpus.read()
        cpus = usable_cpus(self._limits, frozenset(self._busy_s))
        real = capacity_of(self._limits, len(cpus), machine_total, len(gpus))
        if self._limits.memory_group is not None:
            group_used = group_memory_bytes(self._limits.memory_group)
            used = min(used, real.memory_bytes) if group_used is None else min(group_used, real.memory_bytes)
            available = min(available, real.memory_bytes - used)
        process_count = sum(proc.counts for proc in self._procs.procs.values())
        if self._belongs is not None:
            members_used = memory_shares(self._in_tree())
            members_count = sum(proc.counts for proc in self._in_tree())
            process_count = process_count - members_count if self._everything_else else members_count
            whole = max(0.0, whole - members) if self._everything_else else members
            used = max(0, used - members_used) if self._everything_else else members_used
            gpus = share_gpus(gpus, self._members, self._everything_else)
        total = self._declared or real
        now = self._counters
        pressure_group = self._limits.unified if self._limits.cpu_group or self._limits.memory_group else None
        psi = {name: read_psi(name, pressure_group) or read_psi(name) for name in ("cpu", "memory", "io")}
        return NodeSnapshot(
            node=self._node, at=self._clock.time(), declared=self._declared is not None,
            cpu_cores_total=total.cpu_cores, cpu_cores_used=min(whole, real.cpu_cores), cpu_cores_real=real.cpu_cores,
            memory_total_bytes=total.memory_bytes, memory_used_bytes=used, memory_real_bytes=real.memory_bytes,
            memory_available_bytes=max(0, min(available, total.memory_bytes - used)),
            gpu_count=total.gpu_count, gpus=gpus,
            swap_total_bytes=memory.get("SwapTotal", 0),
            swap_used_bytes=memory.get("SwapTotal", 0) - memory.get("SwapFree", 0),
            psi_cpu=psi["cpu"], psi_memory=psi["memory"], psi_io=psi["io"], load_1m=self._machine.load_1m(),
            network_receive_bytes_s=_rate(now.network_receive_bytes, before.network_receive_bytes, step_s),
            network_send_bytes_s=_rate(now.network_send_bytes, before.network_send_bytes, step_s),
            disk_read_bytes_s=_rate(now.disk_read_bytes, before.disk_read_bytes, step_s),
            disk_write_bytes_s=_rate(now.disk_write_bytes, before.disk_write_bytes, step_s),
            process_count=process_count,
        )  # fmt: skip

    def _binding_limits(self) -> CgroupLimits:
        limits = self._read_limits()
        cpus = usable_cpus(limits, frozenset(self._busy_s))
        return binding(limits, len(cpus), self._machine.memory().get("MemTotal", 0))

    def _group_cpu_s(self) -> float | None:
        return group_cpu_s(self._limits.cpu_account) if self._limits.cpu_account else None

    def _group_cores(self, group_s: float | None, step_s: float) -> float:
        """Use of the group whose quota binds us: by its accounts, else by adding its processes up."""
        if group_s is not None and self._group_s is not None:
            return max(0.0, group_s - self._group_s) / step_s
        assert self._limits.cpu_group is not None
        pids = group_pids(self._limits.cpu_group)
        return self._procs.tree_cores([p for p in self._procs.procs.values() if p.pid in pids], ())

    def _in_tree(self) -> list[Proc]:
        procs = self._procs.procs
        return [procs[pid] for pid in self._members if pid in procs]

    def _follow_members(self) -> list[Proc]:
        """Bring the trees up to date; those of them that ended since the last look."""
        if self._belongs is None:
            return []
        procs, before = self._procs.procs, self._members
        ended = [proc for proc in self._procs.ended if before.get(proc.pid) == proc.start_ticks]
        roots = self._belongs()
        known = {pid for pid, start in before.items() if (proc := procs.get(pid)) and proc.start_ticks == start}
        self._members = {pid: procs[pid].start_ticks for pid in grow_trees(procs, roots | known, roots)}
        return ended


def grow_trees(procs: dict[int, Proc], seeds: set[int], sessions: set[int]) -> set[int]:
    """The seeds that are there, all their descendants, and all in the sessions that the roots lead."""
    children: dict[int, list[int]] = {}
    for proc in procs.values():
        children.setdefault(proc.ppid, []).append(proc.pid)
    todo = [pid for pid in seeds if pid in procs]
    todo += [proc.pid for proc in procs.values() if proc.session in sessions]
    found: set[int] = set()
    while todo:
        pid = todo.pop()
        if pid not in found:
            found.add(pid)
            todo += children.get(pid, [])
    return found


def share_gpus(
    gpus: tuple[GpuSnapshot, ...], members: Collection[int], everything_else: bool
) -> tuple[GpuSnapshot, ...]:
    """Devices that several nodes share, each with one node's part: its processes and their memory.

    NVML does not split a device's load between processes reliably; it counts for every node that has one on it.
    """
    found = []
    for gpu in gpus:
        of_members = [p for p in gpu.processes if p.pid in members]
        members_used = sum(p.memory_used_bytes or 0 for p in of_members)
        if everything_else:
            mine = tuple(p for p in gpu.processes if p.pid not in members)
            used = max(0, gpu.memory_used_bytes - members_used)
            busy = gpu.utilization if mine or not of_members else 0.0
        else:
            mine, used = tuple(of_members), members_used
            busy = gpu.utilization if mine else 0.0
        found.append(replace(gpu, processes=mine, memory_used_bytes=used, utilization=busy))
    return tuple(found)


def _rate(now: int, before: int, step_s: float) -> float:
    return max(0, now - before) / step_s if step_s > 0 else 0.0
