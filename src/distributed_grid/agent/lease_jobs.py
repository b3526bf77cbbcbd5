"""A job's own directory on its node: the files it was sent, and the sweep when it is forgotten."""

from __future__ import annotations

import errno
import os
import re
import shutil
import tarfile
import time
from pathlib import Path, PurePosixPath

from distributed_grid.agent.users import Account, account_of
from distributed_grid.core.errors import GridError, Refused, UsageError

#: A directory whose task is not known (yet) is left alone this long.
FRESH_S = 600.0
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,119}")


class JobFiles:
    """`jobs/ID` is the job's directory; another user's lies in /tmp, for ours is closed to others, and is linked."""

    def __init__(self, home: Path, node: str) -> None:
        self._home = home
        self._node = node
        home.mkdir(mode=0o700, parents=True, exist_ok=True)

    def place(self, task_id: str, user: str) -> Path:
        """The directory, made if it is not there."""
        if not _ID.fullmatch(task_id):
            raise UsageError(f"{task_id!r} is not a task id", code="bad-task-id")
        link = self._home / task_id
        if link.exists():
            return link.resolve()
        account = account_of(user, self._node)
        if account.uid == os.geteuid():
            link.mkdir(mode=0o700)
            return link
        place = Path("/tmp") / f"grid-{self._node}-{task_id}"
        try:
            place.mkdir(mode=0o700)
        except FileExistsError:
            raise Refused(f"{place} is in the way", code="job-directory") from None
        os.chown(place, account.uid, account.gid)
        link.symlink_to(place)
        return place

    def find(self, task_id: str) -> Path | None:
        """The directory, if there is one."""
        link = self._home / task_id
        return link.resolve() if _ID.fullmatch(task_id) and link.is_dir() else None

    def is_fresh(self, task_id: str) -> bool:
        try:
            return time.time() - (self._home / task_id).lstat().st_mtime < FRESH_S
        except OSError:
            return False

    # -- files ----------------------------------------------------------------------------------------------------

    def put(self, task_id: str, user: str, data: bytes, first: bool, last: bool) -> None:
        place = self.place(task_id, user)
        archive = self._home / f".{task_id}.tar"
        try:
            with archive.open("wb" if first else "ab") as out:
                out.write(data)
            if last:
                self._unpack(archive, place, account_of(user, self._node))
        except OSError as error:
            archive.unlink(missing_ok=True)
            raise GridError(
                f"the files of {task_id} can't be written on {self._node}", cause=str(error), code="staging"
            ) from error
        if last:
            archive.unlink(missing_ok=True)

    def _unpack(self, archive: Path, place: Path, account: Account) -> None:
        try:
            with tarfile.open(archive, "r:") as tar:
                tar.extraction_filter = lambda member, _: member  # where there are filters: ours has checked it
                tar.extractall(place, members=[_checked(one) for one in tar.getmembers()])
        except tarfile.TarError as error:
            raise GridError("the files of the job are damaged", cause=str(error), code="staging") from error
        if account.uid != os.geteuid():
            for folder, folders, files in os.walk(place):
                for name in [*folders, *files]:
                    os.chown(Path(folder) / name, account.uid, account.gid, follow_symlinks=False)

    # -- the end --------------------------------------------------------------------------------------------------

    def sweep(self, known: set[str]) -> None:
        """Take away the directories of tasks that were forgotten."""
        for one in list(self._home.iterdir()):
            task_id = one.name.lstrip(".").removesuffix(".tar")
            if task_id in known or self.is_fresh(task_id):
                continue
            try:
                if one.is_symlink():
                    shutil.rmtree(one.resolve(), ignore_errors=True)
                    one.unlink()
                elif one.is_dir():
                    shutil.rmtree(one, ignore_errors=True)
                else:
                    one.unlink()
            except OSError as error:
                if error.errno != errno.ENOENT:
                    raise


def _checked(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Files and directories beneath the place, as those who stage send them (`filter="data"` is not in every 3.11)."""
    path = PurePosixPath(member.name)
    if path.is_absolute() or ".." in path.parts or not (member.isfile() or member.isdir()):
        raise tarfile.TarError(f"{member.name} does not belong there")
    member.mode &= 0o755
    return member
