"""Measures commands, functions and processes, and reports each figure beside its peer and its limit."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TextIO

Action = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Sample:
    """Wall times of one thing done several times."""

    times_s: tuple[float, ...]

    @property
    def median_s(self) -> float:
        return statistics.median(self.times_s)


def command(argv: Sequence[str], *, env: Mapping[str, str] | None = None, limit_s: float = 120.0) -> Action:
    """A command as something to measure; it must exit 0, or the figure would mean nothing."""

    def act() -> None:
        environment = None if env is None else dict(env)
        done = subprocess.run(
            list(argv), env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=limit_s
        )
        if done.returncode != 0:
            tail = done.stderr.decode(errors="replace")[-2000:]
            raise RuntimeError(f"{argv[0]} exited {done.returncode}: {tail}")

    return act


def timed(action: Action) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def sample(action: Action, *, times: int = 5, warm_up: int = 1) -> Sample:
    for _ in range(warm_up):
        action()
    return Sample(tuple(timed(action) for _ in range(times)))


def sample_pair(ours: Action, peer: Action, *, times: int = 5, warm_up: int = 1) -> tuple[Sample, Sample]:
    """Both in turns, so that a noisy neighbour disturbs them alike."""
    for _ in range(warm_up):
        ours()
        peer()
    pairs = [(timed(ours), timed(peer)) for _ in range(times)]
    return Sample(tuple(a for a, _ in pairs)), Sample(tuple(b for _, b in pairs))


def cpu_s(pid: int) -> float:
    """CPU time a process has used so far, without its children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def core_share(pid: int, *, over_s: float) -> float:
    """Fraction of one core that a process uses, watched for a while."""
    used, began = cpu_s(pid), time.perf_counter()
    time.sleep(over_s)
    return (cpu_s(pid) - used) / (time.perf_counter() - began)


def pss_bytes(pid: int) -> int:
    """Memory of a process, with shared pages counted by their share."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no Pss for process {pid}")


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the report: `ratio` (or `ours`, where there is no peer) must not exceed `limit`."""

    name: str
    unit: str
    ours: float
    peer: float | None
    ratio: float | None
    limit: float | None
    kept: bool


@dataclass(slots=True)
class Report:
    """Collects figures and prints each as soon as it is known."""

    out: TextIO = field(default_factory=lambda: sys.stdout)
    figures: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def ratio(self, name: str, ours: float, peer: float, *, limit: float | None, unit: str = "s") -> Figure:
        """Ours against the peer's in the same run; less is better."""
        quotient = ours / peer if peer else float("inf")
        kept = limit is None or quotient <= limit
        return self._add(Figure(name, unit, ours, peer, quotient, limit, kept))

    def value(self, name: str, ours: float, *, limit: float | None, unit: str) -> Figure:
        """A figure that stands alone; less is better."""
        return self._add(Figure(name, unit, ours, None, None, limit, limit is None or ours <= limit))

    def note(self, text: str) -> None:
        self.notes.append(text)
        print(f"  {text}", file=self.out, flush=True)

    def head(self) -> None:
        print(f"{'name':44} {'ours':>12} {'peer':>12} {'ratio':>8} {'limit':>8}", file=self.out, flush=True)

    @property
    def kept(self) -> bool:
        return all(figure.kept for figure in self.figures)

    def to_json(self) -> str:
        return json.dumps(
            {"kept": self.kept, "figures": [asdict(figure) for figure in self.figures], "notes": self.notes}, indent=2
        )

    def _add(self, figure: Figure) -> Figure:
        self.figures.append(figure)
        print(line(figure), file=self.out, flush=True)
        return figure


def line(figure: Figure) -> str:
    """`name  ours  peer  ratio  limit  kept|NOT KEPT`."""
    peer = "-" if figure.peer is None else f"{figure.peer:.4g} {figure.unit}"
    ratio = "-" if figure.ratio is None else f"{figure.ratio:.3f}"
    limit = "-" if figure.limit is None else f"{figure.limit:g}"
    verdict = "" if figure.limit is None else "  kept" if figure.kept else "  NOT KEPT"
    ours = f"{figure.ours:.4g} {figure.unit}"
    return f"{figure.name:44} {ours:>12} {peer:>12} {ratio:>8} {limit:>8}{verdict}"
