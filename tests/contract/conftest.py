"""Every test that asks for ``scheduler`` runs on each of our schedulers; the fixtures are those of the public suite."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import helmsman
from helmsman.api.scheduler import Scheduler, Timeouts
from helmsman.testing.contract import engine, gate, own_processes, peer, role, scheduler, shared_workers
from tests.contract.engines import Counter
from tests.contract.helpers import Driver

__all__ = ["engine", "gate", "own_processes", "peer", "role", "scheduler", "shared_workers"]

TIMEOUTS = Timeouts(start_s=60.0, create_engine_s=60.0, call_s=60.0, health_s=10.0, shutdown_s=8.0)
OPTIONS: dict[str, dict[str, Any]] = {
    "inline": {"num_cpus": 24, "num_gpus": 8, "accelerator": "cuda"},
    "local": {"num_cpus": 24, "num_gpus": 8, "accelerator": "cuda"},
    "ray": {"num_cpus": 24, "num_gpus": 8},
}


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker of this suite."""
    config.addinivalue_line("markers", "not_on(backend, reason): the promise makes no sense on that scheduler")
    config.addinivalue_line("markers", "also_apart: runs once more on Ray workers that share no memory with the script")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what need not run on workers that share no memory with the script, as those of other machines do not."""

    def is_wanted(item: pytest.Item) -> bool:
        callspec = getattr(item, "callspec", None)
        apart = callspec is not None and callspec.params.get("variant") == "ray_apart"
        return not apart or item.get_closest_marker("also_apart") is not None

    items[:] = [item for item in items if is_wanted(item)]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what ``not_on`` says, with its reason."""
    callspec = getattr(item, "callspec", None)
    variant = callspec.params.get("variant", "") if callspec is not None else ""
    for marker in item.iter_markers("not_on"):
        name, reason = marker.args
        if variant.removesuffix("_apart") == name:
            pytest.skip(f"{variant}: {reason}")


@pytest.fixture(scope="package", params=["inline", "local", "ray", "ray_apart"])
def variant(request: pytest.FixtureRequest) -> str:
    """The scheduler's name; 'ray_apart' is Ray with workers that share no memory with the script."""
    return str(request.param)


@pytest.fixture(scope="package")
def backend(variant: str) -> str:
    """The scheduler's name."""
    return variant.removesuffix("_apart")


@pytest.fixture(scope="package")
def make_scheduler(variant: str, backend: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Scheduler]]:
    """Makes a scheduler of the variant."""
    options = {"log_dir": tmp_path_factory.mktemp("logs"), "timeouts": TIMEOUTS, **OPTIONS[backend]}
    with pytest.MonkeyPatch.context() as patch:
        if variant != backend:
            patch.setattr("helmsman.controller._ray_backend.transport.HAS_SEGMENTS", False)
        yield functools.partial(helmsman.make_scheduler, backend, **options)


@pytest.fixture(scope="package")
def engine_class() -> type[Counter]:
    """Class of the fixtures `engine` and `peer`."""
    return Counter


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
