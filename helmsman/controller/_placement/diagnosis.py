"""Why jobs do not fit: what is missing where. Pure, and cheap enough to be asked on every look at a busy cluster."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence

from helmsman.api.plan import Shortfall
from helmsman.api.scheduler import Job, SchedulingSpec
from helmsman.controller._placement.bin_packing import Packing, Work
from helmsman.controller._placement.bundles import Demand, Way, accelerator_types, allowed_nodes, ways
from helmsman.controller._placement.resources import Resources, missing_of, show, total_of
from helmsman.controller._placement.snapshot import NodeState

_SHOWN = 8


def shortfall_of(nodes: Sequence[NodeState], free: Sequence[Resources], jobs: Sequence[Job]) -> Shortfall:
    """The first reason found why these jobs do not fit into what is free: no node is allowed, a bundle is larger than any, all
    together are more than there is, or it lies in pieces that are too small."""
    found = oversized_bundle(nodes, free, jobs)
    return found if isinstance(found, Shortfall) else _several(nodes, free, jobs, found)


def oversized_bundle(nodes: Sequence[NodeState], free: Sequence[Resources], jobs: Sequence[Job]) -> Shortfall | Way:
    """Why a bundle of these jobs fits no node even alone; the first way in which each of them fits one, where there is one."""
    nearest: tuple[float, Shortfall] | None = None
    for way in ways(jobs, nodes):
        found = [each for demand in way.demands if (each := _single(nodes, free, jobs, demand)) is not None]
        if not found:
            return way
        if nearest is None or found[0][0] < nearest[0]:
            nearest = found[0]
    assert nearest is not None
    return nearest[1]


def _single(
    nodes: Sequence[NodeState], free: Sequence[Resources], jobs: Sequence[Job], demand: Demand
) -> tuple[float, Shortfall] | None:
    """Why one bundle finds no place, and how far it is from one, relatively."""
    return _bundle(nodes, free, jobs, demand) if demand.nodes else (math.inf, _selector(nodes, jobs, demand))


def _several(nodes: Sequence[NodeState], free: Sequence[Resources], jobs: Sequence[Job], way: Way) -> Shortfall:
    """Why bundles that fit one by one do not fit together; of one job if that alone is too much."""
    packing = Packing(nodes, free, way.demands, Work())
    for index in range(len(jobs)):
        demands = [demand for demand in way.demands if demand.job == index]
        if not packing.may_fit(demands):
            own = jobs[index : index + 1]
            return _together(nodes, free, own, demands) or _pieces(nodes, free, own, demands, packing)
    return _together(nodes, free, jobs, way.demands) or _pieces(nodes, free, jobs, way.demands, packing)


def node_name(node: NodeState) -> str:
    """A node, for people."""
    return f"{node.hostname} ({node.address})" if node.hostname and node.hostname != node.address else node.address


def _selector(nodes: Sequence[NodeState], jobs: Sequence[Job], demand: Demand) -> Shortfall:
    asked, there, change = _unmet(jobs[demand.job].spec(demand.replicas[0]), nodes)
    return Shortfall(
        role=jobs[demand.job].role,
        kind="selector",
        requested=f"a node that meets {asked}" if asked else "a node",
        observed=f"none among {len(nodes)} nodes; {there}",
        missing={},
        missing_text=asked or "a node",
        change=change,
    )


def _unmet(spec: SchedulingSpec, nodes: Sequence[NodeState]) -> tuple[str, str, str]:
    """The selectors up to the first that none of the nodes left by those before it meets, what these have instead, and the
    fields to change."""
    if not nodes:
        return "", "the cluster has no nodes", "Add nodes"
    met: list[str] = []
    fields: list[str] = []
    left = list(nodes)
    for field, selector, asked, there in _selectors(spec):
        of_these = f"of those that meet {' and '.join(met)}, " if met else ""
        met.append(asked)
        fields.append(f"SchedulingSpec.{field}")
        if not allowed_nodes(selector, nodes):  # whatever the others say
            return asked, there(nodes), f"Change {fields[-1]}"
        if not (now := [left[index] for index in sorted(allowed_nodes(selector, left))]):
            return " and ".join(met), of_these + there(left), f"Change {' or '.join(dict.fromkeys(fields))}"
        left = now
    raise AssertionError("some node meets them all")


def _selectors(spec: SchedulingSpec) -> Iterator[tuple[str, SchedulingSpec, str, Callable[[Sequence[NodeState]], str]]]:
    """Each selector alone: its field, a spec with nothing else, what it asks for, and what nodes have of it."""

    def names(nodes: Sequence[NodeState]) -> str:
        return f"nodes there: {_some(sorted({node_name(node) for node in nodes}))}"

    def types(nodes: Sequence[NodeState]) -> str:
        return f"types there: {_some(accelerator_types(nodes)) or 'none that Ray knows by name'}"

    def values(key: str, nodes: Sequence[NodeState]) -> str:
        found = sorted({node.labels[key] for node in nodes if key in node.labels})
        return f"values of {key!r} there: {_some(found)}" if found else f"no node has the label {key!r}"

    if spec.nodelist:
        yield "nodelist", SchedulingSpec(nodelist=spec.nodelist), f"nodelist {_some(sorted(spec.nodelist))}", names
    if spec.exclude:
        yield "exclude", SchedulingSpec(exclude=spec.exclude), f"exclude {_some(sorted(spec.exclude))}", names
    if spec.accelerator_type:
        asked = f"accelerator_type:{spec.accelerator_type}"
        yield "accelerator_type", SchedulingSpec(accelerator_type=spec.accelerator_type), asked, types
    for key, wanted in spec.node_labels.items():
        asked = f"the label {key}={wanted!r}"
        yield "node_labels", SchedulingSpec(node_labels={key: wanted}), asked, functools.partial(values, key)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _bundle(
    nodes: Sequence[NodeState], free: Sequence[Resources], jobs: Sequence[Job], demand: Demand
) -> tuple[float, Shortfall] | None:
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
    relative, index, missing = best
    what = "a worker with" if demand.num_parts == 1 else f"an instance in {demand.num_parts} parts, one of them with"
    count = f"the {len(demand.nodes)} nodes that it may use" if len(demand.nodes) < len(nodes) else f"{len(nodes)} nodes"
    best_of = f"the best-fitting of {count}" if len(demand.nodes) > 1 else "the only node that it may use"
    return relative, Shortfall(
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


def _pieces(
    nodes: Sequence[NodeState], free: Sequence[Resources], jobs: Sequence[Job], demands: Sequence[Demand], packing: Packing
) -> Shortfall:
    """What is there would do in sum, but not as it lies."""
    sizes = "; ".join(f"{len(demand.replicas)} of {show(dict(demand.bundle))}" for demand in demands[:_SHOWN])
    more = f"; and {len(demands) - _SHOWN} other sizes" if len(demands) > _SHOWN else ""
    apart = " on nodes of their own" if any(demand.apart for demand in demands) else ""
    wanted = total_of({name: amount * len(demand.replicas) for name, amount in demand.bundle} for demand in demands)
    there = total_of(free)
    packing.reset()
    rooms = [(demand, packing.room(demand)) for demand in demands]
    demand, room = min(rooms, key=lambda each: each[1] / len(each[0].replicas))
    if room < len(demand.replicas):
        pieces, short = f"which hold {room} of {show(dict(demand.bundle))}", f"room for {len(demand.replicas) - room} more"
    else:
        pieces, short = "in pieces into which these do not all go", "room in one piece"
    return Shortfall(
        role=_roles(jobs),
        kind="pieces",
        requested=f"room for {sizes}{more}{apart}, for {_workers(jobs)} together",
        observed=f"{show({name: there.get(name, 0.0) for name in wanted})} on {_num_nodes(len(nodes))}, {pieces}{apart}",
        missing={},
        missing_text=short,
    )


def _num_nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes together"


def _roles(jobs: Sequence[Job]) -> str:
    return " and ".join(job.role for job in jobs)


def _workers(jobs: Sequence[Job]) -> str:
    if len(jobs) == 1:
        return "1 worker" if jobs[0].replicas == 1 else f"{jobs[0].replicas} workers"
    return " and ".join(f"{job.replicas} of {job.role!r}" for job in jobs)
