"""Fixtures of all tests of the controller."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture
def young_heap() -> Iterator[None]:
    """Collections of garbage look at new objects alone: beside those of torch and Ray, each would take a second."""
    gc.freeze()
    yield
    gc.unfreeze()
