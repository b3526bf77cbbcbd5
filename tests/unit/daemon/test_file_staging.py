"""Files of several moved processes of one directory, between two nodes' real staging services and one journal."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distributed_grid.agent.staging.names import Agreed
from distributed_grid.agent.staging.service import StagingService
from distributed_grid.core.errors import Refused
from distributed_grid.daemon.staging import FileStaging
from distributed_grid.orchestration.offloading.staging import Agreement
from distributed_grid.store.journal import Journal
from distributed_grid.store.moves import MoveRow
from distributed_grid.wire.rpc import CallContext

WORK = "/grid-test-work"  # the same name on all nodes; below a directory of each node's own


class Node:
    """A node's disk below a directory, and the daemon's link to its service."""

    def __init__(self, name: str, home: Path) -> None:
        self.node, self.disk = name, home / name / "disk"
        self.work = Path(f"{self.disk}{WORK}")
        self.work.mkdir(parents=True)
        self._service = StagingService(SimpleNamespace(name=name, node_dir=home / name))  # type: ignore[arg-type]

    async def call(self, name: str, **arguments: Any) -> Any:
        given = {key: value for key, value in arguments.items() if key not in ("timeout_s", "wait_s")}
        inward = self._each(given, lambda text: f"{self.disk}{text}" if text.startswith(WORK) else text)
        at = str(self.work)
        answer = await getattr(self._service, name)(CallContext(), **inward)
        return self._each(answer, lambda text: WORK + text.removeprefix(at) if text.startswith(at) else text)

    def _each(self, data: Any, change: Any) -> Any:
        if isinstance(data, dict):
            return {self._each(key, change): self._each(value, change) for key, value in data.items()}
        if isinstance(data, list | tuple):
            return [self._each(one, change) for one in data]
        return change(data) if isinstance(data, str) else data

    def write(self, name: str, text: str) -> None:
        (self.work / name).write_text(text)

    def read(self, name: str) -> str:
        return (self.work / name).read_text()


class Bench:
    def __init__(self, home: Path, journal: Journal) -> None:
        self.nodes = {name: Node(name, home) for name in ("gpu-master", "gpu1", "gpu2")}
        self.events: list[str] = []
        events = SimpleNamespace(publish=lambda kind, text, **facts: self.events.append(f"{kind}: {text}"))
        links = SimpleNamespace(get=self.nodes.__getitem__)
        self.journal = journal
        self.files = FileStaging(journal, links, events)  # type: ignore[arg-type]

    async def move(self, move_id: str, target: str, open_files: tuple[str, ...] = ()) -> None:
        """All that a move does about files; what the process has open travels as the mover would carry it."""
        here, there = self.nodes["gpu-master"], self.nodes[target]
        frozen = tuple(f"{WORK}/{name}" for name in open_files)
        tree = Agreed((WORK,))
        facts = {"staging": Agreement(tree, tree, frozen, (WORK,)).to_wire()}
        self.journal.moves.start(MoveRow(move_id, "PLANNED", here.node, 1, 1, target, 0, 1.0, 1.0), "")
        await self.files.before(move_id, here.node, target, facts)
        for name in open_files:
            (there.work / f"{name}.carried").write_text(here.read(name))
            (there.work / f"{name}.carried").rename(there.work / name)
        await self.files.after_freeze(move_id, here.node, target, facts)

    def left(self) -> list[str]:
        return sorted(path.name for path in self.nodes["gpu-master"].work.iterdir())


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    journal = Journal.open(tmp_path / "journal.sqlite3")
    yield Bench(tmp_path, journal)
    journal.close()


async def test_processes_of_one_directory_bring_everything_home_without_conflict(bench: Bench) -> None:
    home, gpu1 = bench.nodes["gpu-master"], bench.nodes["gpu1"]
    for name in ("one.log", "two.log", "two.state", "three.log", "settings"):
        home.write(name, "1")
    await bench.move("one", "gpu1", ("one.log",))
    gpu1.write("one.log", "1 one")  # the first goes on there, the others here
    home.write("two.log", "1 two")
    home.write("two.state", "two here")
    home.write("three.log", "1 three")
    await bench.move("two", "gpu1", ("two.log",))
    assert gpu1.read("one.log") == "1 one"  # what the first changed there is not undone by the second
    assert (gpu1.read("two.state"), gpu1.read("three.log")) == ("two here", "1 three")
    gpu1.write("two.log", "1 two more")
    gpu1.write("two.state", "two there")
    home.write("three.log", "1 three more")
    for move_id in ("one", "two", "one"):
        assert (await bench.files.bring_home(move_id))["conflicts"] == []
        gpu1.write("two.state", f"after {move_id}")
    assert (await bench.files.bring_home("two"))["conflicts"] == []
    assert [home.read(name) for name in ("one.log", "two.log", "two.state", "three.log")] == [
        "1 one", "1 two more", "after one", "1 three more",
    ]  # fmt: skip
    assert bench.left() == ["one.log", "settings", "three.log", "two.log", "two.state"]
    assert bench.events == []


async def test_a_true_conflict_between_nodes_is_still_kept_as_both(bench: Bench) -> None:
    home, gpu1, gpu2 = (bench.nodes[name] for name in ("gpu-master", "gpu1", "gpu2"))
    home.write("shared", "base")
    await bench.move("one", "gpu1")
    await bench.move("two", "gpu2")
    gpu1.write("shared", "of the first")
    gpu2.write("shared", "of the second")
    assert (await bench.files.bring_home("one"))["conflicts"] == []
    assert (await bench.files.bring_home("two"))["conflicts"] == [f"{WORK}/shared"]
    assert (home.read("shared"), home.read("shared.from-gpu2")) == ("of the first", "of the second")
    assert len(bench.events) == 1


async def test_an_open_file_is_not_put_over_one_that_a_moved_process_has_changed(bench: Bench) -> None:
    bench.nodes["gpu-master"].write("shared.log", "base")
    await bench.move("one", "gpu1", ("shared.log",))
    bench.nodes["gpu1"].write("shared.log", "base and the first's")
    with pytest.raises(Refused) as caught:
        await bench.move("two", "gpu1", ("shared.log",))
    assert caught.value.code == "file-conflict" and bench.nodes["gpu1"].read("shared.log") == "base and the first's"
