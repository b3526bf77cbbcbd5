"""Files of a move on one node: only beneath what was agreed, whole, as their owner, and never over somebody's own."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distributed_grid.agent.staging.names import Agreed
from distributed_grid.agent.staging.service import StagingService
from distributed_grid.core.errors import GridError, Refused
from distributed_grid.core.process import process_id
from distributed_grid.wire.rpc import CallContext
from tests.lab.waiting import wait_until

HERE = CallContext()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    found = tmp_path / "tree"
    found.mkdir()
    return found


@pytest.fixture
def service(tmp_path: Path) -> StagingService:
    return StagingService(SimpleNamespace(name="gpu1", node_dir=tmp_path / "node"))  # type: ignore[arg-type]


def agreed(*trees: Path, files: tuple[str, ...] = ()) -> dict[str, Any]:
    return Agreed(tuple(map(str, trees)), files).to_wire()


def digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=20).hexdigest()


def entry(path: Path | str, data: bytes, **changes: Any) -> dict[str, Any]:
    base = {
        "path": str(path), "size": len(data), "mtime_ns": 10**18 + 5, "mode": 0o640, "uid": os.getuid(),
        "gid": os.getgid(), "digest": digest(data),
    }  # fmt: skip
    return {**base, **changes}


def mark(path: Path) -> list[int]:
    about = path.stat()
    return [about.st_size, about.st_mtime_ns]


async def place(service: StagingService, tree: Path, path: Path | str, data: bytes, **changes: Any) -> dict[str, Any]:
    files = [{"entry": entry(path, data, **changes), "data": data}]
    (answer,) = await service.stage_place(HERE, move_id="m1", agreed=agreed(tree), files=files)
    return answer


async def bring(
    service: StagingService, tree: Path, path: Path, data: bytes, expect: list[int] | None, uid: int | None = None
) -> dict[str, Any]:
    files = [{"entry": entry(path, data, uid=0), "data": data, "expect": expect}]
    owner = os.getuid() if uid is None else uid
    (answer,) = await service.stage_home(
        HERE, move_id="m1", agreed=agreed(tree), uid=owner, gid=owner and os.getgid(), files=files
    )
    return answer


@pytest.mark.parametrize(
    "name", ["../../etc/x", "{tree}/../x", "{tree}/./x", "//etc/x", "/etc/x", "{tree}", "{tree}x/y", "", "{tree}/a\0b"]
)
async def test_names_outside_of_the_agreed_directories_are_refused(
    service: StagingService, tree: Path, name: str
) -> None:
    path = name.format(tree=tree)
    wanted = agreed(tree)
    file = {"entry": entry(path, b"x"), "data": b"x"}
    calls = [
        service.stage_place(HERE, move_id="m1", agreed=wanted, files=[file]),
        service.stage_home(HERE, move_id="m1", agreed=wanted, uid=0, gid=0, files=[file]),
        service.stage_have(HERE, agreed=wanted, entries=[entry(path, b"x", link="/etc")]),
        service.stage_read(HERE, agreed=wanted, wanted=[{"path": path, "offset": 0, "size": 1}]),
        service.stage_look(HERE, agreed=wanted, paths=[path], digests=True),
        service.stage_remove(HERE, agreed=wanted, marks={path: [0, 0]}),
    ]
    for call in calls:
        with pytest.raises(Refused, match="outside"):
            await call
    assert not list(tree.iterdir())


async def test_a_link_leads_nowhere(service: StagingService, tree: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("secret")
    (tree / "way").symlink_to(outside)
    (tree / "file").symlink_to(outside / "secret")
    assert (await place(service, tree, tree / "way" / "new", b"x"))["refused"] == "file-link"
    assert (await bring(service, tree, tree / "way" / "new", b"x", None))["refused"] == "file-link"
    assert (await bring(service, tree, tree / "file", b"x", mark(outside / "secret")))["refused"] == "not-owner"
    with pytest.raises(GridError):
        wanted = [{"path": str(tree / "file"), "offset": 0, "size": 6}]
        await service.stage_read(HERE, agreed=agreed(tree), wanted=wanted)
    assert [one.name for one in outside.iterdir()] == ["secret"]
    assert (outside / "secret").read_text() == "secret"


@pytest.mark.root
async def test_a_users_own_link_to_the_tree_is_not_followed(
    service: StagingService, tree: Path, tmp_path: Path
) -> None:
    link = tmp_path / "link"
    link.symlink_to(tree)
    assert "refused" not in await place(service, link, link / "a", b"x")  # root made it
    os.chown(link, 1000, 1000, follow_symlinks=False)
    assert (await place(service, link, link / "b", b"x"))["refused"] == "file-link"


async def test_a_file_is_placed_whole_and_another_ones_is_kept(service: StagingService, tree: Path) -> None:
    path = tree / "new" / "data.txt"
    answer = await place(service, tree, path, b"first")
    assert path.read_bytes() == b"first" and path.stat().st_mode & 0o777 == 0o640
    assert mark(path) == [answer["size"], answer["mtime_ns"]] == [5, 10**18 + 5]
    await place(service, tree, path, b"second")  # it was ours
    path.write_text("somebody's")
    await place(service, tree, path, b"third")
    assert path.read_bytes() == b"third"
    assert (tree / "new" / "data.txt.of-gpu1").read_text() == "somebody's"
    assert (await place(service, tree, path, b"fourth", digest=digest(b"other")))["refused"] == "file-digest"
    assert path.read_bytes() == b"third"
    assert sorted(one.name for one in path.parent.iterdir()) == ["data.txt", "data.txt.of-gpu1"]


async def test_the_same_content_comes_over_the_wire_once(service: StagingService, tree: Path) -> None:
    data = b"large" * 1000
    for offset in range(0, len(data), 2000):
        piece = data[offset : offset + 2000]
        await service.stage_piece(HERE, move_id="m1", digest=digest(data), offset=offset, data=piece)
    one, two = entry(tree / "one", data), entry(tree / "two", data)
    await service.stage_place(HERE, move_id="m1", agreed=agreed(tree), files=[{"entry": one}])
    link = entry(tree / "link", b"", link="one")
    other = entry(tree / "other", b"unknown")
    missing = await service.stage_have(HERE, agreed=agreed(tree), entries=[one, two, link, other])
    assert missing == [str(tree / "other")]
    assert (tree / "one").read_bytes() == (tree / "two").read_bytes() == (tree / "link").read_bytes() == data


async def test_what_comes_home_replaces_only_what_is_expected(service: StagingService, tree: Path) -> None:
    path = tree / "notes.txt"
    path.write_text("ours")
    path.chmod(0o604)
    before = mark(path)
    assert "refused" not in await bring(service, tree, path, b"theirs", before)
    assert path.read_text() == "theirs" and path.stat().st_mode & 0o777 == 0o604
    path.write_text("changed")
    assert (await bring(service, tree, path, b"again", before))["refused"] == "file-changed"
    assert (await bring(service, tree, path, b"again", None))["refused"] == "file-changed"
    assert path.read_text() == "changed"


@pytest.mark.root
async def test_what_comes_home_is_the_users_whatever_the_other_side_says(
    service: StagingService, tree: Path, tmp_path: Path
) -> None:
    tree.chmod(0o755)
    assert (await bring(service, tree, tree / "new", b"x", None, uid=1000))["refused"] == "not-writable"
    (tree / "roots").write_text("root's")
    answer = await bring(service, tree, tree / "roots", b"x", mark(tree / "roots"), uid=1000)
    assert answer["refused"] == "not-owner"
    os.chown(tree, 1000, 1000)
    await bring(service, tree, tree / "below" / "new", b"x", None, uid=1000)
    assert (tree / "below").stat().st_uid == (tree / "below" / "new").stat().st_uid == 1000


def test_a_program_is_given_time_to_save_itself(service: StagingService, tmp_path: Path) -> None:
    script = 'trap "echo saved >saved" USR1; echo ready; while :; do sleep 0.05; done'
    with subprocess.Popen(["/bin/sh", "-c", script], stdout=subprocess.PIPE, text=True, cwd=tmp_path) as program:
        assert program.stdout and program.stdout.readline() == "ready\n"
        who = process_id(program.pid)
        assert who
        start = {"pid": who.pid, "start_ticks": who.start_ticks}
        assert asyncio.run(service.stage_save(HERE, **start, number=signal.SIGUSR1, grace_s=0.1))
        wait_until((tmp_path / "saved").exists, 30, "the program to save itself")
        assert not asyncio.run(service.stage_save(HERE, **start, number=signal.SIGKILL, grace_s=60))
        with pytest.raises(GridError):
            asyncio.run(service.stage_save(HERE, **{**start, "start_ticks": 1}, number=signal.SIGUSR1, grace_s=0))


async def test_a_scan_lists_files_without_following_links(service: StagingService, tree: Path, tmp_path: Path) -> None:
    for name in ("a.txt", "sub/b.txt", ".git/config", "__pycache__/x.pyc", "big/1", "big/2"):
        (tree / name).parent.mkdir(exist_ok=True)
        (tree / name).write_text(name)
    (tmp_path / "secret").write_text("secret")
    (tree / "out").symlink_to(tmp_path)
    named = str(tmp_path / "secret")
    found = await service.stage_scan(HERE, agreed=agreed(tree, files=(named, "/nowhere/at/all")), max_files=10)
    listed = {one["path"].removeprefix(f"{tmp_path}/"): one["link"] for one in found["entries"]}
    assert listed == {
        "tree/a.txt": "", "tree/sub/b.txt": "", "tree/big/1": "", "tree/big/2": "", "tree/out": str(tmp_path),
        "secret": "",
    }  # fmt: skip
    assert {one["path"] for one in found["directories"]} == {str(tree), f"{tree}/sub", f"{tree}/big"}
    found = await service.stage_scan(HERE, agreed=agreed(tree), max_files=3)
    assert found["large"] == [str(tree)] and not found["entries"]
