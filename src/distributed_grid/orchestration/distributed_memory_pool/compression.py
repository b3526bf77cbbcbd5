"""Whether data is packed on its way: a decision from the link's rate and a probe, not a habit."""

from __future__ import annotations

import time
from dataclasses import dataclass

from distributed_grid.agent.memory.packing import LZ4, PROBE_BYTES, RAW, WORTH_RATIO, ZSTD, pack, probe_ratio
from distributed_grid.core.errors import UsageError

MODES = ("off", "auto", "lz4", "zstd")
_FROM_CONFIG = {"never": "off", "always": "zstd", "auto": "auto"}
#: Below this a link is slower than zstd on one core, so that packing can win.
SLOW_LINK_BYTES_S = 300e6
#: Smaller ones are not worth a thought, and tell nothing about the link.
LEAST_BYTES = 1024 * 1024
#: Every so often one goes as it is, so that the link's rate stays known.
MEASURE_EVERY = 32


def mode_of(given: str | None, configured: str) -> str:
    mode = given if given is not None else _FROM_CONFIG.get(configured, configured)
    if mode not in MODES:
        cause = f"one of {', '.join(MODES)}"
        raise UsageError(f"there is no compression {mode!r}", cause=cause, code="bad-compression")
    return mode


def pays(rate_bytes_s: float, ratio: float, pack_bytes_s: float) -> bool:
    """Packing and sending overlap: the slower of the two counts, and it must win clearly."""
    return max(1 / pack_bytes_s, ratio / rate_bytes_s) < 0.8 / rate_bytes_s


@dataclass(slots=True)
class Link:
    """What is known about the way to one node."""

    rate_bytes_s: float = 0.0
    transfers: int = 0

    def sent(self, count: int, took_s: float) -> None:
        """As it is, not packed."""
        if count >= LEAST_BYTES and took_s > 0:
            rate = count / took_s
            self.rate_bytes_s = rate if not self.rate_bytes_s else 0.7 * self.rate_bytes_s + 0.3 * rate

    def codec_for_read(self, mode: str, size: int) -> int:
        """What the server may use; it looks at the data itself."""
        if mode == "off" or size < LEAST_BYTES:
            return 0
        if mode != "auto":
            return LZ4 if mode == "lz4" else ZSTD
        self.transfers += 1
        slow = 0 < self.rate_bytes_s < SLOW_LINK_BYTES_S and self.transfers % MEASURE_EVERY
        return ZSTD if slow else RAW

    def codec_for_write(self, mode: str, view: memoryview) -> int:
        if mode == "off" or len(view) < LEAST_BYTES:
            return 0
        if mode != "auto":
            return LZ4 if mode == "lz4" else ZSTD
        if probe_ratio(view, RAW) <= WORTH_RATIO:  # zeros
            return RAW
        self.transfers += 1
        if not 0 < self.rate_bytes_s < SLOW_LINK_BYTES_S or not self.transfers % MEASURE_EVERY:
            return 0
        began = time.perf_counter()
        pack(view[:PROBE_BYTES], ZSTD)
        took = time.perf_counter() - began
        return ZSTD if pays(self.rate_bytes_s, probe_ratio(view, ZSTD), PROBE_BYTES / max(took, 1e-9)) else 0
