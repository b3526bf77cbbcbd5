"""Where things are: the state directory and every file of ours in it."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from distributed_grid.core.errors import Refused


@dataclass(frozen=True, slots=True)
class GridPaths:
    """The state directory (`$GRID_HOME`, else `~/.distributed_grid`), mode 0700, and its files."""

    home: Path

    @classmethod
    def default(cls) -> GridPaths:
        given = os.environ.get("GRID_HOME")
        return cls(Path(given).expanduser().absolute() if given else Path.home() / ".distributed_grid")

    @property
    def journal(self) -> Path:
        return self.home / "journal.sqlite3"

    @property
    def socket(self) -> Path:
        return self.home / "grid_daemon.sock"

    @property
    def lock(self) -> Path:
        return self.home / "daemon.lock"

    @property
    def daemon_log(self) -> Path:
        return self.home / "daemon.log"

    @property
    def audit_log(self) -> Path:
        return self.home / "audit.log"

    @property
    def token(self) -> Path:
        """Ray's auth token, 0600; the agents' secret is derived from it too."""
        return self.home / "ray_token"

    @property
    def cluster_record(self) -> Path:
        """What `cluster start` started: nodes, addresses, pids with start times."""
        return self.home / "cluster.json"

    @property
    def offload_state(self) -> Path:
        return self.home / "grid_offload_state.json"

    @property
    def boosts(self) -> Path:
        return self.home / "resource_boosts.json"

    @property
    def ssh_keys(self) -> Path:
        return self.home / "ssh"

    def node_dir(self, node: str) -> Path:
        """A node's own state on the machine it runs on: spools, staging, Ray's logs link."""
        return self.home / "nodes" / node

    def ensure(self) -> GridPaths:
        """Create the state directory, or refuse one that another user owns or could change."""
        try:
            self.home.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = self.home.stat()
        except OSError as error:
            raise Refused(
                f"the state directory {self.home} can't be used",
                cause=error.strerror or str(error),
                hint="set GRID_HOME to a directory of your own",
                code="state-dir",
            ) from error
        if found.st_uid != os.geteuid():
            raise Refused(
                f"the state directory {self.home} belongs to another user (uid {found.st_uid})",
                hint="set GRID_HOME to a directory of your own",
                code="state-dir-owner",
            )
        if stat.S_IMODE(found.st_mode) & 0o066:  # 0711 lets allowed users reach the socket, and see nothing
            self.home.chmod(0o700)
        return self
