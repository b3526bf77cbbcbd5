"""One host of a lab: its power, its programs, files and processes."""

from __future__ import annotations

import itertools
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from distributed_grid.core.process import tree_of
from tests.lab.cgroups import HostCgroups
from tests.lab.waiting import wait_until

if TYPE_CHECKING:
    from tests.lab.hosts import Lab

INIT = Path(__file__).with_name("init.py")
NETWORK = "10.77.4"
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

# Enters the host's cgroups and the directory asked for, then becomes the program.
ENTER = (
    "for g in /sys/fs/cgroup/cgroup.procs /sys/fs/cgroup/*/cgroup.procs; do "
    '[ -w "$g" ] && echo 0 2>/dev/null >"$g"; done; '
    'cd "$1" || exit 127; shift; exec "$@"'
)


@dataclass(frozen=True, slots=True)
class HostSpec:
    """What a host is like; no limit where None."""

    name: str
    cpus: float | None = None
    memory_mb: int | None = None
    disk_mb: int = 8192
    shared_venv: bool = True  # the checkout and its virtual environment, read-only, as over NFS


class HostPopen(subprocess.Popen[Any]):
    """A program on a host. Signals go to the program itself, not to the `nsenter` that waits for it."""

    @property
    def program_pid(self) -> int | None:
        """Its pid as this machine sees it; None while it is not there yet, or no more."""
        below = tree_of(self.pid)[1:]
        return below[0] if below else None

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            for pid in tree_of(self.pid)[1:2] or [self.pid]:
                send(pid, sig)

    def kill_tree(self) -> None:
        """End it and all that it started and still has as its children."""
        for pid in reversed(tree_of(self.pid)):
            send(pid, signal.SIGKILL)


class Host:
    """One host of a lab; made by `Lab`."""

    def __init__(self, lab: Lab, spec: HostSpec, number: int, orders: dict[str, Any]) -> None:
        self.lab, self.spec, self.name = lab, spec, spec.name
        self.address = f"{NETWORK}.{10 + number}"
        self._number = number
        self._orders = orders
        self._boots = itertools.count(1)
        self.process: subprocess.Popen[Any] | None = None
        self._log = lab.directory / f"{self.name}.log"
        self.link = ""  # the bridge's end of its cable
        self.init_pid = 0  # as this machine sees it
        self.cgroups = HostCgroups(lab.id, self.name)
        self._orders["cgroups"] = [str(group) for group in self.cgroups.groups]

    # power

    @property
    def is_on(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def power_on(self) -> None:
        """Boot it: the disk is as it was, the boot id is new. Returns when its sshd listens."""
        if self.is_on:
            return
        self.start()
        self.finish_start()

    def start(self) -> None:
        """The first half of a boot, so that several hosts can boot at once."""
        self.cgroups.limit(self.spec.cpus, self.spec.memory_mb)
        init = [sys.executable, "-IS", str(INIT), "host"]
        spaces = ["--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child=KILL"]
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [*self.lab.enter("--mount", "--net", "--pid"), "unshare", *spaces, "--", *init],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=self.lab.environment(), text=True,
                start_new_session=True,
            )  # fmt: skip
        parent = self.process.pid

        def booted() -> int:  # nsenter, unshare, init
            if self.process is None or self.process.poll() is not None:
                raise RuntimeError(f"host {self.name} did not boot: {self._log.read_text()}")
            tree = tree_of(parent)
            return tree[2] if len(tree) > 2 else 0

        self.init_pid = wait_until(booted, 30, f"the first process of {self.name}", every_s=0.002)
        self.link = f"v{self._number}b{next(self._boots)}"
        mac = f"02:67:72:64:00:{10 + self._number:02x}"  # the same after a reboot: neighbours remember it
        self.lab.ip("link", "add", self.link, "type", "veth", "peer", "name", "eth0", "address", mac, "netns",
                    str(self.init_pid))  # fmt: skip
        self.lab.ip("link", "set", self.link, "master", "bridge0", "up")
        order(self.process, self._orders)

    def finish_start(self) -> None:
        assert self.process is not None
        await_ready(self.process, f"host {self.name}", self._log)

    def power_off(self) -> None:
        """Pull the plug: every process of it is gone at once, nothing is told, the disk stays."""
        if self.process is None:
            return
        if self.is_on:
            send(self.init_pid, signal.SIGKILL)
        self.process.wait(timeout=60)
        self.process = None
        self.lab.ip("link", "del", self.link, check=False)

    def remove(self) -> None:
        """What is left to do once the lab's first process took the host with it."""
        process, self.process = self.process, None
        if process is not None:
            for pipe in (process.stdin, process.stdout):
                if pipe:
                    pipe.close()
            process.wait(timeout=60)
        self.cgroups.remove()

    # programs and files

    def _argv(self, argv: Sequence[str | os.PathLike[str]], user: str, cwd: str) -> list[str]:
        if not self.is_on:
            raise RuntimeError(f"host {self.name} is off")
        program = [os.fspath(word) for word in argv]
        if user != "root":
            program = ["setpriv", "--reuid", user, "--regid", user, "--init-groups", *program]
        spaces = ["--mount", "--uts", "--ipc", "--net", "--pid", "--cgroup"]
        return ["nsenter", "--target", str(self.init_pid), *spaces, "--", "/bin/sh", "-c", ENTER, "lab", cwd, *program]

    def environment(self, user: str = "root", env: Mapping[str, str] | None = None) -> dict[str, str]:
        """A login's environment, nothing of the tests' own but their mark; `env` goes over it."""
        path = f"{Path(sys.prefix) / 'bin'}:{SYSTEM_PATH}" if self.spec.shared_venv else SYSTEM_PATH
        home = "/root" if user == "root" else f"/home/{user}"
        base = {"HOME": home, "USER": user, "LOGNAME": user, "PATH": path, "LANG": "C.UTF-8", "SHELL": "/bin/sh"}
        return {**base, "GRID_TEST_RUN": self.lab.run_mark, **(env or {})}

    def popen(
        self,
        argv: Sequence[str | os.PathLike[str]],
        *,
        env: Mapping[str, str] | None = None,
        user: str = "root",
        cwd: str = "/",
        **options: Any,
    ) -> HostPopen:
        """Start a program on the host; `options` as for `subprocess.Popen`."""
        options.setdefault("stdin", subprocess.DEVNULL)
        options.setdefault("start_new_session", True)
        return HostPopen(self._argv(argv, user, cwd), env=self.environment(user, env), **options)

    def run(
        self,
        argv: Sequence[str | os.PathLike[str]],
        *,
        check: bool = True,
        timeout: float = 60,
        input: str | bytes | None = None,
        env: Mapping[str, str] | None = None,
        user: str = "root",
        cwd: str = "/",
        text: bool = True,
    ) -> subprocess.CompletedProcess[Any]:
        """Run a program on the host to its end; what it said is in the error if it fails and `check` is set."""
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        stdin = subprocess.DEVNULL if input is None else subprocess.PIPE
        with self.popen(argv, env=env, user=user, cwd=cwd, stdin=stdin, text=text, **pipes) as process:
            try:
                out, err = process.communicate(input, timeout=timeout)
            except subprocess.TimeoutExpired:
                process.kill_tree()
                out, err = process.communicate(timeout=30)
                said = f"\nstdout: {out}\nstderr: {err}\n{self.describe()}"
                raise AssertionError(f"{self.name}: {list(argv)} did not end within {timeout:g} s{said}") from None
            except BaseException:  # a test's own time limit: leave nothing that would hold the pipes open
                process.kill_tree()
                raise
        done = subprocess.CompletedProcess(list(argv), process.returncode, out, err)
        if check and done.returncode != 0:
            raise AssertionError(f"{self.name}: {list(argv)} gave {done.returncode}\nstdout: {out}\nstderr: {err}")
        return done

    def read(self, path: str | Path) -> str:
        return str(self.run(["cat", str(path)]).stdout)

    def write(self, path: str | Path, content: str | bytes, mode: int = 0o644, user: str = "root") -> None:
        """Write a file on the host, its directories too; whole, or not at all."""
        script = 'mkdir -p "$(dirname "$1")" && cat >"$1.new" && chmod "$2" "$1.new" && mv "$1.new" "$1"'
        argv = ["/bin/sh", "-c", script, "write", str(path), f"{mode:o}"]
        self.run(argv, input=content, user=user, text=isinstance(content, str))

    def exists(self, path: str | Path) -> bool:
        return self.run(["test", "-e", str(path)], check=False).returncode == 0

    def add_user(self, name: str) -> None:
        """An ordinary user with a home, who can log in with the lab's key."""
        self.run(["useradd", "--create-home", "--shell", "/bin/sh", "--password", "*", name])
        keys = f"/home/{name}/.ssh/authorized_keys"
        self.write(keys, self.read("/root/.ssh/authorized_keys"), user=name)

    # processes, by the pids that the host itself knows

    def processes(self) -> dict[int, str]:
        """Command line by pid, of all processes on the host that have one."""
        if not self.is_on:
            return {}
        found: dict[int, str] = {}
        try:
            for directory in Path(f"/proc/{self.init_pid}/root/proc").iterdir():
                if directory.name.isdigit():
                    try:
                        words = (directory / "cmdline").read_bytes().split(b"\0")
                    except OSError:
                        continue
                    found[int(directory.name)] = b" ".join(words).decode(errors="replace").strip()
        except OSError:
            return {}
        return {pid: line for pid, line in found.items() if line}

    def pids(self, *matching: str) -> list[int]:
        """The pids of the processes whose command line has all of these texts in it."""
        return sorted(pid for pid, line in self.processes().items() if all(text in line for text in matching))

    def kill(self, pid: int, sig: int = signal.SIGKILL) -> None:
        self.run(["/bin/sh", "-c", 'kill -"$1" "$2"', "kill", str(int(sig)), str(pid)])

    def describe(self) -> str:
        lines = [f"  {pid} {line[:200]}" for pid, line in sorted(self.processes().items())]
        return "\n".join([f"processes on {self.name}:", *lines])


def tool(argv: list[str], check: bool = True) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=30, stdin=subprocess.DEVNULL)
    if check and done.returncode != 0:
        raise RuntimeError(f"{argv} gave {done.returncode}: {done.stderr.strip()}")


def send(pid: int, sig: int) -> None:
    try:
        os.kill(pid, sig)
    except ProcessLookupError:
        pass


def order(process: subprocess.Popen[Any], orders: Mapping[str, Any], close: bool = True) -> None:
    stdin: IO[str] = process.stdin  # type: ignore[assignment]
    try:
        stdin.write(f"{json.dumps(orders)}\n")
        stdin.flush()
        if close:
            stdin.close()
    except BrokenPipeError:
        pass  # it died: the wait for its answer says why


def await_ready(process: subprocess.Popen[Any], what: str, log: Path) -> None:
    stdout: IO[str] = process.stdout  # type: ignore[assignment]
    answered = select.select([stdout], [], [], 60)[0]
    line = stdout.readline() if answered else ""
    stdout.close()
    if line.strip() != "ready":
        process.kill()
        process.wait(timeout=30)
        raise RuntimeError(f"{what} did not come up: {log.read_text().strip() or 'no answer within 60 s'}")
