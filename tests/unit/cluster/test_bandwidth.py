"""The two halves of a measurement over real sockets."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from distributed_grid.cluster.bandwidth import format_rate, measure_send, measure_sink, open_sink
from distributed_grid.core.errors import Refused, TimedOut, Unavailable


def test_both_sides_agree() -> None:
    sink = open_sink("127.0.0.1")
    with ThreadPoolExecutor(1) as pool:
        counted = pool.submit(measure_sink, sink, 30.0)
        told = measure_send("127.0.0.1", sink.port, sink.nonce, seconds=20.0, limit_bytes=5_000_000)
        assert told == counted.result(30)
    assert told.count_bytes == 5_000_000
    assert told.bytes_per_s > 0


def test_a_stranger_is_refused() -> None:
    sink = open_sink("127.0.0.1")
    with ThreadPoolExecutor(1) as pool:
        counted = pool.submit(measure_sink, sink, 30.0)
        with pytest.raises(Unavailable):
            measure_send("127.0.0.1", sink.port, b"x" * 16, seconds=20.0, limit_bytes=50_000_000)
        with pytest.raises(Refused):
            counted.result(30)


def test_nobody_comes() -> None:
    with pytest.raises(TimedOut):
        measure_sink(open_sink("127.0.0.1"), 0.05)


def test_rates_are_in_bits() -> None:
    assert format_rate(117_625_000) == "941 Mbit/s"
    assert format_rate(1_175_000_000) == "9.4 Gbit/s"
    assert format_rate(0) == "0 bit/s"
