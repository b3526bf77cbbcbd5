"""Measures what a link between two nodes carries: one plain TCP stream, from a sender to a sink that counts."""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import time
from dataclasses import dataclass

from distributed_grid.core.errors import Refused, TimedOut, Unavailable

NONCE_BYTES = 16
_CHUNK_BYTES = 1024 * 1024
_VERDICT = struct.Struct("!Qd")  # bytes that came, seconds from the first to the last


@dataclass(frozen=True, slots=True)
class Measured:
    count_bytes: int
    seconds: float

    @property
    def bytes_per_s(self) -> float:
        return self.count_bytes / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Sink:
    """A listener for one measurement, and the nonce that its sender must show."""

    listener: socket.socket
    nonce: bytes

    @property
    def port(self) -> int:
        return int(self.listener.getsockname()[1])

    def close(self) -> None:
        self.listener.close()


def open_sink(host: str) -> Sink:
    return Sink(socket.create_server((host, 0), backlog=1), secrets.token_bytes(NONCE_BYTES))


def measure_sink(sink: Sink, limit_s: float) -> Measured:
    """Count what one sender sends, and tell it; blocks for at most the limit. Closes the sink."""
    deadline = time.monotonic() + limit_s
    try:
        sink.listener.settimeout(limit_s)
        stream, _ = sink.listener.accept()
        with stream:
            stream.settimeout(_left(deadline))
            if not hmac.compare_digest(_read_exactly(stream, NONCE_BYTES), sink.nonce):
                raise Refused("a stranger connected to the measurement", code="bandwidth-nonce")
            measured = _count(stream, deadline)
            stream.sendall(_VERDICT.pack(measured.count_bytes, measured.seconds))
            return measured
    except TimeoutError:
        raise TimedOut(f"no whole measurement within {limit_s:.0f} s", code="bandwidth-timeout") from None
    except OSError as error:
        raise Unavailable("the measurement broke off", cause=str(error), code="bandwidth-lost") from error
    finally:
        sink.close()


def measure_send(host: str, port: int, nonce: bytes, seconds: float, limit_bytes: int | None = None) -> Measured:
    """Send for so long (or so much), and return what the sink counted; blocks at most 10 s longer than that."""
    chunk = memoryview(secrets.token_bytes(_CHUNK_BYTES))  # random, so that no link compresses it
    deadline = time.monotonic() + seconds + 10.0
    sent = 0
    try:
        with socket.create_connection((host, port), timeout=5.0) as stream:
            stream.sendall(nonce)
            until = time.monotonic() + seconds
            while time.monotonic() < until and (limit_bytes is None or sent < limit_bytes):
                stream.settimeout(_left(deadline))
                sent += stream.send(chunk if limit_bytes is None else chunk[: limit_bytes - sent])
            stream.shutdown(socket.SHUT_WR)
            stream.settimeout(_left(deadline))
            return Measured(*_VERDICT.unpack(_read_exactly(stream, _VERDICT.size)))
    except TimeoutError:
        raise TimedOut(f"{host}:{port} stopped taking data", code="bandwidth-timeout") from None
    except OSError as error:
        raise Unavailable(f"the measurement towards {host}:{port} broke off", cause=str(error),
                          code="bandwidth-lost") from error  # fmt: skip


def format_rate(bytes_per_s: float) -> str:
    """In bits, as links are sold: `941 Mbit/s`, `9.4 Gbit/s`."""
    value = bytes_per_s * 8
    for unit in ("bit/s", "kbit/s", "Mbit/s"):
        if value < 1000:
            return f"{value:.0f} {unit}" if value >= 100 or unit == "bit/s" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} Gbit/s"


def _count(stream: socket.socket, deadline: float) -> Measured:
    buffer = bytearray(_CHUNK_BYTES)
    count, started = 0, time.monotonic()
    while True:
        stream.settimeout(_left(deadline))
        got = stream.recv_into(buffer)
        if got == 0:
            return Measured(count, time.monotonic() - started)
        count += got


def _read_exactly(stream: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = stream.recv(count - len(data))
        if not part:
            raise ConnectionResetError("the other side hung up")
        data += part
    return data


def _left(deadline: float) -> float:
    return max(0.01, deadline - time.monotonic())
