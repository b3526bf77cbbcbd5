"""What only the node itself can say about its health: whether CRIU works there, its GPU driver, its room."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from distributed_grid.agent.moving.criu import find as find_criu
from distributed_grid.cluster.probe import probe_machine
from distributed_grid.wire.rpc import CallContext, method

CRIU_LIMIT_S = 20.0


class HealthService:
    @method
    async def health(self, context: CallContext) -> dict[str, Any]:
        return await asyncio.to_thread(health_of_machine)


def health_of_machine() -> dict[str, Any]:
    """The machine's probe and what takes longer to find out; for `grid doctor`."""
    return {
        **probe_machine(), "criu_state": criu_state(), "gpu_driver": gpu_driver(),
        "tmp_free_bytes": shutil.disk_usage("/tmp").free,
    }  # fmt: skip


def criu_state() -> dict[str, Any]:
    """Where CRIU is, its version, whether it works here, and if not what it says."""
    criu = find_criu()
    if not criu:
        return {"path": "", "version": "", "works": False, "why": "there is no criu on this node"}
    code, version = _ask([criu, "--version"])
    words = version.split()
    state = {
        "path": criu, "is_script": _is_script(criu), "version": words[1] if code == 0 and len(words) > 1 else "",
        "works": False, "why": "",
    }  # fmt: skip
    if code != 0:
        return {**state, "why": f"it does not run: {version}"}
    if os.geteuid() == 0:
        code, said = _ask([criu, "check"])
    else:
        code, said = _ask([criu, "check", "--unprivileged"])
    if code == 0:
        return {**state, "works": True}
    return {**state, "why": _first_error(said) or f"criu check gave {code}"}


def _is_script(path: str) -> bool:
    """Then the loader is what runs, and capabilities on files do not reach CRIU."""
    with open(path, "rb") as file:
        return file.read(2) == b"#!"


def _ask(argv: list[str]) -> tuple[int, str]:
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=CRIU_LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return 1, f"no answer within {CRIU_LIMIT_S:.0f} s"
    except OSError as error:
        return 1, str(error)
    return done.returncode, done.stdout.decode(errors="replace").strip()


def _first_error(said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line.split("): ", 1)[-1] for line in lines if line.startswith("Error")]
    return (errors or lines or [""])[0][:300].rstrip(":. ")


def gpu_driver() -> dict[str, Any]:
    """`state` is none, works or broken; no GPU and no driver are normal answers."""
    import pynvml

    has_device = Path("/proc/driver/nvidia").exists() or Path("/dev/nvidia0").exists()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return {"state": "broken" if has_device else "none", "version": "", "count": 0, "why": str(error)}
    try:
        version = pynvml.nvmlSystemGetDriverVersion()
        text = version.decode() if isinstance(version, bytes) else str(version)
        return {"state": "works", "version": text, "count": int(pynvml.nvmlDeviceGetCount()), "why": ""}
    except pynvml.NVMLError as error:
        return {"state": "broken", "version": "", "count": 0, "why": str(error)}
    finally:
        pynvml.nvmlShutdown()
