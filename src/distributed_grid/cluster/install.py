"""Puts this Python, its packages and ourselves on a node over SSH, so that the node needs no internet."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import os
import shlex
import sys
import sysconfig
import tarfile
import threading
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, BinaryIO

import distributed_grid
from distributed_grid.cluster.probe import version_of
from distributed_grid.cluster.ssh import SshLauncher
from distributed_grid.core.errors import GridError, Refused

SEND_LIMIT_S = 1800.0
STEP_LIMIT_S = 60.0
STAMP = "grid-env.json"
# Never needed to run; tests of the standard library alone are 60 MB.
_LEFT_OUT = {"__pycache__", "test", "tests", "idlelib", "turtledemo", "ensurepip", "site-packages", "dist-packages"}
_EDITABLE = ("_editable", "__editable")  # marks of an installation that points into a checkout

Step = Callable[[str], None]


def environment_stamp() -> dict[str, str]:
    """What makes two environments the same: Python, every package, our own source."""
    packages = sorted({f"{one.metadata['Name']}=={one.version}" for one in metadata.distributions()})
    ours = hashlib.sha256()
    for path in sorted(_package_dir().rglob("*.py")):
        ours.update(str(path.relative_to(_package_dir())).encode() + b"\0" + path.read_bytes())
    return {
        "python": sys.version.split()[0], "platform": sysconfig.get_platform(), "ray": version_of("ray"),
        "packages": hashlib.sha256("\n".join(packages).encode()).hexdigest(), "source": ours.hexdigest(),
    }  # fmt: skip


async def install_node(launcher: SshLauncher, step: Step = lambda text: None) -> dict[str, Any]:
    """Make the node's environment match ours; a second time costs one question. Returns the node's probe."""
    step("looking")
    stamp = await asyncio.to_thread(environment_stamp)
    env_dir, machine, running, found = await _look(launcher)
    if machine != os.uname().machine:
        raise Refused(
            f"{launcher.node} is {machine}, this machine is {os.uname().machine}",
            hint="install Python, Ray and this package there by hand, and set `python` of the node",
            code="install-machine",
        )
    if found and found != stamp and running:
        raise Refused(
            f"Ray is running on {launcher.node}, from the environment that would be replaced",
            hint="grid cluster stop, then install again", code="install-running",
        )  # fmt: skip
    if found != stamp:
        step("sending Python, Ray and the grid")
        await _send(launcher, env_dir, stamp)
    step("checking")
    probe = await launcher.run("probe", {"state_dir": str(Path(env_dir).parent)}, STEP_LIMIT_S)
    if probe["ray_version"] != stamp["ray"]:
        raise GridError(
            f"{launcher.node} has Ray {probe['ray_version'] or 'none'} after the installation, not {stamp['ray']}",
            cause=f"it runs {probe['executable']}",
            hint="remove `python` of the node from the config, so that the installed one is used",
            code="install-check",
        )
    step("the same as here" if found == stamp else "installed")
    return {**probe, "changed": found != stamp}


async def _look(launcher: SshLauncher) -> tuple[str, str, bool, dict[str, Any]]:
    """Where the environment goes on the node, its machine type, whether Ray runs, the stamp of what is there."""
    home = launcher.state_dir
    where = '"$HOME"/' + shlex.quote(home[2:]) if home.startswith("~/") else shlex.quote(home)
    command = (
        f"umask 077; mkdir -p {where} && cd {where} && pwd -P && uname -m && "
        f"{{ ls nodes/*/ray.json 2>/dev/null | wc -l; cat env/{STAMP} 2>/dev/null; true; }}"
    )
    out, err, _ = await launcher.execute(command, b"", STEP_LIMIT_S)
    lines = out.decode(errors="replace").splitlines()
    if len(lines) < 3:
        raise GridError(
            f"no state directory could be made on {launcher.node}", cause=err.decode(errors="replace").strip(),
            hint=f"look at {home} there", code="install-state-dir",
        )  # fmt: skip
    try:
        found = json.loads("\n".join(lines[3:]) or "{}")
    except ValueError:
        found = {}
    return f"{lines[0]}/env", lines[1], lines[2].strip() != "0", found


async def _send(launcher: SshLauncher, env_dir: str, stamp: dict[str, str]) -> None:
    """Stream a tar into a directory beside the old one, then put it in its place."""
    read_fd, write_fd = os.pipe()
    failure: list[OSError] = []

    def pack() -> None:
        try:
            with os.fdopen(write_fd, "wb") as out:
                write_tar(out, env_dir, stamp)
        except OSError as error:  # the node stopped reading; its own error says why
            failure.append(error)

    new, old = shlex.quote(f"{env_dir}.new"), shlex.quote(f"{env_dir}.old")
    place = shlex.quote(env_dir)
    command = (
        f"umask 022; rm -rf {new} {old} && mkdir {new} && tar -xf - -C {new} && "
        f"{{ [ ! -e {place} ] || mv {place} {old}; }} && mv {new} {place} && rm -rf {old}"
    )
    packer = threading.Thread(target=pack, name="grid-install", daemon=True)
    packer.start()
    try:
        with os.fdopen(read_fd, "rb") as stream:
            _, err, code = await launcher.execute(command, stream, SEND_LIMIT_S)
    finally:
        await asyncio.to_thread(packer.join, 30.0)
    if code != 0 or failure:
        raise GridError(
            f"the environment could not be unpacked on {launcher.node}",
            cause=err.decode(errors="replace").strip()[-300:] or str(failure),
            hint=f"look at the free space of {env_dir} there", code="install-send",
        )  # fmt: skip


def write_tar(out: BinaryIO, env_dir: str, stamp: dict[str, str]) -> None:
    """The base Python with our packages merged into it: it finds itself by its own place, so it can live anywhere."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    base = Path(sys.base_prefix)
    site = Path(sysconfig.get_path("purelib"))
    # Debian's Python, outside of a virtual environment, looks only there.
    packages = "dist-packages" if "deb_system" in sysconfig.get_scheme_names() else "site-packages"
    target_site = f"lib/{version}/{packages}"
    with tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT, dereference=False) as tar:
        executable = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
        tar.add(executable, f"bin/{version}")
        for name in ("python3", "python"):
            link = tarfile.TarInfo(f"bin/{name}")
            link.type, link.linkname = tarfile.SYMTYPE, version
            tar.addfile(link)
        for library in sorted(base.glob("lib/libpython3*.so*")):
            tar.add(library, f"lib/{library.name}")
        for path in _files(Path(sysconfig.get_path("stdlib")), _LEFT_OUT):
            tar.add(path, f"lib/{version}/{path.relative_to(sysconfig.get_path('stdlib'))}", recursive=False)
        for path in _files(site, {"__pycache__"}):
            relative = path.relative_to(site)
            top = relative.parts[0]
            if top != "distributed_grid" and not top.startswith(_EDITABLE):
                tar.add(path, f"{target_site}/{relative}", recursive=False)
        for path in _files(_package_dir(), {"__pycache__"}):
            tar.add(path, f"{target_site}/distributed_grid/{path.relative_to(_package_dir())}", recursive=False)
        for name, content in _scripts(Path(sys.prefix) / "bin", f"{env_dir}/bin/python3"):
            _add_bytes(tar, f"bin/{name}", content, 0o755)
        _add_bytes(tar, STAMP, json.dumps(stamp).encode(), 0o644)


def _files(root: Path, left_out: set[str]) -> Iterator[Path]:
    """Files and links below a directory. Tests are left out of the standard library only: packages may need theirs."""
    for place, directories, names in os.walk(root):
        directories[:] = sorted(name for name in directories if name not in left_out)
        for name in sorted(names):
            if not name.endswith(".pyc"):
                yield Path(place) / name
        yield from (Path(place) / name for name in directories if (Path(place) / name).is_symlink())


def _scripts(directory: Path, python: str) -> Iterator[tuple[str, bytes]]:
    """Our virtual environment's commands, with the node's Python in their first line."""
    for path in sorted(directory.iterdir()):
        if path.is_symlink() or not path.is_file():
            continue
        content = path.read_bytes()
        first, _, rest = content.partition(b"\n")
        if first.startswith(b"#!") and b"python" in first:
            yield path.name, f"#!{python}\n".encode() + rest


def _add_bytes(tar: tarfile.TarFile, name: str, content: bytes, mode: int) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(content), mode
    tar.addfile(info, io.BytesIO(content))


def _package_dir() -> Path:
    return Path(str(distributed_grid.__file__)).parent
