"""Tests on real clusters: bringing one up on a slow machine takes longer than a unit test may."""

from __future__ import annotations

from pathlib import Path

import pytest

LIMIT_S = 300


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(LIMIT_S))
