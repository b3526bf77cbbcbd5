"""Waiting for a condition, with a limit and a name for what did not come."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Answer = TypeVar("Answer")


def wait_until(condition: Callable[[], Answer], limit_s: float = 60, what: str = "", every_s: float = 0.05) -> Answer:
    """Ask again and again until the answer is true, and return it; fail with `what` after the limit."""
    deadline = time.monotonic() + limit_s
    while True:
        answer = condition()
        if answer:
            return answer
        if time.monotonic() > deadline:
            asked = what or getattr(condition, "__name__", "the condition")
            raise AssertionError(f"waited {limit_s:g} s in vain for {asked}; the last answer was {answer!r}")
        time.sleep(every_s)
