"""Measures the link from this node to another: one side counts, the other sends, both for a limited time."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import Any

from distributed_grid.agent.node import AgentNode
from distributed_grid.cluster.bandwidth import Sink, measure_send, measure_sink, open_sink
from distributed_grid.core.errors import GridError, Refused, UsageError
from distributed_grid.wire.rpc import CallContext, method

log = logging.getLogger(__name__)

MAX_SINKS = 4
MAX_SECONDS = 60.0


class BandwidthService:
    def __init__(self, node: AgentNode) -> None:
        self._node = node
        self._free = threading.BoundedSemaphore(MAX_SINKS)

    @method
    async def bandwidth_sink(self, context: CallContext, *, limit_s: float) -> dict[str, Any]:
        """Listen for one sender that shows the key, and count what it sends; gives up after the limit."""
        if not self._free.acquire(blocking=False):
            raise Refused(f"{self._node.name} is already measuring {MAX_SINKS} links", code="bandwidth-busy")
        try:
            sink = open_sink(self._node.address)
        except OSError as error:
            self._free.release()
            raise GridError(
                f"{self._node.name} can't listen on {self._node.address}", cause=str(error), code="bandwidth-listen"
            ) from error
        told = {"host": self._node.address, "port": sink.port, "key": sink.nonce.hex()}
        limit_s = max(1.0, min(limit_s, MAX_SECONDS + 30))
        # A thread of its own: a sender that never comes must not hold one of the loop's few.
        threading.Thread(target=self._count, args=(sink, limit_s), daemon=True, name="grid-bandwidth").start()
        return told

    def _count(self, sink: Sink, limit_s: float) -> None:
        try:
            measure_sink(sink, limit_s)
        except GridError as error:
            log.info("a measurement came to nothing: %s", error.message)
        finally:
            self._free.release()

    @method
    async def bandwidth_send(
        self, context: CallContext, *, host: str, port: int, key: str, seconds: float
    ) -> dict[str, Any]:
        """Send to another node's sink for so long; the rate is what the sink counted."""
        try:
            nonce = bytes.fromhex(key)
        except ValueError:
            raise UsageError("the key of a measurement is a hexadecimal number", code="bandwidth-nonce") from None
        seconds = max(0.05, min(seconds, MAX_SECONDS))
        measured = await asyncio.to_thread(measure_send, host, port, nonce, seconds)
        return {"bytes_per_s": measured.bytes_per_s, "bytes": measured.count_bytes, "seconds": measured.seconds}
