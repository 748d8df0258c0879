"""From a snapshot of a cluster and jobs to a place for every rank, or the reason why there is none. Pure: no Ray, no clock."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from helmsman.api.plan import Plan, PlannedBundle, PlannedInstance, PlannedRole, PlannedWorker, Shortfall
from helmsman.api.scheduler import Job
from helmsman.controller._placement.bin_packing import Packing, Placed, Work
from helmsman.controller._placement.bundles import Demand, Way, ways
from helmsman.controller._placement.colocation import targets_first, tile
from helmsman.controller._placement.diagnosis import oversized_bundle, shortfall_of
from helmsman.controller._placement.heuristics import lay
from helmsman.controller._placement.resources import ACCELERATORS, Resources, field_of
from helmsman.controller._placement.search import orders, search
from helmsman.controller._placement.snapshot import ClusterSnapshot, NodeState

Of = Literal["available", "total"]
_MIN_ATTEMPTS = 4
_PLENTY = 1e9
"""Of a shared resource, once each bundle alone has been found to fit."""


def plan_jobs(
    snapshot: ClusterSnapshot,
    jobs: Sequence[Job],
    *,
    running: Sequence[PlannedRole] = (),
    of: Of = "available",
    work: Work | None = None,
) -> Plan | Shortfall:
    """A place for every rank of all of these jobs together.

    Single-node instances never straddle; ranks stand in the order of nodes and devices, as far as their specs are equal; no
    device is given twice; whole nodes are left free where they can be.

    Args:
        running: roles that jobs may be colocated with, besides each other.
        of: what is free now, or the whole cluster as if it were empty.
        work: what the trying is charged to, where several calls share a limit.
    Returns: the plan, or why there is none.
    Raises: RoleNotFoundError (a target that is neither among the jobs nor running), InvalidSpecError (a colocation that does
    not tile).
    """
    colocated = targets_first(jobs, [role.role for role in running])
    separate = [job for job in jobs if job.scheduling_strategy.type == "separation"]
    free = [dict(node.available if of == "available" else node.total) for node in snapshot.nodes]
    if snapshot.shared:
        oversized = oversized_bundle(snapshot.nodes, free, separate)
        if isinstance(oversized, Shortfall):
            return oversized
        separate = [_without(job, snapshot.shared) for job in separate]
        free = [{**amounts, **dict.fromkeys(snapshot.shared, _PLENTY)} for amounts in free]
    found = _find(snapshot.nodes, free, separate, work or Work())
    if found is None:
        return shortfall_of(snapshot.nodes, free, separate)
    way, placed = found
    roles = {role.role: role for role in _roles(snapshot.nodes, free, separate, way, placed)}
    known = {role.role: role for role in running} | roles
    for job in colocated:
        roles[job.role] = known[job.role] = _beside(job, known[str(job.scheduling_strategy.target)])
    return Plan(roles=tuple(roles[job.role] for job in jobs))


def _without(job: Job, names: frozenset[str]) -> Job:
    """The job without what it asks of these resources."""
    fields: dict[str, Any] = {field_of(name).rpartition(".")[2]: 0 for name in names}
    return msgspec.structs.replace(job, tasks=[msgspec.structs.replace(spec, **fields) for spec in job.tasks])


def _find(nodes: Sequence[NodeState], free: Sequence[Resources], jobs: Sequence[Job], work: Work) -> tuple[Way, Placed] | None:
    """All ways by the quick rules first, then by the search; a few attempts are made however little work is left."""
    all_ways = list(ways(jobs, nodes))
    packing = Packing(nodes, free, [demand for way in all_ways for demand in way.demands], work)
    possible = [way for way in all_ways if packing.may_fit(way.demands)]
    attempts = ((way, order) for way in possible for order in orders(jobs, way, len(nodes)))
    for number, (way, order) in enumerate(attempts):
        if number >= _MIN_ATTEMPTS and work.left <= 0:
            return None
        if (placed := lay(packing, jobs, way, order)) is not None:
            return way, placed
    for number, way in enumerate(possible):
        if (placed := search(packing, way, work.left // (len(possible) - number))) is not None:
            return way, placed
    return None


# --- ranks and devices --------------------------------------------------------------------------------------------------


def _roles(
    nodes: Sequence[NodeState], free: Sequence[Resources], jobs: Sequence[Job], way: Way, placed: Placed
) -> list[PlannedRole]:
    granted: dict[int, dict[tuple[int, int, int], int]] = {}
    """Of each job: (job, replica, part) -> node, with like replicas exchanged so that they stand in the order of nodes."""
    demands: defaultdict[int, list[Demand]] = defaultdict(list)
    for demand in way.demands:
        demands[demand.job].append(demand)
    for index in range(len(jobs)):
        granted[index] = {}
        for head in demands[index]:
            if head.part:
                continue
            parts = [demand for demand in demands[index] if demand.replicas == head.replicas]
            instances = sorted(tuple(placed[index, replica, demand.part] for demand in parts) for replica in head.replicas)
            for replica, instance in zip(head.replicas, instances, strict=True):
                for demand, node in zip(parts, instance, strict=True):
                    granted[index][index, replica, demand.part] = node
    devices = _Devices(nodes, free)
    return [_role(nodes, job, way.kinds[index], demands[index], granted[index], devices) for index, job in enumerate(jobs)]


class _Devices:
    """Hands out the devices of each node, lowest first, as far as it is known which are free."""

    def __init__(self, nodes: Sequence[NodeState], free: Sequence[Resources]) -> None:
        self._left: list[list[str] | None] = [self._free(node, free[index]) for index, node in enumerate(nodes)]

    @staticmethod
    def _free(node: NodeState, free: Resources) -> list[str] | None:
        total = int(sum(node.total.get(name, 0.0) for name in ACCELERATORS))
        num_free = int(sum(free.get(name, 0.0) for name in ACCELERATORS) + 1e-6)
        if num_free == total and node.free_devices is None:
            return [str(index) for index in range(total)]
        if node.free_devices is not None and len(node.free_devices) == num_free:
            return list(node.free_devices)
        return None

    def take(self, node: int, count: int) -> tuple[str, ...]:
        left = self._left[node]
        if left is None or not count:
            return ()
        taken, self._left[node] = left[:count], left[count:]
        return tuple(taken)


def _role(
    nodes: Sequence[NodeState],
    job: Job,
    kind: str,
    demands: Sequence[Demand],
    granted: Mapping[tuple[int, int, int], int],
    devices: _Devices,
) -> PlannedRole:
    parts_of: dict[int, list[Demand]] = defaultdict(list)
    for demand in demands:
        for replica in demand.replicas:
            parts_of[replica].append(demand)
    shared = job.spec(0).ray_placement_strategy == "shared"
    bundles: list[list[PlannedBundle]] = []
    workers: list[PlannedWorker] = []
    for replica in range(job.replicas):
        own = []
        for demand in parts_of[replica]:
            node = granted[demand.job, replica, demand.part]
            own.append(
                PlannedBundle(
                    node_id=nodes[node].node_id,
                    node=nodes[node].address,
                    resources=dict(demand.bundle),
                    devices=devices.take(node, demand.num_devices),
                )
            )
        bundles.append(own)
        workers.append(
            PlannedWorker(
                worker_id=f"{job.role}/{replica}",
                node_id=own[0].node_id,
                node=own[0].node,
                bundle=replica if shared else 0,
                num_devices=parts_of[replica][0].num_devices,
                devices=own[0].devices,
                num_ports=job.spec(replica).port_count,
            )
        )
    if shared:
        instances = [PlannedInstance(index=0, bundles=tuple(own[0] for own in bundles), workers=tuple(workers))]
    else:
        instances = [
            PlannedInstance(index=replica, bundles=tuple(bundles[replica]), workers=(workers[replica],))
            for replica in range(job.replicas)
        ]
    return PlannedRole(role=job.role, accelerator=kind, instances=tuple(instances))


def _beside(job: Job, target: PlannedRole) -> PlannedRole:
    workers = [
        PlannedWorker(
            worker_id=f"{job.role}/{index}",
            node_id=share.node_id,
            node=share.node,
            num_devices=share.num_devices,
            devices=share.devices,
            num_ports=job.spec(index).port_count,
        )
        for index, share in enumerate(tile(job, target.workers))
    ]
    instance = PlannedInstance(index=0, bundles=(), workers=tuple(workers))
    return PlannedRole(role=job.role, accelerator=target.accelerator, target=target.role, instances=(instance,))
