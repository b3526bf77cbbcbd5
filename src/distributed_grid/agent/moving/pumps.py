"""The streams of a restored tree whose other ends stayed behind: files, pipes and a terminal that lead to the spool.

Part of restored.py, which runs without our package: standard library only.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class Pumps:
    def __init__(self, task_dir: str, poll: select.poll) -> None:
        self.dir = task_dir
        self.poll = poll
        self.open: dict[int, int] = {}  # our end of a pipe or terminal -> spool file

    def terminal(self) -> int:
        """A terminal of our own in place of the one left behind; what is printed on it goes to the spool."""
        import pty
        import termios

        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        os.tcsetpgrp(theirs, os.getpgrp())
        self._watch(ours, "stdout")
        return theirs

    def _watch(self, fd: int, stream: str) -> None:
        os.set_blocking(fd, False)
        self.open[fd] = self._spool(stream)
        self.poll.register(fd, select.POLLIN)

    def _spool(self, stream: str) -> int:
        return os.open(f"{self.dir}/{stream}", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def pump(self, fd: int) -> bool:
        """Carry what is there; False if nothing is."""
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            return False
        except OSError:
            data = b""  # EIO: nobody has the terminal open any more
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self.open[fd], view) :]
            except OSError:
                time.sleep(0.1)  # a full disk: the writer waits with us, nothing is lost
        if not data:
            self.poll.unregister(fd)
            os.close(self.open.pop(fd))
            os.close(fd)
        return bool(data)

    def drain(self) -> None:
        for fd in list(self.open):
            while self.pump(fd):
                pass

    def inherited(self, streams: list[dict[str, Any]]) -> tuple[list[str], list[int]]:
        """CRIU's `--inherit-fd` for each stream that goes to the spool, and the descriptors for it to inherit."""
        words, fds = [], []
        for one in streams:
            if one["kind"] == "file":
                fd = self._spool(one["stream"])
            else:
                reading, writing = os.pipe()
                if one["write"]:
                    self._watch(reading, one["stream"])
                    fd = writing
                else:
                    fd = reading  # its writer stayed: that input is at its end
                    os.close(writing)
            os.set_inheritable(fd, True)
            words.append(f"fd[{fd}]:{one['key']}")
            fds.append(fd)
        return words, fds
