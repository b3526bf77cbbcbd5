"""A cluster for tests to use, by the real `grid` command: embedded on this machine, or over SSH on a lab's hosts."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from distributed_grid.core.process import ProcessId, process_id
from tests.lab.hosts import Host, Lab

GRID = Path(sys.prefix) / "bin" / "grid"
PYTHON = Path(sys.prefix) / "bin" / "python"
KEY, KNOWN_HOSTS = "/root/.ssh/id_ed25519", "/root/.ssh/known_hosts"
START_LIMIT_S, STOP_LIMIT_S = 170.0, 90.0

# Any free port, so that a cluster of somebody else on this machine is not in the way.
EMBEDDED_CONFIG = "embedded: true\nray:\n  port: 0\n  dashboard_port: 0\n"


class Cluster:
    """What both kinds have in common; `grid` is what differs."""

    def grid(
        self, *args: str, check: bool = True, timeout: float = 60, env: Mapping[str, str] | None = None,
        input: str | None = None,
    ) -> subprocess.CompletedProcess[str]:  # fmt: skip
        """Run a `grid` command line to its end, with this cluster's configuration and state."""
        raise NotImplementedError

    def json(self, *args: str, timeout: float = 60) -> Any:
        """The answer of a command in JSON."""
        words = list(args)
        at = words.index("--") if "--" in words else len(words)
        return json.loads(self.grid(*words[:at], "--format", "json", *words[at:], timeout=timeout).stdout)

    def start(self, *args: str, timeout: float = START_LIMIT_S) -> None:
        self.grid("cluster", "start", *args, timeout=timeout)

    def stop(self) -> None:
        """Take the cluster and its daemon down by their own commands."""
        self.grid("cluster", "stop", timeout=STOP_LIMIT_S)
        self.grid("daemon", "stop", timeout=STOP_LIMIT_S)

    def node(self, name: str) -> dict[str, Any]:
        """What `grid cluster status` says of one node."""
        nodes: list[dict[str, Any]] = self.json("cluster", "status")["nodes"]
        return next(node for node in nodes if node["name"] == name)

    def pid_of(self, what: str) -> int:
        """The pid, on its own host, of `daemon`, `gcs`, `agent:NODE` or `raylet:NODE`; 0 where there is none now.

        The one place that knows where the commands' JSON has them.
        """
        kind, _, name = what.partition(":")
        if kind == "daemon":
            return int(self.json("daemon", "status").get("pid") or 0)
        if kind == "gcs":
            pids = [node.get("gcs_pid") for node in self.json("cluster", "status")["nodes"]]
            return next((int(pid) for pid in pids if pid), 0)
        return int(self.node(name).get(f"{kind}_pid") or 0)

    def kill(self, what: str, sig: int = signal.SIGKILL) -> int:
        """Send a signal to what `pid_of` knows; its pid."""
        raise NotImplementedError

    def renew(self) -> None:
        """Put a cluster whose state nobody knows (a test failed on it) out of the way, and start it anew."""
        raise NotImplementedError

    def describe(self) -> str:
        """What a failed test's report should show."""
        raise NotImplementedError


class EmbeddedCluster(Cluster):
    """Three nodes on this machine, with a state directory of its own at a short path (sockets live below it)."""

    def __init__(self, home: Path, config: str | None = EMBEDDED_CONFIG, mark: str | None = None) -> None:
        self.home = home
        self.mark = mark if mark is not None else os.environ.get("GRID_TEST_RUN", "")
        # Away from the checkout, whose own config would be found.
        self.cwd = home.with_name(f"{home.name}.cwd")
        self.cwd.mkdir(parents=True, exist_ok=True)
        self.config = self.cwd / "cluster.yaml" if config is not None else None
        if self.config is not None and config is not None:
            self.config.write_text(config)

    def environment(self, env: Mapping[str, str] | None = None) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("GRID_", "RAY_"))}
        return {**kept, "GRID_HOME": str(self.home), "GRID_TEST_RUN": self.mark, **(env or {})}

    def argv(self, *args: str) -> list[str]:
        return [str(GRID), *(["--config", str(self.config)] if self.config else []), *args]

    def popen(self, *args: str, env: Mapping[str, str] | None = None, **options: Any) -> subprocess.Popen[Any]:
        """Start a `grid` command line, for one that runs on while the test does something else."""
        options.setdefault("stdin", subprocess.DEVNULL)
        return subprocess.Popen(self.argv(*args), env=self.environment(env), cwd=self.cwd, **options)

    def grid(
        self, *args: str, check: bool = True, timeout: float = 60, env: Mapping[str, str] | None = None,
        input: str | None = None,
    ) -> subprocess.CompletedProcess[str]:  # fmt: skip
        given: dict[str, Any] = {"input": input} if input is not None else {"stdin": subprocess.DEVNULL}
        try:
            done = subprocess.run(
                self.argv(*args), env=self.environment(env), cwd=self.cwd, capture_output=True, text=True,
                timeout=timeout, **given,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            said = f"stdout: {_text(error.stdout)}\nstderr: {_text(error.stderr)}\n{self.describe()}"
            raise AssertionError(f"grid {' '.join(args)} did not end within {timeout:g} s\n{said}") from None
        return _checked(done, args, check)

    def kill(self, what: str, sig: int = signal.SIGKILL) -> int:
        pid = self.pid_of(what)
        assert pid, f"there is no {what} now"
        os.kill(pid, sig)
        return pid

    def remove(self) -> None:
        """Forget the state, after `stop`."""
        shutil.rmtree(self.home, ignore_errors=True)
        shutil.rmtree(self.cwd, ignore_errors=True)

    def renew(self) -> None:
        for stopped in marked_processes(self.mark):
            stopped.signal(signal.SIGCONT)
        for words in (("cluster", "stop"), ("daemon", "stop")):
            with contextlib.suppress(AssertionError):
                self.grid(*words, check=False, timeout=STOP_LIMIT_S)
        for left in marked_processes(self.mark):
            left.signal(signal.SIGKILL)
        shutil.rmtree(self.home, ignore_errors=True)
        self.start()

    def describe(self) -> str:
        log = self.home / "daemon.log"
        return f"{log}:\n{_tail(log.read_text(errors='replace'))}" if log.exists() else f"no {log}"


class LabCluster(Cluster):
    """A lab's hosts as nodes, the first as head; `grid` runs on the head as root and reaches the others by SSH."""

    def __init__(
        self,
        lab: Lab,
        config_path: str = "/root/cluster.yaml",
        nodes: Sequence[str] | None = None,
        declared: Mapping[str, float] | None = None,
        more: str = "",
        users: Mapping[str, str] | None = None,
    ) -> None:
        """`declared`: e.g. {"cpu_count": 16, "memory_gb": 64} for every node; else the real ones count.

        `more`: further YAML, at the top level of the file. `users`: by node whom to log in as; else root.
        """
        self.lab = lab
        self.head: Host = lab.head
        self.config = config_path
        self.names = list(nodes or lab.hosts)
        self._users = users or {}
        self.head.write(config_path, self.config_text(declared or {}, more), mode=0o600)

    def config_text(self, declared: Mapping[str, float], more: str = "") -> str:
        lines = ["name: lab", "embedded: false", "nodes:"]
        for name in self.names:
            host = self.lab[name]
            keys: dict[str, Any] = {
                "name": name, "host": host.address, "user": self._users.get(name, "root"), "key": KEY,
                "known_hosts": KNOWN_HOSTS, "role": "head" if host is self.head else "worker", **declared,
            }  # fmt: skip
            if host.spec.shared_venv:
                keys["python"] = str(PYTHON)
            first, *rest = [f"{key}: {value}" for key, value in keys.items()]
            lines += [f"  - {first}", *(f"    {line}" for line in rest)]
        ray = "" if "ray:" in more else "ray:\n  object_store_bytes: 80000000\n"
        return "\n".join(lines) + f"\n{ray}{more}"

    def argv(self, *args: str) -> list[str]:
        return [str(GRID), "--config", self.config, *args]

    def popen(self, *args: str, **options: Any) -> subprocess.Popen[Any]:
        return self.head.popen(self.argv(*args), cwd="/root", **options)

    def grid(
        self, *args: str, check: bool = True, timeout: float = 60, env: Mapping[str, str] | None = None,
        input: str | None = None,
    ) -> subprocess.CompletedProcess[str]:  # fmt: skip
        done = self.head.run(self.argv(*args), check=False, timeout=timeout, env=env, input=input, cwd="/root")
        return _checked(done, args, check)

    def pid_of(self, what: str) -> int:
        kind, _, name = what.partition(":")
        if kind == "raylet":  # the daemon knows Ray's pids on its own machine only
            return next(iter(self.lab[name].pids("/raylet/raylet --raylet_socket_name")), 0)
        return super().pid_of(what)

    def kill(self, what: str, sig: int = signal.SIGKILL) -> int:
        pid = self.pid_of(what)
        assert pid, f"there is no {what} now"
        name = what.partition(":")[2]
        (self.lab[name] if name else self.head).kill(pid, sig)
        return pid

    def renew(self) -> None:
        for name, host in self.lab.hosts.items():
            host.power_off()
            host.power_on()
            self.lab.shape(name, None)
            host.run(["/bin/sh", "-c", "rm -rf /root/.distributed_grid /home/*/.distributed_grid /tmp/grid-*"])
        self.start()

    def describe(self) -> str:
        if not self.head.is_on:
            return f"{self.head.name} is off"
        said = self.head.run(["cat", "/root/.distributed_grid/daemon.log"], check=False).stdout
        return "\n".join([f"daemon.log:\n{_tail(said)}", *(host.describe() for host in self.lab.hosts.values())])


def marked_processes(mark: str) -> list[ProcessId]:
    """What carries the mark of a run in its environment."""
    found = []
    for name in os.listdir("/proc"):  # noqa: PTH208
        if name.isdigit() and int(name) != os.getpid():
            try:
                words = Path(f"/proc/{name}/environ").read_bytes().split(b"\0")
            except OSError:
                continue
            who = process_id(int(name)) if f"GRID_TEST_RUN={mark}".encode() in words else None
            found += [who] if who else []
    return found


def _checked(
    done: subprocess.CompletedProcess[str], args: Sequence[str], check: bool
) -> subprocess.CompletedProcess[str]:
    if check and done.returncode != 0:
        raise AssertionError(
            f"grid {' '.join(args)} gave {done.returncode}\nstdout: {done.stdout}\nstderr: {done.stderr}"
        )
    return done


def _tail(text: str, lines: int = 60) -> str:
    return "\n".join(text.splitlines()[-lines:])


def _text(said: str | bytes | None) -> str:
    return said.decode(errors="replace") if isinstance(said, bytes) else said or ""
