"""Every test that asks for ``scheduler`` runs on each of our schedulers; the fixtures are those of
the public suite.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import helmsman
from helmsman.api.scheduler import Job, Scheduler, Timeouts
from helmsman.testing.contract_fixtures import (
    engine,
    gate,
    own_processes,
    peer,
    role,
    scheduler,
    shared_workers,
)
from tests.contract.engines import Counter
from tests.contract.helpers import Driver, Engine

__all__ = ["engine", "gate", "own_processes", "peer", "role", "scheduler", "shared_workers"]

TIMEOUTS = Timeouts(start_s=60.0, create_engine_s=60.0, call_s=60.0, health_s=10.0, shutdown_s=8.0)
OPTIONS: dict[str, dict[str, Any]] = {
    "inline": {"num_cpus": 24, "num_gpus": 8, "accelerator": "cuda"},
    "local": {"num_cpus": 24, "num_gpus": 8, "accelerator": "cuda", "preload": ()},
    "ray": {"num_cpus": 24, "num_gpus": 8},
}


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker of this suite."""
    config.addinivalue_line(
        "markers", "not_on(backend, reason): the promise makes no sense on that scheduler"
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what ``not_on`` says, with its reason."""
    callspec = getattr(item, "callspec", None)
    backend = callspec.params.get("backend", "") if callspec is not None else ""
    for marker in item.iter_markers("not_on"):
        name, reason = marker.args
        if backend == name:
            pytest.skip(f"{backend}: {reason}")


@pytest.fixture(scope="package", params=["inline", "local", "ray"])
def backend(request: pytest.FixtureRequest) -> str:
    """The scheduler's name."""
    return str(request.param)


@pytest.fixture(scope="package")
def make_scheduler(
    backend: str, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[], Scheduler]:
    """Makes a scheduler of the backend."""
    options = {"log_dir": tmp_path_factory.mktemp("logs"), "timeouts": TIMEOUTS, **OPTIONS[backend]}
    options.pop("preload", None)  # these workers load torch, some of them, and find it imported
    return functools.partial(helmsman.make_scheduler, backend, **options)


@pytest.fixture
def make_own(backend: str, tmp_path: Path) -> Callable[..., Scheduler]:
    """Makes a scheduler of a run beside the shared one; on Ray, in the same cluster."""
    options = {"log_dir": tmp_path / "own-logs", **(OPTIONS[backend] if backend != "ray" else {})}
    return functools.partial(helmsman.make_scheduler, backend, **options)


@pytest.fixture(scope="package")
def engine_class() -> type[Counter]:
    """Class of the fixtures `engine` and `peer`."""
    return Counter


@pytest.fixture
def own(backend: str, scheduler: Scheduler, role: str) -> Engine:
    """A Counter in a worker of this test alone; on Ray it shares no memory with the script, as on
    another machine.
    """
    with pytest.MonkeyPatch.context() as patch:
        if backend == "ray":
            patch.setattr("helmsman.controller._ray_backend.transport.HAS_SEGMENTS", False)
        scheduler.create_workers(Job(role=role))
    return Engine.create(scheduler, f"{role}/0", Counter)


@pytest.fixture
def run_driver(tmp_path: Path, backend: str) -> Iterator[Callable[..., Driver]]:
    """Start a driver script on the backend of the test."""
    started: list[Driver] = []

    def start(script: str, folder: Path = tmp_path, **options: Any) -> Driver:
        started.append(Driver(folder, backend, script, **options))
        return started[-1]

    yield start
    for driver in started:
        driver.close()
