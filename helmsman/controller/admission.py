"""What is said of jobs that cannot be placed: never, or not now."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from helmsman.api import errors
from helmsman.api.plan import PlannedRole, Shortfall
from helmsman.api.platform_kinds import PLATFORMS
from helmsman.api.scheduler import Job
from helmsman.controller.cluster_snapshot import ClusterSnapshot, Resources
from helmsman.controller.deadline import Deadline
from helmsman.controller.planner import plan_jobs
from helmsman.controller.shortfall import explain

ACCELERATORS = tuple(info.ray_resource for info in PLATFORMS.values() if info.visibility_env_var)
"""Ray's names of what SchedulingSpec.gpu counts."""


def require_feasible(snapshot: ClusterSnapshot, jobs: Sequence[Job], running: Sequence[PlannedRole]) -> None:
    """Raise PlacementInfeasibleError when the cluster, even empty, could not hold all of these jobs."""
    outcome = plan_jobs(snapshot, jobs, running=running, of="total")
    if isinstance(outcome, Shortfall):
        raise infeasible(explain(outcome, snapshot, jobs, running=running))


def infeasible(shortfall: Shortfall) -> errors.PlacementInfeasibleError:
    """The error of a shortfall of the whole cluster."""
    return errors.PlacementInfeasibleError(
        role=shortfall.role,
        requested=shortfall.requested,
        observed=shortfall.observed,
        shortfall=str(shortfall.missing),
        setting=shortfall.change,
    )


def busy(jobs: Sequence[Job], snapshot: ClusterSnapshot, holders: str, deadline: Deadline) -> errors.PlacementTimeoutError:
    """The error of jobs that would fit if others held less."""
    wanted = asked_for(jobs)
    free = total_of(node.available for node in snapshot.nodes)
    kinds = [name for name in ACCELERATORS if any(node.total.get(name) for node in snapshot.nodes)] or ACCELERATORS[:1]
    return errors.PlacementTimeoutError(
        role=" and ".join(job.role for job in jobs),
        requested=show(_of_kinds(wanted, kinds)),
        free=show({name: free.get(name, 0.0) for name in _of_kinds(wanted, kinds)}),
        holders=holders,
        elapsed_s=deadline.elapsed_s,
        limit_s=deadline.limit_s,
    )


def _of_kinds(wanted: Mapping[str, float], kinds: Sequence[str]) -> Resources:
    return {name: amount for name, amount in wanted.items() if name not in ACCELERATORS or name in kinds}


def asked_for(jobs: Iterable[Job]) -> Resources:
    """What jobs ask for together, by Ray's names; accelerators under the name of every kind, since any will do."""
    wanted = []
    for job in jobs:
        for index in range(job.replicas):
            spec = job.spec(index)
            wanted.append(
                {**dict.fromkeys(ACCELERATORS, spec.gpu), "CPU": spec.cpu, "memory": spec.mem * 1e9, **spec.resources}
            )
    return {name: amount for name, amount in total_of(wanted).items() if amount}


def total_of(parts: Iterable[Mapping[str, float]]) -> Resources:
    """The sum of resources by name."""
    total: Resources = {}
    for part in parts:
        for name, amount in part.items():
            total[name] = total.get(name, 0.0) + amount
    return total


def show(resources: Mapping[str, float]) -> str:
    """Resources for people: '8 GPU, 64 CPU, 100 GB memory'."""
    order = sorted(resources, key=lambda name: (name not in ACCELERATORS, name == "memory"))
    return ", ".join(
        f"{resources[name] / 1e9:.4g} GB memory" if name == "memory" else f"{resources[name]:g} {name}" for name in order
    )
