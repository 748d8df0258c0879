"""Calls that exceed their timeout: they raise once, locate the engine, and are not sent again."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import Any

import pytest

from helmsman.api import errors
from helmsman.api.scheduler import WorkerState
from tests.contract.helpers import LIMIT_S, Engine, Gate, begin_as, held, stop, wait_until
from tests.contract.marks import needs_processes, ray_smoke


@ray_smoke
def test_timeout_near_zero_runs_at_most_once(engine: Engine) -> None:
    for timeout in (0.0, -1.0, 1e-6, 0.001):
        before = engine.call("add", 0)
        try:
            outcome = engine.call("add", 1, timeout=timeout)
        except errors.CallTimeoutError as error:
            outcome = error
        wait_until(lambda: engine.state is WorkerState.READY, "the call has ended")
        after = engine.call("add", 0)
        assert after in (before, before + 1)
        assert isinstance(outcome, errors.CallTimeoutError) or after == outcome


@needs_processes
@pytest.mark.parametrize("form", ["sync", "async", pytest.param("group", marks=ray_smoke)])
def test_timeout_of_stopped_worker(
    own: Engine, gate: Gate, caplog: pytest.LogCaptureFixture, form: str
) -> None:
    pid = own.call("pid")
    with held(own, gate) as running:
        stop(pid)
        started = time.monotonic()
        with pytest.raises(errors.CallTimeoutError) as caught:
            begin_as(form, own, "add", timeout=0.5).result(timeout=LIMIT_S)
        elapsed_s = time.monotonic() - started
        assert 0.5 <= elapsed_s < 1.5, "the caller does not wait for Timeouts.health_s, 10 s"
        error = caught.value
        assert (error.method, error.limit_s, error.worker_alive) == ("add", 0.5, False)
        assert (error.stack, error.elapsed_s < 1.5) == ("", True)
        assert "the state of the call is unknown; it is logged once the worker" in str(error)
        os.kill(pid, signal.SIGCONT)
        late = wait_until(
            lambda: [each for each in caplog.messages if ".add timed out after" in each],
            "the stack is logged",
        )
        assert "had not begun behind" in late[0]
        assert "in wait" in late[0], "the call that it waited behind"
        wait_until(lambda: own.state is WorkerState.READY, "the withdrawn call is dropped")
        gate.open()
        assert running.result(timeout=LIMIT_S) == 1
    assert own.call("add", 0) == 1, "the withdrawn call never ran"


def test_timeout_of_many_calls(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    """The worker locates all calls in time, although they exceed their timeouts together."""

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


@needs_processes
def test_timeout_worker_dies_at_limit(own: Engine, gate: Gate) -> None:
    pid = own.call("pid")
    stop(pid)
    future = own.begin("wait", *gate.files, timeout=0.5)
    wait_until(lambda: own.state is WorkerState.OVERDUE or future.done(), "the limit has passed")
    os.kill(pid, signal.SIGKILL)
    with pytest.raises((errors.CallTimeoutError, errors.WorkerFailedError)) as caught:
        future.result(timeout=LIMIT_S)
    assert caught.value.method == "wait"
    with pytest.raises(errors.WorkerFailedError) as later:
        own.call("add")
    assert later.value.method == "add"
