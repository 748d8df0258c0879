"""Chooses node and devices of every rank, or explains why it cannot; needs no Ray and no clock.

On Ray, the ids of devices are those that Ray grants on the chosen node.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from helmsman.api.plan import (
    Plan,
    PlannedBundle,
    PlannedInstance,
    PlannedRole,
    PlannedWorker,
    Shortfall,
)
from helmsman.api.scheduler import Job, SchedulingSpec
from helmsman.controller._placement.bin_packing import WORK, Packing, Placed, orders, pack, search
from helmsman.controller._placement.bundles import (
    Demand,
    Split,
    accelerator_types,
    allowed_nodes,
    by_instance,
    change_specs,
    splits,
)
from helmsman.controller._placement.placement import targets_first, tile
from helmsman.controller._placement.resources import (
    ACCELERATORS,
    ClusterSnapshot,
    NodeState,
    Resources,
    field_of,
    missing_of,
    show,
    total_of,
)

_SHOWN = 8


def shortfall_of(
    nodes: Sequence[NodeState], free: Sequence[Resources], jobs: Sequence[Job]
) -> Shortfall:
    """Return the first reason why these jobs do not fit into the free resources.

    Reasons are checked in this order: the selectors allow no node, a bundle is larger than any
    node, the jobs together exceed the resources, or the free resources are fragmented. A single job
    is named if it alone is too much.
    """
    split = oversized_bundle(nodes, free, jobs)
    if isinstance(split, Shortfall):
        return split
    packing = Packing(nodes, free, split.demands)
    for index, job in enumerate(jobs):
        demands = split.of_job(index)
        if not packing.may_fit(demands):
            return _together(free, [job], demands, packing)
    return _together(free, jobs, split.demands, packing)


def oversized_bundle(
    nodes: Sequence[NodeState], free: Sequence[Resources], jobs: Sequence[Job]
) -> Shortfall | Split:
    """Return the first split whose bundles each fit a node, or the shortfall closest to fitting."""
    nearest: tuple[float, Shortfall] | None = None
    for split in splits(jobs, nodes):
        found = next(
            filter(None, (_bundle(nodes, free, jobs, demand) for demand in split.demands)), None
        )
        if not found:
            return split
        if nearest is None or found[0] < nearest[0]:
            nearest = found
    assert nearest is not None
    return nearest[1]


def node_name(node: NodeState) -> str:
    return (
        f"{node.hostname} ({node.address})"
        if node.hostname and node.hostname != node.address
        else node.address
    )


# --- selectors ------------------------------------------------------------------------------------


def _selector(nodes: Sequence[NodeState], job: Job, spec: SchedulingSpec) -> Shortfall:
    asked, there, change = (
        _unmet(spec, nodes) if nodes else ("", "the cluster has no nodes", "Add nodes")
    )
    return Shortfall(
        role=job.role,
        kind="selector",
        requested=f"a node that meets {asked}" if asked else "a node",
        observed=f"none among {len(nodes)} nodes; {there}",
        missing={},
        missing_text=asked or "a node",
        change=change,
    )


def _unmet(spec: SchedulingSpec, nodes: Sequence[NodeState]) -> tuple[str, str, str]:
    """Return the unmet selectors, the values that nodes have instead, and the fields to change.

    These are the selectors up to the first that leaves no node, with the values of the nodes left
    before it. A selector that no node meets is returned alone.
    """
    met: list[str] = []
    fields: list[str] = []
    left = list(nodes)
    for selector, asked in _selectors(spec):
        of_these = f"of those that meet {' and '.join(met)}, " if met else ""
        met.append(asked)
        fields += [f"SchedulingSpec.{field}" for field in selector]
        alone = SchedulingSpec(**selector)
        if not allowed_nodes(alone, nodes):
            return asked, _values(selector, nodes), f"Change {fields[-1]}"
        if not (now := [left[index] for index in sorted(allowed_nodes(alone, left))]):
            return (
                " and ".join(met),
                of_these + _values(selector, left),
                f"Change {' or '.join(dict.fromkeys(fields))}",
            )
        left = now
    raise AssertionError("some node meets them all")


def _selectors(spec: SchedulingSpec) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield each selector of a spec as a field with its value, and its description."""
    for field, listed in (("nodelist", spec.nodelist), ("exclude", spec.exclude)):
        if listed:
            yield {field: listed}, f"{field} {_some(sorted(listed))}"
    if spec.accelerator_type:
        yield (
            {"accelerator_type": spec.accelerator_type},
            f"accelerator_type:{spec.accelerator_type}",
        )
    for key, wanted in spec.node_labels.items():
        yield {"node_labels": {key: wanted}}, f"the label {key}={wanted!r}"


def _values(selector: Mapping[str, Any], nodes: Sequence[NodeState]) -> str:
    """Describe the nodes' values for the property that a selector checks."""
    if "accelerator_type" in selector:
        return f"types there: {_some(accelerator_types(nodes)) or 'none that Ray knows by name'}"
    for key in selector.get("node_labels", ()):
        found = sorted({node.labels[key] for node in nodes if key in node.labels})
        return (
            f"values of {key!r} there: {_some(found)}"
            if found
            else f"no node has the label {key!r}"
        )
    return f"nodes there: {_some(sorted({node_name(node) for node in nodes}))}"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (
        f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    )


# --- amounts --------------------------------------------------------------------------------------


def _bundle(
    nodes: Sequence[NodeState], free: Sequence[Resources], jobs: Sequence[Job], demand: Demand
) -> tuple[float, Shortfall] | None:
    """Return a bundle's relative gap to the best node and the shortfall; None if it fits."""
    job, wanted = jobs[demand.job], dict(demand.bundle)
    if not demand.nodes:
        return math.inf, _selector(nodes, job, job.spec(demand.replicas[0]))
    best: tuple[int, float, int, Resources] | None = None
    for index in sorted(demand.nodes):
        missing = missing_of(wanted, free[index])
        if not missing:
            return None
        relative = sum(by / wanted[name] for name, by in missing.items())
        if best is None or (len(missing), relative) < best[:2]:
            best = len(missing), relative, index, missing
    assert best is not None
    _, relative, index, missing = best
    what = (
        "a worker with"
        if demand.num_parts == 1
        else f"an instance in {demand.num_parts} parts, one of them with"
    )
    count = (
        f"the {len(demand.nodes)} nodes that it may use"
        if len(demand.nodes) < len(nodes)
        else f"{len(nodes)} nodes"
    )
    best_of = (
        f"the best-fitting of {count}" if len(demand.nodes) > 1 else "the only node that it may use"
    )
    name = node_name(nodes[index])
    return relative, Shortfall(
        role=job.role,
        kind="bundle",
        requested=f"{what} {show(wanted)}",
        best_node=name,
        observed=f"at most {show({name: free[index].get(name, 0.0) for name in wanted})} on "
        f"{best_of}, {name}",
        missing=missing,
        missing_text=show(missing),
    )


def _together(
    free: Sequence[Resources], jobs: Sequence[Job], demands: Sequence[Demand], packing: Packing
) -> Shortfall:
    """Explain why bundles that fit individually do not fit together."""
    role = " and ".join(job.role for job in jobs)
    workers = " and ".join(f"{job.replicas} of {job.role!r}" for job in jobs)
    if len(jobs) == 1:
        workers = "1 worker" if jobs[0].replicas == 1 else f"{jobs[0].replicas} workers"
    wanted = total_of(
        {name: amount * len(demand.replicas) for name, amount in demand.bundle}
        for demand in demands
    )
    allowed = frozenset().union(*(demand.nodes for demand in demands))
    there = total_of(free[index] for index in sorted(allowed))
    observed = show({name: there.get(name, 0.0) for name in wanted})
    if missing := missing_of(wanted, there):
        return Shortfall(
            role=role,
            kind="together",
            requested=f"{show(wanted)} for {workers} together",
            observed=f"{observed} on {_num_nodes(len(allowed))}",
            missing=missing,
            missing_text=show(missing),
        )
    sizes = "; ".join(
        f"{len(demand.replicas)} of {show(dict(demand.bundle))}" for demand in demands[:_SHOWN]
    )
    more = f"; and {len(demands) - _SHOWN} other sizes" if len(demands) > _SHOWN else ""
    apart = " on nodes of their own" if any(demand.apart for demand in demands) else ""
    room, demand = min(
        ((packing.room(each), each) for each in demands),
        key=lambda found: found[0] / len(found[1].replicas),
    )
    pieces, short = "too fragmented for these bundles", "room in one piece"
    if room < len(demand.replicas):
        pieces = f"which hold {room} of {show(dict(demand.bundle))}"
        short = f"room for {len(demand.replicas) - room} more"
    return Shortfall(
        role=role,
        kind="pieces",
        requested=f"room for {sizes}{more}{apart}, for {workers} together",
        observed=f"{observed} on {_num_nodes(len(allowed))}, {pieces}{apart}",
        missing={},
        missing_text=short,
    )


def _num_nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes together"


_MIN_ATTEMPTS = 4
_PLENTY = 1e9
"""Amount assumed for a shared resource after each bundle was checked alone."""


def plan_jobs(
    snapshot: ClusterSnapshot,
    jobs: Sequence[Job],
    *,
    running: Sequence[PlannedRole] = (),
    of: Literal["available", "total"] = "available",
    work: int = WORK,
) -> Plan | Shortfall:
    """Plan a place for every rank of all of these jobs together.

    Instances that fit one node never span two. Ranks with equal specs follow the order of nodes and
    devices. No device is assigned twice, and whole nodes are left free where possible.

    Args:
        snapshot: State of the cluster.
        jobs: Jobs to place.
        running: Running roles that jobs may be colocated with, besides each other.
        of: Whether to use the free resources, or all resources as if the cluster were empty.
        work: Limit on the nodes and node classes that the planner may visit.

    Returns:
        The plan, or the reason why there is none.

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


def _find(
    nodes: Sequence[NodeState], free: Sequence[Resources], jobs: Sequence[Job], work: int
) -> tuple[Split, Placed] | None:
    """Try the heuristics on every split, at least a few times, and then the search."""
    candidates = list(splits(jobs, nodes))
    packing = Packing(
        nodes, free, [demand for split in candidates for demand in split.demands], work
    )
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


# --- ranks and devices ----------------------------------------------------------------------------


class _Devices:
    """Assigns the devices of each node, lowest id first, if the free ids are known."""

    def __init__(self, nodes: Sequence[NodeState], free: Sequence[Resources]) -> None:
        self._left = [
            self._free(node, resources) for node, resources in zip(nodes, free, strict=True)
        ]

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
    nodes: Sequence[NodeState],
    job: Job,
    kind: str,
    demands: Sequence[Demand],
    placed: Placed,
    devices: _Devices,
) -> PlannedRole:
    instances: dict[int, list[tuple[Demand, int]]] = {}
    """(demand, node index) for each part, by replica; identical replicas are exchanged to follow
    the order of nodes.
    """
    for parts in by_instance(demands):
        replicas = parts[0].replicas
        found = sorted(
            [placed[each.job, replica, each.part] for each in parts] for replica in replicas
        )
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
        groups = [
            PlannedInstance(
                index=0, bundles=tuple(own[0] for own in bundles), workers=tuple(workers)
            )
        ]
    else:
        groups = [
            PlannedInstance(index=index, bundles=own, workers=(worker,))
            for index, (own, worker) in enumerate(zip(bundles, workers, strict=True))
        ]
    return PlannedRole(role=job.role, accelerator=kind, instances=tuple(groups))


def _beside(job: Job, target: PlannedRole) -> PlannedRole:
    workers = tuple(worker for _, worker in tile(job, target.workers))
    instance = PlannedInstance(index=0, bundles=(), workers=workers)
    return PlannedRole(
        role=job.role, accelerator=target.accelerator, target=target.role, instances=(instance,)
    )
