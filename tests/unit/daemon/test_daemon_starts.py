"""The daemon as commands find it: started by several at once, of another version, with its socket elsewhere."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from distributed_grid.cluster.record import ClusterRecord
from distributed_grid.config.models import ClusterConfig
from distributed_grid.config.paths import GridPaths
from distributed_grid.core.errors import GridError, Refused, Unavailable
from distributed_grid.core.process import process_id
from distributed_grid.daemon.client import connect, daemon_holds_lock, start_daemon
from distributed_grid.daemon.control import ControlPlane
from distributed_grid.daemon.keeper import ClusterKeeper
from distributed_grid.wire.channel import Channel, serve_unix
from distributed_grid.wire.rpc import pack
from tests.lab.waiting import wait_until


@pytest.fixture
def paths(grid_home: Path) -> Iterator[GridPaths]:
    found = GridPaths(grid_home).ensure()
    yield found
    asyncio.run(stopped(found))


async def stopped(paths: GridPaths) -> None:
    try:
        async with await connect(paths) as client:
            pid = (await client.call("daemon_stop"))["pid"]
    except Unavailable:
        return
    await asyncio.to_thread(wait_until, lambda: process_id(pid) is None or not daemon_holds_lock(paths))


def test_two_starts_at_once_give_one_daemon(paths: GridPaths) -> None:
    async def both() -> list[int]:
        clients = await asyncio.gather(*(connect(paths, autostart=True) for _ in range(3)))
        pids = [int(client.hello["pid"]) for client in clients]
        for client in clients:
            await client.close()
        return pids

    assert len(set(asyncio.run(both()))) == 1


def test_the_socket_may_be_elsewhere(paths: GridPaths, tmp_path: Path) -> None:
    elsewhere = tmp_path / "grid.sock"
    config = tmp_path / "c.yaml"
    config.write_text(f"daemon:\n  socket: {elsewhere}\n")
    mode = tmp_path.stat().st_mode
    start_daemon(paths, str(config))
    assert elsewhere.is_socket() and tmp_path.stat().st_mode == mode
    asyncio.run(stopped(paths))
    assert not elsewhere.exists() and not paths.socket.is_symlink()


def test_a_port_in_use_is_told(paths: GridPaths, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = tmp_path / "c.yaml"
        config.write_text(f"daemon:\n  metrics_port: {taken.getsockname()[1]}\n")
        with pytest.raises(Unavailable) as told:
            start_daemon(paths, str(config))
    assert told.value.code == "metrics-port" and "in use" in told.value.cause
    assert not daemon_holds_lock(paths)


async def test_a_host_program_whose_start_failed_holds_nothing_and_may_try_again(grid_home: Path) -> None:
    paths = GridPaths(grid_home).ensure()
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = ClusterConfig.model_validate({"daemon": {"metrics_port": taken.getsockname()[1]}})
        with pytest.raises(Unavailable) as told:
            await ControlPlane(config, paths).start()
    assert told.value.code == "metrics-port"
    assert not daemon_holds_lock(paths)
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors
    plane = ControlPlane(ClusterConfig(), paths)
    await plane.start()
    await plane.stop()
    assert not daemon_holds_lock(paths)


def test_a_state_directory_that_cannot_be_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Refused) as told:
        GridPaths(tmp_path / "file" / "home").ensure()
    assert told.value.code == "state-dir"


async def test_a_daemon_of_another_version_can_only_be_stopped(grid_home: Path) -> None:
    paths = GridPaths(grid_home).ensure()

    async def on_channel(channel: Channel) -> None:
        await channel.send(pack({"hello": {"protocol": 0, "version": "0.0", "pid": os.getpid()}}))
        await channel.recv()

    listener = await serve_unix(paths.socket, on_channel)
    try:
        with pytest.raises(Refused) as told:
            await connect(paths, autostart=True)
        assert told.value.code == "daemon-protocol" and "grid daemon stop" in told.value.hint
        async with await connect(paths, any_protocol=True) as client:
            assert client.hello["protocol"] == 0
    finally:
        await listener.close()


async def test_a_stop_that_was_cut_short_is_finished_not_undone(grid_home: Path) -> None:
    from distributed_grid.cluster.plan import plan_cluster

    paths = GridPaths(grid_home).ensure()
    record = plan_cluster(ClusterConfig.model_validate({"embedded": True, "ray": {"port": 0}}), paths)
    record.state = "stopping"
    record.save(paths.cluster_record)
    opened: list[str] = []

    async def on_node(node: str, _endpoint: tuple[str, int] | None) -> None:
        opened.append(node)

    async def on_down() -> None:
        pass

    keeper = ClusterKeeper(paths, lambda *_words, **_data: None, on_node, on_down)
    await keeper.resume()
    running = asyncio.create_task(keeper.run())
    try:
        async with asyncio.timeout(120):
            while keeper.state != "down":
                await asyncio.sleep(0.05)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await keeper.close()
    found = ClusterRecord.load(paths.cluster_record)
    assert found is not None and found.state == "down" and opened == []


async def test_a_return_that_was_cut_short_is_tried_again(grid_home: Path) -> None:
    from distributed_grid.cluster.plan import plan_cluster

    paths = GridPaths(grid_home).ensure()
    record = plan_cluster(ClusterConfig.model_validate({"embedded": True, "ray": {"port": 0}}), paths)
    record.state = "failed"  # as it stands while what half started is being tidied up
    for node in record.nodes.values():
        node.state = "stopping"
    record.save(paths.cluster_record)
    opened: list[str] = []

    async def on_node(node: str, _endpoint: tuple[str, int] | None) -> None:
        opened.append(node)

    async def on_down() -> None:
        pass

    keeper = ClusterKeeper(paths, lambda *_words, **_data: None, on_node, on_down)
    await keeper.resume()
    await keeper.close()
    assert keeper.state == "failed" and opened == ["gpu-master", "gpu1", "gpu2"]


async def test_a_start_that_ends_another_cluster_forgets_its_nodes(
    grid_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forgotten: list[str] = []

    async def on_node(_node: str, _endpoint: tuple[str, int] | None) -> None:
        pass

    async def on_down() -> None:
        forgotten.append("all")

    async def bring_up(*_words: object, before_end: Callable[[], Awaitable[None]], **_options: object) -> None:
        await before_end()
        raise GridError("no head today")

    monkeypatch.setattr("distributed_grid.daemon.keeper.bring_up", bring_up)
    keeper = ClusterKeeper(GridPaths(grid_home).ensure(), lambda *_words, **_data: None, on_node, on_down)
    with pytest.raises(GridError, match="no head today"):
        async for _ in keeper.start(ClusterConfig()):
            pass
    await keeper.close()
    assert forgotten == ["all"]


def test_completion_completes() -> None:
    asked = {**os.environ, "_GRID_COMPLETE": "bash_complete", "COMP_WORDS": "grid clu", "COMP_CWORD": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "distributed_grid.cli"], env=asked, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == "plain,cluster", done.stderr


def test_an_error_of_its_own_kind_keeps_its_exit_code() -> None:
    class Special(Unavailable):
        code = "special"

    back = GridError.from_wire(Special("gone").to_wire())
    assert type(back) is Unavailable and back.code == "special"


def test_a_daemon_that_comes_back_serves_what_the_cluster_was_started_from(grid_home: Path, tmp_path: Path) -> None:
    from distributed_grid.cluster.plan import plan_cluster
    from distributed_grid.daemon.__main__ import config_to_serve

    paths = GridPaths(grid_home).ensure()
    lab, same, other = (tmp_path / name for name in ("lab.yaml", "same.yaml", "other.yaml"))
    two = "embedded: true\nray: {port: 0}\nnodes: [{name: h, role: head}, {name: w, role: worker}]\n"
    lab.write_text(two)
    same.write_text(two + "name: same\n")
    other.write_text(two.replace("w,", "x,"))

    def served(named: Path | None = None, found: Path | None = None) -> Path | None:
        return config_to_serve(str(named) if named else None, str(found) if found else None, paths).path

    record = plan_cluster(ClusterConfig.from_yaml(lab), paths)
    record.save(paths.cluster_record)  # down
    assert served(found=other) == other
    record.state = "up"
    record.save(paths.cluster_record)
    assert served() == served(found=other) == served(found=same) == lab
    assert served(named=same) == same
    assert served(named=other) == lab, "config_use refuses it, as it does while a daemon runs"
    lab.write_text(two.replace("w,", "w2,"))
    assert served() == lab, "nodes may be edited: they hold after the next start"
    lab.unlink()
    assert served(named=other) == other

    built_in = plan_cluster(ClusterConfig.model_validate({"embedded": True, "ray": {"port": 0}}), paths)
    built_in.state = "up"
    built_in.save(paths.cluster_record)
    assert served() is None and served(found=other) is None and served(named=other) is None


@pytest.mark.root
def test_a_full_disk_is_told(tmp_path: Path) -> None:
    home = tmp_path / "full"
    home.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "tmpfs", home], check=True)
    try:
        with pytest.raises(OSError), (home / "fill").open("wb", buffering=0) as fill:
            while fill.write(bytes(65536)):
                pass
        with pytest.raises(Unavailable) as caught:
            start_daemon(GridPaths(home))
        assert caught.value.code == "disk-full"
    finally:
        subprocess.run(["umount", home], check=True)
