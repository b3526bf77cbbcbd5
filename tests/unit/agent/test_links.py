"""Measuring a link: both calls on loopback."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from distributed_grid.agent.links import MAX_SINKS, BandwidthService
from distributed_grid.core.errors import GridError, Refused, UsageError
from distributed_grid.wire.rpc import CallContext
from tests.lab.waiting import wait_until

WHO = CallContext()


@pytest.fixture
def service() -> BandwidthService:
    node: Any = SimpleNamespace(name="gpu1", address="127.0.0.1")
    return BandwidthService(node)


async def test_a_rate(service: BandwidthService) -> None:
    sink = await service.bandwidth_sink(WHO, limit_s=30)
    result = await service.bandwidth_send(WHO, **sink, seconds=0.2)
    assert result["bytes_per_s"] > 0 and result["bytes"] > 0


async def test_a_stranger_gets_no_figure(service: BandwidthService) -> None:
    sink = await service.bandwidth_sink(WHO, limit_s=30)
    with pytest.raises(GridError):
        await service.bandwidth_send(WHO, host=sink["host"], port=sink["port"], key="00" * 16, seconds=0.2)
    with pytest.raises(UsageError):
        await service.bandwidth_send(WHO, host=sink["host"], port=sink["port"], key="no key", seconds=0.2)


async def test_sinks_are_few_and_end_by_themselves(service: BandwidthService) -> None:
    for _ in range(MAX_SINKS):
        await service.bandwidth_sink(WHO, limit_s=1)
    with pytest.raises(Refused):
        await service.bandwidth_sink(WHO, limit_s=1)
    wait_until(lambda: not any(one.name == "grid-bandwidth" for one in threading.enumerate()), 30, "the sinks to end")
    sink = await service.bandwidth_sink(WHO, limit_s=10)
    assert (await service.bandwidth_send(WHO, **sink, seconds=0.1))["bytes_per_s"] > 0
