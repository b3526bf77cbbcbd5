"""Who holds bytes that no node has yet; they are written when the pool is shut down or the process ends, or before."""

from __future__ import annotations

import atexit
import threading
from typing import Protocol

from distributed_grid.core.errors import GridError
from distributed_grid.orchestration.distributed_memory_pool import forks


class Flushable(Protocol):
    def flush(self) -> None: ...


class Unflushed:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: set[Flushable] = set()
        forks.watch(self)

    def after_fork(self) -> None:
        """A forked child has a copy of what is its parent's to write."""
        self._lock = threading.Lock()
        self._held = set()
        atexit.unregister(self.flush)

    def add(self, one: Flushable) -> None:
        with self._lock:
            if not self._held:
                atexit.register(self.flush)
            self._held.add(one)

    def discard(self, one: Flushable) -> None:
        with self._lock:
            self._held.discard(one)
            if not self._held:
                atexit.unregister(self.flush)

    def flush(self) -> None:
        """All of them, also where one fails; the first failure is told."""
        failures = []
        with self._lock:
            held = list(self._held)
        for one in held:
            try:
                one.flush()
            except GridError as error:
                failures.append(error)
        if failures:
            raise failures[0]
