"""Calls: blocking and async forms, timeouts, and the health that a worker reports beside them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helmsman._base.event_loop import submit
from helmsman.api import errors
from helmsman.api.scheduler import Call, Job, Scheduler, Timeouts, WorkerState
from helmsman.controller._groups.call_all import call_all
from tests.contract.engines import Counter, Slow
from tests.contract.helpers import FORMS, LIMIT_S, Engine, Gate, begin_as, held, wait_until

LATE_S = 0.2


async def test_async_forms_of_blocking_operations(scheduler: Scheduler, role: str) -> None:
    """Async forms return and raise as the blocking forms do, on any event loop."""
    workers = await scheduler.async_create_workers(Job(role=role))
    assert workers == [f"{role}/0"]
    assert [each.id for each in await scheduler.async_get_workers(role, timeout=0)] == workers
    assert workers[0] in {each.worker_id for each in await scheduler.async_status()}
    handle = await scheduler.async_put([1, 2])
    assert await scheduler.async_get(handle) == [1, 2]
    await scheduler.async_release(handle)
    await scheduler.async_delete_workers(role)
    with pytest.raises(errors.RoleNotFoundError, match=role):
        await scheduler.async_delete_workers(role)


def test_call_engine_refused_on_own_loop(engine: Engine) -> None:
    async def blocks() -> None:
        engine.call("add")

    with pytest.raises(RuntimeError, match="would wait for itself; use the non-blocking form"):
        submit(blocks()).result(timeout=LIMIT_S)

    async def awaits() -> int:
        return int(await engine.acall("add"))

    assert submit(awaits()).result(timeout=LIMIT_S) == 1


def test_close_refused_on_own_loop(make_own: Callable[..., Scheduler]) -> None:
    with make_own() as own:
        (worker,) = own.create_workers(Job(role="own"))
        engine = Engine.create(own, worker, Counter)
        kept = engine.call("add", 5, rpc_meta={"keep": True})

        async def on_our_loop(work: Callable[[], None]) -> None:
            work()

        for work in (
            own.close,
            lambda: own.delete_workers("own"),
            own.delete_workers,
            lambda: own.release(kept),
        ):
            with pytest.raises(RuntimeError, match=r"await asyncio\.to_thread\(scheduler\.close\)"):
                submit(on_our_loop(work)).result(timeout=LIMIT_S)
            assert engine.call("add", 0) == 5, "nothing has ended"
        assert own.get(kept) == 5

        async def close() -> None:
            await asyncio.to_thread(own.close)

        submit(close()).result(timeout=LIMIT_S)
        with pytest.raises(errors.SchedulerClosedError):
            engine.call("add")


def test_call_engine_in_async_script(engine: Engine) -> None:
    async def script() -> int:
        return int(engine.call("add"))  # blocks the event loop of the script alone

    assert asyncio.run(script()) == 1


# --- timeouts -------------------------------------------------------------------------------------


def test_timeout_withdraws_constructor(
    scheduler: Scheduler, engine: Engine, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "withdrawn"
    monkeypatch.setattr(scheduler, "timeouts", Timeouts(create_engine_s=LATE_S))
    with (
        held(engine, gate),
        pytest.raises(errors.CallTimeoutError, match=r"set by Timeouts.create_engine_s"),
    ):
        Engine.create(scheduler, engine.worker_id, Counter, name)
    monkeypatch.undo()
    assert Engine.create(scheduler, engine.worker_id, Counter, name, 5).call("add") == 6


def test_timeout_of_constructor(
    scheduler: Scheduler,
    shared_workers: list[str],
    gate: Gate,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The place of a late constructor is in the error, or in the log if the machine is busy."""
    name = "late"
    monkeypatch.setattr(scheduler, "timeouts", Timeouts(create_engine_s=LATE_S))
    with pytest.raises(errors.CallTimeoutError) as caught:
        Engine.create(scheduler, shared_workers[0], Slow, name, *gate.files)
    monkeypatch.undo()
    assert isinstance(caught.value, errors.EngineCreationError)
    wait_until(lambda: "in __init__" in f"{caught.value.stack}{caplog.text}", "its place is told")
    gate.open()
    late = Engine(scheduler, shared_workers[0], name)
    wait_until(lambda: late.state is WorkerState.READY, "the constructor ends")
    assert late.call("ready"), "the constructor ran once, and its engine exists"


def test_timeout_of_ranks_withdraws_nothing(
    scheduler: Scheduler, engine: Engine, shared_workers: list[str], gate: Gate, tmp_path: Path
) -> None:
    """A late rank still makes its call, since other ranks may wait for it."""
    other = Engine.create(scheduler, shared_workers[1], Counter, engine.name)
    collective = Gate(tmp_path, "collective")
    with held(engine, gate):
        calls = {each.worker_id: Call(collective.files) for each in (engine, other)}
        late = submit(
            call_all(scheduler, "role", "wait", calls, engine_name=engine.name, timeout=3.0)
        )
        with pytest.raises(errors.GroupCallError) as caught:
            late.result(timeout=LIMIT_S)
        assert "and will still run, as other ranks may wait for it" in str(caught.value)
        collective.open()
    assert (engine.call("add", 0), other.call("add", 0)) == (2, 1), "both ranks made the call"


@pytest.mark.parametrize("form", FORMS)
def test_timeout_short_has_stack(engine: Engine, gate: Gate, form: str) -> None:
    future = begin_as(form, engine, "wait", *gate.files, timeout=0.3)
    with pytest.raises(errors.CallTimeoutError) as caught:
        future.result(timeout=LIMIT_S)
    assert caught.value.worker_alive
    assert "in wait" in caught.value.stack


def test_timeout_types(engine: Engine) -> None:
    with pytest.raises(ValueError, match="timeout=nan is not a number of seconds"):
        engine.call("add", timeout=float("nan"))
    limits: list[Any] = [np.float32(LIMIT_S), np.int64(LIMIT_S), np.float64(LIMIT_S)]
    for limit in limits:
        assert engine.call("add", 0, timeout=limit) == 0
        assert asyncio.run(engine.acall("add", 0, timeout=limit)) == 0


# --- health ---------------------------------------------------------------------------------------


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
