"""The target side of a move: receives pages into tmpfs, images and files, checks that all is there, has it restored.

Runs in a process of its own until everything is there; from then on the restored shim (restored.py) is on its own.
"""

from __future__ import annotations

import json
import os
import pwd
import shutil
import socket
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

from distributed_grid.agent.moving import criu, gpu, images, stream
from distributed_grid.agent.moving.ranges import Range, merge, subtract, total_bytes
from distributed_grid.agent.moving.state import State, write_json
from distributed_grid.core.errors import GridError, InternalError, Refused, Unavailable
from distributed_grid.core.process import boot_id

RESTORED = Path(__file__).with_name("restored.py")
_HEAD = struct.Struct("<II")  # pid, ranges
_MERGE_AT = 8192
_TOP = 1 << 47


class Target:
    def __init__(self, spec: dict[str, Any], state: State, listener: socket.socket) -> None:
        self.options: dict[str, Any] = spec["options"]
        self.spec = spec
        self.state = state
        self.listener = listener
        self.shm = Path(state["shm"])
        self.images, self.store = self.shm / "images", self.shm / "store"
        self.task_dir = Path(state["task_dir"])
        self.files: dict[int, int] = {}
        self.got: dict[int, list[Range]] = {}
        self.shim: subprocess.Popen[bytes] | None = None

    def run(self) -> None:
        link = stream.accept(
            self.listener, bytes.fromhex(self.spec["key"]), encrypt=bool(self.options.get("encrypt", True)),
            stall_s=float(self.options.get("stall_s", 60.0)), wait_s=float(self.options.get("wait_s", 120.0)),
        )  # fmt: skip
        self.listener.close()
        try:
            self._receive(link)
        except (GridError, OSError) as error:
            told = error if isinstance(error, GridError) else GridError("the target failed", cause=str(error))
            try:
                link.send(stream.ANSWER, stream.pack_json({"error": told.to_wire()}))
            except GridError:
                pass
            raise
        finally:
            link.close()

    def _receive(self, link: stream.Link) -> None:
        while True:
            op, body = link.receive()
            if op == stream.PAGES:
                self._pages(body)
            elif op == stream.FILE:
                self._file(body)
            elif op == stream.HELLO:
                self._hello(json.loads(bytes(body)))
                link.send(stream.ANSWER, b"{}")
            elif op == stream.END:
                end = json.loads(bytes(body))
                lazy = self._check_whole()
                self._stage(end, lazy)
                link.send(stream.ANSWER, b"{}")
                return
            else:
                raise Refused("the source sent something unknown", code="move-protocol")

    # -------------------------------------------------------------- what arrives

    def _hello(self, hello: dict[str, Any]) -> None:
        for directory in (self.shm, self.images, self.store):
            directory.mkdir(mode=0o700, exist_ok=True)
        make_task_dir(self.task_dir, self.spec["move_id"], hello, self.options)
        command = [sys.executable, "-I", "-S", str(RESTORED), str(self.task_dir), str(self.state.path.parent)]
        if hello["terminal"]:
            command.append("--pty")
        with (self.task_dir / "shim.log").open("ab") as errors:
            self.shim = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=errors, cwd="/",
                env={"GRID_PIDS": ",".join(map(str, hello["pids"])), **gpu.libraries()}, start_new_session=True,
            )  # fmt: skip
        if self.shim.wait(30) != 0:
            raise InternalError("the shim on the target did not start", cause=_tail(self.task_dir / "shim.log"))
        self._order({"op": "prepare", "store": str(self.store), "images": str(self.images)})
        self.state.set(phase="receiving")

    def _order(self, order: dict[str, Any]) -> None:
        assert self.shim and self.shim.stdin
        try:
            self.shim.stdin.write(json.dumps(order).encode() + b"\n")
            self.shim.stdin.flush()
        except OSError as error:
            raise Unavailable("the shim on the target is gone", cause=str(error), code="shim") from None

    def _pages(self, body: memoryview) -> None:
        pid, count = _HEAD.unpack_from(body)
        numbers = struct.unpack_from(f"<{2 * count}Q", body, _HEAD.size)
        fd = self.files.get(pid)
        if fd is None:
            fd = os.open(self.store / f"{pid}.pages", os.O_CREAT | os.O_RDWR, 0o600)
            self.files[pid], self.got[pid] = fd, []
        got = self.got[pid]
        at = _HEAD.size + 16 * count
        for start, end in zip(numbers[::2], numbers[1::2], strict=True):
            if not 0 <= start < end <= _TOP or at + end - start > len(body):
                raise Refused("the source sent pages that cannot be", code="move-protocol")
            done = os.pwrite(fd, body[at : at + end - start], start)
            if done != end - start:
                raise OSError("short write into the page store")
            at += done
            got.append((start, end))
        if len(got) > _MERGE_AT:
            got[:] = merge(got)

    def _file(self, body: memoryview) -> None:
        (size,) = struct.unpack_from("<I", body)
        about = json.loads(bytes(body[4 : 4 + size]))
        data = body[4 + size :]
        if "image" in about:
            path = self.images / Path(about["image"]).name
        else:
            path = allowed(Path(about["path"]), self.options.get("file_roots", []))
        fresh = path if "image" in about else path.with_name(f".{path.name}.grid-{self.spec['move_id']}")
        with open(fresh, "r+b" if about["at"] else "wb") as file:
            file.seek(about["at"])
            file.write(data)
        if "path" in about and about["at"] + len(data) >= about["size"]:
            fresh.chmod(about["mode"])
            os.chown(fresh, about["uid"], about["gid"])
            os.utime(fresh, ns=(about["mtime_ns"], about["mtime_ns"]))
            fresh.rename(path)

    # -------------------------------------------------------------- when all is there

    def _check_whole(self) -> dict[int, list[Range]]:
        """A hole would read as zeros: every page the image leaves out must have arrived."""
        lazy = images.lazy_by_pid(self.images)
        for pid, extents in lazy.items():
            missing = subtract(extents, merge(self.got.get(pid, [])))
            if missing:
                raise Refused(
                    f"{total_bytes(missing)} bytes of memory did not arrive", code="pages-missing",
                    cause=f"process {pid}, first at {missing[0][0]:#x}",
                )  # fmt: skip
            if pid not in self.files:
                self.files[pid] = os.open(self.store / f"{pid}.pages", os.O_CREAT | os.O_RDWR, 0o600)
            os.ftruncate(self.files[pid], _TOP)  # so that any extent can be mapped
            numbers = [number for extent in merge(extents) for number in extent]
            (self.store / f"{pid}.extents").write_bytes(struct.pack(f"<{len(numbers)}Q", *numbers))
        for fd in self.files.values():
            os.close(fd)
        return lazy

    def _stage(self, end: dict[str, Any], lazy: dict[int, list[Range]]) -> None:
        images.let_files_grow(self.images)
        command = criu.restore_command(
            criu.require(), str(self.images), shell_job=end["shell_job"], tcp_close=end["tcp_close"], inherit=[]
        )
        self.state.set(phase="received", bytes=sum(map(total_bytes, lazy.values())), streams=end["streams"])
        self._order(
            {
                "op": "stage", "command": command, "streams": end["streams"], "left": end["left"],
                "stopped_before": end["stopped_before"], "priorities": end.get("priorities", {}),
                "strict": bool(self.options.get("strict", False)),
                "gpu": gpu.words_of(end["gpu"]) if "gpu" in end else [],
            }
        )  # fmt: skip


def allowed(path: Path, roots: list[str]) -> Path:
    """The path, if it lies beneath one of the agreed directories, links followed."""
    real = path.parent.resolve() / path.name
    if path.name in ("", ".", "..") or not any(real.is_relative_to(Path(root).resolve()) for root in roots):
        raise Refused(f"{path} is outside of the agreed directories", code="file-outside")
    real.parent.mkdir(parents=True, exist_ok=True)
    return real


def make_task_dir(task_dir: Path, move_id: str, hello: dict[str, Any], options: dict[str, Any]) -> None:
    """A task's directory as spool.py describes it, whole at once; `hold`, because it waits for go."""
    if task_dir.exists():
        return
    try:
        user = pwd.getpwuid(hello["uid"]).pw_name
    except KeyError:
        user = str(hello["uid"])
    fresh = task_dir.with_name(f".new-{os.getpid()}-{task_dir.name}")
    fresh.mkdir(mode=0o700, parents=True)
    try:
        spec = {
            "argv": hello["argv"], "cwd": hello["cwd"], "user": user, "stdin": "", "cores": [], "cpu_quota_cores": 0.0,
            "memory_limit_bytes": 0, "nice": 0, "umask": 0o022, "rlimits": {}, "hold": True,
            "node": options.get("node", ""), "boot_id": boot_id(), "uid": hello["uid"], "gid": hello["gid"],
            "groups": [], "stdout": str(task_dir / "stdout"), "stderr": str(task_dir / "stderr"),
            "cgroups": options.get("cgroups", []), "shim_cgroups": options.get("shim_cgroups", []),
            "memory_limited": False, "move_id": move_id,
        }  # fmt: skip
        write_json(fresh / "spec.json", spec)
        for name in ("stdout", "stderr"):
            (fresh / name).touch(mode=0o600)
        fresh.rename(task_dir)
    except OSError:
        shutil.rmtree(fresh, ignore_errors=True)
        raise


def _tail(path: Path) -> str:
    lines = path.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else ""
