"""What the memory pool is measured beside: a raw TCP stream, a ping-pong in C, Redis, Arrow Flight, a Ray actor."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from distributed_grid.core.process import tree_of

MIB = 1024**2
SLICE = 256 * 1024

#: Blocking sockets, 256 KiB at a time, straight from and into one buffer; no sums, no checks: SIZE [ADDRESS].
RAW = """
import socket, sys
listener = socket.create_server(((sys.argv[2:] or ["127.0.0.1"])[0], 0)); print(listener.getsockname()[1], flush=True)
line, _ = listener.accept(); line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
view = memoryview(bytearray(int(sys.argv[1])))
while len(head := line.recv(9, socket.MSG_WAITALL)) == 9:
    size = int.from_bytes(head[1:], "big")
    if head[:1] == b"r":
        for at in range(0, size, 262144): line.sendall(view[at:min(size, at + 262144)])
    else:
        got = 0
        while got < size: got += line.recv_into(view[got:min(size, got + 262144)])
        line.sendall(b"k")
"""

#: A 64-byte question and a 64-byte answer, as often as the line on stdin says; then the seconds it took.
_PING_PONG = r"""
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>
static int all(int fd, char *b, int write_it) {
  for (int got = 0; got < 64;) {
    int n = write_it ? write(fd, b + got, 64 - got) : read(fd, b + got, 64 - got);
    if (n <= 0) return 0;
    got += n;
  }
  return 1;
}
int main(void) {
  struct sockaddr_in at = {.sin_family = AF_INET};
  socklen_t size = sizeof at;
  char b[64] = {0};
  int one = 1, listener = socket(AF_INET, SOCK_STREAM, 0);
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  bind(listener, (struct sockaddr *)&at, size);
  listen(listener, 1);
  getsockname(listener, (struct sockaddr *)&at, &size);
  if (!fork()) {
    close(0);
    int line = accept(listener, 0, 0);
    setsockopt(line, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    while (all(line, b, 0) && all(line, b, 1)) {}
    return 0;
  }
  int line = socket(AF_INET, SOCK_STREAM, 0), count;
  connect(line, (struct sockaddr *)&at, size);
  setsockopt(line, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  while (scanf("%d", &count) == 1) {
    struct timespec a, z;
    clock_gettime(CLOCK_MONOTONIC, &a);
    for (int i = 0; i < count; i++) if (!all(line, b, 1) || !all(line, b, 0)) return 1;
    clock_gettime(CLOCK_MONOTONIC, &z);
    printf("%.9f\n", (z.tv_sec - a.tv_sec) + (z.tv_nsec - a.tv_nsec) / 1e9);
    fflush(stdout);
  }
  return 0;
}
"""

_FLIGHT = """
import sys
import numpy, pyarrow, pyarrow.flight as flight
data = pyarrow.table({"b": pyarrow.array(numpy.frombuffer(bytearray(int(sys.argv[1])), numpy.uint8))})
class Server(flight.FlightServerBase):
    def do_get(self, context, ticket): return flight.RecordBatchStream(data)
server = Server("grpc://127.0.0.1:0"); print(server.port, flush=True); server.serve()
"""


class _Child:
    """A process that prints a line when it is ready, and ends when told to."""

    def __init__(self, argv: Sequence[str]) -> None:
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdin and self.process.stdout
        self.stdin, self.stdout = self.process.stdin, self.process.stdout

    def close(self) -> None:
        self.process.kill()
        self.process.wait(30)
        self.stdin.close()
        self.stdout.close()


class RawLine:
    """The asking end."""

    def __init__(self, address: str, port: int) -> None:
        self._line = socket.create_connection((address, port))
        self._line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def write(self, view: memoryview) -> None:
        self._line.sendall(b"w" + len(view).to_bytes(8, "big"))
        for at in range(0, len(view), SLICE):
            self._line.sendall(view[at : at + SLICE])
        self._line.recv(1)

    def read(self, view: memoryview) -> None:
        self._line.sendall(b"r" + len(view).to_bytes(8, "big"))
        got = 0
        while got < len(view):
            got += self._line.recv_into(view[got : min(len(view), got + SLICE)])

    def close(self) -> None:
        self._line.close()


class RawStream(_Child, RawLine):
    def __init__(self, size: int) -> None:
        _Child.__init__(self, [sys.executable, "-c", RAW, str(size)])
        RawLine.__init__(self, "127.0.0.1", int(self.stdout.readline()))

    def close(self) -> None:
        RawLine.close(self)
        _Child.close(self)


class PingPong(_Child):
    """In C where there is a compiler; else `language` says what it is instead."""

    def __init__(self, directory: Path) -> None:
        compiler = shutil.which("cc") or shutil.which("gcc")
        self.language = "C" if compiler else "Python, for want of a C compiler"
        self._raw: RawStream | None = None
        if compiler is None:
            self._raw = RawStream(64)
            return
        source, program = directory / "pingpong.c", directory / "pingpong"
        source.write_text(_PING_PONG)
        subprocess.run([compiler, "-O2", "-w", "-o", str(program), str(source)], check=True, timeout=120)
        super().__init__([str(program)])

    @property
    def pids(self) -> list[int]:
        """The one who asks first."""
        return tree_of(self.process.pid) if self._raw is None else [os.getpid(), self._raw.process.pid]

    def seconds(self, count: int) -> float:
        if self._raw is not None:
            place, began = memoryview(bytearray(64)), time.perf_counter()
            for _ in range(count):
                self._raw.read(place)
            return time.perf_counter() - began
        self.stdin.write(b"%d\n" % count)
        self.stdin.flush()
        return float(self.stdout.readline())

    def close(self) -> None:
        if self._raw is not None:
            self._raw.close()
        else:
            super().close()


class Flight(_Child):
    def __init__(self, size: int) -> None:
        super().__init__([sys.executable, "-c", _FLIGHT, str(size)])
        from pyarrow import flight

        self._client: Any = flight.connect(f"grpc://127.0.0.1:{int(self.stdout.readline())}")
        self._ticket: Any = flight.Ticket(b"")

    def read(self) -> None:
        self._client.do_get(self._ticket).read_all()

    def close(self) -> None:
        self._client.close()
        super().close()


class Redis(_Child):
    @staticmethod
    def lacking() -> str:
        """Why it can't be measured here; empty where it can."""
        lacks = [] if shutil.which("redis-server") else ["no redis-server on the PATH (scripts/setup.sh --bench)"]
        lacks += [] if importlib.util.find_spec("redis") else ["no redis-py"]
        return ", ".join(lacks)

    def __init__(self, directory: Path, data: bytes) -> None:
        import redis

        path = str(directory / "redis.sock")
        with socket.create_server(("127.0.0.1", 0)) as found:
            port = found.getsockname()[1]
        super().__init__([
            "redis-server", "--port", str(port), "--bind", "127.0.0.1", "--unixsocket", path, "--save", "",
            "--appendonly", "no", "--dir", str(directory),
        ])  # fmt: skip
        self._client: Any = redis.Redis("127.0.0.1", port)
        deadline = time.monotonic() + 30
        while not Path(path).exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        self._client.set("block", data)

    def read(self) -> None:
        self._client.get("block")

    def close(self) -> None:
        self._client.close()
        super().close()


class RayActor:
    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def write(self, data: bytes) -> None:
        import ray

        ray.get(self._actor.write.remote(data))

    def read(self) -> None:
        import ray

        ray.get(self._actor.read.remote())

    def close(self) -> None:
        import ray

        ray.kill(self._actor)


class _Holder:
    def __init__(self) -> None:
        self.data = bytearray()

    def write(self, data: bytes) -> None:
        self.data = bytearray(data)

    def read(self) -> bytearray:
        return self.data


@contextlib.contextmanager
def ray_actor() -> Iterator[Callable[[], RayActor]]:
    """A Ray of its own, and a way to make actors that hold a block."""
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_raylet_start_wait_time_s", "180")
    import ray

    ray.init(
        address="local", num_cpus=2, include_dashboard=False, object_store_memory=2 * 1024 * MIB, log_to_driver=False,
        logging_level=logging.ERROR,
    )  # fmt: skip
    holder: Any = ray.remote(_Holder)
    try:
        yield lambda: RayActor(holder.remote())
    finally:
        ray.shutdown()
