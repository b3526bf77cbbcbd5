"""What of the caller's environment goes along with a command to another node: what makes it the same program there."""

from __future__ import annotations

import os

PASSED_ON = (
    "PATH", "LANG", "LC_ALL", "TZ", "TERM", "COLORTERM", "NO_COLOR", "VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONPATH",
    "OMP_NUM_THREADS", "GRID_OFFLOAD",
)  # fmt: skip


def passed_on() -> dict[str, str]:
    return {name: os.environ[name] for name in PASSED_ON if name in os.environ}
