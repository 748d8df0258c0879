"""Selection of the backends, and the fixtures of the contract tests: those of the public suite, and
worker groups, reward pools and driver scripts.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import helmsman
from helmsman.api.scheduler import Job, Scheduler, Timeouts
from helmsman.api.worker_group import ClusterConfig
from helmsman.controller._groups.resource_manager import ResourceManager
from helmsman.controller._rollout.reward_pool import RewardPool
from helmsman.testing.contract_fixtures import (
    engine,
    gate,
    own_processes,
    peer,
    role,
    shared_workers,
)
from tests.contract.engines import Counter
from tests.contract.group_workers import Member
from tests.contract.groups import ACT, ON_CPU, Members
from tests.contract.helpers import LIMIT_S, Driver, Engine

__all__ = ["engine", "gate", "own_processes", "peer", "role", "shared_workers"]

HERE = Path(__file__).parent
TIMEOUTS = Timeouts(start_s=60.0, create_engine_s=60.0, call_s=60.0, health_s=10.0, shutdown_s=8.0)
OPTIONS: dict[str, dict[str, Any]] = {
    "inline": {"num_cpus": 24, "num_gpus": 8, "accelerator": "cuda"},
    "local": {"num_cpus": 24, "num_gpus": 8, "accelerator": "cuda", "preload": ()},
    "ray": {"num_cpus": 24, "num_gpus": 8, "preload": ()},
}


# --- selection ------------------------------------------------------------------------------------


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marks of this suite."""
    config.addinivalue_line("markers", "not_on(*backends): the test cannot run on these backends")
    config.addinivalue_line("markers", "ray_smoke: runs on Ray with --backends ray-smoke, too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests of backends that ``--backends`` does not name."""
    names = config.getoption("backends")
    selected: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        is_selected = HERE not in item.path.parents or _runs_on(item, names)
        (selected if is_selected else left_out).append(item)
    if left_out:
        items[:] = selected
        config.hook.pytest_deselected(items=left_out)


def _runs_on(item: pytest.Item, names: tuple[str, ...]) -> bool:
    callspec = getattr(item, "callspec", None)
    params = callspec.params if callspec is not None else {}
    backend = params.get("backend", "inline")
    if any(backend in mark.args for mark in item.iter_markers("not_on")):
        return False
    if backend == "inline":
        # The public suite itself would skip these two kinds.
        needs_process = "own_processes" in getattr(item, "fixturenames", ())
        return "inline" in names and not needs_process and params.get("method") != "spin"
    if HERE / "before_backend" in item.path.parents:
        return False
    is_smoke = backend == "ray" and item.get_closest_marker("ray_smoke") is not None
    return backend in names or (is_smoke and "ray-smoke" in names)


# --- schedulers and engines -----------------------------------------------------------------------


@pytest.fixture(scope="package", params=list(OPTIONS))
def backend(request: pytest.FixtureRequest) -> str:
    """Name of the scheduler."""
    return str(request.param)


@pytest.fixture(scope="package")
def make_scheduler(
    backend: str, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[], Scheduler]:
    """Make a scheduler of the backend."""
    options = {"log_dir": tmp_path_factory.mktemp("logs"), "timeouts": TIMEOUTS, **OPTIONS[backend]}
    return functools.partial(helmsman.make_scheduler, backend, **options)


@pytest.fixture(scope="package")
def scheduler(backend: str, make_scheduler: Callable[..., Scheduler]) -> Iterator[Scheduler]:
    """Provide a scheduler that all tests share; its workers find torch imported."""
    options = {"preload": ("torch",)} if "preload" in OPTIONS[backend] else {}
    with make_scheduler(**options) as made:
        yield made


@pytest.fixture
def make_own(backend: str, tmp_path: Path) -> Callable[..., Scheduler]:
    """Make the scheduler of another run; on Ray, in the same cluster."""
    options = {"log_dir": tmp_path / "own-logs", **(OPTIONS[backend] if backend != "ray" else {})}
    return functools.partial(helmsman.make_scheduler, backend, **options)


@pytest.fixture(scope="package")
def engine_class() -> type[Counter]:
    """Return the class of the fixtures `engine` and `peer`."""
    return Counter


@pytest.fixture
def own(scheduler: Scheduler, role: str) -> Iterator[Engine]:
    """Provide a Counter in a worker of this test alone, which the test may stop."""
    (worker,) = scheduler.create_workers(Job(role=role))
    made = Engine.create(scheduler, worker, Counter)
    pid = made.call("pid")
    yield made
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


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


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    """Provide threads for calls that block."""
    with ThreadPoolExecutor(8) as pool:
        yield pool


# --- worker groups and reward pools ---------------------------------------------------------------


@pytest.fixture(scope="module")
def resources(scheduler: Scheduler) -> Iterator[ResourceManager]:
    """Hold all eight devices during a module."""
    with ResourceManager(8, scheduler=scheduler) as manager:
        yield manager


@pytest.fixture(scope="module")
def members(resources: ResourceManager) -> Iterator[Members]:
    """Provide a group of 2 dp x 2 tp x 2 pp to tests that leave it usable."""
    config = ClusterConfig(
        device_mapping="0-7", tp_size=2, pp_size=2, num_cpus=0.5, env_vars=ON_CPU
    )
    with Members("members", Member, resources, config, args=(100,)) as made:
        yield made


@pytest.fixture
def make_cluster(
    resources: ResourceManager, request: pytest.FixtureRequest
) -> Iterator[Callable[..., Members]]:
    """Start clusters that are closed after the test."""
    made: list[Members] = []

    def start(worker_cls: Any = Member, *args: Any, name: str = "", **config: Any) -> Members:
        settings = {"num_cpus": 0.5, "env_vars": ON_CPU, **config}
        name = name or f"group-{abs(hash(request.node.nodeid)) % 10**8}-{len(made)}"
        made.append(Members(name, worker_cls, resources, ClusterConfig(**settings), args=args))
        return made[-1]

    yield start
    for each in made:
        each.close()


@pytest.fixture
def make_pool(scheduler: Scheduler, role: str) -> Iterator[Callable[..., RewardPool]]:
    """Start reward pools, of two workers by default, that are closed after the test."""
    with contextlib.ExitStack() as pools:

        def make(
            function: Any = ACT,
            timeout: float | None = LIMIT_S,
            num: int = 2,
            **options: Any,
        ) -> RewardPool:
            pool = pools.enter_context(
                RewardPool(scheduler, function, Job(role=role, replicas=num), timeout, **options)
            )
            pool.initialize()
            return pool

        yield make
