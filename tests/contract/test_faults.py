"""Drills, observed in /proc and by the calls that meet them."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

import psutil
import pytest

from helmsman.api import errors
from helmsman.api.scheduler import Job, Scheduler, Timeouts
from helmsman.testing import Fault, FaultPlan, FaultRecord, Hang, Kill
from tests.contract.engines import Counter
from tests.contract.helpers import LIMIT_S, Engine, Gate, has_stopped, held, wait_gone, wait_until
from tests.contract.marks import needs_processes, only_local

pytestmark = needs_processes


def _inject(scheduler: Scheduler, fault: Fault) -> FaultRecord:
    (record,) = FaultPlan([fault]).begin(scheduler).step(fault.at_step)
    return record


def test_kill_fails_calls(scheduler: Scheduler, own: Engine, engine: Engine, gate: Gate) -> None:
    pid = own.call("pid")
    running = own.begin("wait", *gate.files)
    gate.wait_started()
    drill = FaultPlan([Kill(own.worker_id, at_step=3)]).begin(scheduler)
    assert drill.step(2) == []
    (record,) = drill.step(3)
    assert (record.pid, record.done, record.outcome) == (pid, True, "killed")
    assert record.node
    with pytest.raises(errors.WorkerFailedError, match="was killed by a drill") as caught:
        running.result(LIMIT_S)
    assert caught.value.exit_signal in (signal.SIGKILL, None), "Ray does not report the signal"
    wait_gone({"worker": pid})
    assert engine.call("add") == 1, "other workers are not affected"

    again = _inject(scheduler, Kill(own.worker_id, at_step=4))
    assert (again.done, again.outcome) == (False, "it had already ended")
    missing = _inject(scheduler, Kill("missing/0", at_step=1))
    assert (missing.done, missing.outcome) == (False, "there is no worker 'missing/0'")


def test_hang_ends_after_its_time(scheduler: Scheduler, own: Engine, gate: Gate) -> None:
    pid = own.call("pid")
    with held(own, gate) as running:
        record = _inject(scheduler, Hang(own.worker_id, at_step=1, seconds=3.0))
        assert (record.done, record.outcome, record.pid) == (True, "stopped for 3 s", pid)
        wait_until(lambda: has_stopped(pid), "all of its threads have stopped")
        gate.open()
        assert asyncio.run(scheduler.check_health(own.worker_id, 1.0)).process_state == "stopped"
        assert not running.done()
        assert running.result(LIMIT_S) == 1
    assert own.call("add") == 2


@only_local
def test_faults_of_stopped_worker(make_own: Callable[..., Scheduler]) -> None:
    with make_own(timeouts=Timeouts(health_s=0.5)) as scheduler:
        (worker_id,) = scheduler.create_workers(Job(role="a"))
        engine = Engine.create(scheduler, worker_id, Counter)
        pid = engine.call("pid")
        assert _inject(scheduler, Hang(worker_id, at_step=1)).outcome == "stopped until its end"
        wait_until(lambda: has_stopped(pid), "it is stopped")
        again = _inject(scheduler, Hang(worker_id, at_step=2, seconds=0.1))
        assert (again.done, again.pid, again.outcome) == (False, pid, "it was stopped already")
        assert _inject(scheduler, Kill(worker_id, at_step=3)).done
        wait_gone({"worker": pid})


@only_local
def test_hang_of_a_worker_elsewhere(scheduler: Scheduler, own: Engine) -> None:
    """A process that does not write to the worker's log is another one, with the same pid."""
    (status,) = (each for each in scheduler.status() if each.worker_id == own.worker_id)
    os.rename(status.log_path, f"{status.log_path}.moved")
    record = _inject(scheduler, Hang(own.worker_id, at_step=1))
    assert not record.done
    assert "the script can stop only workers on its own machine" in record.outcome
    assert psutil.Process(own.call("pid")).status() != psutil.STATUS_STOPPED
