"""The first process of a lab and of each of its hosts: mounts, address, sshd, and reaping; standard library only.

`init.py keeper` holds what outlives a host's power cut: the hosts' disks and the bridge between them. It ends, and the
kernel ends everything below it, when the tests that started it are gone (its standard input is closed then).
`init.py host` is pid 1 of one host. Both take their orders as one line of JSON and answer `ready`.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 32, 4096, 16384, 1 << 18
MNT_DETACH = 2
CLONE_NEWCGROUP = 0x02000000
SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}

# A host has its own, empty to begin with; all else shows through from the machine, read until first written.
OWN_DIRECTORIES = {"tmp": 0o1777, "var/tmp": 0o1777, "run": 0o755, "home": 0o755, "root": 0o711, "mnt": 0o755}

libc = ctypes.CDLL(None, use_errno=True)


def checked(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def mount(source: str, target: Path | str, kind: str = "", flags: int = 0, options: str = "") -> None:
    arguments = [source.encode(), os.fsencode(target), kind.encode() or None, flags, options.encode() or None]
    libc.mount.argtypes = [ctypes.c_char_p] * 3 + [ctypes.c_ulong, ctypes.c_char_p]
    checked(libc.mount(*arguments), f"mount {kind or 'bind'} {source} at {target}")


def bind_read_only(source: Path, target: Path) -> None:
    if source.is_dir():
        target.mkdir(parents=True, exist_ok=True)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
    mount(str(source), target, flags=MS_BIND | MS_REC)
    mount("none", target, flags=MS_BIND | MS_REMOUNT | MS_RDONLY)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def cgroup_mounts() -> list[tuple[str, str, str]]:
    """(mount point, fstype, controllers) of every hierarchy of the machine; one entry per mount point."""
    found: dict[str, tuple[str, str, str]] = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, right = line.split(" - ")
        kind, _, options = right.split(" ")[:3]
        point = left.split(" ")[4]
        if kind in ("cgroup", "cgroup2"):
            wanted = [word for word in options.split(",") if word not in ("rw", "ro", "xattr", "clone_children")]
            found[point] = (point, kind, ",".join(wanted) if kind == "cgroup" else "")
    return list(found.values())


def own_root(disk: Path, orders: dict[str, Any]) -> Path:
    """The host's file system: the machine's below, never written, and the host's own disk above."""
    upper, work, root = disk / "upper", disk / "work", disk / "root"
    first_boot = not upper.exists()
    for directory in (upper, work, root):
        directory.mkdir(exist_ok=True)
    if first_boot:
        for name, mode in OWN_DIRECTORIES.items():
            (upper / name).mkdir(parents=True)
            (upper / name).chmod(mode)
            os.setxattr(upper / name, "trusted.overlay.opaque", b"y")
    mount("overlay", root, "overlay", 0, f"lowerdir=/,upperdir={upper},workdir={work}")
    for link, target in orders["links"]:
        at = root / link.lstrip("/")
        at.parent.mkdir(parents=True, exist_ok=True)
        if not at.is_symlink():
            at.symlink_to(target)
    for shared in orders["shared"]:
        bind_read_only(Path(shared), root / shared.lstrip("/"))
    for hidden in orders["hidden"]:
        (root / hidden.lstrip("/")).mkdir(parents=True, exist_ok=True)
        mount("hidden", root / hidden.lstrip("/"), "tmpfs", 0, "mode=755,size=8g")
    return root


def kernel_file_systems(root: Path) -> None:
    hierarchies = cgroup_mounts()
    mount("/dev", root / "dev", flags=MS_BIND | MS_REC)
    mount("devpts", root / "dev/pts", "devpts", 0, "newinstance,mode=620,ptmxmode=666")
    mount("shm", root / "dev/shm", "tmpfs", 0, "mode=1777")
    mount("proc", root / "proc", "proc")
    mount("sysfs", root / "sys", "sysfs")
    mount("run", root / "run", "tmpfs", 0, "mode=755")
    if not any(point == "/sys/fs/cgroup" for point, _, _ in hierarchies):
        mount("cgroups", root / "sys/fs/cgroup", "tmpfs", 0, "mode=755")
    for point, kind, controllers in hierarchies:
        at = root / point.lstrip("/")
        at.mkdir(parents=True, exist_ok=True)
        mount(kind, at, kind, 0, controllers)


def change_root(root: Path) -> None:
    """Make it the root of this mount namespace, so that whoever enters the namespace is there too."""
    os.chdir(root)
    number = SYS_PIVOT_ROOT[os.uname().machine]
    checked(libc.syscall(ctypes.c_long(number), b".", b"."), "pivot_root")
    checked(libc.umount2(b".", MNT_DETACH), "umount of the old root")
    os.chdir("/")


def new_boot_id() -> None:
    """The kernel is the machine's, but a host that was off must show another boot."""
    at = Path("/run/boot_id")
    at.write_text(f"{uuid.uuid4()}\n")
    at.chmod(0o444)
    mount(str(at), "/proc/sys/kernel/random/boot_id", flags=MS_BIND)


def identity(orders: dict[str, Any]) -> None:
    socket.sethostname(orders["name"])
    Path("/etc/hostname").write_text(f"{orders['name']}\n")
    Path("/etc/hosts").write_text(orders["hosts"])
    machine_id = Path("/etc/machine-id")
    machine_id.write_text(f"{uuid.uuid5(uuid.NAMESPACE_DNS, orders['name']).hex}\n")
    ip("link", "set", "lo", "up")
    ip("addr", "add", f"{orders['address']}/24", "dev", "eth0")
    ip("link", "set", "eth0", "up")
    ip("route", "add", "default", "via", orders["gateway"])


def private_file(path: Path, text: str) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.touch(mode=0o600)
    path.write_text(text)


def start_sshd(orders: dict[str, Any]) -> None:
    if not Path("/root/.ssh").exists():
        for path, text in orders["files"].items():
            private_file(Path(path), text)
    config = Path("/etc/ssh/lab_sshd_config")
    config.write_text(
        f"Port 22\nListenAddress {orders['address']}\nHostKey /etc/ssh/lab_host_key\n"
        "AuthorizedKeysFile .ssh/authorized_keys\nPermitRootLogin prohibit-password\nPasswordAuthentication no\n"
        "KbdInteractiveAuthentication no\nUsePAM no\nStrictModes no\nUseDNS no\nMaxStartups 100\nMaxSessions 100\n"
        f"PidFile /run/sshd.pid\nSubsystem sftp internal-sftp\nSetEnv GRID_TEST_RUN={orders['run']}\n"
    )
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    subprocess.run(["/usr/sbin/sshd", "-f", str(config), "-E", "/var/log/lab_sshd.log"], check=True)


def silence() -> None:
    """Let go of the pipe to the tests: they wait for its end, and it must not be one of the host's own making."""
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1):
        os.dup2(null, fd)


def keeper() -> None:
    orders = json.loads(sys.stdin.readline())
    mount("none", "/", flags=MS_REC | MS_PRIVATE)
    for disk, size in orders["disks"].items():
        Path(disk).mkdir(parents=True, exist_ok=True)
        mount("disk", disk, "tmpfs", 0, f"mode=755,size={size}")
    ip("link", "set", "lo", "up")
    ip("link", "add", "bridge0", "type", "bridge")
    ip("addr", "add", f"{orders['gateway']}/24", "dev", "bridge0")
    ip("link", "set", "bridge0", "up")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    print("ready", flush=True)
    sys.stdin.read()


def host() -> None:
    orders = json.loads(sys.stdin.readline())
    os.umask(0o022)
    for group in orders["cgroups"]:
        Path(group, "cgroup.procs").write_text("0")
    checked(libc.unshare(CLONE_NEWCGROUP), "unshare of the cgroup namespace")
    mount("none", "/", flags=MS_REC | MS_PRIVATE)
    root = own_root(Path(orders["disk"]), orders)
    kernel_file_systems(root)
    change_root(root)
    new_boot_id()
    identity(orders)
    start_sshd(orders)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    print("ready", flush=True)
    silence()
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            time.sleep(0.2)


if __name__ == "__main__":
    {"keeper": keeper, "host": host}[sys.argv[1]]()
