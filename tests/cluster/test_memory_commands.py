"""`grid memory` on a real cluster: files, pipes, what is broken off in the middle, and the guide's own lines."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.lab.clusters import GRID, EmbeddedCluster
from tests.lab.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
MB = 1000**2
KEYS = ("k", "big", "small", "cache", "two words")


@pytest.fixture
def grid(embedded: EmbeddedCluster) -> Iterator[EmbeddedCluster]:
    yield embedded
    for found in blocks(embedded):
        if found["name"] in KEYS:
            embedded.grid("memory", "deallocate", found["id"])


def blocks(grid: EmbeddedCluster) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = grid.json("memory", "list-blocks")
    return found


def ids(grid: EmbeddedCluster) -> set[str]:
    return {found["id"] for found in blocks(grid)}


def shell(grid: EmbeddedCluster, line: str, *, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """A line as one types it, with this cluster's configuration."""
    env = {**grid.environment({"GRID_CONFIG": str(grid.config)}), "PATH": f"{GRID.parent}:{os.environ['PATH']}"}
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", line], env=env, cwd=cwd or grid.cwd, capture_output=True, text=True,
        timeout=120, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def test_a_file_and_its_object(grid: EmbeddedCluster, tmp_path: Path) -> None:
    data = os.urandom(3 * MB)
    file, out = tmp_path / "model.bin", tmp_path / "out.bin"
    file.write_bytes(data)
    assert "on gpu2" in grid.grid("memory", "store", "k", str(file), "-n", "gpu2").stdout
    assert "3.0 MB" not in grid.grid("memory", "retrieve", "k", "-o", str(out)).stderr
    assert out.read_bytes() == data
    (found,) = [one for one in grid.json("memory", "list-objects") if one["key"] == "k"]
    assert (found["size_bytes"], found["nodes"], found["state"]) == (len(data), ["gpu2"], "ready")
    part = grid.json("memory", "retrieve", "k", "--offset", "1000", "-s", "2KiB", "-o", str(out))
    assert part["bytes"] == 2048 and out.read_bytes() == data[1000:3048]
    assert grid.json("memory", "retrieve", found["id"][:14], "-o", str(out))["key"] == "k"
    for command in ("list-objects", "list-blocks"):
        (line,) = [line for line in grid.grid("memory", command).stdout.splitlines() if found["id"] in line]
        assert " k" in f" {line}" and "gpu2" in line and "ready" in line
    again = grid.json("memory", "store", "k", str(file), "--replicas", "2")
    assert sorted(again["nodes"]) == ["gpu1", "gpu2"] and again["id"] != found["id"]
    assert found["id"] not in ids(grid)
    assert "freed" in grid.grid("memory", "deallocate", "k").stdout
    assert again["id"] not in ids(grid)


def test_blocks_and_figures(grid: EmbeddedCluster) -> None:
    block = grid.grid("memory", "allocate", "64MiB", "--node", "gpu1", "--strict", "--name", "cache").stdout.strip()
    (found,) = [one for one in blocks(grid) if one["id"] == block]
    assert (found["size_bytes"], found["name"], found["nodes"]) == (64 * 1024**2, "cache", ["gpu1"])
    figures = grid.json("memory", "stats")
    assert figures["nodes"]["gpu1"]["promised_bytes"] >= 64 * 1024**2 and figures["blocks"] >= 1
    assert figures["nodes"]["gpu1"]["lends"] and not figures["nodes"]["gpu-master"]["lends"]
    assert "gpu1" in grid.grid("memory", "stats").stdout
    assert [one["id"] for one in grid.json("memory", "deallocate", block[:15])] == [block]
    assert block not in ids(grid)


def test_pipes(grid: EmbeddedCluster, tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(os.urandom(40 * MB))
    line = "cat big | grid memory store k - && grid memory retrieve k -o - | cmp - big"
    done = shell(grid, f"{line} && grid memory retrieve k | wc -c", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == str(40 * MB)
    done = shell(grid, "cat big | grid memory store 'two words' - --size 100MB --format json", cwd=tmp_path)
    assert done.returncode == 0 and f'"size_bytes": {40 * MB}' in done.stdout, done.stderr
    done = shell(grid, "grid memory store small - < /dev/null && grid memory retrieve small | wc -c")
    assert (done.returncode, done.stdout.split()[-1]) == (0, "0"), done.stderr
    # A reader that has enough is no error.
    done = shell(grid, "grid memory retrieve k -o - | head -c 3 | wc -c")
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "3", "")
    assert sum(one["name"] == "" for one in blocks(grid)) == 0


@contextmanager
def storing(grid: EmbeddedCluster, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """`grid memory store k -` in the middle of its work: some came, more is to come."""
    before = ids(grid)
    process = grid.popen("memory", "store", "k", "-", stdin=subprocess.PIPE, **options)
    assert process.stdin
    try:
        process.stdin.write(b"n" * 20 * MB)
        process.stdin.flush()
        wait_until(lambda: ids(grid) - before, 90, "the first block")
        yield process
    finally:
        process.kill()
        process.wait(60)
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream:
                stream.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_breaking_off_leaves_the_old_object(grid: EmbeddedCluster, tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "old").write_bytes(b"old")
    grid.grid("memory", "store", "k", str(tmp_path / "old"))
    before = ids(grid)
    with storing(grid, stderr=subprocess.PIPE) as process:
        process.send_signal(number)
        said = process.communicate(timeout=90)[1].decode()
        assert process.returncode == (-9 if number is signal.SIGKILL else 130)
        assert "Traceback" not in said
    wait_until(lambda: ids(grid) == before, 60, "all that was half-stored to be freed")
    assert shell(grid, "grid memory retrieve k").stdout == "old"


def test_the_daemon_dies_in_the_middle(grid: EmbeddedCluster) -> None:
    with storing(grid) as process:
        assert process.stdin
        grid.kill("daemon")
        process.stdin.write(b"m" * 20 * MB)
        process.stdin.close()
        assert process.wait(120) == 0
    done = shell(grid, "grid memory retrieve k | tr -d n | wc -c")
    assert (done.returncode, done.stdout.strip()) == (0, str(20 * MB)), done.stderr
    assert sum(one["name"] == "" for one in blocks(grid)) == 0


def test_progress_on_a_terminal(grid: EmbeddedCluster) -> None:
    terminal, end = pty.openpty()
    try:
        with storing(grid, stderr=end) as process:
            assert process.stdin
            said, deadline = b"", time.monotonic() + 90
            while b"storing k" not in said and time.monotonic() < deadline:
                process.stdin.write(b"p" * MB)
                process.stdin.flush()
                if select.select([terminal], [], [], 0.1)[0]:
                    said += os.read(terminal, 4096)
            assert re.search(rb"storing k: [0-9.]+ MB, [0-9.]+ [KMG]?B/s", said)
    finally:
        os.close(terminal)
        os.close(end)


BAD = [
    ("store k /no/such/file", 3, "/no/such/file"),
    ("store k /", 2, "directory"),
    ("store '' /etc/hostname", 2, "name of an object"),
    ("store k /etc/hostname -n gpu9", 3, "gpu9"),
    ("store k /etc/hostname --strict", 2, "-n NODE"),
    ("store k /etc/hostname --replicas 9", 2, "--replicas"),
    ("store k", 2, "FILE"),
    ("store k - --size 10 < /dev/zero", 2, "--size"),
    ("retrieve nothing-there", 3, "list-objects"),
    ("retrieve block_00", 3, "list-blocks"),
    ("retrieve nothing-there -o - --format json", 2, "-o FILE"),
    ("retrieve nothing-there --offset=-1", 2, "bytes"),
    ("retrieve nothing-there -s many", 2, "amount"),
    ("allocate 0", 2, "at least one byte"),
    ("allocate -- -5", 2, "amount"),
    ("allocate lots", 2, "amount"),
    ("allocate 1e40", 2, "any machine"),
    ("allocate 100000", 6, "largest that would fit"),
    ("allocate 1MiB -n gpu9", 3, "gpu9"),
    ("deallocate", 2, "BLOCK"),
    ("deallocate nothing-there", 3, "list-objects"),
    ("deallocate block_0123456789abcdef", 3, "list-blocks"),
    ("store-it", 2, "store-it"),
]


def test_bad_input_gets_one_clear_error(grid: EmbeddedCluster) -> None:
    for line, code, says in BAD:
        done = shell(grid, f"grid memory {line}")
        assert (done.returncode, done.stdout) == (code, ""), f"{line}: {done.stderr}"
        begins = '{"error": ' if "--format json" in line else "error: "
        assert done.stderr.startswith(begins) and says in done.stderr, f"{line}: {done.stderr}"
        assert "Traceback" not in done.stderr
    assert not [one for one in blocks(grid) if one["name"] in ("k", "")]


def test_a_part_that_is_not_there(grid: EmbeddedCluster, tmp_path: Path) -> None:
    (tmp_path / "small").write_bytes(b"12345")
    grid.grid("memory", "store", "small", str(tmp_path / "small"))
    for part in ("-s 6", "--offset 6", "--offset 3 -s 3"):
        done = shell(grid, f"grid memory retrieve small -o out {part}", cwd=tmp_path)
        assert done.returncode == 2 and "has 5 bytes" in done.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["small"]


def test_completion(grid: EmbeddedCluster) -> None:
    grid.grid("memory", "allocate", "1MiB", "--name", "cache")

    def offered(words: str) -> list[str]:
        env = {"_GRID_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        done = subprocess.run([GRID], env=grid.environment(env), capture_output=True, text=True, timeout=60)
        return [line.rpartition(",")[2] for line in done.stdout.splitlines()]

    assert offered("grid memory retrieve cac") == ["cache"]
    assert "gpu1" in offered("grid memory allocate 1 -n gp")
    assert any(word.startswith("block_") for word in offered("grid memory deallocate block_"))


# -- the guide's own lines ----------------------------------------------------------------------------------------

REQUEST = """
poetry run grid resource-sharing request \\
  --node gpu-master \\
  --type memory \\
  --amount 10.0 \\
  --priority high \\
  --config config/my-cluster-enhanced.yaml
"""


def typed(grid: EmbeddedCluster, line: str) -> str:
    """In a clone of the project, by a shell, as written; `poetry run` only finds the command."""
    env = {**grid.environment(), "PATH": f"{GRID.parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", f'poetry() {{ shift; "$@"; }}\n{line}'], env=env, cwd=ROOT, capture_output=True, text=True,
        timeout=120, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, f"{line}\n{done.stderr}"
    return done.stdout


def test_the_distributed_memory_guide(grid: EmbeddedCluster) -> None:
    allocations = []
    for request in (REQUEST, REQUEST.replace("10.0", "15.0")):
        allocations.append(typed(grid, request).rpartition("allocation id: ")[2].strip())
    status = typed(grid, "poetry run grid resource-sharing status --config config/my-cluster-enhanced.yaml")
    assert all(allocation[:8] in status for allocation in allocations)
    assert "10.0 GB memory" in status and "15.0 GB memory" in status
    assert typed(grid, "poetry run grid resource-sharing status")
    for allocation in allocations:
        assert "Released" in typed(grid, f"poetry run grid resource-sharing release {allocation}")
    assert typed(grid, "poetry run grid distribute status").count(" alive ") == 3
    assert "CPU" in typed(grid, 'eval "$(grid env)"\nray status')
