"""Test scripts in AReaL's spelling on processes of this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from helmsman.compat.areal import Scheduler
from tests.compat.areal.suite import SchedulerSuite, check_dropped_scheduler, make


@pytest.fixture(scope="module")
def scheduler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scheduler]:
    with make("local", tmp_path_factory.mktemp("logs")) as scheduler:
        yield scheduler


class TestLocal(SchedulerSuite):
    pass


def test_dropped_scheduler_ends_workers(tmp_path: Path) -> None:
    check_dropped_scheduler("local", tmp_path)
