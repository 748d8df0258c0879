"""Restarts replace workers in any state; killing a worker fails its calls with the cause."""

from __future__ import annotations

import asyncio
import gc
import os
import signal

import pytest

from helmsman.api import errors
from helmsman.api.scheduler import Job, Scheduler, SchedulingSpec, WorkerState
from helmsman.controller._scheduler.transport.client import WorkerClient
from tests.contract.engines import Counter
from tests.contract.helpers import LIMIT_S, Engine, Gate, is_running, stop, wait_gone, wait_until
from tests.contract.marks import needs_processes, ray_smoke

ONE_DEVICE = SchedulingSpec(cpu=0, gpu=1, port_count=1)


@needs_processes
def test_kill_worker_stopped(scheduler: Scheduler, role: str, gate: Gate) -> None:
    stopped, other = scheduler.create_workers(Job(role=role, replicas=2))
    engine, healthy = (Engine.create(scheduler, each, Counter) for each in (stopped, other))
    pid = engine.call("pid")
    future = engine.begin("wait", *gate.files)
    gate.wait_started()
    stop(pid)
    asyncio.run(scheduler.kill_worker(stopped, "was ended because the test wanted it"))
    with pytest.raises(
        errors.WorkerFailedError, match="was ended because the test wanted it while"
    ) as caught:
        future.result(LIMIT_S)
    assert caught.value.worker_id == stopped
    assert caught.value.cause == "was ended because the test wanted it"
    wait_gone({"the stopped one": pid})
    assert healthy.call("add", 2) == 2
    with pytest.raises(errors.WorkerFailedError, match="because the test wanted it"):
        asyncio.run(scheduler.check_health(stopped))
    assert engine.state is WorkerState.FAILED
    scheduler.restart_worker(stopped)
    assert Engine.create(scheduler, stopped, Counter).call("add", 1) == 1
    with pytest.raises(errors.WorkerNotFoundError):
        asyncio.run(scheduler.kill_worker(f"{role}/7", "was ended"))


@needs_processes
def test_restart_worker_log_tail(scheduler: Scheduler, role: str) -> None:
    (worker,) = scheduler.create_workers(Job(role=role))
    engine = Engine.create(scheduler, worker, Counter)
    engine.call("print_lines", 20)
    with pytest.raises(errors.WorkerFailedError) as first:
        engine.call("die", "exit 3")
    assert "line 19" in first.value.log_tail
    scheduler.restart_worker(worker)
    engine = Engine.create(scheduler, worker, Counter)
    with pytest.raises(errors.WorkerFailedError) as second:
        engine.call("die", "exit 3")
    assert "line 19" not in second.value.log_tail, "the line is of the old process"
    scheduler.restart_workers(role)
    engine = Engine.create(scheduler, worker, Counter)
    engine.call("print_lines", 2)
    with pytest.raises(errors.WorkerFailedError) as third:
        engine.call("die", "exit 3")
    assert third.value.log_tail.endswith("is created: Counter\nline 0\nline 1")
    assert "line 19" not in third.value.log_tail


@ray_smoke
@needs_processes
def test_restart_workers_replaces_all(scheduler: Scheduler, role: str) -> None:
    ids = scheduler.create_workers(Job(role=role, replicas=3, tasks=[ONE_DEVICE]))
    before = scheduler.get_workers(role)
    for elsewhere in (False, True):
        engines = [Engine.create(scheduler, worker_id, Counter) for worker_id in ids]
        pids = [engine.call("pid") for engine in engines]
        stop(pids[0])
        os.kill(pids[1], signal.SIGKILL)
        scheduler.restart_workers(role, elsewhere=elsewhere)
        assert not any(map(is_running, pids))
        after = scheduler.get_workers(role)
        assert [worker.id for worker in after] == ids
        assert [worker.devices for worker in after] == [worker.devices for worker in before]
        with pytest.raises(errors.EngineNotFoundError):
            engines[2].call("add", 1)
    engines = [
        Engine.create(scheduler, worker_id, Counter, None, rank)
        for rank, worker_id in enumerate(ids)
    ]
    assert [engine.call("add", 1) for engine in engines] == [1, 2, 3]
    assert len(scheduler.scale(role, 8)) == 5, "no device is held twice"


@needs_processes
def test_restart_workers_after_removal(scheduler: Scheduler, role: str) -> None:
    def pids() -> dict[str, int | None]:
        return {
            status.worker_id: status.pid
            for status in scheduler.status()
            if status.worker_id.startswith(f"{role}/")
        }

    spec = SchedulingSpec(cpu=0, port_count=1)
    scheduler.create_workers(Job(role=role, replicas=3, tasks=[spec]))
    scheduler.remove_workers(role, [f"{role}/1"])
    before = pids()
    scheduler.restart_workers(role)
    after = pids()
    assert list(after) == list(before) == [f"{role}/0", f"{role}/2"]
    assert not set(after.values()) & set(before.values())
    scheduler.restart_workers(role, elsewhere=True)
    assert [worker.id for worker in scheduler.get_workers(role)] == [f"{role}/0", f"{role}/1"]
    assert scheduler.add_workers(role, 1) == [f"{role}/2"]


@needs_processes
def test_restarts_keep_nothing_of_old_processes(scheduler: Scheduler, role: str) -> None:
    """A run of weeks restarts its workers often; descriptors and memory do not grow."""
    (worker,) = scheduler.create_workers(Job(role=role))
    for _ in range(3):
        engine = Engine.create(scheduler, worker, Counter)
        with pytest.raises(errors.WorkerFailedError):
            engine.call("die", "exit 3")
        scheduler.restart_worker(worker)
    assert len(_pages(role)) >= 1
    wait_until(lambda: len(_pages(role)) <= 1, "the pages of the old processes are closed")
    wait_until(lambda: _num_clients(worker) <= 1, "the clients of the old processes are freed")


def _num_clients(worker: str) -> int:
    """Return how many clients of a worker this process holds, with all that they refer to."""
    gc.collect()
    return sum(type(each) is WorkerClient and each.worker_id == worker for each in gc.get_objects())


def _pages(role: str) -> list[str]:
    """Return the heartbeat pages of a role's workers that this process maps."""
    gc.collect()
    with open("/proc/self/maps") as file:
        return [line for line in file if "helmsman_pulse" in line and f"/{role}/" in line]
