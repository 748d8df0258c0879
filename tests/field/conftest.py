"""Fixtures of the tests of races and faults that other libraries of the field have reported."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from helmsman import Scheduler, make_scheduler
from tests.contract.helpers import Gate
from tests.controller.conftest import engines_scheduler, forking
from tests.controller.sync_world import SUPERVISED, World
from tests.examples.conftest import one_thread

__all__ = ["engines_scheduler", "forking", "one_thread"]


@pytest.fixture(scope="package")
def local() -> Iterator[Scheduler]:
    """Scheduler of processes, for all tests; each uses roles of its own."""
    with make_scheduler("local", num_cpus=128, preload=()) as made:
        yield made


@pytest.fixture
def role(request: pytest.FixtureRequest) -> str:
    """Name of the test, as a role."""
    return str(request.node.originalname).removeprefix("test_").replace("_", "-")


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    """Provide the files that hold a call of an engine."""
    return Gate(tmp_path)


@pytest.fixture(scope="module")
def world(engines_scheduler: Scheduler) -> Iterator[World]:
    """A trainer of two ranks and a rollout of two instances, with a small model."""
    with World(engines_scheduler, 2, 2, "-field", supervision=SUPERVISED) as made:
        yield made
