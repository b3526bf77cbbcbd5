"""The distributed memory guide's code and the example, as they stand, on three hosts."""

from __future__ import annotations

import pytest

from tests.cluster.test_memory_objects import AROUND_IT, EXAMPLES, LIMIT_S, NUMPY_ARRAYS, USE_REMOTE_MEMORY
from tests.lab.clusters import PYTHON, LabCluster


@pytest.mark.root
def test_the_guide_and_the_example_on_three_hosts(lab_cluster: LabCluster) -> None:
    head = lab_cluster.head
    head.write("/root/guide/config/my-cluster-enhanced.yaml", head.read(lab_cluster.config), mode=0o600)

    def there(*argv: str, given: str | None = None) -> str:
        return str(head.run([PYTHON, *argv], cwd="/root/guide", input=given, timeout=LIMIT_S).stdout)

    there("-c", USE_REMOTE_MEMORY)
    assert there("-c", AROUND_IT, given=NUMPY_ARRAYS).split() == ["gpu2", "800000000"]
    assert "read by another" in there(str(EXAMPLES / "distributed_memory_usage.py"), "--scale", "0.1")
