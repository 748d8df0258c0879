"""Explain why jobs do not fit. Pure, and cheap enough to run on every look at a busy cluster."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from helmsman.api.plan import Shortfall
from helmsman.api.scheduler import Job, SchedulingSpec
from helmsman.controller._placement.bin_packing import Packing
from helmsman.controller._placement.bundles import Demand, Split, accelerator_types, allowed_nodes, splits
from helmsman.controller._placement.resources import NodeState, Resources, missing_of, show, total_of

_SHOWN = 8


def shortfall_of(nodes: Sequence[NodeState], free: Sequence[Resources], jobs: Sequence[Job]) -> Shortfall:
    """Return the first reason found why these jobs do not fit into the free resources.

    The reasons, in this order: the selectors allow no node, a bundle is larger than any node, the jobs together ask for more
    than there is, or the free resources lie in pieces that are too small. A single job is named if it alone is too much.
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


def oversized_bundle(nodes: Sequence[NodeState], free: Sequence[Resources], jobs: Sequence[Job]) -> Shortfall | Split:
    """Return the first split whose bundles each fit some node, or why the bundle closest to fitting fits none."""
    nearest: tuple[float, Shortfall] | None = None
    for split in splits(jobs, nodes):
        found = next(filter(None, (_bundle(nodes, free, jobs, demand) for demand in split.demands)), None)
        if not found:
            return split
        if nearest is None or found[0] < nearest[0]:
            nearest = found
    assert nearest is not None
    return nearest[1]


def node_name(node: NodeState) -> str:
    """Return the name of a node for people."""
    return f"{node.hostname} ({node.address})" if node.hostname and node.hostname != node.address else node.address


# --- selectors ----------------------------------------------------------------------------------------------------------


def _selector(nodes: Sequence[NodeState], job: Job, spec: SchedulingSpec) -> Shortfall:
    asked, there, change = _unmet(spec, nodes) if nodes else ("", "the cluster has no nodes", "Add nodes")
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
    """Return the selectors up to the first that leaves no node, the values of the nodes left before it, and the fields to
    change. A selector that no node meets at all is returned alone."""
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
            return " and ".join(met), of_these + _values(selector, left), f"Change {' or '.join(dict.fromkeys(fields))}"
        left = now
    raise AssertionError("some node meets them all")


def _selectors(spec: SchedulingSpec) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield each selector of a spec as a field with its value, and its description."""
    for field, listed in (("nodelist", spec.nodelist), ("exclude", spec.exclude)):
        if listed:
            yield {field: listed}, f"{field} {_some(sorted(listed))}"
    if spec.accelerator_type:
        yield {"accelerator_type": spec.accelerator_type}, f"accelerator_type:{spec.accelerator_type}"
    for key, wanted in spec.node_labels.items():
        yield {"node_labels": {key: wanted}}, f"the label {key}={wanted!r}"


def _values(selector: Mapping[str, Any], nodes: Sequence[NodeState]) -> str:
    """Describe what nodes have of that which a selector asks for."""
    if "accelerator_type" in selector:
        return f"types there: {_some(accelerator_types(nodes)) or 'none that Ray knows by name'}"
    for key in selector.get("node_labels", ()):
        found = sorted({node.labels[key] for node in nodes if key in node.labels})
        return f"values of {key!r} there: {_some(found)}" if found else f"no node has the label {key!r}"
    return f"nodes there: {_some(sorted({node_name(node) for node in nodes}))}"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


# --- amounts ------------------------------------------------------------------------------------------------------------


def _bundle(
    nodes: Sequence[NodeState], free: Sequence[Resources], jobs: Sequence[Job], demand: Demand
) -> tuple[float, Shortfall] | None:
    """Return how far a bundle is from fitting the best node, relatively, and why; None when it fits one."""
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
    what = "a worker with" if demand.num_parts == 1 else f"an instance in {demand.num_parts} parts, one of them with"
    count = f"the {len(demand.nodes)} nodes that it may use" if len(demand.nodes) < len(nodes) else f"{len(nodes)} nodes"
    best_of = f"the best-fitting of {count}" if len(demand.nodes) > 1 else "the only node that it may use"
    name = node_name(nodes[index])
    return relative, Shortfall(
        role=job.role,
        kind="bundle",
        requested=f"{what} {show(wanted)}",
        best_node=name,
        observed=f"at most {show({name: free[index].get(name, 0.0) for name in wanted})} on {best_of}, {name}",
        missing=missing,
        missing_text=show(missing),
    )


def _together(free: Sequence[Resources], jobs: Sequence[Job], demands: Sequence[Demand], packing: Packing) -> Shortfall:
    """Explain why bundles that fit one by one do not fit together: in sum, or in the pieces that are free."""
    role = " and ".join(job.role for job in jobs)
    workers = " and ".join(f"{job.replicas} of {job.role!r}" for job in jobs)
    if len(jobs) == 1:
        workers = "1 worker" if jobs[0].replicas == 1 else f"{jobs[0].replicas} workers"
    wanted = total_of({name: amount * len(demand.replicas) for name, amount in demand.bundle} for demand in demands)
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
    sizes = "; ".join(f"{len(demand.replicas)} of {show(dict(demand.bundle))}" for demand in demands[:_SHOWN])
    more = f"; and {len(demands) - _SHOWN} other sizes" if len(demands) > _SHOWN else ""
    apart = " on nodes of their own" if any(demand.apart for demand in demands) else ""
    room, demand = min(((packing.room(each), each) for each in demands), key=lambda found: found[0] / len(found[1].replicas))
    pieces, short = "in pieces into which these do not all go", "room in one piece"
    if room < len(demand.replicas):
        pieces, short = f"which hold {room} of {show(dict(demand.bundle))}", f"room for {len(demand.replicas) - room} more"
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
