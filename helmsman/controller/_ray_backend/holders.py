"""Who holds what jobs wait for."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec

from helmsman.api.plan import Plan
from helmsman.api.scheduler import Job
from helmsman.controller._placement.admission import asked_for
from helmsman.controller._placement.planner import plan_jobs
from helmsman.controller._placement.resources import ACCELERATORS, Resources, show, total_of
from helmsman.controller._placement.snapshot import ClusterSnapshot
from helmsman.controller._ray_backend import cluster_state

_SHOWN = 8


def is_held_by_run(prefix: str, snapshot: ClusterSnapshot, jobs: Sequence[Job]) -> bool:
    """Whether groups whose names begin with ``prefix`` are in the way of the jobs, even if all others held nothing."""
    held: dict[str, Resources] = {}
    for group in cluster_state.group_rows():
        if group.name.startswith(f"{prefix}/") and group.state == "CREATED":
            for node_id, bundle in group.bundles:
                held[node_id] = total_of([held.get(node_id, {}), bundle])
    if not held:
        return False
    nodes = [
        msgspec.structs.replace(
            node,
            available={name: amount - held.get(node.node_id, {}).get(name, 0.0) for name, amount in node.total.items()},
        )
        for node in snapshot.nodes
    ]
    return not isinstance(plan_jobs(ClusterSnapshot(nodes=tuple(nodes)), jobs), Plan)


def describe_holders(prefix: str, jobs: Sequence[Job]) -> str:
    """Who holds something of what the jobs ask for, largest first; groups of the run ``prefix`` as its own."""
    wanted = asked_for(jobs).keys()
    drivers = cluster_state.jobs()
    found: list[tuple[float, str]] = []
    for group in cluster_state.group_rows():
        part = _part(total_of([bundle for _, bundle in group.bundles]), wanted)
        if group.state == "CREATED" and part:
            own = group.name.startswith(f"{prefix}/")
            name = group.name.removeprefix(f"{prefix}/") if own else group.name or f"placement group {group.id[:12]}"
            whose = "this run itself, which delete_workers frees" if own else drivers.get(group.job_id, f"job {group.job_id}")
            found.append((_weight(part), f"{name} of {whose} ({show(part)})"))
    for actor in cluster_state.actor_rows():
        if part := _part(actor.resources, wanted):
            whose = drivers.get(actor.job_id, f"job {actor.job_id}")
            found.append((_weight(part), f"actor {actor.name}, pid {actor.pid}, of {whose} ({show(part)})"))
    found.sort(key=lambda holder: -holder[0])
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return "; ".join(text for _, text in found[:_SHOWN]) + more or "tasks, or groups and actors that end just now"


def _part(resources: Mapping[str, float], wanted: Collection[str]) -> Resources:
    # A trace of CPU, which every bundle has that asks for nothing else, is in nobody's way.
    return {name: amount for name, amount in resources.items() if name in wanted and amount >= 0.01}


def _weight(resources: Resources) -> float:
    """Accelerators before anything else."""
    units = {**dict.fromkeys(ACCELERATORS, 1e3), "memory": 1e-9}
    return sum(amount * units.get(name, 1.0) for name, amount in resources.items())
