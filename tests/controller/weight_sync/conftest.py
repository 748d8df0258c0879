"""Fixtures of the tests of weight syncs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.controller.sync_world import SharedWorld, World


@pytest.fixture
def world(shared: SharedWorld) -> Iterator[World]:
    """Lend the world that the tests of a module share."""
    with shared.lent() as world:
        yield world
