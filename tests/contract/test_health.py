"""Health is answered within a second, also during a long call, with the running method and since
when.

Where the worker cannot answer, as C code holds its interpreter's lock or its process is stopped, it
is observed from outside.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import time
from collections.abc import Iterator

import pytest

from helmsman.api import errors
from helmsman.api.scheduler import Job, Scheduler, WorkerHealth, WorkerState
from tests.contract.engines import Counter, release_interpreter
from tests.contract.helpers import LIMIT_S, Engine, Gate, held, stop, wait_until

ANSWER_LIMIT_S = 0.5
OBSERVED_LIMIT_S = 1.0
SHARED_LOCK = "script and engines share one interpreter's lock, so the script cannot run either"


def _health(engine: Engine) -> WorkerHealth:
    """The health of a worker, asked five times: one late answer is the load of a shared machine,
    and three are ours.
    """
    elapsed_s = []
    for _ in range(5):
        started = time.monotonic()
        statuses = {status.worker_id: status for status in engine.scheduler.status()}
        elapsed_s.append(time.monotonic() - started)
    status = statuses[engine.worker_id]
    assert status.state is WorkerState.READY
    assert status.health is not None
    assert sorted(elapsed_s)[2] < ANSWER_LIMIT_S, "this is the promise"
    return status.health


def test_check_health_beside_long_call(engine: Engine, gate: Gate) -> None:
    asyncio.run(engine.scheduler.check_health(engine.worker_id))
    with held(engine, gate, "wait") as running:
        asyncio.run(engine.scheduler.check_health(engine.worker_id, LIMIT_S))
    running.result(timeout=LIMIT_S)
    with pytest.raises(errors.WorkerNotFoundError, match="missing/0"):
        asyncio.run(engine.scheduler.check_health("missing/0"))


def test_health_counts_async_calls(engine: Engine, gate: Gate) -> None:
    with held(engine, gate, "async_wait"):
        others = [engine.begin("async_wait", *gate.files) for _ in range(3)]
        assert engine.call("add", 0) >= 1, "a synchronous call goes on beside them"
        counts = _health(engine).async_running
        assert counts.get(f"{engine.name}.async_wait", 0) >= 1
        assert engine.call("async_add", 0) >= 1, "and so does another asynchronous one"
    for other in others:
        other.result(timeout=LIMIT_S)
    wait_until(lambda: not _health(engine).async_running, "the loop is idle")


def test_health_of_blocked_event_loop(engine: Engine, gate: Gate) -> None:
    with held(engine, gate, "block_loop") as running:
        health = _health(engine)
        assert health.async_running == {f"{engine.name}.block_loop": 1}
        assert engine.call("add") == 1, "synchronous methods have a thread of their own"
    running.result(timeout=LIMIT_S)


def test_health_fields(engine: Engine, scheduler: Scheduler) -> None:
    health = _health(engine)
    assert health.worker_id == engine.worker_id
    assert health.pid == engine.call("pid")
    assert health.engines[engine.name] == "Counter"
    assert health.rss_bytes > 1e6
    assert health.cpu_s > 0
    statuses = scheduler.status()
    assert {"shared/0", "shared/1"} <= {status.worker_id for status in statuses}
    assert all(status.node for status in statuses)


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
        assert engine.call("add") == 1, "synchronous methods go on"
    finally:
        engine.call("allow_threads")
    assert engine.call("async_add") == 2
    assert asyncio.run(scheduler.check_health(worker_id)).failure is None


def _observed(engine: Engine) -> WorkerHealth:
    """The health of a worker that cannot answer, asked five times as by _health."""
    elapsed_s = []
    for _ in range(5):
        started = time.monotonic()
        health = asyncio.run(engine.scheduler.check_health(engine.worker_id))
        elapsed_s.append(time.monotonic() - started)
        assert not health.answered
    assert sorted(elapsed_s)[2] < OBSERVED_LIMIT_S, "this is the promise"
    statuses = {status.worker_id: status for status in engine.scheduler.status()}
    assert statuses[engine.worker_id].state is WorkerState.READY, (
        "a question that was observed instead marks nothing"
    )
    assert statuses[engine.worker_id].health is not None
    return health


@contextlib.contextmanager
def _held_interpreter(engine: Engine, gate: Gate, method: str) -> Iterator[None]:
    future = engine.begin(method, *gate.files)
    try:
        gate.wait_started()
        wait_until(
            lambda: not asyncio.run(engine.scheduler.check_health(engine.worker_id)).answered,
            "the interpreter is held",
        )
        yield
    finally:
        release_interpreter(gate.started)
    future.result(timeout=LIMIT_S)


@pytest.mark.not_on("inline", SHARED_LOCK)
def test_health_of_held_interpreter(own: Engine, gate: Gate) -> None:
    wait_until(
        lambda: asyncio.run(own.scheduler.check_health(own.worker_id)).answered, "it answers"
    )
    pid = own.call("pid")
    with _held_interpreter(own, gate, "hold_interpreter"):
        began = time.monotonic()
        wait_until(
            lambda: (_observed(own).stuck_s or 0.0) > 1.0, "the interpreter is seen to be stuck"
        )
        health = _observed(own)
        assert (health.worker_id, health.pid) == (own.worker_id, pid)
        assert health.running == f"{own.name}.hold_interpreter"
        assert health.running_s is not None
        assert health.stuck_s is not None
        assert 1.0 < health.stuck_s <= health.running_s + 1.0
        assert health.running_s <= time.monotonic() - began + LIMIT_S
        assert health.cpu_s > 0
        assert health.rss_bytes > 1e6
        wait_until(lambda: _observed(own).process_state == "running", "it is seen to compute")
        assert asyncio.run(own.scheduler.check_health(own.worker_id)).is_busy
    health = wait_until(lambda: _answer(own), "it answers again")
    assert (health.running, health.process_state, health.engines) == (
        None,
        None,
        {own.name: "Counter"},
    )


def _answer(engine: Engine) -> WorkerHealth | None:
    health = asyncio.run(engine.scheduler.check_health(engine.worker_id))
    return health if health.answered and health.running is None else None


@pytest.mark.not_on("inline", SHARED_LOCK)
def test_health_of_held_interpreter_async(own: Engine, gate: Gate) -> None:
    with _held_interpreter(own, gate, "async_hold_interpreter"):
        assert _observed(own).async_running == {f"{own.name}.async_hold_interpreter": 1}


@pytest.mark.not_on("inline", SHARED_LOCK)
def test_health_of_sleeping_c_code(own: Engine) -> None:
    future = own.begin("sleep_with_interpreter", 6.0)
    wait_until(
        lambda: not asyncio.run(own.scheduler.check_health(own.worker_id)).answered,
        "the interpreter is held",
    )
    wait_until(
        lambda: _observed(own).process_state == "sleeping",
        "threads that wait for the lock are not taken for work",
    )
    future.result(timeout=LIMIT_S)


@pytest.mark.not_on("inline", "a stopped worker would be the stopped script")
def test_health_of_stopped_worker(own: Engine, engine: Engine) -> None:
    for each in (own, engine):  # on Ray, observed by way of the network and in shared memory
        pid = each.call("pid")
        stop(pid)
        try:
            health = _observed(each)
            assert (health.process_state, health.pid, health.is_busy) == ("stopped", pid, False)
        finally:
            os.kill(pid, signal.SIGCONT)
        assert wait_until(functools.partial(_answer, each), "it answers again").pid == pid
