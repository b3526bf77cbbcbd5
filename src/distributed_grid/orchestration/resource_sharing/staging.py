"""Which of the user's files a job is sent: those its command names here, and the modules beside a Python program."""

from __future__ import annotations

import os
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from distributed_grid.core.errors import NotFound, Refused, UsageError
from distributed_grid.core.resources import GB, format_bytes

CHUNK_BYTES = 1024 * 1024
LIMIT_BYTES = 2 * GB
NEVER = frozenset({".git", ".venv", "venv", "node_modules", "__pycache__", ".mypy_cache", ".pytest_cache"})


def files_for(argv: Sequence[str], cwd: Path, extra: Sequence[str] = ()) -> list[Path]:
    """Files below `cwd`, sorted; `extra` are named by the user and must be there. Absolute paths are left alone."""
    found: set[Path] = set()
    for at, word in enumerate(argv):
        path = _below(cwd, word.partition("=")[2] if word.startswith("-") and "=" in word else word)
        if path is None and at and argv[at - 1] == "-m":
            path = _module(cwd, word)
        if path is None or path == cwd:
            continue
        found |= set(_walk(path, cwd))
        if path.suffix == ".py":
            found |= set(_modules_beside(path.parent, cwd))
    for word in extra:
        path = _below(cwd, word)
        if path is None:
            raise NotFound(f"{word} is not below {cwd}", hint="--stage takes files of this directory", code="staging")
        found |= set(_walk(path, cwd))
    total = sum(path.stat().st_size for path in found)
    if total > LIMIT_BYTES:
        raise UsageError(
            f"the files that the command names have {format_bytes(total)}",
            cause=f"at most {format_bytes(LIMIT_BYTES)} are copied",
            hint="--no-stage, and absolute paths on a file system that the worker has too",
            code="staging",
        )
    return sorted(found)


def _below(cwd: Path, word: str) -> Path | None:
    """What a relative name stands for, if it is there and does not lead out of the directory."""
    if not word or len(word) > 4096 or "\0" in word or Path(word).is_absolute():
        return None
    path = Path(os.path.normpath(cwd / word))
    if path != cwd and cwd not in path.parents:
        return None
    try:
        return path if path.exists() else None
    except OSError:
        return None


def _module(cwd: Path, word: str) -> Path | None:
    first = word.split(".")[0]
    return _below(cwd, first) or _below(cwd, f"{first}.py")


def _modules_beside(folder: Path, cwd: Path) -> Iterator[Path]:
    for one in folder.iterdir():
        if one.suffix == ".py" and one.is_file() and os.access(one, os.R_OK):  # nobody named it
            yield one
        elif one.name not in NEVER and (one / "__init__.py").is_file():
            yield from _walk(one, cwd)


def _walk(path: Path, cwd: Path, within: tuple[Path, ...] = ()) -> Iterator[Path]:
    """Files, also those that links lead to.

    Links to directories that lead round in a circle, or out of `cwd` without having been named, are left out.
    """
    if path.is_file():
        yield path
    if not path.is_dir():
        return
    real = path.resolve()
    if path.is_symlink() and within and (real in within or cwd.resolve() not in real.parents):
        return
    try:
        names = sorted(os.listdir(path))  # noqa: PTH208 - names are all that is wanted
    except OSError as error:
        raise _unreadable(path, error) from error
    for name in names:
        if name not in NEVER:
            yield from _walk(path / name, cwd, (*within, real))


def packed(files: Sequence[Path], cwd: Path) -> Iterator[bytes]:
    """The files as parts of one tar archive, their names as seen from `cwd`; of a link, what it leads to."""
    with tempfile.SpooledTemporaryFile(max_size=16 * CHUNK_BYTES) as out:
        with tarfile.open(fileobj=out, mode="w:", dereference=True) as tar:
            for path in files:
                try:
                    tar.add(path, arcname=str(path.relative_to(cwd)), recursive=False)
                except OSError as error:
                    raise _unreadable(path, error) from error
        out.seek(0)
        while part := out.read(CHUNK_BYTES):
            yield part


def _unreadable(path: Path, error: OSError) -> Refused:
    return Refused(
        f"{path} can't be sent", cause=error.strerror or str(error), hint="--no-stage sends no files", code="staging"
    )
