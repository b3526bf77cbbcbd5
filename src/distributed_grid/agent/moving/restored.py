# ruff: noqa: PTH100, PTH106, PTH110, PTH118, PTH120, PTH208
"""The shim of a restored tree: pid 1 of its namespace; restores it stopped, lets it go when told, keeps its exit code.

Run by path, `python -I -S restored.py TASKDIR MOVEDIR [--pty]`, with the receiver's commands on stdin. Built on the
ordinary shim, so that what was moved is a task like any other. Holds a duplicate of every userfaultfd and restarts a
dead pager. Standard library only.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import signal
import socket
import struct
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from distributed_grid.agent.moving import priorities
    from distributed_grid.agent.moving.gpu import libraries
    from distributed_grid.agent.moving.pumps import Pumps
    from distributed_grid.agent.program import libc_call, put, read_json, write_json
    from distributed_grid.agent.supervisor import (
        CLONE_NEWPID,
        WATCHED,
        HostProc,
        Shim,
        detach,
        mount_own_proc,
        read_within,
    )
else:
    HERE = os.path.dirname(os.path.abspath(__file__))
    sys.path += [os.path.dirname(HERE), HERE]
    import priorities
    from gpu import libraries
    from program import libc_call, put, read_json, write_json
    from pumps import Pumps
    from supervisor import CLONE_NEWPID, WATCHED, HostProc, Shim, detach, mount_own_proc, read_within

ADD, START, DONE, FORKED = b"A", b"S", b"D", b"F"  # as in pager.py
MESSAGE = struct.Struct("<cII")
RESTORE_FINISHED = 0x52535446  # what CRIU sends when every process is restored
PAGER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "pager.py")
GPU = os.path.join(os.path.dirname(os.path.abspath(__file__)), "gpu.py")
OUR_PIDS = 600  # room for CRIU's helpers and pagers, apart from the pids in the image
ENVIRONMENT = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}


def launch(task_dir: str, move_dir: str, own_pty: bool) -> int:
    """Start the shim, detached; 0 once it waits for its orders."""
    detach()
    lock = os.open(f"{task_dir}/shim.lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    spec = read_json(f"{task_dir}/spec.json")
    for directory in spec["shim_cgroups"]:
        put(f"{directory}/cgroup.procs", "0")
    libc_call("unshare", CLONE_NEWPID)
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.close(reading)
        code = 1
        try:
            code = Restored(task_dir, spec, move_dir, own_pty, writing).run({})
        except BaseException:  # noqa: BLE001 - a forked child must never return into its parent's code
            import traceback

            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writing)
    return 0 if read_within(reading, 20.0) == b"r" else 1


class Restored(Shim):
    def __init__(self, task_dir: str, spec: dict[str, Any], move_dir: str, own_pty: bool, answer: int) -> None:
        super().__init__(task_dir, spec, True, answer)
        self.move_dir = move_dir
        self.own_pty = own_pty
        self.phase = "waiting"
        self.order: dict[str, Any] = {}
        self.poll = select.poll()
        self.pumps = Pumps(task_dir, self.poll)
        self.held: dict[int, tuple[int, int]] = {}  # key -> (pid in the image, userfaultfd)
        self.next_key = 0
        self.pager_pid = self.criu_pid = self.gpu_pid = 0
        self.gpu_back = False  # the copy has its GPU, though it is stopped
        self.pager: socket.socket | None = None
        self.lazy: socket.socket | None = None  # where CRIU brings the userfaultfds
        self.criu_link: socket.socket | None = None
        self.restored = False  # CRIU brought them all
        self.began = 0.0
        self.commands = b""
        self.terminal = -1

    def run(self, env: dict[str, str]) -> int:
        os.setsid()
        self.proc = HostProc()
        mount_own_proc()
        me = self.proc.identity(self.proc.own_pid())
        self.facts = {"boot_id": self.spec["boot_id"], "shim": me, "namespaced": True}
        self._keep_pids_apart()
        self._watch_signals()
        if self.own_pty:
            self.terminal = self.pumps.terminal()
        self.poll.register(0, select.POLLIN)
        write_json(f"{self.dir}/shim.json", {**me, **self.facts})
        self._write_stage()
        self.tell()
        while self.phase != "ended":
            for fd, _ in self.poll.poll(1000):
                self._ready(fd)
            if self.phase == "staged" and os.path.exists(f"{self.dir}/go"):
                self._release()
        for directory in self.spec["cgroups"]:
            try:
                os.rmdir(directory)
            except OSError:
                pass
        return 0

    def _ready(self, fd: int) -> None:
        if fd == self.wake:
            try:
                os.read(self.wake, 4096)
            except BlockingIOError:
                pass
            if not self.reap() or (self.recorded and self._alone()):
                self._end()
            elif self.pumps.input:
                self.pumps.input.hand_on()
        elif fd == 0:
            self._command()
        elif fd in self.pumps.open:
            self.pumps.pump(fd)
        elif self.pumps.input and fd == self.pumps.input.fd:
            self.pumps.input.hand_on()
        elif self.lazy and fd == self.lazy.fileno():
            self.criu_link, _ = self.lazy.accept()
            self.poll.register(self.criu_link, select.POLLIN)
        elif self.criu_link and fd == self.criu_link.fileno():
            self._take_userfaultfd(self.criu_link)
        elif self.pager and fd == self.pager.fileno():
            self._pager_said(self.pager)

    # -------------------------------------------------------------- orders

    def _watch_signals(self) -> None:
        self.wake, writing = os.pipe()
        os.set_blocking(self.wake, False)
        os.set_blocking(writing, False)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        for number in WATCHED:
            signal.signal(number, self._forward)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        self.poll.register(self.wake, select.POLLIN)

    def _forward(self, number: int, _: object) -> None:
        if number in (signal.SIGCHLD, signal.SIGUSR1) or not self.main or self.recorded:
            return
        try:
            os.kill(self.main, number)
        except ProcessLookupError:
            pass

    def _command(self) -> None:
        """Two orders on stdin: prepare, stage. If the receiver ends before the second, there is nothing to restore."""
        data = os.read(0, 1 << 16)
        *lines, self.commands = (self.commands + data).split(b"\n")
        for line in lines:
            self.order = json.loads(line)
            if self.order["op"] == "prepare":
                self.store, self.images = self.order["store"], self.order["images"]
                self._start_pager()
                self._listen_for_criu()
            else:
                self._forget(0)
                self._stage()
                return
        if not data:
            self._forget(0)
            self._fail(["the receiver ended before everything was there"])

    def _forget(self, fd: int) -> None:
        self.poll.unregister(fd)
        if fd == 0:
            null = os.open("/dev/null", os.O_RDWR)
            os.dup2(null, 0)
            os.close(null)

    def _write_stage(self, **facts: Any) -> None:
        try:
            write_json(f"{self.move_dir}/stage.json", {"phase": self.phase, **facts})
        except OSError:
            pass  # the task's own files are what counts

    def _fail(self, errors: list[str]) -> None:
        self.phase = "failed"
        self._write_stage(errors=errors)
        os._exit(1)  # with us, pid 1, goes all that was restored

    # -------------------------------------------------------------- restore

    def _keep_pids_apart(self) -> None:
        with open("/proc/sys/kernel/pid_max") as file:
            top = int(file.read())
        taken = {int(word) for word in os.environ.get("GRID_PIDS", "").split(",") if word}
        for base in (top - 2 * OUR_PIDS, top // 2, top // 4, top // 8):
            if not any(base <= pid < base + OUR_PIDS for pid in taken):
                put("/proc/sys/kernel/ns_last_pid", str(base))
                return

    def _stage(self) -> None:
        self.phase, self.began = "staging", time.monotonic()
        owner = (self.spec["uid"], self.spec["gid"])
        words, fds = self.pumps.inherited(self.order["streams"], self.order["left"], owner)
        command = list(self.order["command"])
        for word in words:
            command += ["--inherit-fd", word]
        null = os.open("/dev/null", os.O_RDWR)
        stdin = self.terminal if self.own_pty else null
        actions = [(os.POSIX_SPAWN_DUP2, stdin if n == 0 or self.own_pty else null, n) for n in range(3)]
        self.criu_pid = os.posix_spawn(
            command[0], command, ENVIRONMENT, file_actions=actions, setsigmask=(), setsigdef=signal.valid_signals() -
            {signal.SIGKILL, signal.SIGSTOP, 32, 33},
        )  # fmt: skip
        for fd in (*fds, null):
            os.close(fd)

    def _listen_for_criu(self) -> None:
        path = f"{self.images}/lazy-pages.socket"
        self.lazy = socket.socket(socket.AF_UNIX)
        self.lazy.bind(path)
        self.lazy.listen(1)
        self.poll.register(self.lazy, select.POLLIN)

    def _take_userfaultfd(self, link: socket.socket) -> None:
        data = link.recv(4)
        number = struct.unpack("<i", data)[0] if len(data) == 4 else 0
        if not data or number == RESTORE_FINISHED:
            self.poll.unregister(link)
            self.restored = number == RESTORE_FINISHED
            if self.restored:
                self._tell_pager(START, 0, 0)
                self._check_staged()
            return
        if number <= 0:
            return
        _, fds, _, _ = socket.recv_fds(link, 1, 1)
        self._hold(number, fds[0], self.next_key)
        self._tell_pager(ADD, self.next_key - 1, number, fds[0])

    def _hold(self, pid: int, fd: int, key: int) -> None:
        self.held[key] = (pid, fd)
        self.next_key = max(self.next_key, key + 1)

    def _criu_ended(self, status: int) -> None:
        self.criu_pid = 0
        if status != 0:
            try:
                with open(f"{self.images}/restore.log", errors="replace") as file:
                    lines = [line.split("): ", 1)[-1].strip() for line in file if "Error (" in line]
            except OSError:
                lines = []
            self._fail([line for line in lines if "RLIMIT_NOFILE" not in line] or [f"CRIU ended with {status}"])
        with open(f"{self.images}/restored.pid") as file:
            self.main = int(file.read())
        self._check_staged()

    def _check_staged(self) -> None:
        """Everything restored and stopped; with `strict`, every page mapped too."""
        if self.phase != "staging" or not self.main or not self.restored or (self.order["strict"] and self.held):
            return
        if self.order.get("gpu") and not self.gpu_back:
            self._give_gpu_back()
            return
        self.phase = "staged"
        assert self.lazy
        self.poll.unregister(self.lazy)
        self.lazy.close()
        self.lazy = None
        for pid in self._tree():
            for directory in self.spec["cgroups"]:
                put(f"{directory}/cgroup.procs", str(pid))
        priorities.give(self.order["priorities"])
        shutil.rmtree(self.images, ignore_errors=True)
        self.who = {**self.proc.identity(self.proc.host_pid(self.main)), "inner_pid": self.main, **self.facts}
        write_json(f"{self.dir}/staged.json", {**self.who, "time": time.time()})
        self.restore_s = round(time.monotonic() - self.began, 4)
        self._write_stage(restore_s=self.restore_s)

    def _give_gpu_back(self) -> None:
        """Before the word to go: a GPU that cannot be had must still lead home."""
        if self.gpu_pid:
            return
        said = (os.POSIX_SPAWN_OPEN, 1, f"{self.images}/gpu.json", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        command = [sys.executable, "-I", "-S", GPU, "unpark-stopped", *self.order["gpu"]]
        self.gpu_pid = os.posix_spawn(sys.executable, command, {**ENVIRONMENT, **libraries()}, file_actions=[said])

    def _gpu_ended(self, status: int) -> None:
        self.gpu_back = status == 0
        if not self.gpu_back:
            with open(f"{self.images}/gpu.json") as file:
                self._fail([f"it did not get its GPU back: {file.read().strip() or status}"])
        self._check_staged()

    def _tree(self) -> list[int]:
        pids = sorted((int(name) for name in os.listdir("/proc") if name.isdigit()), reverse=True)
        return [pid for pid in pids if pid not in (1, self.pager_pid)]

    def _release(self) -> None:
        """Go: what ran when it was frozen runs on."""
        for pid in self._tree():
            if pid not in self.order["stopped_before"]:
                try:
                    os.kill(pid, signal.SIGCONT)
                except ProcessLookupError:
                    pass
        self.phase = "running"
        self.times["started_at"] = time.time()
        self.record_start({**self.who, "time": self.times["started_at"]})
        self._write_stage(restore_s=self.restore_s)

    # -------------------------------------------------------------- pager

    def _start_pager(self) -> None:
        self.pager, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        actions = [(os.POSIX_SPAWN_DUP2, theirs.fileno(), 0)]
        self.pager_pid = os.posix_spawn(
            sys.executable, [sys.executable, "-I", "-S", PAGER, self.store], ENVIRONMENT, file_actions=actions,
            setsigmask=(),
        )  # fmt: skip
        theirs.close()
        self.poll.register(self.pager, select.POLLIN)
        for key, (pid, fd) in sorted(self.held.items()):
            self._tell_pager(ADD, key, pid, fd)
        if self.restored:
            self._tell_pager(START, 0, 0)

    def _tell_pager(self, what: bytes, key: int, pid: int, fd: int = -1) -> None:
        assert self.pager
        try:
            socket.send_fds(self.pager, [MESSAGE.pack(what, key, pid)], [fd] if fd >= 0 else [])
        except OSError:
            pass  # it died: the next one is told everything

    def _pager_said(self, pager: socket.socket) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(pager, MESSAGE.size, 1)
        except OSError:
            data, fds = b"", []
        if not data:
            self.poll.unregister(pager)
            pager.close()
            self.pager = None
            if self.held or not self.restored:
                self._start_pager()
            return
        what, key, parent = MESSAGE.unpack(data)
        if what == FORKED:
            self._hold(self.held[parent][0], fds[0], key)
        elif what == DONE and key in self.held:
            os.close(self.held.pop(key)[1])
            if not self.held and self.restored:
                shutil.rmtree(self.store, ignore_errors=True)  # every page is mapped: nobody needs it again
                self._check_staged()
                try:
                    os.rmdir(os.path.dirname(self.store))
                except OSError:
                    pass

    # -------------------------------------------------------------- end

    def reap(self) -> bool:
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return self.phase == "waiting"
            if pid == 0:
                return True
            if pid == self.criu_pid:
                self._criu_ended(status)
            elif pid == self.gpu_pid:
                self._gpu_ended(status)
            elif pid == self.main and not self.recorded:
                self.pumps.drain()
                if self.pumps.input:
                    self.more["input_taken"] = self.pumps.input.taken_bytes()
                self.record_end(status, usage)
                if self.pumps.input:
                    self.pumps.input.end()

    def _alone(self) -> bool:
        """Whether only the pager is left."""
        with open("/proc/1/task/1/children") as file:
            return {int(word) for word in file.read().split()} <= {self.pager_pid}

    def _end(self) -> None:
        if self.main and not self.recorded:
            return
        self.phase = "ended"
        self.pumps.drain()
        if self.order:
            shutil.rmtree(os.path.dirname(self.store), ignore_errors=True)


if __name__ == "__main__":
    os._exit(launch(sys.argv[1], sys.argv[2], "--pty" in sys.argv[3:]))
