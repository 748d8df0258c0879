"""Fixtures of the tests of rollouts on processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from helmsman.api.scheduler import Scheduler
from helmsman.controller._scheduler.factory import make_scheduler


@pytest.fixture(scope="package")
def scheduler() -> Iterator[Scheduler]:
    """Scheduler on processes; each test deletes its workers."""
    with make_scheduler("local", preload=()) as scheduler:
        yield scheduler
