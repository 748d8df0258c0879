"""Test scripts in AReaL's spelling on Ray."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from helmsman.compat.areal import Scheduler
from tests.compat.areal.suite import SchedulerSuite, check_dropped_scheduler, make


def test_dropped_scheduler_ends_workers(tmp_path: Path) -> None:
    """The first test, since it starts a Ray of its own."""
    import ray

    if ray.is_initialized():
        pytest.skip("another test uses its cluster")
    check_dropped_scheduler("ray", tmp_path)


@pytest.fixture(scope="module")
def scheduler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scheduler]:
    with make("ray", tmp_path_factory.mktemp("logs")) as scheduler:
        yield scheduler


class TestRay(SchedulerSuite):
    pass
