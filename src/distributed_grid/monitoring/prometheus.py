"""Figures in Prometheus' text format, and the small loopback server that hands them out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping

from distributed_grid.monitoring.snapshot import NodeSnapshot

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_REQUEST_BYTES = 8192
_REQUEST_S = 5.0
_MAX_CONNECTIONS = 16

Labels = dict[str, str]
Rows = Iterable[tuple[Labels, float]]

_NODE_GAUGES: tuple[tuple[str, str, Callable[[NodeSnapshot], float]], ...] = (
    ("cpu_cores_total", "Cores that the node may use.", lambda s: s.cpu_cores_total),
    ("cpu_cores_used", "Cores in use.", lambda s: s.cpu_cores_used),
    ("memory_total_bytes", "Memory that the node may use.", lambda s: s.memory_total_bytes),
    ("memory_used_bytes", "Memory in use.", lambda s: s.memory_used_bytes),
    ("memory_available_bytes", "Memory free for new allocations.", lambda s: s.memory_available_bytes),
    ("swap_total_bytes", "Swap space.", lambda s: s.swap_total_bytes),
    ("swap_used_bytes", "Swap space in use.", lambda s: s.swap_used_bytes),
    ("load_1m", "Load average over one minute.", lambda s: s.load_1m),
    ("network_receive_bytes_per_second", "Bytes received per second.", lambda s: s.network_receive_bytes_s),
    ("network_send_bytes_per_second", "Bytes sent per second.", lambda s: s.network_send_bytes_s),
    ("disk_read_bytes_per_second", "Bytes read from disks per second.", lambda s: s.disk_read_bytes_s),
    ("disk_write_bytes_per_second", "Bytes written to disks per second.", lambda s: s.disk_write_bytes_s),
    ("processes", "Processes of the node.", lambda s: s.process_count),
    ("sampled_timestamp_seconds", "When the figures were taken, by the node's clock.", lambda s: s.at),
)


def render(snapshots: Mapping[str, NodeSnapshot], counters: Mapping[str, float] | None = None) -> str:
    """All nodes, then our own counters by name (`offloads_total` becomes `grid_offloads_total`)."""
    lines: list[str] = []
    nodes = sorted(snapshots.items())
    for name, text, value in _NODE_GAUGES:
        _family(lines, f"grid_node_{name}", text, "gauge", [({"node": node}, value(s)) for node, s in nodes])
    pressure = [
        ({"node": node, "resource": kind}, value)
        for node, s in nodes
        for kind, value in (("cpu", s.cpu_pressure), ("memory", s.memory_pressure), ("gpu", s.gpu_pressure))
    ]
    _family(lines, "grid_node_pressure_ratio", "Use as a fraction of what is there.", "gauge", pressure)
    stall = [
        ({"node": node, "resource": resource, "kind": kind}, total_us / 1e6)
        for node, s in nodes
        for resource, psi in (("cpu", s.psi_cpu), ("memory", s.psi_memory), ("io", s.psi_io))
        if psi is not None
        for kind, total_us in (("some", psi.some_total_us), ("full", psi.full_total_us))
    ]
    _family(lines, "grid_node_stall_seconds_total", "Time in which some or all tasks waited.", "counter", stall)
    gpus = [({"node": node, "gpu": str(g.index), "uuid": g.uuid}, g) for node, s in nodes for g in s.gpus]
    total, used = [(k, g.memory_total_bytes) for k, g in gpus], [(k, g.memory_used_bytes) for k, g in gpus]
    _family(lines, "grid_gpu_memory_total_bytes", "GPU memory.", "gauge", total)
    _family(lines, "grid_gpu_memory_used_bytes", "GPU memory in use.", "gauge", used)
    busy = [(k, g.utilization) for k, g in gpus if g.utilization is not None]
    _family(lines, "grid_gpu_utilization_ratio", "Share of time a kernel ran on the GPU.", "gauge", busy)
    for name, count in sorted((counters or {}).items()):
        kind = "counter" if name.endswith("_total") else "gauge"
        _family(lines, f"grid_{name}", name.replace("_", " ").capitalize() + ".", kind, [({}, count)])
    return "\n".join(lines) + "\n"


def _family(lines: list[str], name: str, text: str, kind: str, rows: Rows) -> None:
    body = [f"{name}{_labels(labels)} {_number(value)}" for labels, value in rows]
    if body:
        lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}", *body]


def _labels(labels: Labels) -> str:
    def quoted(value: str) -> str:
        return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

    return "{" + ",".join(f'{key}="{quoted(value)}"' for key, value in labels.items()) + "}" if labels else ""


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else repr(float(value))


class MetricsServer:
    """One answer per connection on 127.0.0.1; who asks badly, slowly or in a crowd is shut out."""

    def __init__(self, text: Callable[[], str]) -> None:
        self._text = text
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0

    async def start(self, port: int) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", port, limit=_REQUEST_BYTES)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            for task in list(self._tasks):
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks)
            await self._server.wait_closed()
            self._server = None

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._tasks) >= _MAX_CONNECTIONS:
            writer.transport.abort()
            return
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_REQUEST_S):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(self._answer(head))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass
        finally:
            writer.transport.abort()

    def _answer(self, head: bytes) -> bytes:
        words = head.split(b"\r\n", 1)[0].split(b" ")
        if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
            return _response("400 Bad Request", "bad request\n")
        if words[0] not in (b"GET", b"HEAD"):
            return _response("405 Method Not Allowed", "only GET\n")
        if words[1].split(b"?", 1)[0] not in (b"/metrics", b"/"):
            return _response("404 Not Found", "see /metrics\n")
        return _response("200 OK", self._text(), body=words[0] == b"GET")


def _response(status: str, text: str, body: bool = True) -> bytes:
    data = text.encode()
    lines = (f"HTTP/1.1 {status}", f"Content-Type: {CONTENT_TYPE}", f"Content-Length: {len(data)}", "Connection: close")
    return "\r\n".join((*lines, "", "")).encode() + (data if body else b"")


async def serve_metrics(port: int, text: Callable[[], str]) -> MetricsServer:
    """Start serving what `text` renders; port 0 takes any free one (`.port` says which). OSError if it is taken."""
    server = MetricsServer(text)
    await server.start(port)
    return server
