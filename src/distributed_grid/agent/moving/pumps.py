# ruff: noqa: PTH102, PTH110
"""The streams of a restored tree whose other ends stayed behind: what leads to the spool, and what comes from home.

Part of restored.py, which runs without our package: standard library only.
"""

from __future__ import annotations

import base64
import fcntl
import os
import select
import shutil
import signal
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from distributed_grid.agent.feed import PARTS, Parts, unread_bytes
else:  # beside restored.py
    from feed import PARTS, Parts, unread_bytes


class Pumps:
    def __init__(self, task_dir: str, poll: select.poll) -> None:
        self.dir = task_dir
        self.poll = poll
        self.open: dict[int, int] = {}  # our end of a pipe or terminal -> spool file
        self.input: Input | None = None

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

    def inherited(
        self, streams: list[dict[str, Any]], left: dict[str, str], owner: tuple[int, int]
    ) -> tuple[list[str], list[int]]:
        """CRIU's `--inherit-fd` for each stream that we have the other end of, and the descriptors for it to inherit.

        `left`: by pipe, in base64, what was unread in it.
        """
        words, fds = [], []
        for one in streams:
            if one["kind"] == "file":
                fd = self._spool(one["stream"])
            else:
                reading, writing = os.pipe()
                os.fchown(reading, *owner)  # it may be opened anew, as /dev/stdin
                if one["write"]:
                    self._watch(reading, one["stream"])
                    fd = writing
                elif one["fed"]:
                    self.input = Input(self.dir, self.poll, writing)
                    fd = reading
                else:  # its writer stayed: that input is at its end
                    fd, rest = reading, base64.b64decode(left.get(one["key"], ""))
                    if rest:
                        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, max(len(rest), 1 << 16))
                        os.write(writing, rest)
                    os.close(writing)
            os.set_inheritable(fd, True)
            words.append(f"fd[{fd}]:{one['key']}")
            fds.append(fd)
        return words, fds


class Input:
    """What comes into its standard input at home, from the parts that agents leave here to the pipe in its place."""

    def __init__(self, task_dir: str, poll: select.poll, fd: int) -> None:
        self._dir, self._moved = f"{task_dir}/{PARTS}", f"{task_dir}/moved"
        os.mkdir(self._dir, 0o700)
        self._parts = Parts(task_dir)
        self._poll = poll
        self._rest = b""
        self._handed = self._unread = 0
        self._open = True
        self.fd = fd
        os.set_blocking(fd, False)
        poll.register(fd, 0)  # tells, unasked, when nobody reads any more

    def hand_on(self) -> None:
        """What is there, as fast as the program takes it; the rest when the pipe has room."""
        while self._open and (self._rest or self._next()):
            try:
                done = os.write(self.fd, self._rest)
            except BlockingIOError:
                self._poll.modify(self.fd, select.POLLOUT)
                return
            except BrokenPipeError:
                break
            self._handed += done
            self._rest = self._rest[done:]
        if self._open:
            self._poll.modify(self.fd, 0)
            ends = select.poll()
            ends.register(self.fd, 0)
            if ends.poll(0):
                self._nobody_reads()

    def _nobody_reads(self) -> None:
        self._unread = unread_bytes(self.fd)
        self._close()
        if not os.path.exists(self._moved):  # else it reads on elsewhere
            shutil.rmtree(self._dir, ignore_errors=True)  # whoever brings more is told

    def end(self) -> None:
        """The program has ended: what it left behind has this much, and no more."""
        if self._open:
            self.hand_on()
        if self._open:
            self._close()

    def _next(self) -> bool:
        self._rest = self._parts.next()
        if self._parts.ended:  # which the program sees once nobody writes; what is in the pipe stays countable for us
            reading = os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            self._close()
            self.fd = reading
        return bool(self._rest)

    def _close(self) -> None:
        self._poll.unregister(self.fd)
        os.close(self.fd)
        self.fd, self._open, self._rest = -1, False, b""

    def taken_bytes(self) -> int:
        """How much of it the program has read."""
        return self._handed - (unread_bytes(self.fd) if self.fd >= 0 else self._unread)
