"""Fixtures of all tests of the controller."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from helmsman import LocalScheduler
from tests.engines.preload import PRELOAD


@pytest.fixture(scope="package")
def forking() -> Iterator[LocalScheduler]:
    """Scheduler of four logical devices, whose workers start with real engines imported.

    It is not for the session: while it is open, this process must not use an accelerator platform,
    as tests of engines do.
    """
    with LocalScheduler(num_gpus=4, preload=PRELOAD) as scheduler:
        yield scheduler


@pytest.fixture(scope="module")
def engines_scheduler(forking: LocalScheduler) -> Iterator[LocalScheduler]:
    """The same scheduler, without workers at the begin and the end of a module."""
    yield forking
    forking.delete_workers()
