"""How nodectl is reached on a node: as a child process here, or over SSH there."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import sys
from collections.abc import Mapping
from typing import Any, Protocol

from distributed_grid.cluster.ray_node import clean_environment
from distributed_grid.core.errors import GridError, TimedOut, Unavailable

NODECTL = "distributed_grid.cluster.nodectl"
CONNECT_LIMIT_S = 10.0


class NodeLauncher(Protocol):
    """Runs a verb of nodectl on one node."""

    kind: str

    async def run(self, verb: str, payload: Mapping[str, Any], timeout_s: float) -> dict[str, Any]: ...

    async def close(self) -> None: ...


def read_answer(node: str, verb: str, out: bytes, err: bytes, exit_code: int | None) -> dict[str, Any]:
    """The answer of nodectl, or the error that it, Python or the shell gave."""
    stdout, stderr = out.decode(errors="replace"), err.decode(errors="replace")
    lines = [line for line in stdout.splitlines() if line.strip()]
    try:
        answer = json.loads(lines[-1]) if lines else {}
    except ValueError:
        answer = {}
    if isinstance(answer, dict) and isinstance(answer.get("ok"), dict):
        return dict(answer["ok"])
    if isinstance(answer, dict) and isinstance(answer.get("error"), dict):
        raise GridError.from_wire(answer["error"])
    last = stderr.strip().splitlines()[-1] if stderr.strip() else f"exit code {exit_code}"
    if "No module named" in stderr:
        raise Unavailable(
            f"{node} has Python, but not this package", cause=last,
            hint=f"grid cluster install --node {node}", code="package-missing",
        )  # fmt: skip
    if exit_code in (126, 127):
        raise Unavailable(
            f"{node} has no Python environment of the grid", cause=last,
            hint=f"grid cluster install --node {node}", code="python-missing",
        )  # fmt: skip
    raise Unavailable(f"{verb} on {node} gave no answer", cause=last, code="node-no-answer")


class LocalLauncher:
    """nodectl as a child of this process, under the same Python."""

    kind = "local"

    def __init__(self, node: str) -> None:
        self.node = node

    async def run(self, verb: str, payload: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", NODECTL, verb,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            env=clean_environment(os.environ), start_new_session=True, cwd="/",
        )  # fmt: skip
        try:
            out, err = await asyncio.wait_for(process.communicate(json.dumps(dict(payload)).encode()), timeout_s)
        except TimeoutError:
            raise TimedOut(f"{verb} on {self.node} took more than {timeout_s:.0f} s", code="node-timeout") from None
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        return read_answer(self.node, verb, out, err, process.returncode)

    async def close(self) -> None:
        return None


def remote_command(verb: str, pythons: list[str]) -> str:
    """A line for the node's shell: the first Python that is there runs nodectl; `~` is the node's home."""
    tries = " ".join(_shell_path(one) for one in pythons)
    return (
        f"for p in {tries}; do if [ -x \"$p\" ]; then exec \"$p\" -m {NODECTL} {shlex.quote(verb)}; fi; done; "
        f"echo 'none of these is there: '{tries} >&2; exit 127"
    )


def _shell_path(path: str) -> str:
    if path.startswith("~/"):
        return '"$HOME"/' + shlex.quote(path[2:])
    return shlex.quote(path)
