"""Tests of the methods that tools and other actors call by the actor handle of a worker."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("ray", reason="its workers are Ray actors")

from helmsman._wire.messages import WorkerConfig
from helmsman.api import errors
from helmsman.api.environment import EnvironmentVariable
from helmsman.api.scheduler import Job
from helmsman.controller._scheduler.ray.scheduler import RayScheduler
from helmsman.rpc_server._server.ray_server import worker_ports_of
from tests.contract.engines import Counter
from tests.contract.helpers import LIMIT_S, Engine, Gate, held

FIRST_PORT, LAST_PORT = 23_100, 23_199
ray: Any = importlib.import_module("ray")
"""Imported after the scheduler's module, which decides how clusters authenticate."""


@pytest.fixture(scope="module")
def scheduler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayScheduler]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HELMSMAN_PORT_RANGE", f"{FIRST_PORT}-{LAST_PORT}")
        with RayScheduler(
            address="local", num_cpus=4, log_dir=tmp_path_factory.mktemp("logs"), preload=None
        ) as made:
            yield made


@pytest.fixture(scope="module")
def engine(scheduler: RayScheduler) -> Engine:
    """A Counter in the worker."""
    (worker,) = scheduler.create_workers(Job(role="target"))
    return Engine.create(scheduler, worker, Counter)


@pytest.fixture
def actor(engine: Engine) -> Any:
    """The actor of the worker, found by its name."""
    found = [
        each
        for each in ray.util.list_named_actors(all_namespaces=True)
        if each["name"].startswith("target/")
    ]
    assert len(found) == 1, found
    return ray.get_actor(found[0]["name"], found[0]["namespace"])


def get(reference: Any) -> Any:
    return ray.get(reference, timeout=LIMIT_S)


def test_actor_health_during_call(actor: Any, engine: Engine, tmp_path: Path) -> None:
    with held(engine, Gate(tmp_path)):
        health = get(actor.health.remote())
        assert (health.worker_id, health.running) == ("target/0", "target/0.wait")


def test_actor_configure_and_set_env(actor: Any, engine: Engine) -> None:
    environment = [EnvironmentVariable("OF_A_TOOL", "configured", "a tool")]
    config = WorkerConfig(role="target", rank=0, seed=5, environment=environment)
    get(actor.configure.remote(config))
    assert engine.call("environ", "OF_A_TOOL") == {"OF_A_TOOL": "configured"}
    get(actor.set_env.remote({"OF_A_TOOL": "set"}))
    assert engine.call("environ", "OF_A_TOOL") == {"OF_A_TOOL": "set"}


def test_actor_create_engine(actor: Any, engine: Engine) -> None:
    get(actor.create_engine.remote("tests.contract.engines.Counter", "by-path", 7))
    get(actor.create_engine.remote(Counter, "by-class", start=8))
    assert engine.scheduler.call_engine("target/0", "add", "by-path") == 8
    assert get(actor.call.remote("add", "by-class")) == 9
    with pytest.raises(errors.EngineExistsError):
        get(actor.create_engine.remote(Counter, "by-path"))


def test_actor_call(actor: Any, engine: Engine) -> None:
    before = engine.call("add", 0)
    assert get(actor.call.remote("add", number=2)) == before + 2
    assert get(actor.call.remote("async_add", None, 3)) == before + 5
    assert engine.call("add", 0) == before + 5
    value = torch.arange(1 << 18)
    assert torch.equal(get(actor.call.remote("echo", None, value)), value)
    with pytest.raises(errors.EngineCallError, match="ZeroDivisionError"):
        get(actor.call.remote("divide"))
    with pytest.raises(errors.MethodNotFoundError, match="it is private"):
        get(actor.call.remote("_secret"))


def test_actor_call_by_another_actor(actor: Any, engine: Engine) -> None:
    @ray.remote
    class Tool:
        def add(self, worker: Any) -> int:
            result: int = ray.get(worker.call.remote("add"))
            return result

    before = engine.call("add", 0)
    assert get(Tool.options(num_cpus=0).remote().add.remote(actor)) == before + 1  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([b"--min_worker_port=10002", b"--max_worker_port=19999"], range(10002, 20000)),
        ([b"--min_worker_port=0", b"--max_worker_port=0"], None),
        ([b"--min_worker_port=", b"--max_worker_port=7"], None),
        ([b"--node_ip_address=10.0.0.1"], None),
    ],
)
def test_worker_ports_of_raylet(options: list[bytes], expected: range | None) -> None:
    assert worker_ports_of([b"/ray/raylet", *options, b"", b"--no_value"]) == expected


def test_remote_worker_listens_on_port_range(
    scheduler: RayScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("helmsman.controller._scheduler.ray.transport.HAS_SEGMENTS", False)
    (worker,) = scheduler.create_workers(Job(role="far"))
    transport: Any = scheduler._roles.client(worker).transport
    assert FIRST_PORT <= transport._socket.getpeername()[1] <= LAST_PORT
