"""Injected faults, observed in /proc and by the calls that meet them."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

import msgspec
import psutil
import pytest

from helmsman.api import errors
from helmsman.api.faults import Fault, Injection
from helmsman.api.scheduler import Job, Scheduler, SchedulingSpec, Timeouts
from helmsman.testing import DropNode, FaultPlan, Hang, Kill, Slow
from tests.contract.conftest import TIMEOUTS
from tests.contract.engines import Counter
from tests.contract.helpers import (
    LIMIT_S,
    Engine,
    Gate,
    has_stopped,
    held,
    is_running,
    wait_gone,
    wait_until,
)
from tests.contract.marks import needs_processes, only_local
from tests.processes import command_of

pytestmark = needs_processes


class Ticker:
    """Counts its progress, in small waits."""

    def __init__(self) -> None:
        self.num_ticks = 0

    async def tick(self, num: int) -> int:
        """Make ``num`` steps and return the total."""
        for _ in range(num):
            self.num_ticks += 1
            await asyncio.sleep(0.001)
        return self.num_ticks

    async def count(self) -> int:
        return self.num_ticks

    def pid(self) -> int:
        return os.getpid()


def _inject(scheduler: Scheduler, fault: Fault) -> Injection:
    (injection,) = asyncio.run(scheduler.inject(fault))
    return injection


def _helpers(pid: int) -> dict[str, int]:
    """Return the helper processes of a worker, zombies included, which have no command line."""
    found = {}
    for child in psutil.Process(pid).children():
        command = command_of(child)
        try:
            is_helper = child.status() == psutil.STATUS_ZOMBIE or "pause_helper.py" in command
        except psutil.NoSuchProcess:
            continue
        if is_helper:
            found[f"helper {child.pid}"] = child.pid
    return found


def test_kill_fails_calls(scheduler: Scheduler, own: Engine, engine: Engine, gate: Gate) -> None:
    pid = own.call("pid")
    running = own.begin("wait", *gate.files)
    gate.wait_started()
    drill = FaultPlan([Kill(own.worker_id, at_step=3)]).begin(scheduler)
    assert drill.step(2) == []
    (record,) = drill.step(3)
    injection = record.injection
    assert (injection.worker_id, injection.pid, injection.done) == (own.worker_id, pid, True)
    assert (injection.outcome, bool(injection.node)) == ("killed", True)
    with pytest.raises(errors.WorkerFailedError) as caught:
        running.result(LIMIT_S)
    assert caught.value.exit_signal == signal.SIGKILL
    wait_gone({"worker": pid})
    assert engine.call("add") == 1, "other workers are not affected"

    again = _inject(scheduler, Kill(own.worker_id, at_step=4))
    assert not again.done
    assert "had already ended: it was ended by SIGKILL" in again.outcome
    with pytest.raises(errors.WorkerNotFoundError):
        asyncio.run(scheduler.inject(Kill("missing/0", at_step=1)))


def test_hang_ends_after_its_time(scheduler: Scheduler, own: Engine, gate: Gate) -> None:
    pid = own.call("pid")
    with held(own, gate) as running:
        injection = _inject(scheduler, Hang(own.worker_id, at_step=1, seconds=3.0))
        assert (injection.done, injection.outcome, injection.pid) == (True, "stopped for 3 s", pid)
        wait_until(lambda: has_stopped(pid), "all of its threads have stopped")
        gate.open()
        assert asyncio.run(scheduler.check_health(own.worker_id, 1.0)).process_state == "stopped"
        assert not running.done()
        assert running.result(LIMIT_S) == 1
    wait_until(lambda: not _helpers(pid), "its helper has ended and is reaped")
    assert own.call("add") == 2


@pytest.mark.parametrize(
    "fault", [Hang("x/0", at_step=1, seconds=1e12), Slow("x/0", at_step=1, factor=20)]
)
def test_pause_helper_ends_with_worker(scheduler: Scheduler, own: Engine, fault: Fault) -> None:
    pid = own.call("pid")
    _inject(scheduler, msgspec.structs.replace(fault, worker_id=own.worker_id))
    helpers = _helpers(pid)
    assert len(helpers) == 1
    wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED, "it is stopped")
    scheduler.delete_workers(own.worker_id.rpartition("/")[0])
    wait_gone({"worker": pid, **helpers})


def test_slow_worker_does_less(scheduler: Scheduler, role: str) -> None:
    first, second = scheduler.create_workers(
        Job(role=role, replicas=2, tasks=[SchedulingSpec(cpu=0.5)])
    )
    slow, other = Engine.create(scheduler, first, Ticker), Engine.create(scheduler, second, Ticker)
    injection = _inject(scheduler, Slow(first, at_step=1, factor=10))
    assert injection.outcome == "slowed by 10x until its end"
    pid, times = slow.call("pid"), iter(range(10))
    working = [each.begin("tick", 10_000, timeout=2 * LIMIT_S) for each in (slow, other)]

    def has_stopped_ten_times() -> bool:
        """Return whether the worker was found stopped ten times; the load decides how soon."""
        return has_stopped(pid) and next(times, None) is None

    wait_until(has_stopped_ten_times, "it stops again and again")
    wait_until(lambda: slow.call("count") > 10, "it makes progress")
    assert not any(each.done() for each in working)
    later = _inject(scheduler, Slow(first, at_step=2, factor=2, seconds=0.2))
    assert later.outcome == "slowed by 2x for 0.2 s, no longer slowed by 10x until its end"
    wait_until(lambda: not _helpers(pid), "the slow-down has ended")
    before, compared = slow.call("count"), other.call("count")
    wait_until(lambda: other.call("count") >= compared + 500, "both work")
    assert slow.call("count") > before + 100, "it is as fast as the other"


@only_local
def test_inject_into_hung_worker(make_own: Callable[..., Scheduler]) -> None:
    with make_own(timeouts=Timeouts(health_s=0.5)) as scheduler:
        (worker_id,) = scheduler.create_workers(Job(role="a"))
        engine = Engine.create(scheduler, worker_id, Counter)
        pid = engine.call("pid")
        _inject(scheduler, Hang(worker_id, at_step=1))
        wait_until(lambda: has_stopped(pid), "it is stopped")
        injection = _inject(scheduler, Kill(worker_id, at_step=2))
        assert (injection.done, injection.pid) == (False, pid)
        assert injection.outcome == "it did not respond within 0.5 s, so the fault was not sent"
        os.kill(pid, signal.SIGCONT)
        assert engine.call("add") == 1
        assert is_running(pid)


def test_drop_node_of_the_script(make_own: Callable[..., Scheduler], engine: Engine) -> None:
    run = make_own(timeouts=TIMEOUTS)
    workers = run.create_workers(
        [Job(role="a", replicas=2), Job(role="b", tasks=[SchedulingSpec(cpu=0.5)])]
    )
    engines = [Engine.create(run, worker, Counter) for worker in workers]
    pids = {each.worker_id: each.call("pid") for each in engines}
    records = FaultPlan([DropNode("a/1", at_step=1)]).begin(run).step(1)
    assert {record.injection.worker_id: record.injection.pid for record in records} == pids
    assert {record.injection.outcome for record in records} == {
        "killed; the node itself stays: the script runs on it"
    }
    wait_gone(pids)
    for each in engines:
        with pytest.raises(errors.WorkerFailedError):
            each.call("add")
    assert engine.call("add") == 1, "another run's worker still runs"
    run.close()
