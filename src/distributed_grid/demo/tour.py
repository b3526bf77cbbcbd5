"""The ground the tour walks on: a state directory of its own, commands shown and run, and nothing left at the end."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from distributed_grid.cluster.ray_node import temp_root
from distributed_grid.cluster.record import ClusterRecord
from distributed_grid.commands._common import paint
from distributed_grid.config.paths import GridPaths
from distributed_grid.core.errors import GridError, TimedOut
from distributed_grid.core.process import ProcessId, process_id

LIMIT_S = 170.0

Answer = TypeVar("Answer")


class TourFailed(GridError):
    """Something that the tour promises did not come true."""

    code = "tour"


class Tour:
    """`grid`, `start`, `json` run real commands against a cluster of the tour's own."""

    def __init__(self, program: Sequence[str] | None = None) -> None:
        # Short, because Ray's and our own unix sockets live below it and their paths end at 107 bytes.
        self.root = Path(tempfile.mkdtemp(prefix="grid-demo-", dir="/tmp"))
        self.home = self.root / "home"
        self.work = self.root / "work"  # where commands run: away from any configuration of the user's
        self.work.mkdir()
        self.began = time.monotonic()
        self.figures: list[tuple[str, str]] = []
        self._program = list(program) if program else [sys.executable, "-m", "distributed_grid.cli"]
        self._running: list[subprocess.Popen[bytes]] = []
        self._owned: list[ProcessId] = []

    # -- words ----------------------------------------------------------------------------------------------------

    def say(self, text: str = "") -> None:
        print(text, flush=True)

    def title(self, number: int, text: str) -> None:
        self.say(f"\n{paint(f'{number}. {text}', 'bold')}")

    def show_command(self, argv: Sequence[str]) -> None:
        self.say(f"{paint('$', 'green')} {paint(_typed(argv), 'bold')}")

    def figure(self, what: str, value: str) -> None:
        """A number worth remembering, for the list at the end."""
        self.figures.append((what, value))
        self.say(paint(f"  → {what}: {value}", "blue"))

    def check(self, true: object, claim: str, found: str = "") -> None:
        """A promise: shown when it came true; when not, the tour ends."""
        if not true:
            raise TourFailed(f"this did not come true: {claim}", cause=found, hint="grid doctor")
        self.say(f"  {paint('✓', 'green')} {claim}")

    # -- commands -------------------------------------------------------------------------------------------------

    def environment(self) -> dict[str, str]:
        drop = ("GRID_HOME", "GRID_CONFIG", "RAY_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith((*drop, "GRID__"))}
        # `python` and `grid` in what is shown are the ones of this installation.
        path = f"{Path(sys.executable).parent}:{kept.get('PATH', os.defpath)}"
        return {**kept, "PATH": path, "GRID_HOME": str(self.home)}

    def _popen(self, argv: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        # A session of its own: Ctrl-C is for the tour, which then takes everything down in order.
        return self._spawn([*self._program, *argv], **options)

    def _spawn(self, argv: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        options = {"env": self.environment(), "stdin": subprocess.DEVNULL, **options}
        process: subprocess.Popen[bytes] = subprocess.Popen(
            list(argv), cwd=self.work, start_new_session=True, **options
        )
        self._running.append(process)
        return process

    def grid(self, *argv: str, expect: int | None = 0, limit_s: float = LIMIT_S) -> str:
        """Show a command, run it, show its output as it comes; its stdout."""
        self.show_command(["grid", *argv])
        with self.start(*argv, shown=False) as run:
            code = run.wait(limit_s)
        if expect is not None and code != expect:
            raise TourFailed(f"grid {argv[0]} gave {code}, not {expect}", cause=run.said()[-500:], hint="grid doctor")
        return run.stdout()

    def json(self, *argv: str, limit_s: float = 60.0) -> Any:
        """A command's answer, not shown."""
        process = self._popen([*argv, "--format", "json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        out, err = self._communicate(process, limit_s)
        try:
            return json.loads(out)
        except ValueError:
            cause = (err or out).decode(errors="replace").strip()[-500:]
            raise TourFailed(f"grid {' '.join(argv)} gave no JSON", cause=cause) from None

    def quiet(self, *argv: str, limit_s: float = 60.0) -> int:
        """Run a command and keep silent about it; its exit code."""
        process = self._popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._communicate(process, limit_s)
        return process.returncode

    def _communicate(self, process: subprocess.Popen[bytes], limit_s: float) -> tuple[bytes, bytes]:
        try:
            return process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise TimedOut(f"a command of the tour did not end within {limit_s:.0f} s") from None
        finally:
            self._running.remove(process)

    @contextlib.contextmanager
    def start(self, *argv: str, shown: bool = True) -> Iterator[Running]:
        """A command that runs while the tour goes on; its lines are shown as they come."""
        if shown:
            self.show_command(["grid", *argv, "&"])
        with self._watched(self._popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE)) as run:
            yield run

    @contextlib.contextmanager
    def shell(self, script: str) -> Iterator[Running]:
        """`sh -c SCRIPT` in the background, as a user would type it: none of it is the grid's."""
        self.say(f"{paint('$', 'green')} {paint(f'({script}) &', 'bold')}")
        process = self._spawn(["sh", "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        with self._watched(process) as run:
            yield run

    @contextlib.contextmanager
    def terminal(self, *argv: str, columns: int = 100, lines: int = 30) -> Iterator[Terminal]:
        """A command with a screen of its own, which runs while the tour goes on; ended after it."""
        self.say(f"{paint('$', 'green')} {paint(_typed(['grid', *argv]), 'bold')}   (in another terminal)")
        ours, theirs = os.openpty()
        try:
            termios.tcsetwinsize(theirs, (lines, columns))
            process = self._popen(
                argv, stdin=theirs, stdout=theirs, stderr=theirs, env={**self.environment(), "TERM": "xterm-256color"}
            )
        finally:
            os.close(theirs)
        screen = Terminal(process, ours)
        try:
            yield screen
        finally:
            screen.close()
            self._running.remove(process)

    @contextlib.contextmanager
    def _watched(self, process: subprocess.Popen[bytes]) -> Iterator[Running]:
        run = Running(process, lambda line: self.say(f"  {line}"))
        try:
            yield run
        finally:
            run.close()
            self._running.remove(process)

    def kill(self, pid: int, what: str) -> None:
        self.show_command(["kill", "-9", str(pid)])
        self.say(paint(f"  that was {what}", "dim"))
        os.kill(pid, signal.SIGKILL)

    def own(self, pid: int) -> None:
        """A process that must not outlive the tour, whatever becomes of its command line and its directory."""
        one = process_id(pid)
        if one is not None:
            self._owned.append(one)

    def until(self, condition: Callable[[], Answer], what: str, limit_s: float = 120.0) -> Answer:
        """Ask again until the answer is true."""
        deadline = time.monotonic() + limit_s
        while not (answer := condition()):
            if time.monotonic() > deadline:
                raise TourFailed(f"waited {limit_s:.0f} s in vain for {what}")
            time.sleep(0.1)
        return answer

    # -- the end --------------------------------------------------------------------------------------------------

    def processes(self) -> list[ProcessId]:
        """What still runs of the tour: its own directory is in its environment, its command line or its place."""
        mark = os.fsencode(f"{self.root}/")
        found = [one for one in self._owned if one.is_alive()]
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            try:
                texts = ((entry / name).read_bytes() for name in ("environ", "cmdline"))
                if any(mark in text for text in texts) or mark in os.fsencode((entry / "cwd").readlink()) + b"/":
                    one = process_id(int(entry.name))
                    if one is not None and one.is_alive():
                        found.append(one)
            except OSError:
                continue
        return found

    def ray_directories(self) -> list[Path]:
        """What Ray keeps outside of the tour's own directory."""
        record = ClusterRecord.load(GridPaths(self.home).cluster_record)
        return [temp_root(record.cluster_id)] if record else []

    def close(self) -> None:
        """Take everything down, whatever state the tour is in; not to be interrupted half-way."""
        with _no_interrupts():
            for process in list(self._running):
                process.kill()
                process.wait()
            places: list[Path] = []
            if self.home.exists() and self.processes():
                self.say("taking everything down")
                places = self._take_down()
            for one in self.processes():
                one.signal(signal.SIGKILL)
            deadline = time.monotonic() + 10
            while self.processes() and time.monotonic() < deadline:
                time.sleep(0.05)
            for place in (*places, self.root):
                shutil.rmtree(place, ignore_errors=True)

    def _take_down(self) -> list[Path]:
        """By the commands that a user has, as far as they still work."""
        with contextlib.suppress(GridError, OSError):
            for job in self.json("jobs", "list"):
                self.quiet("jobs", "cancel", "--grace", "0", job["id"])
            for move in self.json("offload", "status")["active"]:
                self.quiet("offload", "cancel", "--grace", "0", move["id"])
        for argv in (["cluster", "stop"], ["daemon", "stop"]):
            with contextlib.suppress(GridError, OSError):
                self.quiet(*argv, limit_s=90)
        return self.ray_directories()


class Running:
    """A command under way, with what it has said so far."""

    def __init__(self, process: subprocess.Popen[bytes], show: Callable[[str], None]) -> None:
        self._process = process
        self._show = show
        self._lines: dict[str, list[str]] = {"stdout": [], "stderr": []}
        assert process.stdout is not None and process.stderr is not None
        self._readers = [
            threading.Thread(target=self._read, args=(name, stream), daemon=True)
            for name, stream in (("stdout", process.stdout), ("stderr", process.stderr))
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, name: str, stream: Any) -> None:
        for raw in stream:
            line = raw.decode(errors="replace").rstrip("\n")
            self._lines[name].append(line)
            self._show(line)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def lines(self) -> list[str]:
        return list(self._lines["stdout"])

    def stdout(self) -> str:
        return "".join(f"{line}\n" for line in self._lines["stdout"])

    def said(self) -> str:
        return "\n".join([*self._lines["stdout"], *self._lines["stderr"]])

    def ended(self) -> bool:
        return self._process.poll() is not None

    def wait(self, limit_s: float) -> int:
        try:
            code = self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise TimedOut(f"a command of the tour did not end within {limit_s:.0f} s") from None
        for reader in self._readers:
            reader.join(10)
        return code

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        for reader in self._readers:
            reader.join(10)
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()


class Terminal:
    """A command on a pseudo-terminal, and all that was ever on its screen."""

    def __init__(self, process: subprocess.Popen[bytes], fd: int) -> None:
        self._process, self._fd = process, fd
        self._shown = b""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # EIO: the other side is closed
            while part := os.read(self._fd, 65536):
                self._shown += part

    def showed(self, text: str) -> bool:
        plain = re.sub(rb"\x1b\[[0-9;?]*[ -/]*[@-~]", b"", self._shown)
        return text.encode() in plain

    def press(self, key: str) -> None:
        with contextlib.suppress(OSError):
            os.write(self._fd, key.encode())

    def wait(self, limit_s: float) -> int:
        try:
            return self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise TimedOut(f"a screen of the tour did not close within {limit_s:.0f} s") from None

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._reader.join(10)
        os.close(self._fd)


def _typed(argv: Sequence[str]) -> str:
    return " ".join(word if word == "&" else shlex.quote(word) for word in argv)


@contextlib.contextmanager
def _no_interrupts() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
