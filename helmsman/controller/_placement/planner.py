"""Plan a place for every rank from a snapshot of a cluster, or report why there is none. Pure: no Ray, no clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from helmsman.api.plan import Plan, PlannedBundle, PlannedInstance, PlannedRole, PlannedWorker, Shortfall
from helmsman.api.scheduler import Job
from helmsman.controller._placement.bin_packing import WORK, Packing, Placed, orders, pack, search
from helmsman.controller._placement.bundles import Demand, Split, by_instance, change_specs, splits
from helmsman.controller._placement.diagnosis import oversized_bundle, shortfall_of
from helmsman.controller._placement.placement import targets_first, tile
from helmsman.controller._placement.resources import ACCELERATORS, ClusterSnapshot, NodeState, Resources, field_of

_MIN_ATTEMPTS = 4
_PLENTY = 1e9
"""Assumed amount of a shared resource, once every bundle fits it alone."""


def plan_jobs(
    snapshot: ClusterSnapshot,
    jobs: Sequence[Job],
    *,
    running: Sequence[PlannedRole] = (),
    of: Literal["available", "total"] = "available",
    work: int = WORK,
) -> Plan | Shortfall:
    """Plan a place for every rank of all of these jobs together.

    Instances that fit one node never straddle two. Ranks with equal specs follow the order of nodes and devices. No device is
    given twice, and whole nodes are left free where possible.

    Args:
        snapshot: the cluster.
        jobs: the jobs to place, all or none of them.
        running: roles that jobs may be colocated with, besides each other.
        of: whether to use the free resources, or all resources as if the cluster were empty.
        work: number of nodes and classes of nodes that the planner may look at.

    Returns:
        The plan, or why there is none.

    Raises:
        RoleNotFoundError: A target is neither among the jobs nor running.
        InvalidSpecError: A colocation does not tile.
    """
    colocated = targets_first(jobs, [role.role for role in running])
    separate = [job for job in jobs if job.scheduling_strategy.type == "separation"]
    free = [dict(node.available if of == "available" else node.total) for node in snapshot.nodes]
    if snapshot.shared:
        oversized = oversized_bundle(snapshot.nodes, free, separate)
        if isinstance(oversized, Shortfall):
            return oversized
        nothing = {field_of(name).rpartition(".")[2]: 0 for name in snapshot.shared}
        separate = [change_specs(job, **nothing) for job in separate]
        free = [{**amounts, **dict.fromkeys(snapshot.shared, _PLENTY)} for amounts in free]
    found = _find(snapshot.nodes, free, separate, work)
    if found is None:
        return shortfall_of(snapshot.nodes, free, separate)
    split, placed = found
    devices = _Devices(snapshot.nodes, free)
    roles = {
        job.role: _role(snapshot.nodes, job, kind, split.of_job(index), placed, devices)
        for index, (job, kind) in enumerate(zip(separate, split.kinds, strict=True))
    }
    known = {role.role: role for role in running} | roles
    for job in colocated:
        roles[job.role] = known[job.role] = _beside(job, known[str(job.scheduling_strategy.target)])
    return Plan(roles=tuple(roles[job.role] for job in jobs))


def _find(nodes: Sequence[NodeState], free: Sequence[Resources], jobs: Sequence[Job], work: int) -> tuple[Split, Placed] | None:
    """Try the quick rules on every split, then the search. A few attempts are made even without work left."""
    candidates = list(splits(jobs, nodes))
    packing = Packing(nodes, free, [demand for split in candidates for demand in split.demands], work)
    possible = [split for split in candidates if packing.may_fit(split.demands)]
    attempts = ((each, order) for each in possible for order in orders(jobs, each))
    for number, (split, order) in enumerate(attempts):
        if number >= _MIN_ATTEMPTS and packing.work <= 0:
            return None
        if (placed := pack(packing, jobs, split, order)) is not None:
            return split, placed
    for number, split in enumerate(possible):
        if (placed := search(packing, split, packing.work // (len(possible) - number))) is not None:
            return split, placed
    return None


# --- ranks and devices --------------------------------------------------------------------------------------------------


class _Devices:
    """Hands out the devices of each node, lowest id first, where the free ids are known."""

    def __init__(self, nodes: Sequence[NodeState], free: Sequence[Resources]) -> None:
        self._left = [self._free(node, resources) for node, resources in zip(nodes, free, strict=True)]

    @staticmethod
    def _free(node: NodeState, free: Resources) -> list[str] | None:
        total = int(sum(node.total.get(name, 0.0) for name in ACCELERATORS))
        num_free = int(sum(free.get(name, 0.0) for name in ACCELERATORS) + 1e-6)
        if node.free_devices is None:
            return [str(index) for index in range(total)] if num_free == total else None
        return list(node.free_devices) if len(node.free_devices) == num_free else None

    def take(self, node: int, count: int) -> tuple[str, ...]:
        left = self._left[node]
        if left is None or not count:
            return ()
        taken, self._left[node] = left[:count], left[count:]
        return tuple(taken)


def _role(
    nodes: Sequence[NodeState], job: Job, kind: str, demands: Sequence[Demand], placed: Placed, devices: _Devices
) -> PlannedRole:
    instances: dict[int, list[tuple[Demand, int]]] = {}
    """(demand, index of a node) for each part, by replica. Identical replicas are exchanged to follow the order of nodes."""
    for parts in by_instance(demands):
        replicas = parts[0].replicas
        found = sorted([placed[each.job, replica, each.part] for each in parts] for replica in replicas)
        for replica, chosen in zip(replicas, found, strict=True):
            instances[replica] = list(zip(parts, chosen, strict=True))
    shared = job.spec(0).ray_placement_strategy == "shared"
    bundles: list[tuple[PlannedBundle, ...]] = []
    workers: list[PlannedWorker] = []
    for replica in range(job.replicas):
        own = tuple(
            PlannedBundle(
                node_id=nodes[node].node_id,
                node=nodes[node].address,
                resources=dict(demand.bundle),
                devices=devices.take(node, demand.num_devices),
            )
            for demand, node in instances[replica]
        )
        bundles.append(own)
        workers.append(
            PlannedWorker(
                worker_id=f"{job.role}/{replica}",
                node_id=own[0].node_id,
                node=own[0].node,
                bundle=replica if shared else 0,
                num_devices=instances[replica][0][0].num_devices,
                devices=own[0].devices,
                num_ports=job.spec(replica).port_count,
            )
        )
    if shared:
        groups = [PlannedInstance(index=0, bundles=tuple(own[0] for own in bundles), workers=tuple(workers))]
    else:
        groups = [
            PlannedInstance(index=index, bundles=own, workers=(worker,))
            for index, (own, worker) in enumerate(zip(bundles, workers, strict=True))
        ]
    return PlannedRole(role=job.role, accelerator=kind, instances=tuple(groups))


def _beside(job: Job, target: PlannedRole) -> PlannedRole:
    workers = tuple(worker for _, worker in tile(job, target.workers))
    instance = PlannedInstance(index=0, bundles=(), workers=workers)
    return PlannedRole(role=job.role, accelerator=target.accelerator, target=target.role, instances=(instance,))
