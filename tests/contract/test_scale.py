"""A role gets more workers, or fewer, while it runs; those that stay are not touched."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from helmsman.api import errors
from helmsman.api.scheduler import Job, Scheduler, SchedulingSpec, SchedulingStrategy
from helmsman.controller._aio.event_loop import submit
from tests.contract.engines import Counter
from tests.contract.helpers import Engine, Gate, held, wait_gone, wait_until

ONE_DEVICE = SchedulingSpec(cpu=0, gpu=1, port_count=1, ray_placement_strategy="separate")


def _job(role: str, backend: str, replicas: int = 1) -> Job:
    spec = ONE_DEVICE if backend != "inline" else SchedulingSpec(cpu=0, port_count=1)
    return Job(role=role, replicas=replicas, tasks=[spec])


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
            assert len({device for worker in workers for device in worker.devices}) == 3, (
                "a device each"
            )
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
    assert seen == [f"{role}/{index}" for index in range(1, 5)], "no id is given twice"
    assert kept.call("pid") == pid
    assert kept.call("add", 1) == 6


@pytest.mark.not_on("inline", "nothing can be missing there")
def test_scale_failure_changes_nothing(scheduler: Scheduler, backend: str, role: str) -> None:
    (first,) = scheduler.create_workers(_job(role, backend))
    kept = Engine.create(scheduler, first, Counter)
    with pytest.raises(errors.PlacementInfeasibleError, match="GPU"):
        scheduler.scale(role, 10)
    assert [
        status.worker_id for status in scheduler.status() if status.worker_id.startswith(f"{role}/")
    ] == [first]
    assert kept.call("add", 2) == 2
    assert len(scheduler.scale(role, 8)) == 7, "nothing of the failed attempt is held"


def test_scale_refuses(scheduler: Scheduler, role: str) -> None:
    scheduler.create_workers(Job(role=role, replicas=2))
    beside = SchedulingStrategy(type="colocation", target=role)
    scheduler.create_workers(Job(role=f"{role}-guest", replicas=2, scheduling_strategy=beside))
    specs = [SchedulingSpec(cpu=0), SchedulingSpec(cpu=0)]
    scheduler.create_workers(Job(role=f"{role}-each", replicas=2, tasks=specs))
    for name, replicas, expected in (
        (role, 1, f"{role}-guest use them"),
        (f"{role}-guest", 3, f"these are colocated with '{role}'"),
        (f"{role}-each", 3, "one spec for all of its replicas"),
    ):
        with pytest.raises(errors.InvalidSpecError, match=expected):
            scheduler.scale(name, replicas)
    with pytest.raises(errors.InvalidSpecError, match="replicas is 0"):
        scheduler.scale(role, 0)
    with pytest.raises(errors.RoleNotFoundError, match="missing"):
        scheduler.scale("missing", 2)
    assert scheduler.scale(role, 3) == [f"{role}/2"]


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
    assert scheduler.scale(role, 3) == [f"{role}/4"], "no id is given twice"
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
    assert again.call("environ", "HOLES_3") == {"HOLES_3": "there"}, "it has its own spec"
    guests = scheduler.create_workers(
        Job(
            role=f"{role}-guest",
            replicas=2,
            scheduling_strategy=SchedulingStrategy(type="colocation", target=role),
        )
    )
    assert guests == [f"{role}-guest/0", f"{role}-guest/1"]
    asyncio.run(scheduler.create_engine(guests[1], Counter))
    assert scheduler.call_engine(guests[1], "pid") == again.call("pid")
    beside = SchedulingStrategy(type="colocation", target=role, fork=True)
    assert (
        len(
            scheduler.plan(Job(role=f"{role}-beside", replicas=2, scheduling_strategy=beside))
            .roles[0]
            .workers
        )
        == 2
    )
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


@pytest.mark.not_on("inline", "it has no devices")
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


def test_remove_workers_refuses(scheduler: Scheduler, role: str) -> None:
    scheduler.create_workers(Job(role=role, replicas=2, tasks=[SchedulingSpec(cpu=0)]))
    guest = f"{role}-guest"
    with pytest.raises(errors.InvalidSpecError, match="at least one worker to remain"):
        scheduler.remove_workers(role, _ids(scheduler, role))
    with pytest.raises(errors.WorkerNotFoundError, match=f"{role}/7"):
        scheduler.remove_workers(role, [f"{role}/0", f"{role}/7"])
    with pytest.raises(errors.RoleNotFoundError):
        scheduler.remove_workers("missing", ["missing/0"])
    beside = SchedulingStrategy(type="colocation", target=role)
    scheduler.create_workers(Job(role=guest, replicas=2, scheduling_strategy=beside))
    with pytest.raises(errors.InvalidSpecError, match=f"these are colocated with '{role}'"):
        scheduler.remove_workers(guest, [f"{guest}/0"])
    assert len(scheduler.get_workers(role)) == 2
    scheduler.delete_workers(guest)
    scheduler.remove_workers(role, [f"{role}/0", f"{role}/0"])
    with pytest.raises(errors.WorkerNotFoundError, match=f"{role}/0"):
        scheduler.restart_worker(f"{role}/0")
    with pytest.raises(errors.WorkerNotFoundError, match=f"{role}/0"):
        scheduler.remove_workers(role, [f"{role}/0"])


@pytest.mark.not_on("inline", "its workers have no process of their own")
def test_remove_workers_during_restart(scheduler: Scheduler, backend: str, role: str) -> None:
    scheduler.create_workers(_job(role, backend, replicas=2))
    for index in range(3):
        doomed = f"{role}/{index + 1}"
        with ThreadPoolExecutor() as pool:
            restart = pool.submit(scheduler.restart_worker, doomed)
            wait_until(
                lambda: (
                    doomed in scheduler._roles.role(role).restarts  # type: ignore[attr-defined]  # noqa: B023
                    or restart.done()  # noqa: B023
                ),
                "it is restarted",
            )
            removal = pool.submit(scheduler.remove_workers, role, [doomed])
            removal.result(30)
            with contextlib.suppress(errors.WorkerNotFoundError):
                restart.result(30)
        assert _ids(scheduler, role) == [f"{role}/0"]
        assert scheduler.scale(role, 2) == [f"{role}/{index + 2}"]
    scheduler.scale(role, 8)  # nothing of any of them is held


def test_remove_workers_concurrently(scheduler: Scheduler, backend: str, role: str) -> None:
    scheduler.create_workers(_job(role, backend, replicas=3))
    with ThreadPoolExecutor() as pool:
        removals = [pool.submit(scheduler.remove_workers, role, [f"{role}/1"]) for _ in range(4)]
        outcomes = [removal.exception(30) for removal in removals]
    assert (
        sorted(type(outcome).__name__ for outcome in outcomes)
        == ["NoneType"] + ["WorkerNotFoundError"] * 3
    )
    assert _ids(scheduler, role) == [f"{role}/0", f"{role}/2"]


@pytest.mark.not_on("inline", "nothing of it takes time to end")
def test_remove_workers_interrupted(
    scheduler: Scheduler, backend: str, role: str, gate: Gate
) -> None:
    scheduler.create_workers(_job(role, backend, replicas=2))
    engine = Engine.create(scheduler, f"{role}/0", Counter)
    pid = engine.call("pid")
    with held(engine, gate) as call:
        removal = submit(scheduler._lifecycle.remove(scheduler._roles.role(role), [f"{role}/0"]))  # type: ignore[attr-defined]
        wait_until(lambda: _ids(scheduler, role) == [f"{role}/1"], "it has begun")
        removal.cancel()
        wait_gone({f"{role}/0": pid})
    with pytest.raises(errors.WorkerFailedError):
        call.result(30)
    wait_until(
        lambda: sum(node.num_free_devices for node in scheduler.nodes()) == 7, "its device is free"
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


def test_add_workers_concurrently(scheduler: Scheduler, backend: str, role: str) -> None:
    scheduler.create_workers(_job(role, backend))
    with ThreadPoolExecutor() as pool:
        asked = [pool.submit(scheduler.add_workers, role, 1) for _ in range(4)]
        removed = (
            pool.submit(scheduler.remove_workers, role, [f"{role}/0"])
            if asked[0].result(30)
            else None
        )
        new = [id_ for each in asked for id_ in each.result(30)]
    assert removed is not None
    assert removed.exception(30) is None
    assert sorted(new) == [f"{role}/{index}" for index in range(1, 5)] == _ids(scheduler, role)
    with pytest.raises(errors.InvalidSpecError, match="replicas is "):
        scheduler.add_workers(role, 0)


@pytest.mark.not_on("inline", "a command needs a process of its own")
def test_add_workers_starts_commands(scheduler: Scheduler, role: str) -> None:
    serve = "http.server {port} --bind 127.0.0.1"
    scheduler.create_workers(Job(role=role, tasks=[SchedulingSpec(cpu=0, cmd=serve)]))
    assert scheduler.add_workers(role, 1) == [f"{role}/1"]
    for worker in scheduler.get_workers(role):
        wait_until(
            lambda port=worker.engine_ports[0]: _answers(int(port)),  # type: ignore[misc]
            f"the server of {worker.id} answers",
        )


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
        return True
    return False


def _ids(scheduler: Scheduler, role: str) -> list[str]:
    return [worker.id for worker in scheduler.get_workers(role)]
