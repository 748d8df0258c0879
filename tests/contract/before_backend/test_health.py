"""Health of a worker whose methods are async, or whose threads cannot start."""

from __future__ import annotations

import asyncio

import pytest

from helmsman.api import errors
from helmsman.api.scheduler import Job, Scheduler
from tests.contract.engines import Counter
from tests.contract.helpers import LIMIT_S, Engine, Gate, held, wait_until


def test_health_counts_async_calls(engine: Engine, gate: Gate) -> None:
    with held(engine, gate, "async_wait"):
        others = [engine.begin("async_wait", *gate.files) for _ in range(3)]
        assert engine.call("add", 0) >= 1, "a synchronous call runs beside them"
        assert engine.health().async_running.get(f"{engine.name}.async_wait", 0) >= 1
        assert engine.call("async_add", 0) >= 1, "another async call runs beside them"
    for other in others:
        other.result(timeout=LIMIT_S)
    wait_until(lambda: not engine.health().async_running, "the loop is idle")


def test_health_of_blocked_event_loop(engine: Engine, gate: Gate) -> None:
    with held(engine, gate, "block_loop") as running:
        assert engine.health().async_running == {f"{engine.name}.block_loop": 1}
        assert engine.call("add") == 1, "synchronous methods have another thread"
    running.result(timeout=LIMIT_S)


def test_health_of_unknown_worker(scheduler: Scheduler) -> None:
    with pytest.raises(errors.WorkerNotFoundError, match="missing/0"):
        asyncio.run(scheduler.check_health("missing/0"))


def test_async_methods_after_thread_failure(scheduler: Scheduler, role: str) -> None:
    (worker_id,) = scheduler.create_workers(Job(role=role))
    engine = Engine.create(scheduler, worker_id, Counter)
    engine.call("refuse_threads")
    try:
        for _ in range(2):
            with pytest.raises(
                errors.EngineCallError,
                match="no thread for async methods can be started.*can't start new thread",
            ):
                engine.call("async_add")
        failure = asyncio.run(scheduler.check_health(worker_id)).failure
        assert failure is not None
        assert "can't start new thread" in failure
        assert engine.call("add") == 1, "synchronous methods run"
    finally:
        engine.call("allow_threads")
    assert engine.call("async_add") == 2
    assert asyncio.run(scheduler.check_health(worker_id)).failure is None
