"""Starts, stops and examines one Ray node on the machine it runs on: JSON on stdin, one JSON line on stdout."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from distributed_grid.cluster.files import read_json, write_private
from distributed_grid.cluster.node_processes import NodeProcess, end_processes, find_marked, ray_node_id
from distributed_grid.cluster.ray_node import RayNodeSpec, node_environment, start_argv, temp_root
from distributed_grid.cluster.ray_start import HEAD_UNREACHABLE, RAYLET_ENDED
from distributed_grid.config.paths import GridPaths
from distributed_grid.core.errors import GridError, Refused, TimedOut, Unavailable, UsageError
from distributed_grid.core.priority import fall_back
from distributed_grid.core.process import ProcessId, boot_id

START_LIMIT_S = 120.0
START_TRIES = 3
LOCK_LIMIT_S = 150.0
STOP_GRACE_S = 2.0  # nothing of Ray keeps state that a kill would lose; its dashboard ignores TERM
LEAST_FREE_BYTES = 256 * 1024**2


def resolve(spec: RayNodeSpec) -> RayNodeSpec:
    """Fill in what only the node knows: its user's state directory, the short temp dir, the token's place."""
    home = Path(spec.state_dir).expanduser() if spec.state_dir else GridPaths.default().home
    return dataclasses.replace(
        spec,
        state_dir=str(home),
        temp_dir=spec.temp_dir or str(temp_root(spec.cluster_id) / spec.node),
        token_path=spec.token_path or str(GridPaths(home).token),
    )


def start(payload: Mapping[str, Any]) -> dict[str, Any]:
    spec = resolve(RayNodeSpec.from_wire(payload["spec"]))
    node_dir = _node_dir(spec)
    with _lock(node_dir):
        limit_s = float(payload.get("limit_s", START_LIMIT_S))
        return _start_locked(spec, node_dir, fresh=bool(payload.get("fresh")), limit_s=limit_s)


def _start_locked(spec: RayNodeSpec, node_dir: Path, *, fresh: bool, limit_s: float) -> dict[str, Any]:
    argv = start_argv(spec, sys.executable)
    record = read_json(node_dir / "ray.json") or {}
    found = find_marked(spec.marker)
    if found and not fresh and record.get("argv") == argv and record.get("state") == "up" and _is_up(spec, found):
        return _report(spec, found, already=True)
    if found or record:
        _stop_locked(spec, node_dir, STOP_GRACE_S)
    _check_before_start(spec)
    _make_temp_dir(Path(spec.temp_dir))
    write_private(node_dir / "ray.json", {"marker": spec.marker, "state": "starting", "argv": argv,
                                          "temp_dir": spec.temp_dir, "processes": []})  # fmt: skip
    found = _run_ray_start(spec, node_dir, argv, time.monotonic() + limit_s)
    write_private(node_dir / "ray.json", {
        "marker": spec.marker, "state": "up", "argv": argv, "temp_dir": spec.temp_dir, "boot_id": boot_id(),
        "processes": [[one.id.pid, one.id.start_ticks, one.comm] for one in found],
    })  # fmt: skip
    return _report(spec, found, already=False)


def _run_ray_start(spec: RayNodeSpec, node_dir: Path, argv: list[str], deadline: float) -> list[NodeProcess]:
    """Its processes, once it is up. Where the machine was too busy for it, it is tried again, one node at a time."""
    log_path = node_dir / "ray_start.log"
    begun = time.monotonic()
    for number in range(1, START_TRIES + 1):
        with _turn(spec, deadline) if number > 1 else contextlib.nullcontext():
            try:
                with log_path.open("wb") as log:
                    code = subprocess.run(
                        argv, env=node_environment(spec, os.environ), stdin=subprocess.DEVNULL, stdout=log,
                        stderr=subprocess.STDOUT, start_new_session=True, check=False, cwd="/",
                        timeout=max(1.0, deadline - time.monotonic()),
                    ).returncode  # fmt: skip
            except subprocess.TimeoutExpired:
                code = None
        found = find_marked(spec.marker)
        if code == 0 and _is_up(spec, found):
            return found
        cause, hint = _last_words(log_path), f"see {log_path} on {spec.node}"
        end_processes(spec.marker, (), 0.0)
        if code == RAYLET_ENDED and number < START_TRIES and time.monotonic() < deadline:
            continue
        _stop_locked(spec, node_dir, grace_s=0.0)
        if code is None:
            limit_s = deadline - begun
            load, cores = os.getloadavg()[0], os.cpu_count() or 1
            if load > 2 * cores:
                cause = f"the machine is busy: a load of {load:.0f} on {cores} cores"
            raise TimedOut(
                f"Ray did not start on {spec.node} within {limit_s:.0f} s", cause=cause, hint=hint,
                code="ray-start-timeout",
            ) from None  # fmt: skip
        code_name = "head-unreachable" if code == HEAD_UNREACHABLE else "ray-start"
        raise Unavailable(f"Ray did not start on {spec.node}", cause=cause, hint=hint, code=code_name)
    raise AssertionError("the last try returns or raises")


@contextlib.contextmanager
def _turn(spec: RayNodeSpec, deadline: float) -> Iterator[None]:
    """Alone on this machine among the nodes of one cluster; after the deadline, with them."""
    with (Path(spec.state_dir) / "ray_start.lock").open("w") as held:
        while time.monotonic() < deadline:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.1)
        yield


def stop(payload: Mapping[str, Any]) -> dict[str, Any]:
    spec = resolve(RayNodeSpec.from_wire(payload["spec"]))
    node_dir = _node_dir(spec)
    grace_s = float(payload.get("grace_s", STOP_GRACE_S))
    ended = end_processes(spec.marker, (), grace_s)  # before the lock: a start under way ends too, and lets go of it
    with _lock(node_dir):
        # A memory server whose agent is dead ends by itself once its record is gone.
        (node_dir / "memory" / "server.json").unlink(missing_ok=True)
        return {"node": spec.node, "ended": ended + _stop_locked(spec, node_dir, grace_s)}


def _stop_locked(spec: RayNodeSpec, node_dir: Path, grace_s: float) -> int:
    record = read_json(node_dir / "ray.json") or {}
    recorded: list[ProcessId] = []
    if record.get("boot_id") == boot_id() and record.get("marker") == spec.marker:
        recorded = [ProcessId(int(pid), int(ticks)) for pid, ticks, _ in record.get("processes", [])]
    ended = end_processes(spec.marker, recorded, grace_s)
    left = find_marked(spec.marker)
    if left:
        raise GridError(
            f"{len(left)} processes of Ray on {spec.node} could not be ended",
            cause="still there: " + ", ".join(f"{one.comm} ({one.id.pid})" for one in left[:5]),
            hint="end them by hand, then stop again",
            code="ray-stop",
        )
    _remove_temp_dir(Path(spec.temp_dir), spec)
    (node_dir / "ray.json").unlink(missing_ok=True)
    return ended


def status(payload: Mapping[str, Any]) -> dict[str, Any]:
    spec = resolve(RayNodeSpec.from_wire(payload["spec"]))
    found = find_marked(spec.marker)
    return {**_report(spec, found, already=True), "up": _is_up(spec, found)}


def probe(payload: Mapping[str, Any]) -> dict[str, Any]:
    from distributed_grid.cluster.probe import probe_machine

    return probe_machine(str(payload.get("state_dir", "")))


def put_token(payload: Mapping[str, Any]) -> dict[str, Any]:
    """Put the cluster's token where Ray and the agent read it, mode 0600."""
    home = Path(payload["state_dir"]).expanduser() if payload.get("state_dir") else GridPaths.default().home
    paths = GridPaths(home).ensure()
    token = base64.b64decode(str(payload["token"]))
    if not paths.token.exists() or paths.token.read_bytes() != token:
        write_private(paths.token, token)
    return {"token_path": str(paths.token)}


def _report(spec: RayNodeSpec, found: list[NodeProcess], *, already: bool) -> dict[str, Any]:
    return {
        "node": spec.node, "already": already, "ray_node_id": ray_node_id(found), "state_dir": spec.state_dir,
        "temp_dir": spec.temp_dir, "token_path": spec.token_path, "boot_id": boot_id(),
        "processes": {str(one.id.pid): one.comm for one in found},
    }  # fmt: skip


def _is_up(spec: RayNodeSpec, found: list[NodeProcess]) -> bool:
    names = {one.comm for one in found}
    return "raylet" in names and (not spec.is_head or "gcs_server" in names)


def _node_dir(spec: RayNodeSpec) -> Path:
    paths = GridPaths(Path(spec.state_dir)).ensure()
    node_dir = paths.node_dir(spec.node)
    node_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    return node_dir


@contextlib.contextmanager
def _lock(node_dir: Path) -> Iterator[None]:
    """One start or stop of a node at a time."""
    deadline = time.monotonic() + LOCK_LIMIT_S
    with (node_dir / "ray.lock").open("w") as held:
        while True:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimedOut(
                        "another start or stop of this node is still under way",
                        hint="wait for it, or end that nodectl process",
                        code="node-busy",
                    ) from None
                time.sleep(0.1)
        yield


def _check_before_start(spec: RayNodeSpec) -> None:
    from distributed_grid.cluster.ports import port_holder, port_is_free

    if not Path(spec.token_path).is_file():
        raise Unavailable(
            f"no token at {spec.token_path}", hint="start the cluster from its head", code="token-missing"
        )
    try:
        here = metadata.version("ray")
    except metadata.PackageNotFoundError:
        raise Unavailable(
            f"Ray is not installed on {spec.node}", hint="grid cluster install", code="ray-missing"
        ) from None
    if spec.ray_version and here != spec.ray_version:
        raise Refused(
            f"{spec.node} has Ray {here}, the head has {spec.ray_version}",
            hint="grid cluster install", code="ray-version",
        )  # fmt: skip
    for place in (Path(spec.temp_dir).anchor + "tmp", spec.state_dir):
        free = shutil.disk_usage(place).free
        if free < LEAST_FREE_BYTES:
            raise Unavailable(
                f"the disk of {place} on {spec.node} is full",
                cause=f"{free // 1024**2} MB free, {LEAST_FREE_BYTES // 1024**2} MB needed",
                hint="make room there and start again", code="disk-full",
            )  # fmt: skip
    for name, port in spec.own_ports().items():
        if not port_is_free(port):
            raise Refused(
                f"port {port} ({name}) is in use on {spec.node}",
                cause=f"held by {port_holder(port)}",
                hint="end that program, or give this node another port",
                code="port-in-use", port=port,
            )  # fmt: skip


def _make_temp_dir(path: Path) -> None:
    """Create it 0700, or refuse what another user put there first."""
    for one in (path.parent, path):
        with contextlib.suppress(FileExistsError):
            one.mkdir(mode=0o700)
        found = one.lstat()
        if found.st_uid != os.geteuid() or not one.is_dir() or one.is_symlink():
            raise Refused(
                f"{one} belongs to another user",
                cause=f"owned by uid {found.st_uid}",
                hint="ask an administrator to remove it",
                code="temp-dir-owner",
            )
        one.chmod(0o700)


def _remove_temp_dir(path: Path, spec: RayNodeSpec) -> None:
    if path.is_symlink() or not path.is_dir() or path.lstat().st_uid != os.geteuid():
        return
    shutil.rmtree(path, ignore_errors=True)
    if path.parent == temp_root(spec.cluster_id):
        with contextlib.suppress(OSError):  # not empty: another node of this cluster is still up
            path.parent.rmdir()


def _last_words(log: Path) -> str:
    """The end of a log, on one line: what a person needs to see first."""
    try:
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    except OSError:
        return ""
    raised = any(line.startswith("Traceback ") for line in lines)  # then the last line says it all
    return " | ".join(lines[-1:] if raised else lines[-3:])[-600:]


VERBS: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "start": start, "stop": stop, "status": status, "probe": probe, "put-token": put_token,
}  # fmt: skip


def main(argv: list[str]) -> int:
    fall_back()
    try:
        if len(argv) != 1 or argv[0] not in VERBS:
            raise UsageError("nodectl knows " + ", ".join(VERBS))
        try:
            payload = json.loads(sys.stdin.read() or "{}")
            answer = {"ok": VERBS[argv[0]](payload)}
        except (KeyError, ValueError, TypeError) as error:
            raise UsageError(f"nodectl {argv[0]} got a wrong message", cause=repr(error)) from error
        except OSError as error:
            raise GridError(f"nodectl {argv[0]} failed", cause=str(error), code="node-os-error") from error
        code = 0
    except GridError as error:
        answer, code = {"error": error.to_wire()}, int(error.exit_code)
    print(json.dumps(answer), flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
