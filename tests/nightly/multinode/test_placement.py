"""Tests of placements without CPUs, of deferred devices, and of a failed report of devices."""

from __future__ import annotations

import os
import signal

import pytest

from helmsman.api import errors
from helmsman.api.scheduler import Job
from helmsman.controller._scheduler.ray import placement_groups
from helmsman.controller._scheduler.ray.scheduler import RayScheduler
from tests.multinode.jobs import cpu_spec, devices_of

pytestmark = pytest.mark.usefixtures("left_as_found")


def _die() -> None:
    """Kill the process of a task, like the OOM killer."""
    os.kill(os.getpid(), signal.SIGKILL)


def test_placement_instance_whose_devices_are_not_reported(
    run: RayScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement_groups, "granted_here", _die)
    spec = cpu_spec(cpu=4, gpu=16, ray_placement_strategy="deferred")
    with pytest.raises(errors.WorkerStartError) as caught:
        run.create_workers(Job(role="server", tasks=[spec]))
    assert caught.value.worker_id == "server/0"
    assert "Ray did not report the devices that a placement group was granted" in str(caught.value)
    assert run.status() == []


def test_placement_deferred_devices_distinct(run: RayScheduler) -> None:
    spec = cpu_spec(gpu=4, ray_placement_strategy="deferred", node_labels={"rack": "a"})
    run.create_workers(Job(role="server", replicas=2, tasks=[spec]))
    one, two = devices_of(run, "server")
    assert one[0] == two[0]
    assert sorted((*one[1], *two[1])) == [str(index) for index in range(8)]


def test_placement_without_cpus(run: RayScheduler) -> None:
    run.create_workers(
        Job(role="cpus", replicas=3, tasks=[cpu_spec(cpu=32, node_packing="strict_spread")])
    )
    run.create_workers(
        Job(
            role="gpus",
            replicas=5,
            tasks=[cpu_spec(cpu=0, gpu=4, ray_placement_strategy="separate")],
        )
    )
    assert len(set(devices_of(run, "gpus"))) == 5
