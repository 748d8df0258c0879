"""A role gets more workers, or fewer, while it runs; those that stay are not touched."""

from __future__ import annotations

import pytest

from helmsman.api import errors
from helmsman.api.scheduler import Job, Scheduler, SchedulingSpec, SchedulingStrategy
from tests.contract.engines import Counter
from tests.contract.helpers import Engine, wait_gone

ONE_DEVICE = SchedulingSpec(cpu=0, gpu=1, port_count=1, ray_placement_strategy="separate")


def _job(role: str, backend: str, replicas: int = 1) -> Job:
    spec = ONE_DEVICE if backend != "inline" else SchedulingSpec(cpu=0, port_count=1)
    return Job(role=role, replicas=replicas, tasks=[spec])


def test_a_role_grows_and_shrinks(scheduler: Scheduler, backend: str, role: str) -> None:
    (first,) = scheduler.create_workers(_job(role, backend))
    kept = Engine.create(scheduler, first, Counter)
    kept.call("add", 5)
    pid = kept.call("pid")
    for _ in range(2):
        assert scheduler.scale(role, 3) == [f"{role}/1", f"{role}/2"]
        workers = scheduler.get_workers(role)
        assert [worker.id for worker in workers] == [first, f"{role}/1", f"{role}/2"]
        assert len({port for worker in workers for port in worker.engine_ports}) == 3
        if backend != "inline":
            assert len({device for worker in workers for device in worker.devices}) == 3, "a device each"
        grown = [Engine.create(scheduler, worker.id, Counter) for worker in workers[1:]]
        assert [each.call("add", 1) for each in grown] == [1, 1]
        assert scheduler.scale(role, 3) == []
        pids = {each.worker_id: each.call("pid") for each in grown}
        assert scheduler.scale(role, 1) == []
        if backend != "inline":
            wait_gone(pids)
        with pytest.raises(errors.WorkerNotFoundError, match=f"{role}/2"):
            scheduler.call_engine(f"{role}/2", "add", None, 1)
    assert kept.call("pid") == pid
    assert kept.call("add", 1) == 6


@pytest.mark.not_on("inline", "it has no devices")
def test_what_a_smaller_role_held_is_free(scheduler: Scheduler, backend: str, role: str) -> None:
    scheduler.create_workers(_job(role, backend, replicas=4))
    scheduler.scale(role, 2)
    scheduler.scale(role, 3)
    scheduler.scale(role, 1)
    others = scheduler.create_workers(_job(f"{role}-others", backend, replicas=7))
    devices = [
        device for name in (role, f"{role}-others") for worker in scheduler.get_workers(name) for device in worker.devices
    ]
    assert len(others) == 7
    assert sorted(devices) == [str(index) for index in range(8)]
    scheduler.delete_workers(f"{role}-others")


@pytest.mark.not_on("inline", "nothing can be missing there")
def test_a_growth_that_fails_leaves_the_role_as_it_was(scheduler: Scheduler, backend: str, role: str) -> None:
    (first,) = scheduler.create_workers(_job(role, backend))
    kept = Engine.create(scheduler, first, Counter)
    with pytest.raises(errors.PlacementInfeasibleError, match="GPU"):
        scheduler.scale(role, 10)
    assert [status.worker_id for status in scheduler.status() if status.worker_id.startswith(f"{role}/")] == [first]
    assert kept.call("add", 2) == 2
    assert len(scheduler.scale(role, 8)) == 7, "nothing of the failed attempt is held"


def test_what_cannot_be_scaled_is_said(scheduler: Scheduler, role: str) -> None:
    scheduler.create_workers(Job(role=role, replicas=2))
    beside = SchedulingStrategy(type="colocation", target=role)
    scheduler.create_workers(Job(role=f"{role}-guest", replicas=2, scheduling_strategy=beside))
    specs = [SchedulingSpec(cpu=0), SchedulingSpec(cpu=0)]
    scheduler.create_workers(Job(role=f"{role}-each", replicas=2, tasks=specs))
    for name, replicas, expected in (
        (role, 1, f"{role}-guest stand on them"),
        (f"{role}-guest", 3, f"these stand on role '{role}'"),
        (f"{role}-each", 3, "one spec for all of its replicas"),
    ):
        with pytest.raises(errors.InvalidSpecError, match=expected):
            scheduler.scale(name, replicas)
    with pytest.raises(errors.InvalidReplicasError, match="0 replicas"):
        scheduler.scale(role, 0)
    with pytest.raises(errors.RoleNotFoundError, match="nobody"):
        scheduler.scale("nobody", 2)
    assert scheduler.scale(role, 3) == [f"{role}/2"]
