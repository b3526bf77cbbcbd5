"""A job's terminal: the command runs on a pseudo-terminal of the caller's size, its output goes on to our own.

Run by path, `python -I -S terminal.py ROWSxCOLUMNS SIZEFILE STDIN COMMAND…`, as the job's main process: it passes
signals on and ends as the command ends. Standard library only.
"""

from __future__ import annotations

import errno
import fcntl
import os
import pty
import select
import signal
import struct
import sys
import termios

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
NOT_FOUND, NOT_RUNNABLE = 127, 126  # what shells return
END_OF_INPUT = b"\x04"


def set_size(fd: int, text: str) -> None:
    """`ROWSxCOLUMNS`; what is no size is no size."""
    rows, _, columns = text.partition("x")
    if rows.isdigit() and columns.isdigit():
        fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", int(rows), int(columns), 0, 0))


def make_plain(fd: int) -> None:
    """The caller's own terminal echoes what is typed and makes lines of the output: not twice."""
    mode = termios.tcgetattr(fd)
    mode[1] &= ~termios.OPOST
    mode[3] &= ~termios.ECHO
    termios.tcsetattr(fd, termios.TCSANOW, mode)


def start(argv: list[str], slave: int, takes_input: bool) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
        for number in range(0 if takes_input else 1, 3):
            os.dup2(slave, number)
        os.execvp(argv[0], argv)
    except OSError as error:
        os.write(2, f"cannot run {argv[0]!r}: {error.strerror}\n".encode())
        os._exit(NOT_FOUND if error.errno == errno.ENOENT else NOT_RUNNABLE)


def write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def pump(master: int, child: int, size_file: str, takes_input: bool) -> int:
    """Both ways, until the command has ended and all it wrote is out; its exit status."""
    wake, writing = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGWINCH):
        signal.signal(number, lambda *_: None)

    def pass_on(number: int, _: object) -> None:
        try:
            os.kill(child, number)
        except ProcessLookupError:
            pass

    for number in PASSED_ON:
        signal.signal(number, pass_on)
    watched, status = {master, wake, *([0] if takes_input else [])}, None
    while True:
        ready = select.select(list(watched), [], [], 0 if status is not None else 1.0)[0]
        if wake in ready:
            numbers = os.read(wake, 4096)
            if signal.SIGWINCH in numbers:
                with open(size_file) as file:
                    set_size(master, file.read().strip())
        if master in ready:
            try:
                data = os.read(master, 65536)
            except OSError:  # EIO: nobody has the other end any more
                data = b""
            write_all(1, data)
            if not data:
                watched.discard(master)
        elif status is not None:
            return status
        if 0 in ready:
            data = os.read(0, 4096)
            write_all(master, data or END_OF_INPUT)
            if not data:
                watched.discard(0)
        if status is None:
            pid, found = os.waitpid(child, 0 if master not in watched else os.WNOHANG)
            status = found if pid else None
            if status is not None:
                watched.discard(0)
                if master not in watched:
                    return status


def main(size: str, size_file: str, takes_input: bool, argv: list[str]) -> int:
    master, slave = pty.openpty()
    os.set_inheritable(slave, False)
    set_size(master, size)
    make_plain(slave)
    child = start(argv, slave, takes_input)
    os.close(slave)
    code = os.waitstatus_to_exitcode(pump(master, child, size_file, takes_input))
    if code < 0:  # ended by a signal: so are we
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3] == "stdin", sys.argv[4:]))
