"""Finding CRIU, its command lines, and what its logs mean in words."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

from distributed_grid.core.errors import GridError, Refused

# What a log line says -> (code, what it means for the user).
_MEANINGS: tuple[tuple[str, str, str], ...] = (
    (r"Connected TCP socket|TCP.*--tcp-established|tcp.*established", "tcp", "it has an open TCP connection"),
    (r"outside of its pid namespace", "session", "its session leader is outside of its pid namespace"),
    (r"io_uring", "io-uring", "it uses io_uring"),
    (r"external socket|unix socket.*--ext-unix-sk|Can't dump half of stream unix", "unix-socket",
     "it has a unix socket to a process that stays"),
    (r"--shell-job|task with slave end|Found dangling tty|tty.*slave", "terminal", "it is tied to a terminal"),
    (r"--file-locks|file locks", "file-lock", "it holds file locks"),
    (r"link remap", "deleted-file", "it has a file open that was renamed or removed just then (a named semaphore?)"),
    (r"ghost file.*(too big|limit)|Can't dump ghost file", "deleted-file", "it has a big deleted file open"),
    (r"nvidia", "gpu", "it has a GPU device open"),
    (r"Can't dump .*dev|char dev|Can't find.*device|Failed to dump.*device", "device", "it has a device open"),
    (r"bad size|has bad mode|bad build-ID", "file-differs", "a file it uses differs on the target"),
    (r"No such file or directory", "file-missing", "a file it uses is missing on the target"),
    (r"isn't init in its pidns", "namespace", "it lives in a pid namespace of its own"),
    (r"[Cc]an't .*(cpu|fpu|xsave)|CPU capabilities", "cpu", "the target's CPU lacks what it uses"),
    (r"already ptraced|seize task.*Operation not permitted|Unseizable", "traced", "another program traces it"),
    (r"Can't get rlimit", "rights", "it is another user's, and our root lacks the right CAP_SYS_RESOURCE"),
    (r"Too many open files", "descriptors", "its memory needs more descriptors than the limit (ulimit -Hn) allows"),
    (r"No space left on device", "space", "there is no space left for its image"),
)  # fmt: skip
_HARMLESS = ("RLIMIT_NOFILE",)
#: CRIU's own limit for bringing all threads to a stop, which takes milliseconds.
SEIZE_LIMIT_S = 5
_SYS_RESOURCE = 24
#: What a dump needs of root's rights, where CRIU is run as the user whose processes it dumps.
_DUMP_RIGHTS = (
    "chown", "dac_override", "dac_read_search", "fowner", "kill", "setgid", "setuid", "ipc_owner", "net_admin",
    "sys_chroot", "sys_ptrace", "sys_admin", "checkpoint_restore",
)  # fmt: skip


def find() -> str:
    """The CRIU to use: $GRID_CRIU, beside our interpreter, or on the path; empty if there is none."""
    for place in (os.environ.get("GRID_CRIU", ""), str(Path(sys.prefix) / "criu" / "criu")):
        if place and os.access(place, os.X_OK):
            return place
    return shutil.which("criu") or ""


def require() -> str:
    found = find()
    if not found:
        raise Refused("CRIU is not installed on this node", hint="grid install criu", code="no-criu")
    return found


def errors_in(log: Path) -> list[str]:
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        return []
    return [
        line.split("): ", 1)[-1]
        for line in lines
        if "Error (" in line and not any(word in line for word in _HARMLESS)
    ]


def explain(log: Path, what: str) -> GridError:
    """The error that a failed run's log amounts to."""
    return explain_lines(errors_in(log), what)


def explain_lines(lines: list[str], what: str) -> GridError:
    for pattern, code, meaning in _MEANINGS:
        if any(re.search(pattern, line) for line in lines):
            return Refused(f"{what}: {meaning}", cause="; ".join(lines[:2]), code=f"criu-{code}")
    return GridError(what, cause="; ".join(lines[:3]) or "it does not say why", code="criu")


def may_read_limits() -> bool:
    """Whether we have CAP_SYS_RESOURCE, which containers often withhold from their root."""
    found = re.search(r"^CapEff:\s*([0-9a-f]+)", Path("/proc/self/status").read_text(), re.MULTILINE)
    return bool(found and int(found.group(1), 16) >> _SYS_RESOURCE & 1)


def dump_as(pids: list[int]) -> tuple[int, int] | None:
    """The user and group that CRIU must be to dump these; None: what we are.

    CRIU asks each process's limits by prlimit(2), which takes CAP_SYS_RESOURCE or the very ids of the process.
    """
    found = {_ids(pid) for pid in pids}
    if found == {((os.geteuid(),) * 3, (os.getegid(),) * 3)} or may_read_limits():
        return None
    users, groups = found.pop()
    if found or len({*users}) != 1 or len({*groups}) != 1:
        raise Refused(
            "its processes belong to several users, and our root lacks the right CAP_SYS_RESOURCE", code="criu-rights"
        )
    return users[0], groups[0]


def _ids(pid: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Real, effective and saved: of the user, and of the group."""
    with open(f"/proc/{pid}/status") as file:
        lines = dict(line.split(":", 1) for line in file)
    users, groups = ([int(word) for word in lines[name].split()[:3]] for name in ("Uid", "Gid"))
    return tuple(users), tuple(groups)


def may_try_again(log: Path) -> bool:
    """Whether a dump failed because CRIU did not get hold of a thread: a moment later it does."""
    try:
        text = log.read_text(errors="replace")
    except OSError:
        return False
    return "can't wait task" in text or "task interruption" in text


def dump_command(
    criu: str, pid: int, image_dir: str, *, lazy_fd: int, status_fd: int, shell_job: bool, options: dict[str, object],
    owner: tuple[int, int] | None = None,
) -> list[str]:  # fmt: skip
    """Everything but the memory: the pages are ours to carry (`--lazy-pages`, over a socket nobody asks).

    `owner`: to be run as that user, with what it needs of root's rights (see `dump_as`).
    """
    command: list[str] = []
    if owner:
        rights = "-all," + ",".join(f"+{name}" for name in _DUMP_RIGHTS)
        command = [
            "setpriv", "--reuid", str(owner[0]), "--regid", str(owner[1]), "--clear-groups", "--inh-caps", rights,
            "--ambient-caps", rights,
        ]  # fmt: skip
    command += [
        criu, "dump", "-t", str(pid), "-D", image_dir, "--leave-stopped", "--lazy-pages",
        "--ps-socket", str(lazy_fd), "--status-fd", str(status_fd), "-o", "dump.log", "-v1",
        "--manage-cgroups=ignore", "--file-locks", "--ghost-limit", str(options.get("ghost_limit_bytes", 64 << 20)),
        "--timeout", str(SEIZE_LIMIT_S),
    ]  # fmt: skip
    if owner:
        command.append("--unprivileged")  # it insists where it is not root, whatever rights it has
    if shell_job:
        command.append("--shell-job")
    if options.get("tcp_close"):
        command.append("--tcp-close")
    return command


def restore_command(criu: str, image_dir: str, *, shell_job: bool, tcp_close: bool, inherit: list[str]) -> list[str]:
    command = [
        criu, "restore", "-D", image_dir, "--lazy-pages", "-d", "--restore-sibling", "--leave-stopped",
        "--pidfile", "restored.pid", "-o", "restore.log", "-v1", "--manage-cgroups=ignore", "--file-locks",
    ]  # fmt: skip
    if shell_job:
        command.append("--shell-job")
    if tcp_close:
        command.append("--tcp-close")
    for one in inherit:
        command += ["--inherit-fd", one]
    return command
