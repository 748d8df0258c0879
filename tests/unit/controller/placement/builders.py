"""Builders of clusters, jobs and plans for the tests of placement."""

from __future__ import annotations

from typing import Any

from helmsman.api.plan import Plan, PlannedRole
from helmsman.api.scheduler import Job, SchedulingSpec, SchedulingStrategy
from helmsman.controller._placement.planner import plan_jobs
from helmsman.controller._placement.resources import ClusterSnapshot, NodeState, Resources

STRATEGIES = ("shared", "separate", "deferred")


def node(
    name: str, *, cpu: float = 64, gpu: int = 8, free: Resources | None = None, **fields: Any
) -> NodeState:
    """Return a node with GPUs; ``free`` overrides the free amounts."""
    total: Resources = {
        "CPU": cpu,
        "memory": 100e9,
        **({"GPU": float(gpu)} if gpu else {}),
        **fields.pop("extra", {}),
    }
    return NodeState(
        node_id=name, address=name, total=total, available={**total, **(free or {})}, **fields
    )


def cluster(*nodes: NodeState) -> ClusterSnapshot:
    return ClusterSnapshot(nodes=nodes)


def job(role: str, replicas: int, strategy: Any = "shared", **spec: Any) -> Job:
    """Return a job with equal replicas."""
    tasks = [SchedulingSpec(**{"cpu": 1, **spec}, ray_placement_strategy=strategy)]
    return Job(role=role, replicas=replicas, tasks=tasks)


def planned(snapshot: ClusterSnapshot, *jobs: Job, **options: Any) -> dict[str, PlannedRole]:
    """Plan jobs that fit, and return the planned roles by name."""
    plan = plan_jobs(snapshot, jobs, **options)
    assert isinstance(plan, Plan), str(plan)
    return {role.role: role for role in plan.roles}


def where(role: PlannedRole) -> list[tuple[str, tuple[str, ...]]]:
    """Return the node and the devices of each rank."""
    return [(worker.node_id, worker.devices) for worker in role.workers]


def nodes_of(role: PlannedRole) -> set[str]:
    """Return all nodes that a role uses."""
    return {bundle.node_id for instance in role.instances for bundle in instance.bundles}


def beside(role: str, replicas: int, target: str) -> Job:
    """Return a job whose workers are forked beside those of ``target``."""
    strategy = SchedulingStrategy(type="colocation", target=target, fork=True)
    return Job(role=role, replicas=replicas, scheduling_strategy=strategy)
