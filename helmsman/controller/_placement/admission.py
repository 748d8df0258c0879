"""What is said of jobs that cannot be placed: never, or not now."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from helmsman.api import errors
from helmsman.api.plan import PlannedRole, Shortfall
from helmsman.api.scheduler import Job
from helmsman.controller._aio.deadline import Deadline
from helmsman.controller._placement.planner import plan_jobs
from helmsman.controller._placement.resources import ACCELERATORS, Resources, show, total_of
from helmsman.controller._placement.snapshot import ClusterSnapshot
from helmsman.controller._placement.suggestions import advise


def require_feasible(snapshot: ClusterSnapshot, jobs: Sequence[Job], running: Sequence[PlannedRole]) -> None:
    """Raise PlacementInfeasibleError when the cluster, even empty, could not hold all of these jobs."""
    outcome = plan_jobs(snapshot, jobs, running=running, of="total")
    if isinstance(outcome, Shortfall):
        told = advise(outcome, snapshot, jobs, running)
        raise errors.PlacementInfeasibleError(
            role=told.role,
            requested=told.requested,
            observed=told.observed,
            shortfall=told.missing_text,
            change=told.change,
            best_node=told.best_node,
        )


def busy(jobs: Sequence[Job], snapshot: ClusterSnapshot, holders: str, deadline: Deadline) -> errors.PlacementTimeoutError:
    """The error of jobs that would fit if others held less."""
    wanted = {name: amount for name, amount in asked_for(jobs).items() if name not in snapshot.shared}
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
