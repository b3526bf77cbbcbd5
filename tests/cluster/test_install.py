"""`grid cluster install` on a host that has nothing: no environment, no Ray, no way to the internet."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.lab.clusters import LabCluster
from tests.lab.hosts import HostSpec, Lab


@pytest.mark.root
@pytest.mark.timeout(600)
def test_a_bare_host_is_installed_and_joins(make_lab: Callable[..., Lab]) -> None:
    lab = make_lab("gpu-master", HostSpec("gpu1", shared_venv=False))
    cluster = LabCluster(lab)
    refused = cluster.grid("cluster", "start", check=False, timeout=200)
    assert refused.returncode == 5 and "gpu1 is not up" in refused.stdout, refused.stdout + refused.stderr
    assert "grid cluster install" in refused.stdout
    try:
        cluster.grid("cluster", "install", "-n", "gpu1", timeout=400)
        cluster.grid("cluster", "start", timeout=200)
        assert cluster.grid("execute", "-n", "gpu1", "hostname").stdout == "gpu1\n"
    finally:
        cluster.stop()
