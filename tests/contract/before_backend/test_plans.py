"""Plans and starts that are refused, and schedulers that do not exist."""

from __future__ import annotations

import pytest

from helmsman.api import errors
from helmsman.api.scheduler import Job, Scheduler, SchedulingSpec
from helmsman.controller._schedulers.factory import make_scheduler


@pytest.mark.parametrize(
    ("replicas", "spec", "shortfall", "setting"),
    [
        (1, SchedulingSpec(cpu=999), "975 CPU", "Set SchedulingSpec.cpu to 24"),
        (
            1,
            SchedulingSpec(gpu=9, ray_placement_strategy="separate"),
            "1 GPU",
            "Set SchedulingSpec.gpu to 8",
        ),
        (3, SchedulingSpec(cpu=0, gpu=3), "1 GPU", "Set Job.replicas to 2"),
        (1, SchedulingSpec(mem=9000), "GB memory", "Set SchedulingSpec.mem to "),
        (
            1,
            SchedulingSpec(resources={"license": 1}),
            "1 license",
            "Set SchedulingSpec.resources to {'license': 0}",
        ),
    ],
)
def test_create_workers_infeasible(
    scheduler: Scheduler,
    role: str,
    replicas: int,
    spec: SchedulingSpec,
    shortfall: str,
    setting: str,
) -> None:
    with pytest.raises(errors.PlacementInfeasibleError) as caught:
        scheduler.create_workers(Job(role=role, replicas=replicas, tasks=[spec]))
    assert shortfall in caught.value.shortfall
    assert role in str(caught.value)
    assert setting in str(caught.value)


def test_create_workers_duplicate_roles(scheduler: Scheduler, role: str) -> None:
    with pytest.raises(errors.InvalidSpecError, match="a different role for each job"):
        scheduler.create_workers([Job(role=role), Job(role=role)])
    assert scheduler.create_workers([]) == []


def test_plan_takes_mapping_values(scheduler: Scheduler) -> None:
    jobs = {name: Job(role=name, tasks=[SchedulingSpec(cpu=0.1)]) for name in ("one", "other")}
    assert [role.role for role in scheduler.plan(jobs.values()).roles] == ["one", "other"]


def test_make_scheduler_unknown_backend() -> None:
    with pytest.raises(
        errors.UnknownBackendError,
        match="there is no scheduler 'slurm'; choose one of: ray, local, inline",
    ):
        make_scheduler("slurm")
