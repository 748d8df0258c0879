"""Fixtures of the tests of weight syncs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from helmsman import Scheduler
from tests.controller.sync_world import SUPERVISED, SharedWorld, World


@pytest.fixture(scope="module")
def shared(engines_scheduler: Scheduler, request: pytest.FixtureRequest) -> Iterator[SharedWorld]:
    """A world of two ranks and two instances, with the options ``WORLD`` of the module."""
    options = getattr(request.module, "WORLD", {})
    shared = SharedWorld(lambda: World(engines_scheduler, 2, 2, supervision=SUPERVISED, **options))
    with contextlib.closing(shared):
        yield shared


@pytest.fixture
def world(shared: SharedWorld) -> Iterator[World]:
    """Lend the world that the tests of a module share."""
    with shared.lent() as world:
        yield world
