"""A call that outlives its time-out: it raises once, says where the engine is, and is never sent
again.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helmsman.api import errors
from helmsman.api.scheduler import Call, Job, Scheduler, Timeouts, WorkerState
from helmsman.controller._aio.event_loop import submit
from helmsman.controller._roles.call_all import call_all
from helmsman.rpc_server._wire.segments import spares
from tests.contract.engines import Counter, Slow
from tests.contract.helpers import LIMIT_S, Engine, Gate, held, stop, wait_until

_names = (f"late-{number}" for number in itertools.count())
LATE_S = 0.2


@pytest.mark.not_on("inline", "the arguments stay in this process")
def test_timeout_frees_arguments(engine: Engine, gate: Gate) -> None:
    before = _segments()
    with held(engine, gate):
        with pytest.raises(errors.CallTimeoutError):
            engine.call("echo", bytearray(32 << 20), timeout=LATE_S)
        wait_until(lambda: _segments() <= before, "the driver releases the segment")


def _segments() -> set[int]:
    """Inodes of this process's segments."""
    spares.drop()
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            path = f"/proc/self/fd/{name}"
            if "memfd:helmsman-" in os.readlink(path):
                found.add(os.stat(path).st_ino)
    return found


def test_timeout_withdraws_constructor(
    scheduler: Scheduler, engine: Engine, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = next(_names)
    monkeypatch.setattr(scheduler, "timeouts", Timeouts(create_engine_s=LATE_S))
    with (
        held(engine, gate),
        pytest.raises(errors.CallTimeoutError, match=r"set by Timeouts.create_engine_s"),
    ):
        Engine.create(scheduler, engine.worker_id, Counter, name)
    monkeypatch.undo()
    assert Engine.create(scheduler, engine.worker_id, Counter, name, 5).call("add") == 6


def test_timeout_of_constructor(
    scheduler: Scheduler, shared_workers: list[str], gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = next(_names)
    monkeypatch.setattr(scheduler, "timeouts", Timeouts(create_engine_s=LATE_S))
    with pytest.raises(errors.CallTimeoutError) as caught:
        Engine.create(scheduler, shared_workers[0], Slow, name, *gate.files)
    monkeypatch.undo()
    assert isinstance(caught.value, errors.EngineCreationError)
    assert "in __init__" in caught.value.stack
    gate.open()
    late = Engine(scheduler, shared_workers[0], name)
    wait_until(lambda: late.state is WorkerState.READY, "the constructor ends")
    assert late.call("ready"), "it was begun once, and what it made is there"


def test_timeout_near_zero(engine: Engine) -> None:
    """Whatever the caller is told, a call ran once or not at all."""
    for timeout in (0.0, -1.0, 1e-6, 0.001):
        before = engine.call("add", 0)
        try:
            outcome = (
                engine.call("add", 1, bytes(0), timeout=timeout)
                if timeout > 1
                else engine.call("add", 1, timeout=timeout)
            )
        except errors.CallTimeoutError as error:
            outcome = error
        wait_until(lambda: engine.state is WorkerState.READY, "it is over")
        after = engine.call("add", 0)
        assert after in (before, before + 1)
        assert isinstance(outcome, errors.CallTimeoutError) or after == outcome


HOWS = ["sync", "async", "group"]


def _begin(
    engine: Engine, how: str, method: str, *args: object, timeout: float
) -> concurrent.futures.Future[Any]:
    """Begin a call in one of the three ways in which there are limits."""
    if how == "group":
        calls = {engine.worker_id: Call(args)}
        return submit(
            call_all(
                engine.scheduler, "role", method, calls, engine_name=engine.name, timeout=timeout
            )
        )
    if how == "async":
        return submit(
            asyncio.to_thread(lambda: asyncio.run(engine.acall(method, *args, timeout=timeout)))
        )
    return submit(asyncio.to_thread(lambda: engine.call(method, *args, timeout=timeout)))


@pytest.fixture
def own(scheduler: Scheduler, role: str) -> Iterator[tuple[Engine, int]]:
    """A Counter in a worker of this test alone, and its pid; the worker goes on at the end."""
    (worker,) = scheduler.create_workers(Job(role=role))
    engine = Engine.create(scheduler, worker, Counter)
    pid = engine.call("pid")
    yield engine, pid
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.not_on("inline", "one process, it cannot be stopped without the test")
def test_timeout_of_stopped_worker(
    own: tuple[Engine, int], gate: Gate, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    engine, pid = own
    with held(engine, gate) as running:
        stop(pid)
        started = time.monotonic()
        with pytest.raises(errors.CallTimeoutError) as caught:
            _begin(engine, how, "add", timeout=0.5).result(timeout=LIMIT_S)
        elapsed_s = time.monotonic() - started
        assert 0.5 <= elapsed_s < 1.5, (
            "a control request of its own would have waited for Timeouts.health_s, 10 s"
        )
        error = caught.value
        assert (error.method, error.limit_s, error.worker_alive, error.stack) == (
            "add",
            0.5,
            False,
            "",
        )
        assert error.elapsed_s < 1.5
        assert "the state of the call is unknown; it is logged once the worker" in str(error)
        os.kill(pid, signal.SIGCONT)
        late = wait_until(
            lambda: [each for each in caplog.messages if ".add timed out after" in each],
            "the stack is logged",
        )
        assert "had not begun behind" in late[0]
        assert "in wait" in late[0], "what it waited behind"
        wait_until(lambda: engine.state is WorkerState.READY, "the withdrawn call occupies nothing")
        gate.open()
        assert running.result(timeout=LIMIT_S) == 1
    assert engine.call("add", 0) == 1, "the withdrawn call never ran"


def test_timeout_of_ranks_withdraws_none_that_others_wait_for(
    scheduler: Scheduler, engine: Engine, shared_workers: list[str], gate: Gate, tmp_path: Path
) -> None:
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


@pytest.mark.parametrize("how", HOWS)
def test_timeout_just_after_result(engine: Engine, gate: Gate, how: str) -> None:
    client = engine.scheduler._roles.client(engine.worker_id)  # type: ignore[attr-defined]
    future = _begin(engine, how, "wait", *gate.files, timeout=3.5)
    wait_until(
        lambda: any(each._seen is not None for each in list(client.in_flight.values())),
        "the worker was asked",
    )
    gate.open()
    assert future.result(timeout=LIMIT_S) in (1, [1])
    assert engine.state is WorkerState.READY


@pytest.mark.parametrize("how", HOWS)
def test_timeout_short_has_stack(engine: Engine, gate: Gate, how: str) -> None:
    future = _begin(engine, how, "wait", *gate.files, timeout=0.3)
    with pytest.raises(errors.CallTimeoutError) as caught:
        future.result(timeout=LIMIT_S)
    assert caught.value.worker_alive
    assert "in wait" in caught.value.stack


def test_timeout_of_many_calls_located(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    """One question and one answer serve them all: a question for each would keep the worker from
    answering in time.
    """

    async def late() -> list[Any]:
        calls = (engine.acall("park", timeout=3.0) for _ in range(300))
        return await asyncio.gather(*calls, return_exceptions=True)

    failures = asyncio.run(late())
    engine.call("unpark")
    assert {type(failure) for failure in failures} == {errors.CallTimeoutError}
    assert {(failure.worker_alive, "in park" in failure.stack) for failure in failures} == {
        (True, True)
    }
    assert not [record for record in caplog.records if "timed out after" in record.message]


@pytest.mark.not_on("inline", "one process, it cannot be killed without the script")
def test_timeout_worker_dies_at_limit(own: tuple[Engine, int], gate: Gate) -> None:
    engine, pid = own
    client = engine.scheduler._roles.client(engine.worker_id)  # type: ignore[attr-defined]
    stop(pid)
    future = engine.begin("wait", *gate.files, timeout=0.5)
    wait_until(lambda: client.late.overdue or future.done(), "the limit is over")
    os.kill(pid, signal.SIGKILL)
    with pytest.raises((errors.CallTimeoutError, errors.WorkerFailedError)) as caught:
        future.result(timeout=LIMIT_S)
    assert caught.value.method == "wait"
    with pytest.raises(errors.WorkerFailedError) as later:
        engine.call("add")
    assert later.value.method == "add"


@pytest.mark.not_on("inline", "one process, it cannot be killed without the script")
def test_timeout_worker_dies_before_limit(own: tuple[Engine, int], gate: Gate) -> None:
    engine, pid = own
    client = engine.scheduler._roles.client(engine.worker_id)  # type: ignore[attr-defined]
    future = engine.begin("wait", *gate.files, timeout=3.5)
    wait_until(
        lambda: any(each._seen is not None for each in list(client.in_flight.values())),
        "the worker was asked",
    )
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(errors.WorkerFailedError) as caught:
        future.result(timeout=LIMIT_S)
    assert (caught.value.method, caught.value.running) == ("wait", f"{engine.worker_id}.wait")


def test_timeout_refuses_nan(engine: Engine) -> None:
    with pytest.raises(ValueError, match="timeout=nan is not a number of seconds"):
        engine.call("add", timeout=float("nan"))
    assert engine.call("add") == 1


@pytest.mark.parametrize("number", [np.float32, np.int64, np.float64])
def test_timeout_of_numpy(engine: Engine, number: Callable[[float], Any]) -> None:
    assert engine.call("add", 0, timeout=number(LIMIT_S)) == asyncio.run(
        engine.acall("add", 0, timeout=number(LIMIT_S))
    )
