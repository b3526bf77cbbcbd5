"""The memory pool on a real cluster: the documents' own code, and blocks that outlive what is killed beside them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap

import pytest

from distributed_grid.agent.memory.launch import read_record
from distributed_grid.config.loader import load_cluster_config
from distributed_grid.orchestration.distributed_memory_pool import BlockLost, DistributedMemoryPool, SyncMemoryPool
from tests.lab.clusters import EmbeddedCluster
from tests.lab.waiting import wait_until

MIB = 1024**2


@pytest.fixture
def cluster(embedded: EmbeddedCluster, monkeypatch: pytest.MonkeyPatch) -> EmbeddedCluster:
    monkeypatch.setenv("GRID_HOME", str(embedded.home))
    monkeypatch.setenv("GRID_TEST_RUN", embedded.mark)  # a daemon that the pool starts serves the whole session
    return embedded


def run(cluster: EmbeddedCluster, program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], env=cluster.environment(), cwd=cluster.cwd,
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


async def test_the_documents_code(cluster: EmbeddedCluster) -> None:
    np = pytest.importorskip("numpy")
    config = load_cluster_config(str(cluster.config))
    pool = DistributedMemoryPool(config)
    await pool.initialize()
    block_id = await pool.allocate(5 * 1024**3, preferred_node="gpu2")
    data = b"Your data here" * 1000000
    await pool.write(block_id, data)
    retrieved = await pool.read(block_id, len(data))
    assert retrieved == data
    await pool.deallocate(block_id)

    large_array = np.random.rand(1000, 1000)
    array_bytes = large_array.tobytes()
    block_id = await pool.allocate(len(array_bytes), preferred_node="gpu2")
    await pool.write(block_id, array_bytes)
    retrieved_bytes = await pool.read(block_id, len(array_bytes))
    retrieved_array = np.frombuffer(retrieved_bytes, dtype=np.float64).reshape(1000, 1000)
    assert (retrieved_array == large_array).all()
    await pool.deallocate(block_id)
    await pool.shutdown()


def is_lost(pool: SyncMemoryPool, block: str) -> bool:
    """Until its loss is known, a block that is mapped here still gives the right bytes, never others."""
    try:
        assert pool.read(block, 4) == b"kept"
    except BlockLost:
        return True
    return False


def test_blocks_outlive_client_daemon_and_agent_and_are_lost_with_their_server(cluster: EmbeddedCluster) -> None:
    block = run(cluster, """
        from distributed_grid.orchestration.distributed_memory_pool import SyncMemoryPool
        with SyncMemoryPool() as pool:
            block = pool.allocate(1024 ** 2, "gpu1", strict=True)
            pool.write(block, b"kept" * (1024 ** 2 // 4))
            print(block, end="")
    """)  # fmt: skip
    cluster.kill("daemon")
    with SyncMemoryPool(load_cluster_config(str(cluster.config))) as pool:  # brings the daemon back
        assert pool.read(block) == b"kept" * (MIB // 4)
        agent = cluster.kill("agent:gpu1")
        assert pool.read(block, 4) == b"kept"
        wait_until(lambda: cluster.pid_of("agent:gpu1") not in (0, agent), 90, "a new agent")
        assert pool.read(block, 4) == b"kept"
        more = pool.allocate(MIB, "gpu1", strict=True)  # the same server goes on
        servers = {copy["incarnation"] for one in (block, more) for copy in pool.info(one)["copies"]}
        assert len(servers) == 1

        record = read_record(cluster.home / "nodes" / "gpu1" / "memory")
        assert record
        os.kill(record.pid, signal.SIGKILL)
        wait_until(lambda: not record.is_alive(), 60, "the server to end")
        wait_until(lambda: is_lost(pool, block), 60, "the block to be told as lost")
        wait_until(lambda: cluster.json("events", "--kind", "memory.lost"), 60, "the event")
        pool.deallocate(block)
        pool.deallocate(more)
