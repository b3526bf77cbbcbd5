"""The source side of a move: pre-copy while it runs, freeze, what is left, images and files, then held.

Runs in a process of its own (see mover.py), and holds the frozen tree as hold.py does.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from distributed_grid.agent.moving import criu, cure, gpu, images, priorities, stream
from distributed_grid.agent.moving.facts import TreeFacts, left_in_pipes, tree_facts
from distributed_grid.agent.moving.hold import Cancelled, Holder
from distributed_grid.agent.moving.ptrace import TRAP
from distributed_grid.agent.moving.ranges import Range, batches, merge, subtract, total_bytes
from distributed_grid.agent.moving.state import State, cpu_ticks, live_tree
from distributed_grid.agent.moving.track import Tracker, has_missing_pages, read_into
from distributed_grid.core.errors import GridError, Refused, TimedOut

MAX_PASSES = 4
SEIZE_TRIES = 3
SMALL_PASS_BYTES = 4 << 20  # less than this is as well sent in the pause
FILL_LIMIT_S = 60.0
_HEAD = struct.Struct("<II")  # pid, ranges


class Source(Holder):
    def __init__(self, spec: dict[str, Any], state: State) -> None:
        super().__init__(spec, state)
        self.options: dict[str, Any] = spec["options"]
        self.spec = spec
        self.shm = Path(state["shm"])
        self.trackers: dict[int, Tracker] = {}
        self.sent: dict[int, list[Range]] = {}
        self.figures = {"passes": [], "bytes": 0}
        self.told_at = 0.0
        self.buffer = bytearray(stream.FRAME_BYTES + (1 << 16))
        self.dump: subprocess.Popen[bytes] | None = None
        self.asked: socket.socket | None = None
        self.gpu_threads: dict[int, int] = {}

    def _let_go(self) -> None:
        for tracker in self.trackers.values():
            tracker.close()
        self._let_dump_end()
        super()._let_go()

    def _run(self) -> None:
        tree = live_tree(self.root)
        if not tree:
            raise Refused(f"process {self.root.pid} is gone", code="gone")
        facts = self._facts(tree)
        self._wait_filled(tree)
        self.link = stream.connect(
            self.spec["host"], self.spec["port"], bytes.fromhex(self.spec["key"]),
            encrypt=bool(self.options.get("encrypt", True)), stall_s=float(self.options.get("stall_s", 30.0)),
        )  # fmt: skip
        hello = {
            "move_id": self.spec["move_id"], "pids": tree, "terminal": facts.terminal, "argv": facts.argv,
            "uid": facts.uid, "gid": facts.gid, "cwd": facts.cwd,
        }  # fmt: skip
        self.link.send(stream.HELLO, stream.pack_json(hello))
        self._reach("precopy")
        began = time.monotonic()
        self._answer()  # the target's supervisor and pager are up: from here the pause could begin
        if self.options.get("precopy", True):
            self._precopy()
        self.figures["precopy_s"] = round(time.monotonic() - began, 4)
        self._freeze()

    def _facts(self, tree: list[int]) -> TreeFacts:
        options = self.options
        return tree_facts(
            tree, redirect=bool(options.get("redirect", True)), feed=str(options.get("feed") or ""),
            moved=bool(options.get("moved")),
        )  # fmt: skip

    def _wait_filled(self, tree: list[int]) -> None:
        """A tree that was just moved here may still wait for pages: CRIU would take those for empty."""
        deadline = time.monotonic() + FILL_LIMIT_S
        for pid in tree:
            while _waits_for_pages(pid):
                if time.monotonic() > deadline:
                    raise Refused("it handles page faults by itself (userfaultfd)", code="userfaultfd")
                time.sleep(0.02)

    # -------------------------------------------------------------- while it runs

    def _track(self, pid: int) -> None:
        self.critical = True
        try:
            self.trackers[pid] = Tracker(pid, apart=True)
        except OSError as error:
            self.figures["untracked"] = str(error)
        finally:
            self.critical = False
        if self.cancelled:
            raise Cancelled

    def _precopy(self) -> None:
        last = 0
        for number in range(MAX_PASSES):
            began, size = time.monotonic(), 0
            for pid in live_tree(self.root):
                try:
                    size += self._send_written(pid)
                except (FileNotFoundError, ProcessLookupError):
                    if pid == self.root.pid:
                        raise
                    self.sent.pop(pid, None)  # a child that ended meanwhile
                    if tracker := self.trackers.pop(pid, None):
                        tracker.close()
            self.figures["passes"].append({"bytes": size, "s": round(time.monotonic() - began, 4)})
            if size <= SMALL_PASS_BYTES or (number and size * 2 > last):
                break
            last = size

    def _send_written(self, pid: int) -> int:
        if pid not in self.trackers and pid not in self.sent:
            self.sent[pid] = []
            self._track(pid)
        if pid not in self.trackers:
            return 0
        if self._forget_other_program(pid):
            self._track(pid)
        return self._send_pages(pid, self.trackers[pid].written()) if pid in self.trackers else 0

    def _forget_other_program(self, pid: int) -> bool:
        """After an exec what was sent is another program's memory."""
        if self.trackers[pid].same_program():
            return False
        self.trackers.pop(pid).close()
        self.sent[pid] = []
        return True

    def _send_pages(self, pid: int, ranges: list[Range], must: bool = False) -> int:
        size = 0
        view = memoryview(self.buffer)
        done: list[Range] = []
        for group in batches(ranges, stream.FRAME_BYTES):
            head = _HEAD.size + 16 * len(group)
            got = read_into(pid, group, view[head:])
            if got is not group:
                if must and total_bytes(got) != total_bytes(group):
                    raise GridError("a page of the frozen process cannot be read", code="unreadable-page")
                # Fewer or joined ranges: the head is shorter, the data follows it closely.
                shorter = _HEAD.size + 16 * len(got)
                if shorter > head:
                    data = bytes(view[head : head + total_bytes(got)])
                    view[shorter : shorter + len(data)] = data
                head_at = head - shorter if shorter <= head else 0
            else:
                shorter, head_at = head, 0
            _HEAD.pack_into(self.buffer, head_at, pid, len(got))
            struct.pack_into(f"<{2 * len(got)}Q", self.buffer, head_at + _HEAD.size, *[n for r in got for n in r])
            end = head_at + shorter + total_bytes(got)
            self.link.send(stream.PAGES, view[head_at:end])
            done += got
            size += total_bytes(got)
            self._tell(size)
        self.sent[pid] = merge([*self.sent.get(pid, []), *done])
        self.figures["bytes"] += size
        return size

    def _tell(self, size: int) -> None:
        """How far it is, twice a second, for those who watch."""
        if time.monotonic() - self.told_at >= 0.5:
            self.told_at = time.monotonic()
            self.state.set(figures={**self.figures, "bytes": self.figures["bytes"] + size})

    # -------------------------------------------------------------- the pause

    def _freeze(self) -> None:
        self.began = time.monotonic()
        stopped_before = self._begin_pause()
        self._park(stopped_before)
        frozen_at, late = time.time(), 0
        for number in range(1, SEIZE_TRIES + 1):
            tree = self._stop_tree(stopped_before)
            self._reach("frozen", tree=tree, frozen_at=frozen_at)
            facts = self._facts(tree)
            self._save(tree)
            self._tick("stopped_s")
            tracked = [pid for pid in tree if pid in self.trackers and not self._forget_other_program(pid)]
            ready = self._start_dump(facts, tree)
            late += sum(self._send_pages(pid, self.trackers[pid].written()) for pid in tracked)
            try:
                self._await_dump(ready)
                break
            except GridError:
                last = number == SEIZE_TRIES or bool(self.gpu_threads)
                if last or not criu.may_try_again(self.shm / "dump.log"):
                    raise
                self._wake_again(tree, stopped_before)
        self._tick("dumped_s")
        # This scan is the one that counts: CRIU's own code ran in the process meanwhile.
        late += sum(self._send_pages(pid, self.trackers[pid].written(), must=True) for pid in tracked)
        for pid, lazy in images.lazy_by_pid(self.shm).items():
            late += self._send_pages(pid, subtract(lazy, self.sent.get(pid, [])), must=True)
        self.figures["late_bytes"] = late
        self._tick("pages_s")
        assert self.asked
        self.asked.close()  # nobody asks CRIU for pages: it lets go of the tree, which stays stopped
        images.unblock(self.shm, cure.unblocked(self.shm / cure.NAME), TRAP)
        for pid, action in cure.trap_actions(self.shm / cure.NAME).items():
            images.put_action(self.shm, pid, signal.SIGTRAP, action)
        images.begin_calls_anew(self.shm, cure.interrupted(self.shm / cure.NAME))
        images.rearm_timerfds(self.shm)
        for path in sorted(self.shm.glob("*.img")):
            self._send_file(path, {"image": path.name})
        self._finish_dump()
        self._guard(tree)
        ticks = cpu_ticks(tree)
        self._tick("images_s")
        for path in map(Path, self.options.get("files", [])):
            self._send_file(path, {"path": str(path)})
        self._tick("files_s")
        if cpu_ticks(tree) != ticks or set(live_tree(self.root)) != set(tree):
            raise Refused("somebody woke or ended the process while it was frozen", code="woken")
        left = left_in_pipes(facts.streams)
        self._reach("sent", streams=facts.streams)
        end = {
            "streams": facts.streams, "shell_job": facts.shell_job, "terminal": facts.terminal,
            "stopped_before": stopped_before, "root": self.root.pid, "tcp_close": bool(self.options.get("tcp_close")),
            "argv": facts.argv, "uid": facts.uid, "gid": facts.gid, "cwd": facts.cwd,
            "left": left, "priorities": priorities.read(tree),
        }  # fmt: skip
        if self.gpu_threads:
            end["gpu"] = {"threads": self.gpu_threads, "pairs": self.options["gpu_pairs"]}
        self.link.send(stream.END, stream.pack_json(end))
        self._answer()
        self._tick("copied_s")
        self.figures["wire_bytes"] = self.link.bytes_sent
        self.link.close()
        for path in self.shm.iterdir():
            if path.name != cure.NAME:
                path.unlink()
        self.state.set(phase="copied", figures=self.figures, cpu_ticks=ticks)
        assert self.guard
        self.guard.stay()

    def _reach(self, phase: str, **facts: Any) -> None:
        self.state.set(phase=phase, **facts)
        if self.options.get("halt_at") == phase:  # for trials: stand still here until called off
            while True:
                signal.pause()

    def _tick(self, name: str) -> None:
        self.figures[name] = round(time.monotonic() - self.began, 4)

    def _park(self, stopped_before: list[int]) -> None:
        """What it has on GPUs comes into its memory. Said first: whoever lets it run on has it given back."""
        if not self.options.get("gpu_pairs"):
            return
        if stopped_before:  # the driver would wait for ever for its answer
            raise Refused("what a stopped program has on its GPU cannot be parked", hint="kill -CONT", code="gpu-park")
        self.state.set(parked=True)
        self.critical = True
        try:
            self.gpu_threads = gpu.call("park", *live_tree(self.root))
        except gpu.GpuError as error:
            raise Refused("what it has on its GPU cannot be carried", cause=str(error), code="gpu-park") from None
        finally:
            self.critical = False
        self._tick("parked_s")
        if self.cancelled:
            raise Cancelled

    def _wake_again(self, tree: list[int], stopped_before: list[int]) -> None:
        """Seen, rarely: CRIU does not get hold of a thread that stands still. It runs on for a moment, as it was."""
        for pid in tree:
            print(f"not seized: {pid} {thread_facts(pid)}", file=sys.stderr, flush=True)
        self.figures["seized_again"] = self.figures.get("seized_again", 0) + 1
        assert self.asked
        self.asked.close()
        self.critical = True
        try:
            told = cure.cure(self.shm / cure.NAME)
        finally:
            self.critical = False
        if self.cancelled:
            raise Cancelled
        if told:
            print("put right:", "; ".join(told), file=sys.stderr, flush=True)
        for path in self.shm.iterdir():
            path.unlink()
        for pid in set(tree) - set(stopped_before):
            os.kill(pid, signal.SIGCONT)
        time.sleep(0.01)

    def _stop_tree(self, stopped_before: list[int]) -> list[int]:
        for _ in range(5):
            tree = self._stop()
            if not any(_stack_at_page_start(pid) for pid in tree):
                return tree
            for pid in set(tree) - set(stopped_before):
                os.kill(pid, signal.SIGCONT)
            time.sleep(0.002)
        return self._stop()

    def _save(self, tree: list[int]) -> None:
        """What CRIU's death in the middle would spoil; put back by whoever lets the source run on."""
        self.critical = True
        try:
            cure.save(tree, self.shm / cure.NAME)
        except PermissionError as error:
            raise Refused("another program traces it", cause=str(error), code="criu-traced") from None
        finally:
            self.critical = False
        if self.cancelled:
            raise Cancelled

    def _start_dump(self, facts: TreeFacts, tree: list[int]) -> int:
        self.asked, given = socket.socketpair()
        ready, status = os.pipe()
        command = criu.dump_command(
            criu.require(), self.root.pid, str(self.shm), lazy_fd=given.fileno(), status_fd=status,
            shell_job=facts.shell_job, options=self.options, owner=criu.dump_as(tree),
        )  # fmt: skip
        self.dump = subprocess.Popen(
            command, pass_fds=(given.fileno(), status), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        _hurry(self.dump.pid)
        given.close()
        os.close(status)
        return ready

    def _await_dump(self, ready: int) -> None:
        assert self.dump
        ended = os.pidfd_open(self.dump.pid)  # a helper of a killed CRIU may hold the pipe open
        readable, _, _ = select.select([ready, ended], [], [], float(self.options.get("dump_limit_s", 120.0)))
        os.close(ended)
        if not readable:
            raise TimedOut("CRIU does not come to an end", code="criu")
        done = os.read(ready, 1) if ready in readable else b""
        os.close(ready)
        if not done:
            self._finish_dump(failed=True)

    def _finish_dump(self, failed: bool = False) -> None:
        assert self.dump
        code = self.dump.wait(30)
        if code < 0:
            raise GridError(f"CRIU was ended by signal {-code}", code="criu-killed")
        if code or failed:
            raise criu.explain(self.shm / "dump.log", "the process cannot be carried")

    def _let_dump_end(self) -> None:
        """Called off: CRIU first takes its own code out of the process again; killed, it leaves that to `cure`."""
        if self.asked:
            self.asked.close()
        if self.dump:
            try:
                self.dump.wait(30)
            except subprocess.TimeoutExpired:
                self.dump.kill()
                self.dump.wait(10)
            if self.dump.returncode < 0:
                try:
                    os.killpg(self.dump.pid, signal.SIGKILL)  # helpers that a killed CRIU left
                except ProcessLookupError:
                    pass

    def _send_file(self, path: Path, about: dict[str, Any]) -> None:
        with open(path, "rb") as file:
            found = os.fstat(file.fileno())
            about |= {
                "size": found.st_size, "mode": found.st_mode & 0o7777, "uid": found.st_uid, "gid": found.st_gid,
                "mtime_ns": found.st_mtime_ns,
            }  # fmt: skip
            at = 0
            while True:
                data = file.read(min(stream.FRAME_BYTES, found.st_size - at))
                head = json.dumps(about | {"at": at}).encode()
                self.link.send(stream.FILE, struct.pack("<I", len(head)) + head + data)
                self.figures["bytes"] += len(data)
                at += len(data)
                if at >= found.st_size or not data:
                    break

    def _answer(self) -> None:
        op, body = self.link.receive()
        answer = json.loads(bytes(body))
        if op != stream.ANSWER or answer.get("error"):
            self.state.set(phase="refused")  # it said so itself: there is no copy
            raise GridError.from_wire(answer.get("error") or {"message": "the target answered nonsense"})


def _hurry(pid: int) -> None:
    """CRIU's run is the pause: it shall not wait for a processor."""
    try:
        os.sched_setscheduler(pid, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    except OSError:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, pid, -20)


def thread_facts(pid: int) -> list[str]:
    """State, tracer and where in the kernel each of its threads is: for the log."""
    found = []
    for name in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208
        place = Path(f"/proc/{pid}/task/{name}")
        try:
            lines = dict(line.split(":", 1) for line in (place / "status").read_text().splitlines() if ":" in line)
            told = [lines[key].strip() for key in ("State", "TracerPid", "SigPnd", "ShdPnd")]
            found.append(f"{name}: {' '.join(told)} {(place / 'wchan').read_text()}")
        except (OSError, KeyError):
            continue
    return found


def _waits_for_pages(pid: int) -> bool:
    try:
        return has_missing_pages(pid)
    except (FileNotFoundError, ProcessLookupError):
        return False  # a child that ended meanwhile


def _stack_at_page_start(pid: int) -> bool:
    """CRIU then takes every page for a stack and leaves none to us (slow, still right): freeze a moment later."""
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            words = (task / "syscall").read_text().split()
            if len(words) >= 3 and int(words[-2], 16) % 4096 == 0:
                return True
    except (OSError, ValueError):
        pass
    return False
