"""Which account a task runs as on this node, and whether we may become it."""

from __future__ import annotations

import os
import pwd
from dataclasses import dataclass

from distributed_grid.core.errors import NotFound, Refused


@dataclass(frozen=True, slots=True)
class Account:
    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str
    shell: str

    def environment(self) -> dict[str, str]:
        """What a login would set; a task's own variables go over it."""
        return {
            "HOME": self.home,
            "USER": self.name,
            "LOGNAME": self.name,
            "SHELL": self.shell or "/bin/sh",
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "LANG": "C.UTF-8",
        }


def account_of(name: str, node: str) -> Account:
    """The account called `name` on this node; empty: the one we run as. Refused if we cannot become it."""
    own_uid = os.geteuid()
    try:
        entry = pwd.getpwnam(name) if name else pwd.getpwuid(own_uid)
    except KeyError:
        if name in ("", str(own_uid)):  # a container may run us under a uid that has no entry
            return Account(str(own_uid), own_uid, os.getegid(), tuple(os.getgroups()), "/", "/bin/sh")
        raise NotFound(
            f"there is no user {name!r} on {node}",
            hint=f"create the account on {node}, or run as a user that exists there",
            code="user-not-found",
        ) from None
    if own_uid not in (0, entry.pw_uid):
        own = pwd.getpwuid(own_uid).pw_name if _has_entry(own_uid) else str(own_uid)
        raise Refused(
            f"cannot run as {entry.pw_name} on {node}",
            cause=f"the grid runs as {own} there, and only root can start another user's process",
            hint=f"start the cluster as root on {node}, or run as {own}",
            code="user-refused",
        )
    groups = tuple(os.getgrouplist(entry.pw_name, entry.pw_gid))
    return Account(entry.pw_name, entry.pw_uid, entry.pw_gid, groups, entry.pw_dir, entry.pw_shell)


def _has_entry(uid: int) -> bool:
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return True
