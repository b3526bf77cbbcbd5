"""Arrays, objects and files in the memory pool on a real cluster: the documents' code, the example, pandas and zarr."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

from tests.lab.clusters import EmbeddedCluster

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
LIMIT_S = 200

#: The two blocks of the distributed memory guide, as they stand there.
USE_REMOTE_MEMORY = '''
import asyncio
from distributed_grid.orchestration.distributed_memory_pool import DistributedMemoryPool
from distributed_grid.config import load_cluster_config

async def use_remote_memory():
    # Initialize
    config = load_cluster_config("config/my-cluster-enhanced.yaml")
    pool = DistributedMemoryPool(config)
    await pool.initialize()
    
    # Allocate 5GB on gpu2
    block_id = await pool.allocate(5*1024**3, preferred_node="gpu2")
    
    # Write data (stored on gpu2, accessed from gpu-master)
    data = b"Your data here" * 1000000
    await pool.write(block_id, data)
    
    # Read data back
    retrieved = await pool.read(block_id, len(data))
    
    # Clean up
    await pool.deallocate(block_id)
    await pool.shutdown()

asyncio.run(use_remote_memory())
'''  # noqa: W293
NUMPY_ARRAYS = '''
import numpy as np

# Create large array
large_array = np.random.rand(10000, 10000)  # ~800MB
array_bytes = large_array.tobytes()

# Store on gpu2
block_id = await pool.allocate(len(array_bytes), preferred_node="gpu2")
await pool.write(block_id, array_bytes)

# Later: retrieve from gpu2
retrieved_bytes = await pool.read(block_id, len(array_bytes))
retrieved_array = np.frombuffer(retrieved_bytes, dtype=np.float64).reshape(10000, 10000)
'''
#: Runs the second one, which expects an open pool and awaits outside of any function.
AROUND_IT = """
import ast, asyncio, sys
from distributed_grid.config import load_cluster_config
from distributed_grid.orchestration.distributed_memory_pool import DistributedMemoryPool

async def main():
    async with DistributedMemoryPool(load_cluster_config("config/my-cluster-enhanced.yaml")) as pool:
        names = {"pool": pool}
        code = compile(sys.stdin.read(), "guide", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        await eval(code, names)
        assert (names["retrieved_array"] == names["large_array"]).all()
        print((await pool.info(names["block_id"]))["node"], names["retrieved_array"].nbytes)
        await pool.deallocate(names["block_id"])

asyncio.run(main())
"""


def run(cluster: EmbeddedCluster, *argv: str, cwd: Path | None = None, given: str = "") -> str:
    try:
        done = subprocess.run(
            [sys.executable, *argv], env=cluster.environment(), cwd=cwd or cluster.cwd, input=given,
            capture_output=True, text=True, timeout=LIMIT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise AssertionError(f"it did not end within {LIMIT_S} s: {error.stdout!r}") from None
    assert done.returncode == 0, done.stderr
    return done.stdout


def program(cluster: EmbeddedCluster, text: str) -> str:
    return run(cluster, "-W", "error", "-c", textwrap.dedent(text))


def names(cluster: EmbeddedCluster) -> set[str]:
    return set(program(cluster, """
        from distributed_grid.orchestration.distributed_memory_pool import SyncMemoryPool
        with SyncMemoryPool() as pool:
            print(*pool.objects, sep="\\n")
    """).splitlines()) - {""}  # fmt: skip


def test_the_guide_as_it_stands(embedded: EmbeddedCluster, tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    assert embedded.config
    (tmp_path / "config" / "my-cluster-enhanced.yaml").write_text(embedded.config.read_text())
    run(embedded, "-c", USE_REMOTE_MEMORY, cwd=tmp_path)
    assert run(embedded, "-c", AROUND_IT, cwd=tmp_path, given=NUMPY_ARRAYS).split()[1] == "800000000"


def test_the_example(embedded: EmbeddedCluster) -> None:
    example = str(EXAMPLES / "distributed_memory_usage.py")
    said = run(embedded, example, "--config", str(embedded.config), "--scale", "0.1")
    assert "an array of 80 MB went there and came back" in said
    assert "written by one process, read by another" in said and "summed up 0.2 GiB" in said
    assert not {name for name in names(embedded) if name.startswith("example/")}


def test_pandas(embedded: EmbeddedCluster) -> None:
    program(embedded, """
        import numpy, pandas
        frame = pandas.DataFrame({"a": numpy.arange(200_000), "b": [f"text {n % 100}" for n in range(200_000)]})
        frame.to_parquet("gridmem://pandas/day.parquet", row_group_size=20_000)
        frame[:1000].to_csv("gridmem://pandas/day.csv", index=False, storage_options={"preferred_node": "gpu1"})
    """)  # fmt: skip
    said = program(embedded, """
        import fsspec, pandas, pyarrow.parquet
        frame = pandas.read_parquet("gridmem://pandas/day.parquet")
        assert len(frame) == 200_000 and frame["a"].sum() == 199_999 * 100_000 and frame["b"][101] == "text 1"
        few = pandas.read_parquet("gridmem://pandas/day.parquet", columns=["a"], filters=[("a", "<", 10)])
        assert list(few["a"]) == list(range(10))
        assert len(pandas.read_csv("gridmem://pandas/day.csv")) == 1000
        files = fsspec.filesystem("gridmem")
        assert pyarrow.parquet.read_table("pandas/day.parquet", filesystem=files).num_rows == 200_000
        assert files.info("pandas/day.csv")["node"] == "gpu1"
        print(*files.ls("gridmem://pandas", detail=False))
        files.rm("pandas", recursive=True)
    """)  # fmt: skip
    assert said.split() == ["pandas/day.csv", "pandas/day.parquet"]
    assert not {name for name in names(embedded) if name.startswith("pandas/")}


def test_zarr_on_the_mapping_and_across_processes(embedded: EmbeddedCluster) -> None:
    program(embedded, """
        import numpy, zarr
        from distributed_grid.orchestration.distributed_memory_pool import SyncMemoryPool
        with SyncMemoryPool() as pool:
            group = zarr.open_group(store=pool.objects.under("cube"), mode="w")
            array = group.create_array("values", shape=(300, 200), chunks=(100, 100), dtype="f8")
            array[...] = numpy.arange(60_000).reshape(300, 200)
            array[5, 5] = -1
            assert "values/c/2/1" in pool.objects.under("cube")
            assert array[299, 199] == 59_999
            pool.objects["plain"] = b"of one process"
    """)  # fmt: skip
    program(embedded, """
        import zarr
        from distributed_grid.orchestration.distributed_memory_pool import SyncMemoryPool
        array = zarr.open_group("gridmem://cube", mode="r")["values"]
        assert array.shape == (300, 200) and array[299, 199] == 59_999 and array[5, 5] == -1
        assert array[:, 7].sum() == sum(range(7, 60_000, 200))
        with SyncMemoryPool() as pool:
            here = pool.objects
            assert here.pop("plain") == b"of one process" and "plain" not in here
            assert [name for name, _ in zarr.open_group(store=here.under("cube"), mode="r").arrays()] == ["values"]
            here.under("cube").clear()
    """)  # fmt: skip
    assert not {name for name in names(embedded) if name.startswith("cube/")}
