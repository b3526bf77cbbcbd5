"""What a forked child must not share with its parent: connections, locks that another thread held, unwritten bytes.

The child gets none of it and opens its own. Nothing is shut down there: the sockets are its parent's too.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Forked(Protocol):
    def after_fork(self) -> None:
        """In the child, where only the thread that forked goes on."""


_watched: weakref.WeakSet[Forked] = weakref.WeakSet()


def watch(one: Forked) -> None:
    _watched.add(one)


def _in_child() -> None:
    for one in list(_watched):
        one.after_fork()


os.register_at_fork(after_in_child=_in_child)
