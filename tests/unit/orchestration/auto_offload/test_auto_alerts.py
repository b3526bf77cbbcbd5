"""Alerts reach a real web server and a real program, and neither can hold us up or break us."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from distributed_grid.orchestration.auto_offload import alerts
from distributed_grid.orchestration.auto_offload.alerts import send_alert

ALERT = {"kind": "alert.memory", "text": "Memory is at 91%", "node": "gpu-master", "figures": {"level": 0.91}}
KEEP = "import sys, pathlib; pathlib.Path(sys.argv[1]).write_text(sys.stdin.read())"


@pytest.fixture
def received() -> Iterator[tuple[str, list[bytes]]]:
    bodies: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(500 if self.path == "/bad" else 200)
            self.end_headers()

        def log_message(self, *_args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", bodies
    server.shutdown()
    thread.join()
    server.server_close()


async def test_webhook_and_command(received: tuple[str, list[bytes]], tmp_path: Path) -> None:
    url, bodies = received
    out = tmp_path / "alert.json"
    command = [sys.executable, "-c", KEEP, str(out)]
    assert await send_alert(ALERT, webhook=url, command=command) == []
    assert json.loads(bodies[0]) == ALERT == json.loads(out.read_text())


async def test_what_fails_is_text(received: tuple[str, list[bytes]]) -> None:
    url, _bodies = received
    missing = await send_alert(ALERT, webhook=f"{url}/bad", command=["/no/such/program"])
    assert len(missing) == 2 and "500" in missing[0] and "/no/such/program" in missing[1]
    failing = [sys.executable, "-c", "raise SystemExit(3)"]
    assert "exited 3" in (await send_alert(ALERT, webhook=None, command=failing))[0]
    assert await send_alert(ALERT, webhook=None, command=None) == []


async def test_a_program_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alerts, "LIMIT_S", 0.2)
    hanging = [sys.executable, "-c", "import time; time.sleep(600)"]
    assert "took longer" in (await send_alert(ALERT, webhook=None, command=hanging))[0]


@pytest.mark.parametrize("answer", [b"what?\r\n", b"HTTP/1.1 fine\r\n\r\n"])
async def test_a_server_that_speaks_something_else_is_text_too(answer: bytes) -> None:
    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"}}")
        writer.write(answer)
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(speak, "127.0.0.1", 0)
    try:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        [told] = await send_alert(ALERT, webhook=url, command=None)
    finally:
        server.close()
        await server.wait_closed()
    assert told.startswith("the webhook did not take the alert: ")


async def test_an_address_that_is_none_is_text_too() -> None:
    assert "webhook" in (await send_alert(ALERT, webhook="http://a b/", command=None))[0]
