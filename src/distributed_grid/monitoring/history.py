"""How a node's use went: every second for ten minutes, every ten for a day, in memory of a fixed size."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass

from distributed_grid.monitoring.snapshot import NodeSnapshot

FINE_S, FINE_POINTS = 1.0, 600
COARSE_S, COARSE_POINTS = 10.0, 8640


@dataclass(frozen=True, slots=True)
class HistoryPoint:
    """Use at one moment, or the mean over ten seconds."""

    at: float
    cpu_pressure: float
    memory_pressure: float
    gpu_pressure: float
    cpu_cores_used: float
    memory_used_bytes: float

    @staticmethod
    def of(snapshot: NodeSnapshot, at: float) -> HistoryPoint:
        return HistoryPoint(
            at, snapshot.cpu_pressure, snapshot.memory_pressure, snapshot.gpu_pressure,
            snapshot.cpu_cores_used, float(snapshot.memory_used_bytes),
        )  # fmt: skip

    def values(self) -> tuple[float, ...]:
        return (
            self.at, self.cpu_pressure, self.memory_pressure, self.gpu_pressure,
            self.cpu_cores_used, self.memory_used_bytes,
        )  # fmt: skip


_WIDTH = 6


class Ring:
    """The last `size` points, as plain doubles."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._data = array("d")
        self._next = 0

    def add(self, values: tuple[float, ...]) -> None:
        if len(self._data) < self._size * _WIDTH:
            self._data.extend(values)
            return
        start = self._next * _WIDTH
        self._data[start : start + _WIDTH] = array("d", values)
        self._next = (self._next + 1) % self._size

    def __len__(self) -> int:
        return len(self._data) // _WIDTH

    def __iter__(self) -> Iterator[HistoryPoint]:
        """Oldest first."""
        count = len(self)
        for i in range(count):
            start = (self._next + i) % count * _WIDTH
            yield HistoryPoint(*self._data[start : start + _WIDTH])


class NodeHistory:
    """One node's rings. Times are the reader's own clock, so that nodes with a wrong one still line up."""

    def __init__(self) -> None:
        self._fine = Ring(FINE_POINTS)
        self._coarse = Ring(COARSE_POINTS)
        self._sums = [0.0] * _WIDTH
        self._count = 0
        self._bucket: float | None = None
        self._last_at = float("-inf")

    def add(self, point: HistoryPoint) -> None:
        # A little slack, so that a tick that came a few ms early is not dropped; a clock set back starts anew.
        if 0 <= point.at - self._last_at < FINE_S / 2:
            return
        self._last_at = point.at
        values = point.values()
        self._fine.add(values)
        bucket = point.at // COARSE_S
        if self._bucket is not None and bucket != self._bucket:
            self._coarse.add(tuple(total / self._count for total in self._sums))
            self._sums, self._count = [0.0] * _WIDTH, 0
        self._bucket = bucket
        self._sums = [total + value for total, value in zip(self._sums, values, strict=True)]
        self._count += 1

    def points(self, since: float = 0.0) -> list[HistoryPoint]:
        """Oldest first: by tens of seconds as far as the seconds do not reach, then by seconds."""
        fine = [point for point in self._fine if point.at >= since]
        first = fine[0].at if fine else float("inf")
        return [point for point in self._coarse if since <= point.at < first] + fine
