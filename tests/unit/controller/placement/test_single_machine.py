"""Tests of plans and resources of the schedulers of one machine."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from helmsman._process.observation import memory_allowed
from helmsman.api import errors
from helmsman.api.scheduler import Job, Scheduler, SchedulingSpec
from helmsman.controller._scheduler.inline import InlineScheduler
from helmsman.controller._scheduler.local import LocalScheduler

SCHEDULERS = pytest.mark.parametrize("make", [LocalScheduler, InlineScheduler])


@SCHEDULERS
def test_plan_workers_share_cpus(make: Callable[..., Scheduler]) -> None:
    with make(num_cpus=2) as scheduler:
        plan = scheduler.plan(
            [Job(role="train", replicas=4), Job(role="reward", tasks=[SchedulingSpec(cpu=2)])]
        )
        assert [len(role.workers) for role in plan.roles] == [4, 1]
        with pytest.raises(errors.PlacementInfeasibleError) as caught:
            scheduler.plan(
                [Job(role="train", replicas=4, tasks=[SchedulingSpec(cpu=999)]), Job(role="reward")]
            )
    text = str(caught.value)
    assert "requested a worker with 999 CPU; observed at most 2 CPU" in text
    assert "short of 997 CPU. Set SchedulingSpec.cpu of 'train' to 2." in text


@SCHEDULERS
def test_plan_without_accelerators(make: Callable[..., Scheduler]) -> None:
    with make(num_gpus=0) as scheduler, pytest.raises(errors.PlacementInfeasibleError) as caught:
        scheduler.plan(Job(role="train", tasks=[SchedulingSpec(gpu=16)]))
    assert "short of 16 GPU. Set SchedulingSpec.gpu to 0." in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "observed"),
    [
        (SchedulingSpec(mem=memory_allowed({}) * 0.6 / 1e9), "GB memory"),
        (SchedulingSpec(resources={"license": 2}), "3 license"),
    ],
)
def test_create_workers_hold_memory_and_resources(spec: SchedulingSpec, observed: str) -> None:
    with InlineScheduler(resources={"license": 3}) as scheduler:
        with pytest.raises(errors.PlacementInfeasibleError, match="Set Job.replicas to 1"):
            scheduler.create_workers(Job(role="first", replicas=2, tasks=[spec]))
        scheduler.create_workers(Job(role="first", tasks=[spec]))
        with pytest.raises(errors.PlacementTimeoutError, match=f"first/0: .*{observed[1:]}"):
            scheduler.create_workers(Job(role="second", tasks=[spec]))
        scheduler.delete_workers("first")
        assert scheduler.create_workers(Job(role="second", tasks=[spec])) == ["second/0"]
