"""Growth and removal of workers; the remaining workers are not affected."""

from __future__ import annotations

import asyncio
import contextlib
from concurrent.futures import ThreadPoolExecutor

import pytest

from helmsman.api import errors
from helmsman.api.scheduler import Job, Scheduler, SchedulingSpec
from tests.contract.engines import Counter
from tests.contract.helpers import (
    Engine,
    Gate,
    alias_of,
    answers,
    held,
    interrupted_when,
    wait_gone,
    wait_until,
)
from tests.contract.marks import needs_processes, ray_smoke

ONE_DEVICE = SchedulingSpec(cpu=0, gpu=1, port_count=1, ray_placement_strategy="separate")


def _job(role: str, backend: str, replicas: int = 1) -> Job:
    spec = ONE_DEVICE if backend != "inline" else SchedulingSpec(cpu=0, port_count=1)
    return Job(role=role, replicas=replicas, tasks=[spec])


@ray_smoke
def test_scale_up_and_down(scheduler: Scheduler, backend: str, role: str) -> None:
    (first,) = scheduler.create_workers(_job(role, backend))
    kept = Engine.create(scheduler, first, Counter)
    kept.call("add", 5)
    pid = kept.call("pid")
    seen: list[str] = []
    for _ in range(2):
        new = scheduler.scale(role, 3)
        workers = scheduler.get_workers(role)
        assert [worker.id for worker in workers] == [first, *new]
        assert len({port for worker in workers for port in worker.engine_ports}) == 3
        if backend != "inline":
            assert len({device for worker in workers for device in worker.devices}) == 3
        grown = [Engine.create(scheduler, worker.id, Counter) for worker in workers[1:]]
        assert [each.call("add", 1) for each in grown] == [1, 1]
        assert scheduler.scale(role, 3) == []
        pids = {each.worker_id: each.call("pid") for each in grown}
        assert scheduler.scale(role, 1) == []
        if backend != "inline":
            wait_gone(pids)
        with pytest.raises(errors.WorkerNotFoundError, match=new[-1]):
            scheduler.call_engine(new[-1], "add", None, 1)
        seen += new
    assert seen == [f"{role}/{index}" for index in range(1, 5)], "no id is reused"
    assert kept.call("pid") == pid
    assert kept.call("add", 1) == 6


@needs_processes
def test_scale_failure_changes_nothing(scheduler: Scheduler, backend: str, role: str) -> None:
    (first,) = scheduler.create_workers(_job(role, backend))
    kept = Engine.create(scheduler, first, Counter)
    with pytest.raises(errors.PlacementInfeasibleError, match="GPU"):
        scheduler.scale(role, 10)
    assert [
        status.worker_id for status in scheduler.status() if status.worker_id.startswith(f"{role}/")
    ] == [first]
    assert kept.call("add", 2) == 2
    assert len(scheduler.scale(role, 8)) == 7, "the failed attempt holds nothing"


def test_remove_workers_keeps_ids(scheduler: Scheduler, backend: str, role: str) -> None:
    scheduler.create_workers(_job(role, backend, replicas=4))
    engines = {index: Engine.create(scheduler, f"{role}/{index}", Counter) for index in range(4)}
    pids = {f"{role}/{index}": engines[index].call("pid") for index in (0, 2)}
    scheduler.remove_workers(role, [f"{role}/2", f"{role}/0"])
    if backend != "inline":
        wait_gone(pids)
    assert _ids(scheduler, role) == [f"{role}/1", f"{role}/3"]
    assert [engines[index].call("add", index) for index in (1, 3)] == [1, 3]
    with pytest.raises(errors.WorkerNotFoundError, match=f"{role}/2"):
        engines[2].call("add", 1)
    assert scheduler.scale(role, 3) == [f"{role}/4"], "no id is reused"
    assert scheduler.scale(role, 2) == []
    assert _ids(scheduler, role) == [f"{role}/1", f"{role}/3"]
    assert scheduler.scale(role, 3) == [f"{role}/5"]


def test_remove_workers_leaves_holes(scheduler: Scheduler, backend: str, role: str) -> None:
    specs = [
        SchedulingSpec(
            cpu=0,
            gpu=0 if backend == "inline" else 1,
            port_count=1,
            env_vars={f"HOLES_{index}": "there"},
        )
        for index in range(4)
    ]
    scheduler.create_workers(Job(role=role, replicas=4, tasks=specs))
    scheduler.remove_workers(role, [f"{role}/0", f"{role}/2"])
    left = [f"{role}/1", f"{role}/3"]
    assert list(scheduler.stacks(role)) == left
    assert [
        status.worker_id for status in scheduler.status() if status.worker_id.startswith(f"{role}/")
    ] == left
    assert list(scheduler.environment(role)) == left
    scheduler.restart_worker(f"{role}/3")
    again = Engine.create(scheduler, f"{role}/3", Counter)
    assert again.call("environ", "HOLES_3") == {"HOLES_3": "there"}, "each worker keeps its spec"
    guests = scheduler.create_workers(alias_of(role, f"{role}-guest", 2))
    assert guests == [f"{role}-guest/0", f"{role}-guest/1"]
    asyncio.run(scheduler.create_engine(guests[1], Counter))
    assert scheduler.call_engine(guests[1], "pid") == again.call("pid")
    plan = scheduler.plan(alias_of(role, f"{role}-beside", 2, fork=True))
    assert len(plan.roles[0].workers) == 2
    siblings = scheduler.fork_workers(f"{role}-beside", role)
    assert siblings == [f"{role}-beside/0", f"{role}-beside/1"]
    devices = [
        [worker.devices for worker in scheduler.get_workers(name)]
        for name in (role, f"{role}-beside")
    ]
    assert devices[0] == devices[1]
    with pytest.raises(errors.InvalidSpecError, match="use them"):
        scheduler.remove_workers(role, [f"{role}/1"])
    scheduler.delete_workers(f"{role}-beside")
    scheduler.delete_workers(f"{role}-guest")
    assert _ids(scheduler, role) == left


@needs_processes
def test_remove_workers_frees_devices(scheduler: Scheduler, backend: str, role: str) -> None:
    scheduler.create_workers(_job(role, backend, replicas=4))
    scheduler.restart_worker(f"{role}/1")
    scheduler.remove_workers(role, [f"{role}/1", f"{role}/2"])
    scheduler.scale(role, 5)
    scheduler.remove_workers(role, [f"{role}/0", f"{role}/5"])
    assert _ids(scheduler, role) == [f"{role}/3", f"{role}/4", f"{role}/6"]
    assert len(scheduler.create_workers(_job(f"{role}-others", backend, replicas=5))) == 5
    devices = [
        device
        for name in (role, f"{role}-others")
        for worker in scheduler.get_workers(name)
        for device in worker.devices
    ]
    assert sorted(devices) == [str(index) for index in range(8)]
    scheduler.delete_workers(f"{role}-others")


@needs_processes
def test_remove_workers_during_restart(scheduler: Scheduler, backend: str, role: str) -> None:
    scheduler.create_workers(_job(role, backend, replicas=2))
    for index in range(3):
        doomed = f"{role}/{index + 1}"
        pid = asyncio.run(scheduler.check_health(doomed)).pid
        with ThreadPoolExecutor() as pool:
            restart = pool.submit(scheduler.restart_worker, doomed)
            wait_gone({doomed: pid})
            removal = pool.submit(scheduler.remove_workers, role, [doomed])
            removal.result(30)
            with contextlib.suppress(errors.WorkerNotFoundError):
                restart.result(30)
        assert _ids(scheduler, role) == [f"{role}/0"]
        assert scheduler.scale(role, 2) == [f"{role}/{index + 2}"]
    scheduler.scale(role, 8)  # requires that the removed workers hold no device


@needs_processes
def test_remove_workers_interrupted(
    scheduler: Scheduler, backend: str, role: str, gate: Gate
) -> None:
    scheduler.create_workers(_job(role, backend, replicas=2))
    engine = Engine.create(scheduler, f"{role}/0", Counter)
    pid = engine.call("pid")
    with held(engine, gate) as call:
        with interrupted_when(lambda: _ids(scheduler, role) == [f"{role}/1"], "removal has begun"):
            scheduler.remove_workers(role, [f"{role}/0"])
        wait_gone({f"{role}/0": pid})
    with pytest.raises(errors.WorkerFailedError):
        call.result(30)
    wait_until(
        lambda: sum(node.num_free_devices for node in scheduler.nodes()) == 7, "the device is free"
    )
    scheduler.scale(role, 8)


@pytest.mark.parametrize("how", ["removed", "deleted"])
def test_remove_workers_fails_calls(
    scheduler: Scheduler, backend: str, role: str, gate: Gate, how: str
) -> None:
    scheduler.create_workers(_job(role, backend, replicas=2))
    with held(Engine.create(scheduler, f"{role}/1", Counter), gate, "async_wait") as call:
        if how == "removed":
            scheduler.remove_workers(role, [f"{role}/1"])
        else:
            scheduler.delete_workers(role)
        with pytest.raises(errors.WorkerFailedError, match=f"worker {role}/1 "):
            call.result(30)


@needs_processes
def test_add_workers_starts_commands(scheduler: Scheduler, role: str) -> None:
    serve = "http.server {port} --bind 127.0.0.1"
    scheduler.create_workers(Job(role=role, tasks=[SchedulingSpec(cpu=0, cmd=serve)]))
    assert scheduler.add_workers(role, 1) == [f"{role}/1"]
    for worker in scheduler.get_workers(role):
        port = int(worker.engine_ports[0])
        wait_until(lambda: answers(port), f"the server of {worker.id} answers")  # noqa: B023


def _ids(scheduler: Scheduler, role: str) -> list[str]:
    return [worker.id for worker in scheduler.get_workers(role)]
