"""Use the workers' memory from the head: bytes, an 800 MB array, a scan of more than fits here, and named objects.

Needs a cluster that is up (`grid cluster start`); about half a minute on the embedded one. `--scale 0.1` makes
everything ten times smaller.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from distributed_grid.config import ClusterConfig, load_cluster_config
from distributed_grid.core.errors import GridError
from distributed_grid.orchestration.distributed_memory_pool import DistributedMemoryPool, SyncMemoryPool

GIB = 1024**3


@contextmanager
def step(text: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    print(f"{text}: {time.perf_counter() - began:.1f} s", flush=True)


async def bytes_on_gpu2(config: ClusterConfig, scale: float) -> None:
    """The pool at its simplest: a block is bytes on another node."""
    pool = DistributedMemoryPool(config)
    await pool.initialize()

    block_id = await pool.allocate(int(5 * GIB * scale), preferred_node="gpu2")
    print(repr(block_id))
    data = b"Your data here" * 1000000
    await pool.write(block_id, data)
    retrieved = await pool.read(block_id, len(data))
    assert retrieved == data
    await pool.deallocate(block_id)

    side = int(10000 * scale**0.5)
    large_array = np.random.rand(side, side)
    array_bytes = large_array.tobytes()
    block_id = await pool.allocate(len(array_bytes), preferred_node="gpu2")
    await pool.write(block_id, array_bytes)
    retrieved_bytes = await pool.read(block_id, len(array_bytes))
    retrieved_array = np.frombuffer(retrieved_bytes, dtype=np.float64).reshape(side, side)
    assert np.array_equal(retrieved_array, large_array)
    await pool.deallocate(block_id)
    print(f"an array of {len(array_bytes) / 1e6:.0f} MB went there and came back")
    await pool.shutdown()


def array_on_a_worker(pool: SyncMemoryPool, scale: float) -> None:
    """The same without copying it whole: an index moves just the bytes that it means."""
    rows = max(2, int(1000 * scale))
    remote = pool.put_array(np.arange(rows * 10_000.0).reshape(rows, 10_000), "gpu1", name="example/table")
    print(remote)
    assert remote[-1, -1] == rows * 10_000 - 1
    remote[1, 10:20] = 0
    assert not remote[1, 10:20].any() and remote[:, 0].shape == (rows,)
    remote.flush()


def more_than_fits_here(pool: SyncMemoryPool, scale: float) -> None:
    """Fill and sum up 2 GiB, with no more than 256 MiB to ourselves."""
    count = int(2 * GIB * scale) // 8
    own = int(next(line for line in Path("/proc/self/status").read_text().splitlines() if "VmData" in line).split()[1])
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (own * 1024 + GIB // 4, before[1]))
    try:
        with step(f"filled {count * 8 / GIB:.1f} GiB"):
            remote = pool.array(count, "i8")
            for first in range(0, count, 2**20):
                last = min(count, first + 2**20)
                remote[first:last] = np.arange(first, last)
        with step(f"summed up {count * 8 / GIB:.1f} GiB"):
            total = sum(int(part.sum()) for part in remote.chunks())
        assert total == count * (count - 1) // 2
        remote.free()
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def shared_with_others(pool: SyncMemoryPool, config: ClusterConfig) -> None:
    """Names are seen by all of the user's processes, until they are removed."""
    pool.objects["example/note"] = b"written by one process, read by another"
    program = """if True:
        import sys
        from distributed_grid.config import load_cluster_config
        from distributed_grid.orchestration.distributed_memory_pool import SyncMemoryPool

        with SyncMemoryPool(load_cluster_config(sys.argv[1] or None)) as pool:
            print(pool.objects["example/note"].decode())
            print("the last row ends with", pool.get_array("example/table")[-1, -3:])
    """
    subprocess.run([sys.executable, "-c", program, str(config.path or "")], check=True, timeout=60)
    pool.objects.under("example").clear()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", help="default: the configuration in effect")
    parser.add_argument("--scale", type=float, default=1.0)
    options = parser.parse_args()
    config = load_cluster_config(options.config)
    with step("bytes on gpu2"):
        asyncio.run(bytes_on_gpu2(config, options.scale))
    with SyncMemoryPool(config) as pool:
        array_on_a_worker(pool, options.scale)
        more_than_fits_here(pool, options.scale)
        shared_with_others(pool, config)


if __name__ == "__main__":
    try:
        main()
    except GridError as error:
        sys.exit(f"error: {error.message}\ncause: {error.cause}\ntry: {error.hint}")
