"""Fixtures of the contract suite: its scheduler, workers, engines and role names."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from helmsman.api import errors
from helmsman.api.scheduler import Job, Scheduler
from helmsman.testing.contract_engine import CountingEngine
from helmsman.testing.contract_tools import Engine, Gate

_numbers = itertools.count()


@pytest.fixture(scope="package")
def scheduler(make_scheduler: Callable[[], Scheduler]) -> Iterator[Scheduler]:
    """Provide a scheduler that all tests share."""
    with make_scheduler() as made:
        yield made


@pytest.fixture(scope="package")
def shared_workers(scheduler: Scheduler) -> list[str]:
    """Provide two workers to tests that leave them usable."""
    return scheduler.create_workers(Job(role="shared", replicas=2))


@pytest.fixture(scope="package")
def engine_class() -> type[CountingEngine]:
    """Return the engine class of the next two fixtures."""
    return CountingEngine


@pytest.fixture
def engine(
    scheduler: Scheduler, shared_workers: list[str], engine_class: type[CountingEngine]
) -> Engine:
    """Provide an engine of this test in the first shared worker."""
    return Engine.create(scheduler, shared_workers[0], engine_class, f"engine-{next(_numbers)}")


@pytest.fixture
def peer(
    scheduler: Scheduler, shared_workers: list[str], engine_class: type[CountingEngine]
) -> Engine:
    """Provide an engine of this test in the second shared worker."""
    return Engine.create(scheduler, shared_workers[1], engine_class, f"engine-{next(_numbers)}")


@pytest.fixture
def role(scheduler: Scheduler) -> Iterator[str]:
    """Provide a role name; delete the roles with this prefix after the test."""
    name = f"role-{next(_numbers)}"
    yield name
    running = {status.worker_id.rpartition("/")[0] for status in scheduler.status()}
    for each in sorted(other for other in running if other.startswith(name)):
        with contextlib.suppress(errors.RoleNotFoundError):
            # Deleting the target of a colocated role deletes that role too.
            scheduler.delete_workers(each)


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    """Provide the gate by which this test holds an engine."""
    made = Gate(tmp_path)
    yield made
    made.open()


@pytest.fixture
def own_processes(scheduler: Scheduler) -> None:
    """Skip the test if workers are not separate processes."""
    if scheduler.shares_process:
        pytest.skip("the workers share the script's process")
