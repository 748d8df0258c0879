"""Fixtures of the unit tests of the controller."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.controller.fakes import FakeScheduler


@pytest.fixture
def scheduler() -> Iterator[FakeScheduler]:
    with FakeScheduler() as scheduler:
        yield scheduler
