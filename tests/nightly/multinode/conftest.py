"""Fixtures of the tests of several nodes by day, in clusters of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.multinode.conftest import (
    base,
    fleet,
    left_as_found,
    make_run,
    nodes,
    open_nodes,
    run,
    sort_by_cluster,
)

__all__ = ["base", "fleet", "left_as_found", "make_run", "nodes", "open_nodes", "run"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run modules that share a cluster one after another."""
    sort_by_cluster(items, Path(__file__).parent)
