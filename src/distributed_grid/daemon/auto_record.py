"""What automatic offload looked at lately, for `--record`: each point once, packed, and never more than a few MB."""

from __future__ import annotations

import json
import zlib
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from distributed_grid.orchestration.auto_offload.signals import Inputs

#: An hour of checks every five seconds.
RECORDS_KEPT = 720
#: The head is short of memory when this matters: what is older goes first.
MOST_BYTES = 4 << 20


class Records:
    def __init__(self) -> None:
        self._packed: deque[bytes] = deque()
        self._until = float("-inf")
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._packed)

    def add(self, inputs: Inputs) -> None:
        points = tuple(point for point in inputs.points if point.at > self._until)
        self._until = max([self._until, *(point.at for point in points)])
        record = replace(inputs, points=points).to_wire()
        packed = zlib.compress(json.dumps(record, separators=(",", ":")).encode())
        self._packed.append(packed)
        self.size_bytes += len(packed)
        while len(self._packed) > RECORDS_KEPT or (self.size_bytes > MOST_BYTES and len(self._packed) > 1):
            self.size_bytes -= len(self._packed.popleft())

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Oldest first."""
        for packed in list(self._packed):
            yield json.loads(zlib.decompress(packed))
