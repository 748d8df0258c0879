"""Why jobs do not fit: what is missing where. Pure, and cheap enough to be asked on every look at a busy cluster."""

from __future__ import annotations

from collections.abc import Sequence

from helmsman.api.plan import Shortfall
from helmsman.api.scheduler import Job, SchedulingSpec
from helmsman.controller.cluster_snapshot import NodeState
from helmsman.controller.demand import Demand, accelerator_types, has_accelerator_type, has_labels, ways
from helmsman.controller.resources import Resources, missing_of, show, total_of

_SHOWN = 8


def shortfall_of(nodes: Sequence[NodeState], free: Sequence[Resources], jobs: Sequence[Job]) -> Shortfall:
    """The first reason found why these jobs do not fit into what is free: no node is allowed, a bundle is larger than any, all
    together are more than there is, or it lies in pieces that are too small."""
    way = next(ways(jobs, nodes))
    for demand in way.demands:
        found = _selector(nodes, jobs, demand) or _bundle(nodes, free, jobs, demand)
        if found is not None:
            return found
    for index in range(len(jobs)):
        found = _together(nodes, free, jobs[index : index + 1], [demand for demand in way.demands if demand.job == index])
        if found is not None:
            return found
    return _together(nodes, free, jobs, way.demands) or _pieces(nodes, free, jobs, way.demands)


def node_name(node: NodeState) -> str:
    """A node, for people."""
    return f"{node.hostname} ({node.address})" if node.hostname and node.hostname != node.address else node.address


def _selector(nodes: Sequence[NodeState], jobs: Sequence[Job], demand: Demand) -> Shortfall | None:
    if demand.nodes:
        return None
    spec = jobs[demand.job].spec(demand.replicas[0])
    asked, there, change = _unmet(spec, nodes)
    return Shortfall(
        role=jobs[demand.job].role,
        kind="selector",
        requested=f"a node with {asked}",
        observed=f"none among {len(nodes)} nodes; {there}",
        missing={},
        missing_text=asked,
        change=change,
    )


def _unmet(spec: SchedulingSpec, nodes: Sequence[NodeState]) -> tuple[str, str, str]:
    """What no node meets, what there is instead, and the field to change."""
    if not nodes:
        return "anything", "the cluster has no nodes", "Add nodes"
    if spec.accelerator_type and not any(has_accelerator_type(node, spec.accelerator_type) for node in nodes):
        there = ", ".join(accelerator_types(nodes)) or "none that Ray knows by name"
        return f"accelerator_type:{spec.accelerator_type}", f"types there: {there}", "Change SchedulingSpec.accelerator_type"
    for key, wanted in spec.node_labels.items():
        if not any(has_labels(node.labels, {key: wanted}) for node in nodes):
            values = sorted({node.labels[key] for node in nodes if key in node.labels})
            there = f"values of {key!r} there: {_some(values)}" if values else f"no node has the label {key!r}"
            return f"the label {key}={wanted!r}", there, "Change SchedulingSpec.node_labels"
    names = sorted({node_name(node) for node in nodes})
    parts = [
        f"{field} {_some(sorted(value))}" for field, value in (("nodelist", spec.nodelist), ("exclude", spec.exclude)) if value
    ]
    if spec.node_labels:
        parts.append(f"the labels {', '.join(f'{key}={value!r}' for key, value in spec.node_labels.items())}")
    if spec.accelerator_type:
        parts.append(f"accelerator_type:{spec.accelerator_type}")
    fields = [field for field in ("nodelist", "exclude", "node_labels", "accelerator_type") if getattr(spec, field)]
    return (
        " and ".join(parts),
        f"nodes there: {_some(names)}",
        f"Change {' or '.join(f'SchedulingSpec.{field}' for field in fields)}",
    )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _bundle(nodes: Sequence[NodeState], free: Sequence[Resources], jobs: Sequence[Job], demand: Demand) -> Shortfall | None:
    wanted = dict(demand.bundle)
    best: tuple[float, int, Resources] | None = None
    for index in sorted(demand.nodes):
        missing = missing_of(wanted, free[index])
        if not missing:
            return None
        relative = sum(by / wanted[name] for name, by in missing.items())
        if best is None or (len(missing), relative) < (len(best[2]), best[0]):
            best = relative, index, missing
    assert best is not None
    _, index, missing = best
    what = "a worker with" if demand.num_parts == 1 else f"an instance in {demand.num_parts} parts, one of them with"
    count = f"the {len(demand.nodes)} nodes that it may use" if len(demand.nodes) < len(nodes) else f"{len(nodes)} nodes"
    best_of = f"the best-fitting of {count}" if len(demand.nodes) > 1 else "the only node that it may use"
    return Shortfall(
        role=jobs[demand.job].role,
        kind="bundle",
        requested=f"{what} {show(wanted)}",
        best_node=node_name(nodes[index]),
        observed=f"at most {show({name: free[index].get(name, 0.0) for name in wanted})} on {best_of}, "
        f"{node_name(nodes[index])}",
        missing=missing,
        missing_text=show(missing),
    )


def _together(
    nodes: Sequence[NodeState], free: Sequence[Resources], jobs: Sequence[Job], demands: Sequence[Demand]
) -> Shortfall | None:
    allowed = sorted(frozenset().union(*(demand.nodes for demand in demands)))
    wanted = total_of({name: amount * len(demand.replicas) for name, amount in demand.bundle} for demand in demands)
    there = total_of(free[index] for index in allowed)
    missing = missing_of(wanted, there)
    if not missing:
        return None
    observed = show({name: there.get(name, 0.0) for name in wanted})
    return Shortfall(
        role=_roles(jobs),
        kind="together",
        requested=f"{show(wanted)} for {_workers(jobs)} together",
        observed=f"{observed} on {_num_nodes(len(allowed))}",
        missing=missing,
        missing_text=show(missing),
    )


def _pieces(nodes: Sequence[NodeState], free: Sequence[Resources], jobs: Sequence[Job], demands: Sequence[Demand]) -> Shortfall:
    """What is there would do in sum, but not as it lies."""
    sizes = "; ".join(f"{len(demand.replicas)} of {show(dict(demand.bundle))}" for demand in demands[:_SHOWN])
    apart = " on nodes of their own" if any(demand.apart for demand in demands) else ""
    wanted = total_of({name: amount * len(demand.replicas) for name, amount in demand.bundle} for demand in demands)
    there = total_of(free)
    return Shortfall(
        role=_roles(jobs),
        kind="pieces",
        requested=f"room for {sizes}{apart}, for {_workers(jobs)} together",
        observed=f"{show({name: there.get(name, 0.0) for name in wanted})} on {_num_nodes(len(nodes))}, in pieces "
        "into which these do not all go",
        missing={},
        missing_text="room in one piece",
    )


def _num_nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes together"


def _roles(jobs: Sequence[Job]) -> str:
    return " and ".join(job.role for job in jobs)


def _workers(jobs: Sequence[Job]) -> str:
    if len(jobs) == 1:
        return f"{jobs[0].replicas} workers"
    return " and ".join(f"{job.replicas} of {job.role!r}" for job in jobs)
