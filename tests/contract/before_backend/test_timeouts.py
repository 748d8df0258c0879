"""Timeouts: their values, and the calls that a worker withdraws or locates."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from helmsman.api import errors
from helmsman.api.scheduler import Call, Scheduler, Timeouts, WorkerState
from helmsman.controller._aio.event_loop import submit
from helmsman.controller._roles.call_all import call_all
from tests.contract.engines import Counter, Slow
from tests.contract.helpers import FORMS, LIMIT_S, Engine, Gate, begin_as, held, wait_until

LATE_S = 0.2


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
    scheduler: Scheduler, shared_workers: list[str], gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "late"
    monkeypatch.setattr(scheduler, "timeouts", Timeouts(create_engine_s=LATE_S))
    with pytest.raises(errors.CallTimeoutError) as caught:
        Engine.create(scheduler, shared_workers[0], Slow, name, *gate.files)
    monkeypatch.undo()
    assert isinstance(caught.value, errors.EngineCreationError)
    assert "in __init__" in caught.value.stack
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
    for number in (np.float32, np.int64, np.float64):
        assert engine.call("add", 0, timeout=number(LIMIT_S)) == 0
        assert asyncio.run(engine.acall("add", 0, timeout=number(LIMIT_S))) == 0
