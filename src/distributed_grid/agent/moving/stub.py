# ruff: noqa: PTH104, PTH108, PTH110, PTH208
"""The stub: stays in the place of a moved process; writes its output, passes on signals, ends with its exit code.

Exec'd in place, so it has the process's pid, parent and standard descriptors. Run as `python -I -S stub.py DIR LABEL…`
(the label is for whoever reads `ps`). Listens on DIR/stub.sock; one JSON object per line and direction:

    {"op": "hello"}                                 -> {"pid", "offsets": {"1": n, "2": n}}, then {"signal", "number"},
                                                       counted from 1, for each that the program has not got yet
    {"op": "heard", "upto"}                         -> {"ok": true}; it has got these: they are not told again
    {"op": "write", "fd", "offset", "data": base64} -> {"offsets"}; what was written before is skipped, a gap refused
    {"op": "input", "offset"}                       -> {"data": base64, "end"} of its standard input, once there is some
    {"op": "input_over"}                            -> {"ok": true}; who writes into that pipe sees that nobody reads it
    {"op": "exit", "code", "signal"}                -> {"ok": true}, and it ends so
"""

from __future__ import annotations

import base64
import ctypes
import errno
import fcntl
import json
import os
import resource
import select
import signal
import socket
import stat
import sys

#: Also what a pipe of input is made to hold: each part takes a round through three processes.
INPUT_PART_BYTES = 1 << 19
#: More than what can be on its way to the program: eight parts, a rest and a pipe.
INPUT_KEPT_BYTES = 1 << 23
STOPPING = (signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)
RELAYED = {
    signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM,
    signal.SIGWINCH, signal.SIGCONT, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU, signal.SIGURG, signal.SIGIO,
}  # fmt: skip


class Stub:
    def __init__(self, directory: str) -> None:
        self.offsets = {1: 0, 2: 0}
        self.broken: set[int] = set()  # streams that nobody reads any more
        self.caught: list[int] = []  # signals, but for the first `heard`
        self.heard = self.told = 0  # how many reached the program, how many the listener was told of
        self.writing = False
        #: What waits for room in a pipe or terminal, in order: whom to answer, its offset, the data.
        self.waiting: dict[int, list[tuple[socket.socket, int, bytes]]] = {}
        self.listener: socket.socket | None = None  # who hears of signals
        #: Input that was read, but for its beginning: it is asked for again from where the program really is.
        self.input, self.input_at, self.input_ended = bytearray(), 0, False
        self.asking: tuple[socket.socket, int] | None = None  # who waits for input, and from where on
        self.clients: dict[int, socket.socket] = {}
        self.pending: dict[int, bytes] = {}
        while os.open(os.devnull, os.O_RDWR) < 2:  # a stream that was closed must not become one of our own
            pass
        self.wake, writing = os.pipe()
        for fd in (self.wake, writing):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        # Everything is blocked since before the exec; the SIGCONT that woke us is ours and has no handler yet.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCONT})
        for number in RELAYED:
            signal.signal(number, self.on_signal)
        signal.signal(signal.SIGCHLD, self.on_child)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        path = f"{directory}/stub.sock"
        if os.path.exists(f"{path}.new"):
            os.unlink(f"{path}.new")
        self.server = socket.socket(socket.AF_UNIX)
        os.umask(0o077)
        self.server.bind(f"{path}.new")
        self.server.listen(8)
        os.rename(f"{path}.new", path)  # who sees it can connect
        self.poll = select.poll()
        self.poll.register(self.server, select.POLLIN)
        self.poll.register(self.wake, select.POLLIN)

    def on_signal(self, number: int, _: object) -> None:
        self.caught.append(number)
        # Else the main loop tells; not if a reader that does not read holds that up, or if we are about to stop.
        if self.writing or number in STOPPING:
            self.tell_signals()
        if number in STOPPING:
            os.kill(os.getpid(), signal.SIGSTOP)  # a shell's Ctrl-Z stops us as well as the one it is meant for

    def on_child(self, *_: object) -> None:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass

    def tell_signals(self) -> None:
        """In order, each in a line of its own: no handler interrupts this."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, RELAYED)
        try:
            while self.listener and self.told < self.heard + len(self.caught):
                number = self.caught[self.told - self.heard]
                self.told += 1
                line = json.dumps({"signal": number, "number": self.told})
                try:
                    self.listener.sendall(line.encode() + b"\n")
                except OSError:
                    self.listener = None  # who says hello next is told again
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def hear(self, upto: int) -> None:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, RELAYED)
        done = max(0, min(upto - self.heard, len(self.caught)))
        del self.caught[:done]
        self.heard += done
        self.told = max(self.told, self.heard)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def run(self) -> None:
        while True:
            for fd, _ in self.poll.poll():
                if fd == self.wake:
                    try:
                        os.read(fd, 4096)
                    except BlockingIOError:
                        pass
                elif fd == self.server.fileno():
                    client, _ = self.server.accept()
                    self.clients[client.fileno()] = client
                    self.pending[client.fileno()] = b""
                    self.poll.register(client, select.POLLIN)
                elif fd == 0:
                    self.read_input()
                elif fd in self.waiting:
                    self.write_some(fd)
                elif fd in self.clients:
                    self.serve(fd)
            self.tell_signals()

    def serve(self, fd: int) -> None:
        client = self.clients[fd]
        try:
            data = client.recv(1 << 20)
        except OSError:
            data = b""
        if not data:
            self.poll.unregister(client)
            if self.listener is client:
                self.listener = None
            if self.asking and self.asking[0] is client:
                self.ask_for_input(None)
            for output in list(self.waiting):
                self.waiting[output] = [one for one in self.waiting[output] if one[0] is not client]
                self.wait_for_room(output)
            del self.clients[fd], self.pending[fd]
            client.close()
            return
        *lines, self.pending[fd] = (self.pending[fd] + data).split(b"\n")
        for line in lines:
            request = json.loads(line)
            try:
                answer = self.answer(client, request)
            except OSError as error:
                answer = {"error": os.strerror(error.errno or 0), "errno": error.errno, "offsets": self.offsets}
            if answer is not None:
                self.send(client, answer)
            if request["op"] == "exit":
                self.end(request)

    def send(self, client: socket.socket, answer: dict[str, object]) -> None:
        try:
            client.sendall(json.dumps(answer).encode() + b"\n")
        except OSError:
            pass

    def answer(self, client: socket.socket, request: dict[str, object]) -> dict[str, object] | None:
        """None: later."""
        if request["op"] == "hello":
            self.listener, self.told = client, self.heard
            return {"pid": os.getpid(), "offsets": self.offsets}
        if request["op"] == "write":
            fd, offset = int(str(request["fd"])), int(str(request["offset"]))
            data = base64.b64decode(str(request["data"]))
            if offset > self.offsets[fd]:
                return {"error": "gap", "offsets": self.offsets}
            view = memoryview(data)[self.offsets[fd] - offset :]
            if not view or stat.S_ISREG(os.fstat(fd).st_mode):
                self.write(fd, view)
                return {"offsets": self.offsets}
            self.waiting.setdefault(fd, []).append((client, offset, data))
            self.wait_for_room(fd)
            return None
        if request["op"] == "heard":
            self.hear(int(str(request["upto"])))
        if request["op"] == "input":
            at = int(str(request["offset"]))
            found = self.found_input(at)
            if found is None:
                self.ask_for_input((client, at))
            return found
        if request["op"] == "input_over" and stat.S_ISFIFO(os.fstat(0).st_mode):
            null = os.open(os.devnull, os.O_RDONLY)
            os.dup2(null, 0)
            os.close(null)
        return {"ok": request["op"] in ("exit", "heard", "input_over")}

    def found_input(self, at: int) -> dict[str, object] | None:
        """What there is from that offset on; None if there is nothing yet."""
        if not self.input_at <= at <= self.input_at + len(self.input):
            return {"error": "gap"}
        data = bytes(self.input[at - self.input_at :][:INPUT_PART_BYTES])
        end = self.input_ended and at + len(data) == self.input_at + len(self.input)
        return {"data": base64.b64encode(data).decode(), "end": end} if data or end else None

    def ask_for_input(self, asking: tuple[socket.socket, int] | None) -> None:
        """Nothing is read before it is asked for: who writes it waits, as for the program itself."""
        if asking and not self.asking:
            try:
                fcntl.fcntl(0, fcntl.F_SETPIPE_SZ, INPUT_PART_BYTES)
            except OSError:
                pass  # it has too many pipes for that: slower
            self.poll.register(0, select.POLLIN)
        if self.asking and not asking:
            self.poll.unregister(0)
        self.asking = asking

    def read_input(self) -> None:
        try:
            data = os.read(0, INPUT_PART_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self.input_ended = not data
        self.input += data
        over = max(0, len(self.input) - INPUT_KEPT_BYTES)
        del self.input[:over]
        self.input_at += over
        if self.asking:
            client, at = self.asking
            self.ask_for_input(None)
            self.send(client, self.found_input(at) or {"error": "gap"})

    def wait_for_room(self, fd: int) -> None:
        """A reader that is slow holds up nothing else: it may itself wait for our input to be taken."""
        if self.waiting[fd]:
            self.poll.register(fd, select.POLLOUT)
        else:
            self.poll.unregister(fd)
            del self.waiting[fd]

    def write_some(self, fd: int) -> None:
        """As much as surely has room, of the first that waits."""
        client, offset, data = self.waiting[fd][0]
        view = memoryview(data)[self.offsets[fd] - offset :]
        answer: dict[str, object] = {"offsets": self.offsets}
        try:
            self.write(fd, view[: select.PIPE_BUF])
            if len(view) > select.PIPE_BUF:
                return
        except BlockingIOError:
            return
        except OSError as error:
            answer |= {"error": os.strerror(error.errno or 0), "errno": error.errno}
        del self.waiting[fd][0]
        self.wait_for_room(fd)
        self.send(client, answer)

    def write(self, fd: int, view: memoryview) -> None:
        self.writing = True
        try:
            while view:
                try:
                    done = os.write(fd, view)
                except OSError as error:
                    if not self.is_broken(fd, error.errno):
                        raise
                    done = len(view)  # nobody will ever read it: it must not keep us from ending
                self.offsets[fd] += done
                view = view[done:]
        finally:
            self.writing = False

    def is_broken(self, fd: int, code: int | None) -> bool:
        """Whether its reader is gone for good: a closed pipe or terminal. The program gets the SIGPIPE that is due."""
        gone = code in (errno.EPIPE, errno.ECONNRESET, errno.EBADF)
        gone = gone or (code == errno.EIO and not stat.S_ISREG(os.fstat(fd).st_mode))
        if code == errno.EPIPE and fd not in self.broken:
            self.broken.add(fd)
            self.caught.append(signal.SIGPIPE)
        return gone

    def end(self, request: dict[str, object]) -> None:
        number = int(str(request.get("signal") or 0))
        if number:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            if number not in (signal.SIGKILL, signal.SIGSTOP):
                signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        os._exit(int(str(request.get("code") or 0)) & 255)


def close_all_but_pipes() -> None:
    """Whoever reads a pipe that the program could write to sees its end when the program ends, not now."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            writes = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY
            if fd > 2 and not (writes and stat.S_ISFIFO(os.fstat(fd).st_mode)):
                os.close(fd)
        except OSError:
            pass  # the one that lists them


if __name__ == "__main__":
    close_all_but_pipes()
    os.chdir("/")
    ctypes.CDLL(None).prctl(15, b"grid-stub", 0, 0, 0)
    Stub(sys.argv[1]).run()
