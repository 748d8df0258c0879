"""Test scripts in AReaL's spelling on Ray."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from helmsman.compat.areal import Scheduler
from tests.compat.areal.suite import SchedulerSuite, make


@pytest.fixture(scope="module")
def scheduler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scheduler]:
    with make("ray", tmp_path_factory.mktemp("logs")) as scheduler:
        yield scheduler


class TestRay(SchedulerSuite):
    pass
