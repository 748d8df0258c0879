"""Health is answered within a second; a worker that cannot answer is observed from outside.

C code may hold a worker's interpreter lock, and its process may be stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Iterator

from helmsman.api.scheduler import Scheduler, WorkerHealth, WorkerState
from tests.contract.engines import release_interpreter
from tests.contract.helpers import LIMIT_S, Engine, Gate, stop, wait_until
from tests.contract.marks import needs_processes, ray_smoke

OBSERVED_LIMIT_S = 1.0


@ray_smoke
def test_health_fields(engine: Engine, scheduler: Scheduler) -> None:
    health = engine.health()
    assert (health.worker_id, health.pid) == (engine.worker_id, engine.call("pid"))
    assert health.engines[engine.name] == "Counter"
    assert health.rss_bytes > 1e6
    assert health.cpu_s > 0
    statuses = {status.worker_id: status for status in scheduler.status()}
    assert {"shared/0", "shared/1"} <= set(statuses)
    assert all(status.node for status in statuses.values())
    status = statuses[engine.worker_id]
    assert status.health is not None
    assert (status.state, status.health.pid) == (WorkerState.READY, health.pid)


def _answer(engine: Engine) -> WorkerHealth | None:
    """Return the health of an idle worker that answers."""
    health = asyncio.run(engine.scheduler.check_health(engine.worker_id))
    return health if health.answered and health.running is None else None


def _observed(engine: Engine) -> WorkerHealth:
    """Check a worker that cannot answer five times; require a median within a second."""
    elapsed_s = []
    for _ in range(5):
        started = time.monotonic()
        health = asyncio.run(engine.scheduler.check_health(engine.worker_id))
        elapsed_s.append(time.monotonic() - started)
        assert not health.answered
    assert sorted(elapsed_s)[2] < OBSERVED_LIMIT_S, "health is answered within a second"
    statuses = {status.worker_id: status for status in engine.scheduler.status()}
    assert statuses[engine.worker_id].state is WorkerState.READY, "a check does not mark a worker"
    assert statuses[engine.worker_id].health is not None
    return health


@contextlib.contextmanager
def _held_interpreter(engine: Engine, gate: Gate, method: str) -> Iterator[None]:
    future = engine.begin(method, *gate.files)
    try:
        gate.wait_started()
        wait_until(lambda: _answer_is_missing(engine), "the interpreter is held")
        yield
    finally:
        release_interpreter(gate.started)
    future.result(timeout=LIMIT_S)


def _answer_is_missing(engine: Engine) -> bool:
    return not asyncio.run(engine.scheduler.check_health(engine.worker_id)).answered


@ray_smoke
@needs_processes
def test_health_of_held_interpreter(own: Engine, gate: Gate) -> None:
    pid = own.call("pid")
    with _held_interpreter(own, gate, "hold_interpreter"):
        began = time.monotonic()
        wait_until(lambda: (_observed(own).stuck_s or 0.0) > 1.0, "the interpreter is stuck")
        health = _observed(own)
        assert (health.worker_id, health.pid) == (own.worker_id, pid)
        assert health.running == f"{own.name}.hold_interpreter"
        assert health.running_s is not None
        assert health.stuck_s is not None
        assert 1.0 < health.stuck_s <= health.running_s + 1.0
        assert health.running_s <= time.monotonic() - began + LIMIT_S
        assert health.cpu_s > 0
        assert health.rss_bytes > 1e6
        wait_until(lambda: _observed(own).process_state == "running", "the process computes")
        assert asyncio.run(own.scheduler.check_health(own.worker_id)).is_busy
    health = wait_until(lambda: _answer(own), "the worker answers again")
    assert (health.process_state, health.engines) == (None, {own.name: "Counter"})


@needs_processes
def test_health_of_held_interpreter_async(own: Engine, gate: Gate) -> None:
    with _held_interpreter(own, gate, "async_hold_interpreter"):
        assert _observed(own).async_running == {f"{own.name}.async_hold_interpreter": 1}


@needs_processes
def test_health_of_sleeping_c_code(own: Engine) -> None:
    future = own.begin("sleep_with_interpreter", 6.0)
    wait_until(lambda: _answer_is_missing(own), "the interpreter is held")
    wait_until(
        lambda: _observed(own).process_state == "sleeping",
        "threads that wait for the lock do not count as running",
    )
    future.result(timeout=LIMIT_S)


@ray_smoke
@needs_processes
def test_health_of_stopped_worker(own: Engine) -> None:
    pid = own.call("pid")
    stop(pid)
    health = _observed(own)
    assert (health.process_state, health.pid, health.is_busy) == ("stopped", pid, False)
    os.kill(pid, signal.SIGCONT)
    assert wait_until(lambda: _answer(own), "the worker answers again").pid == pid
