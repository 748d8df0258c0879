"""Jobs of GPUs, and the placement groups of the connected cluster."""

from __future__ import annotations

from typing import Any

from helmsman.api.scheduler import Job, SchedulingSpec
from helmsman.controller._scheduler.ray.scheduler import RayScheduler


def make_job(role: str, replicas: int, gpu: int, strategy: Any = "separate", **fields: Any) -> Job:
    spec = SchedulingSpec(cpu=0, gpu=gpu, ray_placement_strategy=strategy, **fields)
    return Job(role=role, replicas=replicas, tasks=[spec])


def placement_groups() -> list[str]:
    """Return the names of all placement groups."""
    from helmsman.controller._scheduler.ray import cluster_state

    return [row.name for row in cluster_state.group_rows()]


def cpu_spec(**fields: Any) -> SchedulingSpec:
    """Return a spec of one CPU, with these fields changed."""
    return SchedulingSpec(**{"cpu": 1, **fields})


def devices_of(run: RayScheduler, role: str) -> list[tuple[str, tuple[str, ...]]]:
    """Return the node and the devices of each worker of a role."""
    return [(worker.node_id, tuple(worker.devices)) for worker in run.get_workers(role)]
