"""Several real hosts on one machine: namespaces, each with its own address, sshd, root file system and processes.

Everything of a lab, its bridge and its disks too, is in namespaces that end with the lab's first process (`init.py
keeper`), which ends when the tests do. So labs never meet each other, or what a crashed one left.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from distributed_grid.core.process import tree_of
from tests.lab.cgroups import remove_empty
from tests.lab.host import INIT, NETWORK, SYSTEM_PATH, Host, HostSpec, await_ready, order, send, tool
from tests.lab.waiting import wait_until

CHECKOUT = Path(__file__).resolve().parents[2]
GATEWAY = f"{NETWORK}.1"
TOOLS = ("/usr/sbin/sshd", "ssh", "ssh-keygen", "ip", "tc", "nsenter", "unshare", "setpriv")

__all__ = ["CHECKOUT", "Host", "HostSpec", "Lab", "missing_tools", "sweep_leftovers"]


def missing_tools() -> list[str]:
    """What this machine lacks for a lab; empty where a lab can be made."""
    path = f"{os.environ.get('PATH', '')}:{SYSTEM_PATH}"
    missing = [name for name in TOOLS if shutil.which(name, path=path) is None]
    return missing if os.geteuid() == 0 else ["root", *missing]


class Lab:
    """Hosts on a bridge of their own. The first is the head by custom; it can log in on all of them, as they can."""

    _numbers = itertools.count(1)

    def __init__(
        self,
        base_dir: str | Path | None = None,
        names: Sequence[str | HostSpec] = ("gpu-master", "gpu1", "gpu2"),
        *,
        shared: Iterable[str | Path] = (),
        run_mark: str | None = None,
    ) -> None:
        specs = [HostSpec(name) if isinstance(name, str) else name for name in names]
        self.id = f"{os.getpid()}-{next(self._numbers)}"
        self.run_mark = os.environ.get("GRID_TEST_RUN", "lab") if run_mark is None else run_mark
        if base_dir is not None:
            Path(base_dir).mkdir(parents=True, exist_ok=True)
        sweep_leftovers(Path(base_dir or tempfile.gettempdir()))
        self.directory = Path(tempfile.mkdtemp(prefix=f"gridlab-{self.id}-", dir=base_dir))
        self._lock = _locked(self.directory)
        self.hosts: dict[str, Host] = {}
        self._keeper: subprocess.Popen[Any] | None = None
        try:
            self._start_keeper({str(self.directory / spec.name): f"{spec.disk_mb}m" for spec in specs})
            self._make_hosts(specs, [Path(path).resolve() for path in shared])
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getitem__(self, name: str) -> Host:
        return self.hosts[name]

    @property
    def head(self) -> Host:
        return next(iter(self.hosts.values()))

    def environment(self) -> dict[str, str]:
        return {"PATH": SYSTEM_PATH, "HOME": "/root", "LANG": "C.UTF-8", "GRID_TEST_RUN": self.run_mark}

    @property
    def pids(self) -> list[int]:
        """Every process of the hosts, as this machine sees them, but for programs that `popen` still waits for."""
        roots = [self._keeper, *(host.process for host in self.hosts.values())]
        return [pid for root in roots if root is not None for pid in tree_of(root.pid)]

    def fds(self) -> set[int]:
        """What the lab keeps open in this process while it is there."""
        return {self._lock, self._keeper.stdin.fileno()} if self._keeper and self._keeper.stdin else set()

    # the cables

    def cut(self, name: str) -> None:
        """Pull the host's cable: nothing comes or goes, and nobody is told."""
        self.ip("link", "set", self.hosts[name].link, "down")

    def heal(self, name: str) -> None:
        self.ip("link", "set", self.hosts[name].link, "up")

    def shape(self, name: str, mbit: float | None) -> None:
        """Make the host's cable this fast, both ways; None: as fast as it goes."""
        host = self.hosts[name]
        outward = ["nsenter", "--target", str(host.init_pid), "--net", "--"]
        for enter, device in ((self.enter("--net"), host.link), (outward, "eth0")):
            if mbit is None:
                tool([*enter, "tc", "qdisc", "del", "dev", device, "root"], check=False)
                continue
            burst = max(128 << 10, int(mbit * 1e6 / 8 / 100))  # 10 ms, and more than one large segment
            rate = ["rate", f"{int(mbit * 1000)}kbit", "burst", f"{burst}b", "latency", "100ms"]
            tool([*enter, "tc", "qdisc", "replace", "dev", device, "root", "tbf", *rate])

    def enter(self, *spaces: str) -> list[str]:
        """The start of an argv that runs the rest in the lab's own namespaces."""
        return ["nsenter", "--target", str(self._keeper_pid), *spaces, "--"]

    def ip(self, *arguments: str, check: bool = True) -> None:
        tool([*self.enter("--net"), "ip", *arguments], check=check)

    def close(self) -> None:
        """Take everything away; harmless when done before."""
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            if keeper.stdin:
                try:
                    keeper.stdin.close()
                except BrokenPipeError:
                    pass
            if keeper.stdout:
                keeper.stdout.close()
            try:
                keeper.wait(timeout=30)
            except subprocess.TimeoutExpired:
                send(self._keeper_pid, signal.SIGKILL)
                keeper.wait(timeout=30)
        for host in self.hosts.values():
            host.remove()
        self.hosts = {}
        shutil.rmtree(self.directory, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    # making it

    def _start_keeper(self, disks: dict[str, str]) -> None:
        log_path = self.directory / "keeper.log"
        spaces = ["--net", "--mount", "--pid", "--fork", "--kill-child=KILL"]
        with log_path.open("ab") as log:
            self._keeper = subprocess.Popen(
                ["unshare", *spaces, "--", sys.executable, "-IS", str(INIT), "keeper"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=self.environment(), text=True,
                start_new_session=True,
            )  # fmt: skip
        unshare = self._keeper.pid
        self._keeper_pid = wait_until(lambda: (tree_of(unshare)[1:2] or [0])[0], 30, "the lab's first process", 0.002)
        order(self._keeper, {"disks": disks, "gateway": GATEWAY}, close=False)
        await_ready(self._keeper, "the lab", log_path)

    def _make_hosts(self, specs: list[HostSpec], shared: list[Path]) -> None:
        client_key, client_public = self._new_key("client")
        host_keys = {spec.name: self._new_key(f"{spec.name}.key") for spec in specs}
        addresses = {spec.name: f"{NETWORK}.{10 + number}" for number, spec in enumerate(specs)}
        names = "".join(f"{address} {name}\n" for name, address in addresses.items())
        known = "".join(f"{name},{addresses[name]} {public}" for name, (_, public) in host_keys.items())
        home, checkout, interpreter = Path(sys.prefix), [CHECKOUT], Path(sys.base_prefix).resolve()
        if CHECKOUT not in home.parents:
            checkout.append(home)
        always = [*shared] if str(interpreter) in ("/usr", "/usr/local") else [*shared, interpreter]
        for number, spec in enumerate(specs):
            binds = [*always, *checkout] if spec.shared_venv else always
            orders = {
                "name": spec.name, "address": addresses[spec.name], "gateway": GATEWAY, "run": self.run_mark,
                "disk": str(self.directory / spec.name), "hosts": f"127.0.0.1 localhost\n{names}",
                "shared": [str(path) for path in binds],
                "hidden": [] if spec.shared_venv else [str(path) for path in checkout],
                "links": links_on_the_way(home / "bin" / "python") if spec.shared_venv else [],
                "files": {
                    "/root/.ssh/id_ed25519": client_key, "/root/.ssh/id_ed25519.pub": client_public,
                    "/root/.ssh/authorized_keys": client_public, "/root/.ssh/known_hosts": known,
                    "/etc/ssh/lab_host_key": host_keys[spec.name][0],
                },
            }  # fmt: skip
            self.hosts[spec.name] = Host(self, spec, number, orders)
            self.hosts[spec.name].start()
        for host in self.hosts.values():
            host.finish_start()

    def _new_key(self, name: str) -> tuple[str, str]:
        path = self.directory / name
        tool(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "lab", "-f", str(path)])
        return path.read_text(), path.with_name(f"{name}.pub").read_text()


def links_on_the_way(path: Path) -> list[tuple[str, str]]:
    """Every symbolic link that is followed from `path` to the file it stands for, with what it says."""
    found: list[tuple[str, str]] = []
    todo = list(path.parts[1:])
    at = Path("/")
    while todo:
        step = at / todo.pop(0)
        if step.is_symlink() and len(found) < 40:
            target = step.readlink()
            found.append((str(step), str(target)))
            whole = Path(os.path.normpath(at / target))
            todo, at = [*whole.parts[1:], *todo], Path("/")
        else:
            at = step
    return [(link, target) for link, target in found if not link.startswith(f"{CHECKOUT}/")]


def sweep_leftovers(base: Path) -> None:
    """Take away the directories and cgroups of labs whose tests were killed; all else of them went by itself."""
    for directory in base.glob("gridlab-*"):
        try:
            lock = os.open(directory / "lock", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove_empty(directory.name.removeprefix("gridlab-").rsplit("-", 1)[0])
            shutil.rmtree(directory, ignore_errors=True)
        except BlockingIOError:
            pass  # it is alive
        finally:
            os.close(lock)


def _locked(directory: Path) -> int:
    """A lock that says that the lab is alive, held before anybody can see it."""
    lock = os.open(directory / "lock.new", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    (directory / "lock.new").rename(directory / "lock")
    return lock


