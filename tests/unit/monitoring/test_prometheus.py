from __future__ import annotations

import asyncio
import re

import pytest

from distributed_grid.monitoring.prometheus import MetricsServer, render, serve_metrics
from distributed_grid.monitoring.snapshot import GpuSnapshot, NodeSnapshot, Psi

LINE = re.compile(r'([a-z_0-9]+)(?:\{((?:[a-z]+="(?:[^"\\\n]|\\.)*",?)*)\})? (\S+)')
NODE = NodeSnapshot(
    'gp"u\\1', 5.5, 8.0, 2.5, 1000, 250, 750, gpus=(GpuSnapshot(0, "GPU-1", "H200", 100, 25, None),),
    psi_memory=Psi(some_total_us=2_500_000),
)  # fmt: skip


def parse(text: str) -> dict[str, float]:
    """Sample -> value, holding every line to the format: one TYPE before a family's samples."""
    assert text.endswith("\n")
    found: dict[str, float] = {}
    typed: set[str] = set()
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            name = line.split()[2]
            assert name not in typed
            typed.add(name)
        elif not line.startswith("# HELP "):
            match = LINE.fullmatch(line)
            assert match and match.group(1) in typed, line
            found[f"{match.group(1)}{{{match.group(2) or ''}}}"] = float(match.group(3))
    return found


def test_text_parses_and_holds_the_figures() -> None:
    found = parse(render({"n": NODE, 'gp"u\\1': NODE}, {"offloads_total": 3, "daemon_uptime_seconds": 1.5}))
    assert found['grid_node_cpu_cores_used{node="n"}'] == 2.5
    assert found['grid_node_cpu_cores_used{node="gp\\"u\\\\1"}'] == 2.5
    assert found['grid_node_pressure_ratio{node="n",resource="memory"}'] == 0.25
    assert found['grid_node_stall_seconds_total{node="n",resource="memory",kind="some"}'] == 2.5
    assert found['grid_gpu_memory_used_bytes{node="n",gpu="0",uuid="GPU-1"}'] == 25
    assert not any(name.startswith("grid_gpu_utilization") for name in found)
    assert found["grid_offloads_total{}"] == 3 and found["grid_daemon_uptime_seconds{}"] == 1.5
    assert render({}) == "\n"


async def end(writer: asyncio.StreamWriter) -> None:
    writer.close()
    try:
        await writer.wait_closed()
    except ConnectionError:
        pass


async def ask(server: MetricsServer, request: bytes) -> bytes:
    async with asyncio.timeout(60):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        try:
            writer.write(request)
            await writer.drain()
            return await reader.read()
        except ConnectionError:
            return b""
        finally:
            await end(writer)


async def test_serves_on_loopback_and_shuts_bad_requests_out() -> None:
    server = await serve_metrics(0, lambda: render({"n": NODE}))
    try:
        head, _, body = (await ask(server, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK\r\n") and b"version=0.0.4" in head
        assert f"Content-Length: {len(body)}".encode() in head
        assert parse(body.decode())
        only_head = await ask(server, b"HEAD / HTTP/1.0\r\n\r\n")
        assert only_head.startswith(b"HTTP/1.1 200") and only_head.endswith(b"\r\n\r\n")
        assert (await ask(server, b"GET /else HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 404")
        assert (await ask(server, b"POST /metrics HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 405")
        assert (await ask(server, b"what\r\n\r\n")).startswith(b"HTTP/1.1 400")
        assert await ask(server, b"x" * 200_000) == b""
    finally:
        await server.close()
        await server.close()
    with pytest.raises(OSError):
        await ask(server, b"")


async def test_the_silent_are_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distributed_grid.monitoring.prometheus._REQUEST_S", 0.05)
    server = await serve_metrics(0, lambda: "")
    try:
        assert await ask(server, b"GET /metrics") == b""
    finally:
        await server.close()


async def test_closing_ends_open_connections() -> None:
    server = await serve_metrics(0, lambda: "")
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"GET")
    await writer.drain()
    async with asyncio.timeout(60):
        await server.close()
        try:
            assert await reader.read() == b""
        except ConnectionError:
            pass
        await end(writer)
