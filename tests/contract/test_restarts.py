"""All processes of a role are replaced, whatever state they are in. A silent one is ended, and its
calls say why.
"""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from helmsman.api import errors
from helmsman.api.scheduler import Job, Scheduler, SchedulingSpec, SchedulingStrategy, WorkerState
from tests.contract.engines import Counter
from tests.contract.helpers import LIMIT_S, Engine, Gate, is_running, stop, wait_gone

ONE_DEVICE = SchedulingSpec(cpu=0, gpu=1, port_count=1)


@pytest.mark.not_on("inline", "one process, it cannot be stopped without the script")
def test_kill_worker_stopped(scheduler: Scheduler, role: str, gate: Gate) -> None:
    stopped, other = scheduler.create_workers(Job(role=role, replicas=2))
    engine, healthy = (
        Engine.create(scheduler, stopped, Counter),
        Engine.create(scheduler, other, Counter),
    )
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
    assert {each.worker_id: each.state for each in scheduler.status()}[
        stopped
    ] is WorkerState.FAILED
    scheduler.restart_worker(stopped)
    assert Engine.create(scheduler, stopped, Counter).call("add", 1) == 1
    with pytest.raises(errors.WorkerNotFoundError):
        asyncio.run(scheduler.kill_worker(f"{role}/7", "was ended"))


@pytest.mark.not_on("inline", "its workers have no logs of their own")
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
    assert "line 19" not in second.value.log_tail, "it is of the process before"
    scheduler.restart_workers(role)
    engine = Engine.create(scheduler, worker, Counter)
    engine.call("print_lines", 2)
    with pytest.raises(errors.WorkerFailedError) as third:
        engine.call("die", "exit 3")
    assert third.value.log_tail.endswith("is created: Counter\nline 0\nline 1")
    assert "line 19" not in third.value.log_tail


def test_restart_workers_replaces_all(scheduler: Scheduler, backend: str, role: str) -> None:
    spec = ONE_DEVICE if backend != "inline" else SchedulingSpec(cpu=0, port_count=1)
    ids = scheduler.create_workers(Job(role=role, replicas=3, tasks=[spec]))
    before = scheduler.get_workers(role)
    for elsewhere in (False, True):
        engines = [Engine.create(scheduler, worker_id, Counter) for worker_id in ids]
        pids = [engine.call("pid") for engine in engines]
        if backend != "inline":
            stop(pids[0])
            os.kill(pids[1], signal.SIGKILL)
        scheduler.restart_workers(role, elsewhere=elsewhere)
        if backend != "inline":
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
    if backend != "inline":
        assert len(scheduler.scale(role, 8)) == 5, "nothing is held twice"


def test_restart_workers_names_dependents(scheduler: Scheduler, role: str) -> None:
    scheduler.create_workers(Job(role=role))
    beside = SchedulingStrategy(type="colocation", target=role, fork=True)
    scheduler.create_workers(Job(role=f"{role}-sibling", scheduling_strategy=beside))
    sibling = Engine.create(scheduler, f"{role}-sibling/0", Counter)
    scheduler.restart_workers(role)
    assert sibling.call("add", 1) == 1
    with pytest.raises(
        errors.InvalidSpecError, match=f"no other role uses; {role}-sibling would end with them"
    ):
        scheduler.restart_workers(role, elsewhere=True)
    inside = SchedulingStrategy(type="colocation", target=role)
    scheduler.create_workers(Job(role=f"{role}-guest", scheduling_strategy=inside))
    with pytest.raises(
        errors.InvalidSpecError, match=f"no other role uses; {role}-guest would end with them"
    ):
        scheduler.restart_workers(role)
    with pytest.raises(
        errors.InvalidSpecError,
        match=f"a role with workers of its own; this one uses those of role '{role}'",
    ):
        scheduler.restart_workers(f"{role}-guest")
    with pytest.raises(errors.RoleNotFoundError):
        scheduler.restart_workers(f"{role}-missing")
    assert sibling.call("add", 1) == 2, "what is refused has ended nothing"


@pytest.mark.not_on("inline", "its workers have no process of their own")
def test_restart_workers_after_removal(scheduler: Scheduler, role: str) -> None:
    spec = SchedulingSpec(cpu=0, port_count=1)
    scheduler.create_workers(Job(role=role, replicas=3, tasks=[spec]))
    scheduler.remove_workers(role, [f"{role}/1"])
    before = {
        status.worker_id: status.pid
        for status in scheduler.status()
        if status.worker_id.startswith(f"{role}/")
    }
    scheduler.restart_workers(role)
    after = {
        status.worker_id: status.pid
        for status in scheduler.status()
        if status.worker_id.startswith(f"{role}/")
    }
    assert list(after) == list(before) == [f"{role}/0", f"{role}/2"]
    assert not set(after.values()) & set(before.values())
    scheduler.restart_workers(role, elsewhere=True)
    assert [worker.id for worker in scheduler.get_workers(role)] == [f"{role}/0", f"{role}/1"]
    assert scheduler.add_workers(role, 1) == [f"{role}/2"]
