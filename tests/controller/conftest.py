"""Fixtures of all tests of the controller."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from helmsman import LocalScheduler
from tests.engines.preload import PRELOAD


@pytest.fixture(scope="package")
def forking() -> Iterator[LocalScheduler]:
    """A scheduler whose workers have imported real engines when they start, which costs its
    forkserver seconds.

    Not for the session: while it is open, this process must not use an accelerator platform, as
        tests of engines do.
    """
    with LocalScheduler(preload=PRELOAD) as scheduler:
        yield scheduler


@pytest.fixture(scope="module")
def engines_scheduler(forking: LocalScheduler) -> Iterator[LocalScheduler]:
    """The same, without workers at the begin and the end of a module."""
    yield forking
    forking.delete_workers()
