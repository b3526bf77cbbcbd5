"""Where the configuration file is looked for; apart from the loader, so that a command need not load the model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from distributed_grid.config.paths import GridPaths
from distributed_grid.core.errors import ConfigError

#: Looked for where the command runs, in this order.
LOCAL_NAMES = ("config/my-cluster-enhanced.yaml", "config/cluster_config.yaml", "cluster_config.yaml")
#: Looked for last, in the state directory.
USER_NAME = "cluster_config.yaml"


def find_config_file(
    explicit: str | Path | None = None, *, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> Path | None:
    """The file in effect, absolute; None means the embedded cluster. A file that was named must be there."""
    variables = os.environ if env is None else env
    here = cwd or Path.cwd()
    named = (explicit, "") if explicit else (variables.get("GRID_CONFIG"), " (named by GRID_CONFIG)")
    if named[0]:
        path = here / Path(named[0]).expanduser()
        if not path.is_file():
            raise ConfigError(
                f"there is no configuration file {named[0]}{named[1]}",
                hint=f"write a starter file with: grid init {named[0]}",
                code="config-missing",
                file=str(named[0]),
            )
        return path
    for name in LOCAL_NAMES:
        if (path := here / name).is_file():
            _refuse_strangers(path)
            return path
    path = GridPaths.default().home / USER_NAME
    return path if path.is_file() else None


def _refuse_strangers(path: Path) -> None:
    """A file merely found lying here could be a trap: it may name programs to run."""
    owner = path.stat().st_uid
    if os.geteuid() not in (0, owner) and owner != 0:
        raise ConfigError(
            f"the configuration {path} belongs to another user (uid {owner})",
            cause="it was found here, not named, and a configuration may name programs to run",
            hint=f"if you trust it: --config {path}",
            code="config-file",
            file=str(path),
        )
