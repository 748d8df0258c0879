"""Plans, and starts of several jobs."""

from __future__ import annotations

import pytest

from helmsman.api import errors
from helmsman.api.scheduler import Job, Scheduler, SchedulingSpec
from tests.contract.engines import Counter
from tests.contract.helpers import Engine, alias_of
from tests.contract.marks import ray_smoke


def _jobs(role: str, gpu: int = 1) -> list[Job]:
    return [
        alias_of(role, f"{role}-beside"),
        Job(role=role, replicas=2, tasks=[SchedulingSpec(cpu=0, gpu=gpu, port_count=1)]),
        Job(role=f"{role}-cpu", tasks=[SchedulingSpec(cpu=0.5)]),
    ]


@ray_smoke
def test_plan_matches_start(scheduler: Scheduler, role: str) -> None:
    before = {status.worker_id for status in scheduler.status()}
    plan = scheduler.plan(_jobs(role))
    assert {status.worker_id for status in scheduler.status()} == before, "nothing was started"
    planned = [worker.worker_id for each in plan.roles for worker in each.workers]
    assert planned == [f"{role}-beside/0", f"{role}/0", f"{role}/1", f"{role}-cpu/0"]
    assert all(worker_id.rpartition("/")[0] in plan.table() for worker_id in planned)
    assert scheduler.create_workers(_jobs(role)) == planned
    assert [len(worker.devices) for worker in scheduler.get_workers(role)] == [1, 1]
    engines = [Engine.create(scheduler, worker_id, Counter) for worker_id in planned]
    assert [engine.call("add", 1) for engine in engines] == [1, 1, 1, 1]
    assert engines[0].call("pid") == engines[1].call("pid")
    scheduler.delete_workers(role)
    with pytest.raises(errors.RoleNotFoundError):
        scheduler.get_workers(f"{role}-beside")


def test_plan_names_holder(scheduler: Scheduler, role: str) -> None:
    scheduler.create_workers(Job(role=role, tasks=[SchedulingSpec(cpu=0, gpu=6)]))
    with pytest.raises(errors.PlacementTimeoutError, match=f"{role}"):
        scheduler.plan(Job(role=f"{role}-more", tasks=[SchedulingSpec(cpu=0, gpu=3)]))
