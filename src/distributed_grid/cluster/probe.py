"""What a machine has: read on the machine itself, by `nodectl probe`."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from distributed_grid.config.paths import GridPaths
from distributed_grid.core.process import boot_id


def version_of(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def gpu_names() -> list[str]:
    """No GPU and no driver are normal answers."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        names = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            name = pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(index))
            names.append(name.decode() if isinstance(name, bytes) else str(name))
        return names
    except pynvml.NVMLError:
        return []
    finally:
        pynvml.nvmlShutdown()


def memory_bytes() -> int:
    """The smaller of the machine's memory and the cgroup's limit."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            total = min(total, int(Path(limit).read_text()))
        except (OSError, ValueError):
            continue
    return total


def probe_machine(state_dir: str = "") -> dict[str, Any]:
    home = Path(state_dir).expanduser() if state_dir else GridPaths.default().home
    place = home
    while not place.exists():
        place = place.parent
    return {
        "hostname": socket.gethostname(), "uid": os.geteuid(), "machine": platform.machine(),
        "python": platform.python_version(), "executable": sys.executable,
        "ray_version": version_of("ray"), "package_version": version_of("distributed-grid"),
        "cores": len(os.sched_getaffinity(0)), "memory_bytes": memory_bytes(), "gpus": gpu_names(),
        "criu": shutil.which("criu") or "", "time": time.time(), "boot_id": boot_id(),
        "state_dir": str(home), "disk_free_bytes": shutil.disk_usage(place).free,
        "file_system_id": f"{os.statvfs(place).f_fsid:x}", "kernel": platform.release(),
    }  # fmt: skip
