"""Refused plans, starts and devices, and schedulers that do not exist."""

from __future__ import annotations

import pytest

from helmsman.api import errors
from helmsman.api.scheduler import Job, Scheduler, SchedulingSpec
from helmsman.api.worker_group import ClusterConfig
from helmsman.controller._groups.resource_manager import ResourceManager
from helmsman.controller._scheduler.factory import make_scheduler
from tests.contract.group_workers import Member
from tests.contract.groups import Members


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


def test_resource_manager_release_after_close() -> None:
    scheduler = make_scheduler("inline", num_gpus=1)
    group = Members(
        "late", Member, ResourceManager(1, scheduler=scheduler), ClusterConfig(world_size=2)
    )
    handle = scheduler.put([1])
    with group.make.keep(2):
        scheduler.close()
    scheduler.release(handle)
    group.close()


def test_resource_manager_of_cpus(scheduler: Scheduler) -> None:
    with ResourceManager(0, scheduler=scheduler) as manager:
        assert manager.devices == () and manager.num_nodes >= 1
        with Members("cpus", Member, manager, ClusterConfig(world_size=2, num_cpus=0.5)) as group:
            assert group.echo(1) == [1, 1]
            assert group.rank_to_devices == {0: (), 1: ()}
        with pytest.raises(errors.InvalidSpecError, match="which are none"):
            Members("gpus", Member, manager, ClusterConfig(device_mapping="0"))


def test_resource_manager_missing_nodes(scheduler: Scheduler) -> None:
    for num_gpus, num_nodes, step in (
        (16, None, "Set num_gpus_per_node to 8"),
        (8, 4, "Set num_nodes to 1"),
        (16, 2, "Add nodes"),
    ):
        with pytest.raises(errors.ResourcesNotMetError) as caught:
            ResourceManager(num_gpus, num_nodes, scheduler=scheduler, name="too-much")
        text = str(caught.value)
        wanted = num_nodes or 1
        assert (
            f"requested:\n  {wanted} node{'s' if wanted > 1 else ''} with {num_gpus} devices "
            f"each, {wanted * num_gpus} in all" in text
        )
        assert "observed:\n  node " in text and "8 GPU" in text and step in text
    for arguments, said in (((-1,), "num_gpus_per_node is -1"), ((8, 0), "num_nodes is 0")):
        with pytest.raises(ValueError, match=said):
            ResourceManager(*arguments, scheduler=scheduler)
