"""Health is answered at once, also during a long call, with the running method and since when.

Out of reach: an engine inside one long C call that holds the interpreter's lock. Then no thread of that worker runs, and health
is a CallTimeoutError that says so (``worker_alive`` is False).
"""

from __future__ import annotations

import asyncio
import time

import pytest

from helmsman.api import errors
from helmsman.api.scheduler import Job, Scheduler, WorkerHealth, WorkerState
from tests.contract.engines import Counter
from tests.contract.helpers import LIMIT_S, Engine, Gate, held, wait_until

ANSWER_LIMIT_S = 0.5


def _health(engine: Engine) -> WorkerHealth:
    """The health of a worker, asked five times: one late answer is the load of a shared machine, and three are ours."""
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


@pytest.mark.parametrize("method", ["wait", "spin"])
def test_health_during_a_call(engine: Engine, gate: Gate, method: str) -> None:
    if method == "spin" and type(engine.scheduler).__name__ == "InlineScheduler":
        pytest.skip("inline: script and engines share one interpreter's lock, so a busy engine makes the script itself slow")
    before = _health(engine)
    assert (before.running, before.running_s) == (None, None)
    with held(engine, gate, method) as running:
        began = time.monotonic()
        health = _health(engine)
        assert health.running == f"{engine.name}.{method}"
        assert health.running_s is not None
        assert health.running_s <= time.monotonic() - began + LIMIT_S
        assert engine.scheduler.get_workers("shared", timeout=LIMIT_S)[0].id == engine.worker_id
        queued = engine.begin("add")
        later = _health(engine)
        assert later.running_s is not None
        assert later.running_s > health.running_s, "since when is told, and moves on"
        assert later.num_calls > before.num_calls
        stacks = engine.scheduler.stacks("shared")
        assert 'engines.py", line' in stacks[engine.worker_id]
        assert f"in {method}\n" in stacks[engine.worker_id]
        assert "thread" in stacks["shared/1"]
    running.result(timeout=LIMIT_S)
    queued.result(timeout=LIMIT_S)
    wait_until(lambda: _health(engine).running is None, "the thread is idle")


def test_one_worker_is_asked_also_beside_a_long_call(engine: Engine, gate: Gate) -> None:
    asyncio.run(engine.scheduler.check_health(engine.worker_id))
    with held(engine, gate, "wait") as running:
        asyncio.run(engine.scheduler.check_health(engine.worker_id, LIMIT_S))
    running.result(timeout=LIMIT_S)
    with pytest.raises(errors.WorkerNotFoundError, match="nobody/0"):
        asyncio.run(engine.scheduler.check_health("nobody/0"))


def test_health_counts_what_runs_on_the_event_loop(engine: Engine, gate: Gate) -> None:
    with held(engine, gate, "async_wait"):
        others = [engine.begin("async_wait", *gate.files) for _ in range(3)]
        assert engine.call("add", 0) >= 1, "a synchronous call goes on beside them"
        counts = _health(engine).async_running
        assert counts.get(f"{engine.name}.async_wait", 0) >= 1
        assert engine.call("async_add", 0) >= 1, "and so does another asynchronous one"
    for other in others:
        other.result(timeout=LIMIT_S)
    wait_until(lambda: not _health(engine).async_running, "the loop is idle")


def test_health_while_an_async_method_blocks_its_loop(engine: Engine, gate: Gate) -> None:
    with held(engine, gate, "block_loop") as running:
        health = _health(engine)
        assert health.async_running == {f"{engine.name}.block_loop": 1}
        assert engine.call("add") == 1, "synchronous methods have a thread of their own"
    running.result(timeout=LIMIT_S)


def test_what_health_tells(engine: Engine, scheduler: Scheduler) -> None:
    health = _health(engine)
    assert health.worker_id == engine.worker_id
    assert health.pid == engine.call("pid")
    assert health.engines[engine.name] == "Counter"
    assert health.rss_bytes > 1e6
    assert health.cpu_s > 0
    statuses = scheduler.status()
    assert {"shared/0", "shared/1"} <= {status.worker_id for status in statuses}
    assert all(status.node for status in statuses)


def test_async_methods_run_again_after_their_thread_could_not_be_started(scheduler: Scheduler, role: str) -> None:
    (worker_id,) = scheduler.create_workers(Job(role=role))
    engine = Engine.create(scheduler, worker_id, Counter)
    engine.call("refuse_threads")
    try:
        for _ in range(2):
            with pytest.raises(
                errors.EngineCallError, match="no thread for async methods can be started.*can't start new thread"
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
